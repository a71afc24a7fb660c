"""The page of a run, and of several: what stands in it, that text stays text, and what is said of broken folders."""

import html.parser
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from llds.cli.app import app
from llds.cli.reporting import report_after_training
from llds.errors import LLDSError
from llds.evaluation.evaluate import EvalResult, save_evaluation
from llds.evaluation.rows import AnswerRow
from llds.report import comparison_page, read_record, run_page
from llds.report.responses import MOST_TOKENS, sampled_responses
from llds.report.series import phase_strip, smoothed
from llds.training.recipe import load_recipe
from llds.training.records import RunFolder, append_line
from llds.training.settings import to_yaml

runner = CliRunner()
HOSTILE = '</title><script>alert(1)</script><img src="http://x/y.png">'


class Parsed(html.parser.HTMLParser):
    """Tags in order, with a check that they nest."""

    ALONE = frozenset({"meta"})

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []
        self.feed(text)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.ALONE:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(page):
    """Parse a page, and hold it to what every page keeps: nothing is run, nothing is loaded."""
    found = Parsed(page)
    assert not {"script", "img", "link", "iframe"} & set(found.tags)
    assert not {"src", "href", "onload", "onclick"} & {name for name, _ in found.attributes}
    assert "url(" not in page
    return found


def response(step, reward=1.0, word="Rome", drop=0.5, count=3):
    return {
        "question_id": f"q{step}",
        "question": f"What is {word}?",
        "golden_answers": [word],
        "answer": word,
        "stop": "answer",
        "reward": reward,
        "advantage": 0.5,
        "prompt": "p",
        "spans": [
            {
                "kind": "search",
                "text": "x",
                "start": 0,
                "end": count,
                "displacement": drop,
                "gate_open": True,
            },
            {"kind": "information", "text": f"Doc about {word}", "start": count, "end": count + 1},
        ],
        "tokens": [f"tok{i}" for i in range(count)] + ["doc"],
        "response_mask": [1] * count + [0],
        "old_logprobs": [-0.1] * (count + 1),
        "logprobs": [-0.1 - drop] + [-0.1] * count,
    }


def answer(number, right):
    return AnswerRow(
        *(
            f"q{number}",
            f"Question {number}?",
            ("yes",),
            1 + number % 2,
            "yes" if right else "no",
            float(right),
        ),
        *(float(right), 1, 1, 1.0, "answer", False, f"I say {right}"),
    )


