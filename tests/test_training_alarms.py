"""What an alarm does to a run: it is told, the run stops, or it goes back; also when it is killed meanwhile.

The alarm is planted: a real collapse takes longer than a test. When the monitor raises one is tested in
``test_dynamics_phases`` and ``test_engine_trl_dynamics``.
"""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llds.dynamics import Event, PhaseMonitor
from llds.errors import LLDSError
from llds.training.alarms import STOPPED_BY_ALARM, checkpoints_to_keep
from llds.training.environment import prepare_environment
from llds.training.plan import make_plan, rollout_seed, seed_of
from llds.training.progress import PlainDisplay
from llds.training.recipe import load_recipe
from llds.training.records import RunFolder, append_line, read_lines
from llds.training.rollback import Rollbacks
from tiny_world import built_world, small_settings

prepare_environment()


@pytest.fixture(scope="module")
def world():
    return built_world()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLDS_CACHE", str(tmp_path / "cache"))


def recipe_for(world, runs, *overrides):
    quick = ["evaluation.questions=2", "evaluation.without_retriever=false", "run.rollouts=5"]
    return load_recipe("tiny", [*small_settings(world, world / "model", runs), *quick, *overrides])


def run_in_process(recipe, display=None):
    from llds.training.run import train

    said = io.StringIO()
    return train(recipe, display or PlainDisplay(said)), said.getvalue()


def comparable(path):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in read_lines(path)]


@pytest.fixture
def plant(monkeypatch):
    """Let the monitor raise an alarm, each of (step, onset, severity) once."""

    def planted(*alarms):
        waiting = list(alarms)

        class Planted(PhaseMonitor):
            def update(self, step, series):
                events = super().update(step, series)
                if waiting and waiting[0][0] == step:
                    _, onset, severity = waiting.pop(0)
                    families = ("likelihood", "reward")
                    events.append(Event("alarm", severity, step, 2, onset, families, {}, {}, "planted."))
                return events

        monkeypatch.setattr("llds.engines.trl.monitor.PhaseMonitor", Planted)

    return planted


@pytest.fixture(scope="module")
def plain(world, tmp_path_factory):
    """A run without an alarm."""
    return run_in_process(recipe_for(world, tmp_path_factory.mktemp("plain")))[0]


@pytest.fixture
def whole(world, plant, shared_folder):
    """A run that went back once."""
    if not (shared_folder / "try" / "result.json").exists():
        plant((7, 5, "critical"))
    return run_in_process(recipe_for(world, shared_folder, *ROLLBACK))[0]


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("whole")


def kinds(run):
    return [event["event"] for event in read_lines(run.events)]


def test_a_warning_is_written_down_shown_and_changes_nothing(world, tmp_path, plant, plain):
    plant((3, 2, "critical"))
    warned, said = run_in_process(recipe_for(world, tmp_path / "warned"))
    assert warned.finished
    assert "ALARM (critical), step 3: planted." in said
    (alarm,) = [one for one in read_lines(warned.folder / "events.jsonl") if one["event"] == "alarm"]
    assert (alarm["step"], alarm["onset"], alarm["families"]) == (3, 2, ["likelihood", "reward"])
    assert comparable(warned.folder / "metrics.jsonl") == comparable(plain.folder / "metrics.jsonl")


def test_stop_ends_the_run_after_its_rollout_and_it_can_go_on(world, tmp_path, plant, plain):
    plant((3, 2, "critical"))
    recipe = recipe_for(world, tmp_path / "stopped", "dynamics.on_alarm=stop", "run.save_every=0")
    stopped, said = run_in_process(recipe)
    assert not stopped.finished
    assert stopped.exit_code == STOPPED_BY_ALARM
    assert stopped.steps == 4
    assert "The run stops, as on_alarm = stop says." in said
    assert kinds(RunFolder(stopped.folder))[-1] == "alarm_stop"
    assert (stopped.folder / "checkpoints" / "step-000004").is_dir()
    resumed, _ = run_in_process(recipe)
    assert resumed.finished
    assert comparable(resumed.folder / "metrics.jsonl") == comparable(plain.folder / "metrics.jsonl")


def test_below_the_severity_it_is_only_told(world, tmp_path, plant):
    plant((3, 2, "warning"))
    result, said = run_in_process(recipe_for(world, tmp_path, "dynamics.on_alarm=stop"))
    assert result.finished
    assert "ALARM (warning)" in said


ROLLBACK = ("dynamics.on_alarm=rollback", "run.save_every=1", "dynamics.coef_factor=3")


