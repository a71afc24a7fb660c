"""The loop: what was answered stays answered, and an interrupted evaluation ends with the same bytes."""

import dataclasses
import json

import pytest
import torch

from llds.data.corpus import read_corpus
from llds.errors import LLDSError
from llds.evaluation.answering import answer
from llds.evaluation.contestants import make_agent, make_baseline
from llds.evaluation.evaluate import evaluate
from llds.evaluation.folder import EvalFolder, Journal, differences, read_rows
from llds.evaluation.tasks import QuestionSet, make_tasks
from llds.inference.engine import Game
from llds.inference.local import TransformersEngine
from llds.search.episode import EpisodeRunner
from llds.search.protocol import Protocol
from llds.search.retrieval import BM25Retriever, NoRetriever, RetrieverUnavailable
from llds.search.sampling import GREEDY, Sampling
from llds.search.trajectory import Limits
from llds.training.environment import prepare_environment
from llds.training.policy import load_policy
from llds.training.recipe import ModelSettings
from tiny_world import built_world, load

prepare_environment()
LIMITS = Limits(3, 32, 32, 128, 64)
SAMPLED = Sampling(temperature=1.0)


@pytest.fixture(scope="module")
def policy():
    torch.set_num_threads(1)
    return load_policy(ModelSettings(path=str(built_world() / "model")))


@pytest.fixture(scope="module")
def game():
    corpus = read_corpus(built_world() / "corpus.jsonl")
    return Game(BM25Retriever(corpus), Protocol(style="short", topk=1), LIMITS)


@pytest.fixture(scope="module")
def tasks():
    questions = load(built_world(), "test")
    sets = [QuestionSet("first", tuple(questions), 8), QuestionSet("second", tuple(questions[:3]), 8)]
    return make_tasks(sets, 2)


class KilledError(Exception):
    pass


class Playing:
    """An engine that stops after some batches, as if it were killed. ``played`` counts its batches."""

    def __init__(self, engine, stop_after=None):
        self.tokenizer, self.positions, self.batch = engine.tokenizer, engine.positions, engine.batch
        self._engine, self._stop_after, self.played = engine, stop_after, 0

    def play(self, prompts, game, sampling, seeds):
        for finished in self._engine.play(prompts, game, sampling, seeds):
            if self.played == self._stop_after:
                raise KilledError
            self.played += 1
            yield finished


def run(policy, game, tasks, path, *, batch=4, sampling=SAMPLED, seed=0, stop_after=None, **options):
    engine = Playing(TransformersEngine(policy.model, policy.tokenizer, batch), stop_after)
    journal = Journal(path)
    agent = make_agent("agent", policy.tokenizer, game)
    done = answer(tasks, agent, engine, sampling, seed, journal, **options)
    return journal.finish(tasks) if done else None


def test_a_killed_evaluation_ends_with_the_same_bytes(policy, game, tasks, tmp_path):
    whole = tmp_path / "whole.jsonl"
    rows = run(policy, game, tasks, whole)
    assert len({row.response for row in rows}) > 10  # sampled answers differ
    for killed_after, torn in ((0, b"\xc3"), (1, b""), (3, b'{"id": "s4", "ques')):
        path = tmp_path / f"killed-{killed_after}.jsonl"
        with pytest.raises(KilledError):
            run(policy, game, tasks, path, stop_after=killed_after)
        kept = path.read_bytes() if path.exists() else b""
        assert kept.count(b"\n") == 4 * killed_after
        path.write_bytes(kept + torn)
        run(policy, game, tasks, path)
        assert path.read_bytes() == whole.read_bytes()
    # A batch of which only a part was written is played whole, and what was written stays.
    path.write_bytes(b"".join(whole.read_bytes().splitlines(keepends=True)[:6]))
    run(policy, game, tasks, path)
    assert path.read_bytes() == whole.read_bytes()