def write_run(path, *, steps=12, alarm=None, word="Rome", finished=True, overrides=(), count=3):
    """Write a run folder as llds train leaves it: four optimizer steps a rollout."""
    run = RunFolder(path)
    path.mkdir(parents=True)
    run.config.write_text(to_yaml(load_recipe("tiny", [f"run.name={path.name}", *overrides])))
    run.event("start", step=0)
    run.event("llds", status="live", text=f"LLDS is live, says {word}.")
    for step in range(1, steps + 1):
        row = {"step": step, "rollout": (step - 1) // 4 + 1, "loss": 0.1, "grad_norm": 0.5, "entropy": 0.3}
        row |= {"llds/logprob_correct": -0.1 * step, "llds/logprob_wrong": -0.2, "llds/coef": 0.2}
        row |= {"llds/loss": 1e-3, "llds/penalised_share": 0.1, "llds/phase": -1.0 if step < 5 else 1.0}
        row |= {"reward": 0.5, "searches": 1.5} if step % 4 == 1 else {}
        append_line(run.metrics, row)
        run.write_trajectories(step, [response(step, word=word, count=count)])
    if alarm is not None:
        run.event("alarm", step=alarm, severity="critical", onset=alarm - 2, text=f"Correct {word} decays.")
    save_evaluation(run.evaluation("before"), EvalResult(tuple(answer(n, n < 3) for n in range(10))))
    save_evaluation(run.evaluation("rollout-000002"), EvalResult(tuple(answer(n, n < 5) for n in range(10))))
    if finished:
        save_evaluation(run.evaluation("after"), EvalResult(tuple(answer(n, 1 <= n < 8) for n in range(10))))
        run.event("finish", step=steps)
        run.result.write_text("{}")
    return run


def test_the_page_tells_scores_alarms_phases_and_responses(tmp_path):
    run = write_run(tmp_path / "one", alarm=9)
    page = run_page(read_record(run.path))
    text = " ".join(parsed(page).text)
    assert "Finished after 12 optimizer steps." in text
    assert "30.0 % [10.8, 60.3]" in text  # Wilson, 3 of 10
    assert "70.0 %" in text
    assert "+40.0" in text
    assert "LLDS is live, says Rome." in text
    assert "The penalty was active in 12 of 12 optimizer steps." in text
    assert "alarm, step 9" in text
    assert "Onset: step 7." in text
    assert "5 answers became right" in text
    assert "1 answers became wrong" in text
    assert "Held-out exact match" in text
    assert "steps 1 to 4: warm-up" in text
    assert "steps 5 to 12: I (stagnation)" in text


def test_text_of_a_run_stays_text(tmp_path):
    run = write_run(tmp_path / "one", alarm=9, word=HOSTILE)
    run.config.write_text(run.config.read_text() + f"# {HOSTILE}\n")
    page = run_page(read_record(run.path))
    parsed(page)
    assert "alert(1)" in page
    assert "<script" not in page


@pytest.mark.parametrize("drop", [0.5, -0.5, 0.0])
def test_a_token_is_coloured_by_what_it_lost(tmp_path, drop):
    run = write_run(tmp_path / "one", steps=1)
    run.write_trajectories(1, [response(1, drop=drop)])
    found = sampled_responses(run, {1: 1})
    kinds = re.findall(r'<b class="(\w+)\d" title="([^"]*)">(\w+)</b>', found)
    expected = {0.5: [("lost", "-0.10 → -0.60", "tok0")], -0.5: [("won", "-0.10 → 0.40", "tok0")], 0.0: []}
    assert kinds == expected[drop]
    assert "held by LLDS" in found


def test_the_step_of_an_alarm_and_the_last_step_of_each_rollout_are_shown(tmp_path):
    run = write_run(tmp_path / "one", steps=12)
    rollouts = {step: (step - 1) // 4 + 1 for step in range(1, 13)}
    shown = [int(one) for one in re.findall(r"<summary>step (\d+)", sampled_responses(run, rollouts, [6]))]
    assert shown == [4, 6, 8, 12]


def test_a_page_holds_a_bounded_number_of_tokens_and_both_ends_of_the_run(tmp_path):
    run = write_run(tmp_path / "one", steps=40, count=MOST_TOKENS // 6)
    shown = [int(one) for one in re.findall(r"<summary>step (\d+)", sampled_responses(run, {}))]
    assert len(shown) <= 6
    assert {1, 40} <= set(shown)


def test_a_run_under_way_and_one_without_numbers_have_a_page(tmp_path):
    run = write_run(tmp_path / "half", finished=False)
    with run.metrics.open("a") as file:
        file.write('{"step": 13, "roll')
    text = run_page(read_record(run.path))
    assert "12 of 160 optimizer steps are done; going on, or cut off." in text
    run.event("stop", step=12)
    assert "are done; stopped." in run_page(read_record(run.path))

    empty = RunFolder(tmp_path / "empty")
    empty.path.mkdir()
    empty.config.write_text(to_yaml(load_recipe("tiny", [])))
    page = run_page(read_record(empty.path))
    parsed(page)
    assert "0 of 160 optimizer steps are done" in page
    assert report_after_training(empty.path) == ""
    assert not empty.report.exists()


def test_numbers_that_are_not_finite_have_a_page(tmp_path):
    run = write_run(tmp_path / "nan")
    append_line(run.metrics, {"step": 13, "rollout": 4, "grad_norm": math.nan, "llds/loss": math.inf})
    run.write_trajectories(13, [response(13) | {"logprobs": ["nan"] * 4}])
    page = run_page(read_record(run.path))
    parsed(page)
    assert 'title="-0.1 → nan"' in page


def test_a_recipe_of_another_version_is_shown_as_it_stands(tmp_path):
    run = write_run(tmp_path / "old")
    run.config.write_text("model:\n  flavour: sweet\n")
    record = read_record(run.path)
    assert record.recipe is None
    page = run_page(record)
    assert "flavour: sweet" in page
    assert "Finished after 12 optimizer steps." in page
    other = read_record(write_run(tmp_path / "new").path)
    assert "does not know" in comparison_page([record, other])


def test_runs_side_by_side(tmp_path):
    first = write_run(tmp_path / "plain", overrides=["llds.coef=0"], alarm=9)
    second = write_run(tmp_path / "held", overrides=["llds.coef=0.2"], steps=20)
    save_evaluation(second.evaluation("after"), EvalResult(tuple(answer(n, True) for n in range(10))))
    page = comparison_page([read_record(first.path), read_record(second.path)])
    text = " ".join(parsed(page).text)
    assert "llds.coef" in text
    assert "run.name" not in text
    assert "+30.0" in text  # 7 of 10 against 10 of 10, paired
    assert {name for name, _ in re.findall(r'class="line (l\d)"()', page)} >= {"l0", "l1"}


@pytest.mark.parametrize("count", [1, 5])
def test_a_comparison_takes_two_to_four(tmp_path, count):
    record = read_record(write_run(tmp_path / "one").path)
    with pytest.raises(LLDSError, match="takes 2 to 4 runs"):
        comparison_page([record] * count)


def test_runs_of_one_name_are_told_by_their_folders(tmp_path):
    records = [read_record(write_run(tmp_path / part / "same").path) for part in ("a", "b")]
    page = comparison_page(records)
    assert str(tmp_path / "a" / "same") in page
    assert str(tmp_path / "b" / "same") in page


def test_a_run_in_verl_has_its_numbers_from_the_log_of_verl(tmp_path):
    run = RunFolder(tmp_path / "far")
    (run.path / "verl").mkdir(parents=True)
    run.config.write_text(to_yaml(load_recipe("tiny", ["run.engine=verl"])))
    for number, begin in (("2", 1), ("10", 11)):
        for step in range(begin, begin + 12):
            data = {"critic/score/mean": 0.5, "actor/entropy": 0.3}
            append_line(run.path / "verl" / f"metrics-{number}.jsonl", {"step": step, "data": data})
    record = read_record(run.path)
    assert record.last_step == 22
    page = run_page(record)
    assert "22 rollouts are done" in page
    assert "Reward" in page


# --- the command


def test_the_command_writes_one_page(tmp_path):
    run = write_run(tmp_path / "one")
    done = runner.invoke(app, ["report", str(run.path)])
    assert done.exit_code == 0
    assert done.stdout == f"Wrote {run.report}.\n"
    parsed(run.report.read_text("utf-8"))
    two = tmp_path / "new" / "both.html"
    done = runner.invoke(app, ["report", str(run.path), str(run.path), "--out", str(two)])
    assert done.exit_code == 0
    assert two.exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere"], "nowhere is not a folder; name a run folder"),
        (["."], "has no config.yaml"),
        (["one", "one"], "--out comparison.html"),
        (["one", "--out", "."], "is a folder; name the file"),
    ],
)
def test_a_wrong_call_is_one_sentence(tmp_path, monkeypatch, arguments, expected):
    write_run(tmp_path / "one")
    monkeypatch.chdir(tmp_path)
    done = runner.invoke(app, ["report", *arguments])
    assert isinstance(done.exception, LLDSError)
    assert expected in str(done.exception)


@pytest.mark.parametrize("broken", ["metrics.jsonl", "events.jsonl", "trajectories/step-000004.jsonl"])
def test_a_damaged_file_is_named(tmp_path, broken):
    run = write_run(tmp_path / "one")
    path = run.path / broken
    path.write_bytes(b"\x00\xff{\n" + path.read_bytes())
    with pytest.raises(LLDSError, match=re.escape(Path(broken).name)):
        run_page(read_record(run.path))
    assert "There is no page of the run" in report_after_training(run.path)


@pytest.mark.parametrize("missing", ["spans", "reward", "tokens"])
def test_responses_of_another_shape_are_named(tmp_path, missing):
    run = write_run(tmp_path / "one", steps=1)
    row = response(1)
    del row[missing]
    (run.trajectories / "step-000001.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(LLDSError, match=r"step-000001\.jsonl does not hold responses"):
        run_page(read_record(run.path))


def test_a_page_does_not_keep_a_run_from_starting(tmp_path):
    run = RunFolder(tmp_path / "new")
    run.path.mkdir()
    run.config.write_text("x")
    run.report.write_text("x")
    assert run.is_free()


# --- series


@given(st.lists(st.one_of(st.floats(-5, 5), st.just(math.nan)), min_size=1, max_size=300))
def test_the_running_mean_is_that_of_its_definition(values):
    values = np.array(values)
    known = values[np.isfinite(values)]
    found = smoothed(values)
    assert (np.isfinite(found) == np.isfinite(values)).all()
    if len(known) <= 40:
        assert np.array_equal(found, values, equal_nan=True)
        return
    half = max(1, len(known) // 40)
    slow = [known[max(0, at - half) : at + half + 1].mean() for at in range(len(known))]
    assert np.allclose(found[np.isfinite(found)], slow)


def test_the_strip_of_phases_covers_the_run(tmp_path):
    strip = phase_strip(read_record(write_run(tmp_path / "one").path).table)
    assert sum(map(float, re.findall(r'width="([\d.]+)" height', strip))) == pytest.approx(560, abs=0.2)
