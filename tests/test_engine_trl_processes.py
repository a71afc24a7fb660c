"""LLDS in two processes, which must train as one does, and in a user's plain script."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

import trl_toy as toy
import trl_worker

ROOT = Path(__file__).parent.parent


def run(*command):
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        # Workers outlive a launcher that is killed, and those that wait for each other wait for ever.
        family = [*psutil.Process(process.pid).children(recursive=True), process]
        for member in family:
            member.kill()
        raise
    assert process.returncode == 0, output[-6000:]
    return output


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    run(*launcher, ROOT / "tests" / "trl_worker.py", folder)
    return folder


def test_two_processes_train_as_one(two_processes, tmp_path):
    """One group, shared by two processes, with failed episodes on both: weights and records are the same."""
    one, records = trl_worker.train(tmp_path, per_device=8)
    theirs = load_file(two_processes / "weights.safetensors")
    for name, p in toy.weights(one).items():
        torch.testing.assert_close(p, theirs[name], rtol=0, atol=1e-6)
    plain, _ = trl_worker.train(tmp_path, per_device=8, llds_coef=0.0)
    assert max(float((p - theirs[name]).abs().max()) for name, p in toy.weights(plain).items()) > 1e-4

    logged = json.loads((two_processes / "records.json").read_text())
    assert len(logged) == len(records) == 8
    for record, (metrics, sums) in zip(records, logged, strict=True):
        # Before rounding in the weights adds up, the series agree more closely.
        tolerance = 1e-6 if record.step < 2 else 1e-5
        assert metrics == pytest.approx(record.metrics | {"llds/micro_batches": 2.0}, abs=tolerance)
        for name in ("tokens", "preserved_tokens", "actions_preserved", "penalised_tokens", "responses"):
            assert sums[name] == record.sums[name]
    assert any(metrics["llds/loss"] > 0 for metrics, _ in logged)
    assert {"llds/first_search_shared", "llds/nll_round_1", "llds/policy_entropy"} <= logged[1][0].keys()


def test_what_only_one_process_gets_wrong_stops_both(two_processes):
    first, second = (json.loads((two_processes / f"told-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["preflight"] == []
    assert first["unseen"].startswith("RuntimeError: LLDS was not applied")
    assert "in 1 of 2 micro-batches" in first["unseen"]
    assert first["garbled"].startswith("LLDSError: rollout_func must return 'answer_mask'")


def test_two_lines_in_a_users_script():
    script = ROOT / "examples" / "trl_two_lines.py"
    lines = [line for line in script.read_text().splitlines() if "attach_llds" in line]
    assert len(lines) == 2
    output = run(script, "--steps", "8")
    steps = re.findall(r"step (\d): LLDS (\d\.\d+), (.+)", output)
    assert [why for *_, why in steps] == (["zero by construction"] + ["live"] * 3) * 2
    assert [float(value) > 0 for _, value, why in steps if why == "live"].count(True) >= 4