def test_an_answer_depends_on_its_own_seed_alone(policy, game, tasks, tmp_path):
    rows = run(policy, game, tasks, None)
    assert [row.response for row in run(policy, game, tasks, None, batch=22)] == [
        row.response for row in rows
    ]
    few = run(policy, game, tasks[5:9], None, batch=3)
    assert [row.response for row in few] == [row.response for row in rows[5:9]]
    other = run(policy, game, tasks, None, seed=1)
    assert [row.response for row in other] != [row.response for row in rows]


def test_greedy_answers_are_those_of_training(policy, game):
    questions = load(built_world(), "test")
    tasks = make_tasks([QuestionSet("", tuple(questions), 8)], 1)
    runner = EpisodeRunner(policy.model, policy.tokenizer, game.retriever, game.protocol, LIMITS, GREEDY)
    assert run(policy, game, tasks, None, sampling=GREEDY) == list(
        evaluate(runner, questions, batch_size=4).rows
    )


def test_progress_and_stopping(policy, game, tasks, tmp_path):
    path, told = tmp_path / "rows.jsonl", []
    stopped = run(policy, game, tasks, path, count=told.append, stopped=lambda: len(told) == 3)
    assert stopped is None
    assert told == [0, 4, 8]
    assert len(read_rows(path)) == 8
    run(policy, game, tasks, path, count=told.append)
    assert told[3:] == [8, 12, 16, 20, 22]


def test_a_failed_tool_is_tried_again_the_next_time(policy, game, tasks, tmp_path):
    class Moody:
        calls = 0

        def search(self, queries, topk):
            self.calls += 1
            if self.calls in (2, 3):
                raise RetrieverUnavailable("down")
            return game.retriever.search(queries, topk)

    path = tmp_path / "rows.jsonl"
    first = run(policy, dataclasses.replace(game, retriever=Moody()), tasks, path, sampling=GREEDY)
    failed = sum(row.tool_failed for row in first)
    assert 0 < failed < len(tasks)
    again = run(policy, game, tasks, path, sampling=GREEDY)
    whole = run(policy, game, tasks, None, sampling=GREEDY)
    assert again == whole
    assert len(read_rows(path)) == len(tasks)

    class Dead:
        def search(self, queries, topk):
            raise RetrieverUnavailable("down")

    with pytest.raises(RetrieverUnavailable, match="failed for every question"):
        run(policy, dataclasses.replace(game, retriever=Dead()), tasks[:4], None, sampling=GREEDY)


def test_baselines_answer_in_one_action(policy, game):
    questions = load(built_world(), "test")
    tasks = make_tasks([QuestionSet("", tuple(questions), 8)], 1)
    engine = TransformersEngine(policy.model, policy.tokenizer, 8)
    found = {}
    for name in ("no-search", "one-shot"):
        contestant, journal = make_baseline(name, policy.tokenizer, game), Journal(None)
        assert answer(tasks, contestant, engine, GREEDY, 0, journal)
        found[name] = journal.finish(tasks)
    for row in found["no-search"]:
        assert row.response.startswith("<think> I think it is")
        assert (row.searches, row.valid_searches, "<information>" in row.response) == (0, 0, False)
    for row in found["one-shot"]:
        assert row.response.startswith("<think> It is")
        assert (row.searches, row.valid_searches) == (1, 1)
    # One search with the question finds what a one-hop question asks for, and the model reads it there.
    assert sum(row.exact_match for row in found["one-shot"]) > sum(
        row.exact_match for row in found["no-search"]
    )


