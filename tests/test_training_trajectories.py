"""Trajectories as rows: what the gates of LLDS are said to have done."""

import pytest

from llds.data.questions import Question
from llds.search.episode import Episode, Turn
from llds.search.protocol import Answer
from llds.training.recipe import LLDSSettings
from llds.training.trajectories import describe


class Letters:
    def decode(self, ids):
        return "".join(chr(96 + number) for number in ids)


@pytest.mark.parametrize(("stop", "expected"), [("answer", True), ("tool_failed", False)])
@pytest.mark.parametrize("gate", ["action", "response", "token"])
def test_a_failed_episode_has_no_open_gate(stop, expected, gate):
    turns = [Turn(Answer("x"), "<answer> x </answer>", 0, 2)]
    episode = Episode([1], [2, 3], [1, 1], [0.0, 0.0], turns, "x", None, stop)
    row = describe(
        episode,
        Question("q", "Q?", ("x",)),
        1.0,
        0.0,
        [-1.0, -1.0],
        [-0.5, -0.5],
        LLDSSettings(gate=gate),
        Letters(),
    )
    assert [span["gate_open"] for span in row["spans"]] == [expected]
    assert row["spans"][0]["displacement"] == 1.0
