"""Run folders: canonical names, torn lines, cutting back, locking."""

import json

import pytest

from llds.errors import LLDSError
from llds.training.records import (
    RunFolder,
    append_line,
    canonical_metrics,
    read_json,
    read_lines,
    write_json,
)


def test_metrics_get_canonical_names():
    logs = {
        "reward": 0.5,
        "completions/mean_length": 30.0,
        "completions/clipped_ratio": 1.0,
        "clip_ratio/region_mean": 0.01,
        "rewards/total/mean": 0.5,
        "profiling/Time taken": 1.0,
        "llds/gate_rate": 0.25,
        "kl": None,
        "epoch": 0.1,
    }
    assert canonical_metrics(logs) == {
        "reward": 0.5,
        "action_tokens": 30.0,
        "clip_share": 0.01,
        "llds/gate_rate": 0.25,
    }


def test_lines_survive_a_torn_end_but_not_a_broken_middle(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in range(3):
        append_line(path, {"step": step, "loss": float("nan"), "best": float("-inf")})
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    rows = read_lines(path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0]["loss"] == "nan"
    assert rows[0]["best"] == "-inf"
    path.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(LLDSError, match="line 2 is not JSON"):
        read_lines(path)


def test_appending_after_a_torn_line_starts_a_new_one(tmp_path):
    run = RunFolder(tmp_path)
    run.event("start", step=0)
    with run.events.open("a") as file:
        file.write('{"event": "to')
    run.cut_after(0)
    run.event("resume", step=0)
    assert [row["event"] for row in read_lines(run.events)] == ["start", "resume"]


def test_cutting_back_removes_what_came_after(tmp_path):
    run = RunFolder(tmp_path)
    for step in range(1, 7):
        append_line(run.metrics, {"step": step, "loss": 1 / step})
        run.write_trajectories(step, [{"step": step}])
    before = run.metrics.read_text().splitlines()[:4]
    run.cut_after(4)
    assert run.metrics.read_text().splitlines() == before
    assert sorted(path.name for path in run.trajectories.iterdir()) == [
        f"step-00000{k}.jsonl" for k in range(1, 5)
    ]
    RunFolder(tmp_path / "fresh").cut_after(0)


def test_a_folder_serves_one_process(tmp_path):
    with (
        RunFolder(tmp_path).locked(),
        pytest.raises(LLDSError, match="Another process"),
        RunFolder(tmp_path).locked(),
    ):
        pytest.fail("locked twice")
    with RunFolder(tmp_path).locked():
        pass


def test_json_is_strict(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"gain": float("nan"), "nested": [{"low": float("inf")}], "text": "é"})
    assert read_json(path) == {"gain": "nan", "nested": [{"low": "inf"}], "text": "é"}
    assert json.loads(path.read_text(), parse_constant=pytest.fail)
    path.write_text("{")
    with pytest.raises(LLDSError, match="is not JSON"):
        read_json(path)


def test_a_penalty_that_is_not_finite_is_no_measured_zero():
    from llds.engines.trl.window import make_record
    from llds.training.records import what_llds_did

    assert what_llds_did({"llds/coef": 0.2, "llds/loss": "nan", "llds/penalised_share": 0.0}) == "active"
    assert what_llds_did({"llds/coef": 0.2, "llds/loss": 0.0, "llds/penalised_share": 0.0}) == "measured zero"
    assert (
        what_llds_did({"llds/coef": 0.2, "llds/loss": 0.0, "llds/structural_zero": 1.0}) == "structural zero"
    )
    assert what_llds_did({"llds/coef": 0.0, "llds/loss": 0.0}) == "off"
    names = ("structural_batches", "batches", "assumed_batches", "nonfinite_tokens", "penalised_tokens")
    names += ("actions_open", "actions_preserved", "preserved_tokens", "tokens")
    sums = dict.fromkeys(names, 0.0) | {"batches": 1.0, "loss": float("nan"), "penalty_sum": float("nan")}
    assert make_record(3, 0.2, sums, {}, 1).verdict == "active"