def test_prompts_of_baselines(policy, game):
    class Words:
        """A tokenizer that shows what it was given."""

        chat_template = "there is one"

        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": list(text)}

        def decode(self, ids, **options):
            return "".join(ids)

        def apply_chat_template(self, messages, **options):
            return f"<|user|>{messages[0]['content']}<|assistant|>"

    def prompt(baseline, style, **limits):
        other = Game(game.retriever, Protocol(style, topk=1), dataclasses.replace(LIMITS, **limits))
        contestant = make_baseline(baseline, Words(), other)
        assert contestant.game.limits.max_turns == 0
        assert isinstance(contestant.game.retriever, NoRetriever)
        return "".join(contestant.prompts(["What is the currency of Estia"])[0])

    wide = {"max_observation_tokens": 300}
    direct = prompt("no-search", "search-r1", **wide)
    assert direct.startswith("Answer the given question. You must conduct reasoning inside <think>")
    assert direct.endswith(
        "For example, <answer> Beijing </answer>. Question: What is the currency of Estia?\n"
    )
    assert "search" not in direct
    informed = prompt("one-shot", "search-r1", **wide)
    shown = '\n\n<information>Doc 1(Title: "Estia") Estia currency: the thaler.</information>\n\n'
    assert informed.endswith(f"</answer>. {shown}Question: What is the currency of Estia?\n")
    chat = prompt("one-shot", "search-r1-instruct", **wide)
    assert chat == f"<|user|>{informed}<|assistant|>"
    short = prompt("one-shot", "short", **wide)
    asked = "<search> What is the currency of Estia? </search>"
    assert short == f"Question: What is the currency of Estia?\n{asked}{shown}<think> It is"
    # What is shown is cut as in an episode of the agent.
    cut = prompt("one-shot", "search-r1", max_observation_tokens=60)
    start = cut.index("\n\n<information>Doc")
    assert len(cut[start : cut.rindex("\n\nQuestion:") + 2]) == 60


def test_one_shot_without_its_search_has_no_answer(policy, game):
    class Dead:
        def search(self, queries, topk):
            raise RetrieverUnavailable("down")

    questions = load(built_world(), "test")
    tasks = make_tasks([QuestionSet("", tuple(questions), 8)], 1)
    contestant = make_baseline("one-shot", policy.tokenizer, dataclasses.replace(game, retriever=Dead()))
    engine = TransformersEngine(policy.model, policy.tokenizer, 8)
    with pytest.raises(RetrieverUnavailable, match="failed for every question"):
        answer(tasks, contestant, engine, GREEDY, 0, Journal(None))


def open_and_close(folder, settings):
    with folder.opened(settings):
        pass


def test_a_folder_keeps_to_its_settings(tmp_path):
    folder = EvalFolder(tmp_path / "out")
    settings = {"sampling": {"temperature": 0.0, "stop": ("a", "b")}, "samples": 1}
    with folder.opened(settings):
        pass
    with folder.opened(settings):
        assert folder.settings() == json.loads(json.dumps(settings))
    other = {**settings, "sampling": {"temperature": 0.7, "stop": ("a", "b")}}
    with (
        pytest.raises(
            LLDSError, match=r"sampling.temperature is 0.0 there and 0.7 here\): give another --out"
        ),
        folder.opened(other),
    ):
        pass
    assert differences(settings, {"samples": 1, "new": None})[-1] == ("new", "absent", "null")
    with pytest.raises(LLDSError, match="is not finished"):
        folder.summary()
    folder.write_summary({"label": "x"})
    assert folder.summary() == {"label": "x"}
    with pytest.raises(LLDSError, match=r"is no evaluation: there is no summary\.json"):
        EvalFolder(tmp_path / "nothing").summary()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("mine")
    with pytest.raises(LLDSError, match="exists and is no evaluation"):
        open_and_close(EvalFolder(tmp_path / "thesis"), settings)
    (tmp_path / "out" / "settings.json").write_text("{")
    with pytest.raises(LLDSError, match="is damaged"), folder.opened(settings):
        pass


def test_one_process_at_a_time_writes(tmp_path):
    folder = EvalFolder(tmp_path / "out")
    with folder.opened({}), pytest.raises(LLDSError, match="Another process is writing"):
        open_and_close(EvalFolder(tmp_path / "out"), {})


def test_a_line_that_is_no_row_is_named(policy, game, tasks, tmp_path):
    path = tmp_path / "rows.jsonl"
    run(policy, game, tasks[:4], path)
    lines = path.read_text().splitlines(keepends=True)
    for wrong in ("{}\n", "[]\n", "nonsense\n", '{"id": 1, "golden_answers": []}\n', "\xff\n"):
        path.write_text(lines[0] + wrong + lines[1])
        with pytest.raises(LLDSError, match=r"rows.jsonl:2: the line is no row"):
            Journal(path)