def test_rollback_goes_back_raises_the_coefficient_and_keeps_what_it_undid(world, tmp_path, plant, plain):
    plant((7, 5, "critical"))
    result, said = run_in_process(recipe_for(world, tmp_path / "back", *ROLLBACK))
    assert result.finished
    assert "The run goes back to step 4 and λ rises from 0.2 to 0.6." in said
    run = RunFolder(result.folder)
    rows = read_lines(run.metrics)
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row["llds/coef"] for row in rows] == pytest.approx([0.2] * 4 + [0.6] * 6)
    undone = run.path / "rolled-back" / "1"
    assert [row["step"] for row in read_lines(undone / "metrics.jsonl")] == [5, 6, 7, 8]
    before, after = comparable(plain.folder / "metrics.jsonl"), comparable(run.metrics)
    assert comparable(undone / "metrics.jsonl") == before[4:8]
    assert after[:4] == before[:4]
    # Other random numbers, or the same decline would come again.
    assert after[4]["entropy"] != before[4]["entropy"]
    assert sorted(path.name for path in (undone / "trajectories").iterdir()) == [
        f"step-{step:06d}.jsonl" for step in (5, 6, 7, 8)
    ]
    (event,) = [one for one in read_lines(run.events) if one["event"] == "rollback"]
    assert (event["step"], event["to_step"], event["coef"]) == (8, 4, pytest.approx(0.6))


def test_rollback_without_an_older_checkpoint_stops(world, tmp_path, plant):
    plant((3, 1, "critical"))
    result, said = run_in_process(recipe_for(world, tmp_path, *ROLLBACK))
    assert result.exit_code == STOPPED_BY_ALARM
    assert "No checkpoint is older than the onset" in said


def test_too_many_rollbacks_stop(world, tmp_path, plant):
    plant((5, 4, "critical"), (7, 4, "critical"))
    result, said = run_in_process(recipe_for(world, tmp_path, *ROLLBACK, "dynamics.max_rollbacks=1"))
    assert result.exit_code == STOPPED_BY_ALARM
    assert "went back 1 times already" in said
    assert len(Rollbacks(RunFolder(result.folder))) == 1


class Stopping(PlainDisplay):
    """Presses Ctrl-C twice, so to say, in the middle of an optimizer step."""

    def __init__(self, step):
        super().__init__(io.StringIO())
        self.stop_at = step

    def step(self, row):
        if row["step"] == self.stop_at:
            raise KeyboardInterrupt


class KilledError(Exception):
    """The process died here."""


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_a_run_killed_while_it_goes_back_ends_with_the_same_numbers(
    world, tmp_path, plant, monkeypatch, moment, whole
):
    plant((7, 5, "critical"))
    recipe = recipe_for(world, tmp_path / "killed", *ROLLBACK)

    def die(*args):
        raise KilledError

    with monkeypatch.context() as patch:
        if moment == "before":
            patch.setattr(Rollbacks, "finish", lambda self: die() if len(self) else None)
        elif moment == "between":
            patch.setattr(RunFolder, "set_aside_after", die)
        else:
            patch.setattr("llds.training.rollback.write_json", _die_at_done)
        with pytest.raises(KilledError):
            run_in_process(recipe)
    again, _ = run_in_process(recipe)
    assert again.finished
    assert comparable(again.folder / "metrics.jsonl") == comparable(whole.folder / "metrics.jsonl")
    kept = "rolled-back/1/metrics.jsonl"
    assert comparable(again.folder / kept) == comparable(whole.folder / kept)


def _die_at_done(path, content):
    from llds.training.records import write_json

    if content["rollbacks"][-1]["done"]:
        raise KilledError
    write_json(path, content)


def test_after_a_rollback_a_kill_goes_on_with_the_raised_coefficient(world, tmp_path, plant, whole):
    plant((7, 5, "critical"))
    recipe = recipe_for(world, tmp_path / "cut", *ROLLBACK)
    stopped, _ = run_in_process(recipe, Stopping(9))
    assert not stopped.finished
    again, _ = run_in_process(recipe)
    assert comparable(again.folder / "metrics.jsonl") == comparable(whole.folder / "metrics.jsonl")


def test_damaged_rollbacks_are_one_sentence(tmp_path):
    run = RunFolder(tmp_path)
    (tmp_path / "rollbacks.json").write_text('{"rollbacks": [{"from": 1}]}')
    with pytest.raises(LLDSError, match=r"rollbacks\.json is damaged"):
        Rollbacks(run)


