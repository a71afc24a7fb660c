"""verl's own TrainingWorker and FSDP2 engine on the processor, LLDS chosen by configuration alone."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from llds.engines.verl.metrics import exact_ratios

HERE = Path(__file__).parent
ALONE = [
    "vanilla",
    "coef-0",
    "vanilla-one-step",
    "one-step",
    "two-steps",
    "two-passes",
    "gspo",
    "ma",
    "reference",
]
TOGETHER = ["two-steps", "one-step"]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run(cases, ranks=1):
    """Return what rank 0 found in each case, and everything that was said."""
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "worker_script.py"), *cases],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, outputs
    (line,) = [line for line in outputs[0].splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT ")), "\n".join(outputs)


@pytest.fixture(scope="module")
def alone():
    return run(ALONE)


@pytest.fixture(scope="module")
def together():
    return run(TOGETHER, ranks=2)


def test_one_optimizer_step_is_exactly_zero_and_says_so(alone):
    found, said = alone
    told = found["one-step"]["metrics"]
    assert told["llds/loss"] == [0.0]
    assert told["llds/gate_rate"] == [0.0]
    assert told["llds/structural_zero"] == [1.0]
    assert told["llds/noise_floor"] == [0.0]
    assert found["one-step"]["weights"] == found["vanilla-one-step"]["weights"]
    assert said.count("STRUCTURAL ZERO") == 1
    assert "each rollout gets one optimizer step, so old and new policy are the same." in said


@pytest.mark.parametrize("case", ["two-steps", "two-passes"])
def test_two_optimizer_steps_add_the_objective(alone, case):
    found, _ = alone
    told = found[case]["metrics"]
    assert told["llds/structural_zero"] == [1.0, 0.0]
    assert told["llds/loss"][0] == 0
    assert told["llds/loss"][1] > 0.001
    assert told["llds/loss"] == pytest.approx(found[case]["objective"], rel=1e-5)
    assert told["llds/updates_since_rollout"] == [0.0, 1.0]
    assert told["llds/micro_batches"] == ([2.0, 2.0] if case == "two-steps" else [4.0, 4.0])


def test_the_loss_that_is_trained_has_the_term(alone):
    found, _ = alone
    base, told = found["vanilla"]["metrics"], found["two-steps"]["metrics"]
    # The first step is the same, so the policy of the second one is too.
    assert told["actor/pg_loss"][0] == base["actor/pg_loss"][0]
    assert told["actor/pg_loss"][1] - base["actor/pg_loss"][1] == pytest.approx(
        told["llds/loss"][1], rel=1e-4
    )
    assert told["grad_norm"][1] != base["grad_norm"][1]
    assert found["two-steps"]["weights"] != found["vanilla"]["weights"]


def test_coef_0_trains_as_without_llds(alone):
    found, _ = alone
    assert found["coef-0"]["config"] == "LLDSPolicyLossConfig"
    assert found["vanilla"]["config"] == "PolicyLossConfig"
    assert found["coef-0"]["weights"] == found["vanilla"]["weights"]
    assert found["coef-0"]["metrics"]["grad_norm"] == found["vanilla"]["metrics"]["grad_norm"]
    assert found["coef-0"]["metrics"]["llds/penalty"][1] > 0


def test_on_gspo(alone):
    found, _ = alone
    told = found["gspo"]["metrics"]
    assert told["llds/loss"][0] == 0 < told["llds/loss"][1]


def test_answers_from_the_agent_loop(alone):
    """Half of the trajectories have one search, half two: β = 1.5 / 4."""
    told = alone[0]["ma"]["metrics"]
    assert told["llds/answer_weight"] == [0.375, 0.375]
    assert told["llds/valid_searches"] == [1.5, 1.5]
    assert len(told["llds/logprob_correct_answer"]) == 2
    assert 0 < told["llds/loss"][1] < alone[0]["two-steps"]["metrics"]["llds/loss"][1]


def test_the_reference_as_baseline_is_live_in_a_single_step(alone):
    """Every token is 0.01 nats less likely than under the reference of the script."""
    told = alone[0]["reference"]["metrics"]
    assert told["llds/structural_zero"] == [0.0]
    assert told["llds/penalty"] == [pytest.approx(0.01, rel=1e-3)]
    assert told["llds/noise_floor"] == [0.0]


def test_two_ranks_say_what_one_says(alone, together):
    one, two = alone[0]["two-steps"]["metrics"], together[0]["two-steps"]["metrics"]
    assert two["llds/micro_batches"] == [2.0, 2.0]
    exact = ["llds/loss", "llds/tokens", "llds/moved_share", "llds/displacement_abs", "llds/preserved_share"]
    exact += [name for name in one if name.startswith("llds/sum/")]
    for name in exact:
        assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-4), name
    last_one, last_two = ({name: value[-1] for name, value in told.items()} for told in (one, two))
    assert exact_ratios(last_two)["displacement_correct"] == pytest.approx(
        last_one["llds/displacement_correct"], rel=1e-3
    )
    assert together[0]["two-steps"]["weights"] == pytest.approx(alone[0]["two-steps"]["weights"], rel=1e-4)
    assert together[0]["one-step"]["metrics"]["llds/loss"] == [0.0]
    assert together[1].count("STRUCTURAL ZERO") == 1