def test_evaluations_after_the_checkpoint_are_put_aside(tmp_path):
    run = RunFolder(tmp_path)
    for step in range(1, 9):
        append_line(run.metrics, {"step": step, "rollout": (step + 1) // 2})
    run.evaluations.mkdir()
    for name in ("before", "rollout-000001", "rollout-000002", "rollout-000003"):
        run.evaluation(name).write_text("{}\n")
    run.set_aside_after(4, tmp_path / "aside")
    assert sorted(path.stem for path in run.evaluations.iterdir()) == [
        "before",
        "rollout-000001",
        "rollout-000002",
    ]
    assert (tmp_path / "aside" / "evaluations" / "rollout-000003.jsonl").exists()


def test_rollback_keeps_checkpoints_that_reach_back(world, tmp_path):
    plan = make_plan(recipe_for(world, tmp_path))
    assert checkpoints_to_keep(recipe_for(world, tmp_path, "run.keep=3"), plan) == 3
    # Two optimizer steps per rollout, a checkpoint every five rollouts: ten steps apart.
    rollback = recipe_for(world, tmp_path, "dynamics.on_alarm=rollback", "run.save_every=5")
    assert checkpoints_to_keep(rollback, plan) == 11
    with pytest.raises(LLDSError, match=r"needs checkpoints to go back to; set run\.save_every"):
        recipe_for(world, tmp_path, "dynamics.on_alarm=rollback", "run.save_every=0")


def test_the_first_attempt_has_the_seeds_of_a_run_without_rollbacks():
    assert rollout_seed(3, "step", 7, 1, 0) == seed_of(3, "step", 7, 1)
    assert len({rollout_seed(3, "step", 7, 1, attempt) for attempt in range(4)}) == 4


# --- the probe


def test_the_probe_is_logged_and_disturbs_nothing(world, tmp_path, plain):
    probed, _ = run_in_process(
        recipe_for(world, tmp_path / "probed", "dynamics.probe_every=2", "dynamics.probe_questions=3")
    )
    rows = read_lines(probed.folder / "metrics.jsonl")
    names = ("llds/probe_gain_correct", "llds/probe_lld_responses", "llds/hidden_similarity")
    groups = [row.get("llds/probe_groups") for row in rows]
    assert [value is not None for value in groups] == [True] + [False] * 3 + [True] + [False] * 3 + [
        True,
        False,
    ]
    assert 1 <= groups[0] <= 3
    for row, count in zip(rows, groups, strict=True):
        assert all((name in row) == bool(count) for name in names)
    assert rows[0]["llds/probe_gain_correct"] != 0
    assert -1 <= rows[0]["llds/hidden_similarity"] <= 1
    without = [
        {key: value for key, value in row.items() if key not in {*names, "llds/probe_groups"}}
        for row in comparable(probed.folder / "metrics.jsonl")
    ]
    assert without == comparable(plain.folder / "metrics.jsonl")
    kept = json.loads((probed.folder / "probe.json").read_text())["questions"]
    assert len(set(kept)) == 3


def test_one_update_is_that_of_the_optimizer(world, tmp_path):
    """The probe's gain, against an update that is really made on a copy."""
    import copy

    from llds.objective import grpo_policy_loss
    from llds.training.policy import load_policy
    from llds.training.probe import ProbeBatch, probe_series, token_logprobs

    recipe = recipe_for(world, tmp_path, "grpo.micro_batch=3", "grpo.max_grad_norm=0.5")
    model = load_policy(recipe.model).model.train()
    torch.manual_seed(0)
    ids = torch.randint(5, 60, (8, 12))
    mask = torch.zeros_like(ids)
    mask[:, 4:7] = mask[:, 9:] = 1
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 0.0, 1.5, -0.5])
    batch = ProbeBatch(ids, torch.ones_like(ids), mask, advantages, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    twin = copy.deepcopy(model)
    before_state = {name: value.clone() for name, value in model.state_dict().items()}
    series = probe_series(model, batch, optimizer, recipe)

    other = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    logprobs = token_logprobs(twin, batch, 1.0)
    before = (logprobs.detach() * mask[:, 1:]).sum(1)
    grpo_policy_loss(logprobs, logprobs.detach(), advantages, mask[:, 1:]).loss.backward()
    torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    other.step()
    after = (token_logprobs(twin, batch, 1.0).detach() * mask[:, 1:]).sum(1)
    gain = (after - before)[advantages > 0].mean().item()
    assert series["probe_gain_correct"] == pytest.approx(gain, rel=1e-3)
    assert gain != pytest.approx(0, abs=1e-3)
    assert all(torch.equal(value, before_state[name]) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert model.training


def test_a_probe_set_of_other_questions_is_one_sentence(world, tmp_path):
    recipe = recipe_for(world, tmp_path, "dynamics.probe_every=1", "run.rollouts=1")
    run_in_process(recipe, Stopping(1))
    (tmp_path / "try" / "probe.json").write_text('{"questions": ["nobody"]}')
    with pytest.raises(LLDSError, match=r"probe\.json does not name questions of the training set"):
        run_in_process(recipe)


def test_two_processes_go_back_together(world, tmp_path):
    settings = [*small_settings(world, world / "model", tmp_path), *ROLLBACK]
    settings += ["run.rollouts=2", "evaluation.questions=2", "evaluation.without_retriever=false"]
    root = Path(__file__).parents[1]
    paths = [str(root / "src"), str(root / "tests"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(root / "tests" / "alarm_worker.py"), *settings]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = read_lines(tmp_path / "try" / "metrics.jsonl")
    assert [row["llds/coef"] for row in rows] == pytest.approx([0.2] * 2 + [0.6] * 2)
    assert len(read_lines(tmp_path / "try" / "rolled-back" / "1" / "metrics.jsonl")) == 2
