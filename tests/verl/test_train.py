"""``llds train engine=verl`` to its end: the recipe's own words, verl's whole trainer, stand-ins for the GPUs alone."""

import json
import shutil
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
from support.launch import ON_A_PROCESSOR, SECONDS, end_marked, make_inputs, surroundings

from llds.training.records import read_lines

RECIPE = [
    "engine=verl",
    "model.device=cuda",  # what is a stand-in here
    "scale.gpus=1",
    "scale.agents=1",
    "scale.tokens_per_gpu=0",
    "grpo.questions=8",
    "grpo.responses=4",
    "grpo.steps_per_rollout=1",
    "grpo.passes=2",
    "grpo.micro_batch=8",
    # Few answers of the tiny model match whole, so that rewards would hardly differ.
    "reward.f1=1.0",
    "evaluation.questions=4",
    "run.rollouts=1",
    "run.name=r",
]


@pytest.mark.timeout(600)
def test_a_recipe_runs_in_verl(tmp_path):
    inputs = make_inputs(tmp_path / "inputs")
    # The recipe says how numbers are kept; hydra takes a new key but once.
    words = [word for word in ON_A_PROCESSOR if "mixed_precision" not in word]
    words += ["+ray_kwargs.ray_init.num_gpus=1", "reward.num_workers=1"]
    command = [
        *(sys.executable, "-m", "llds.cli", "train", "tiny", *RECIPE, f"run.folder={tmp_path}"),
        f"model.path={inputs.model}",
        *[part for word in words for part in ("--verl", word)],
        "--json",
    ]
    mark, scratch = uuid.uuid4().hex, tempfile.mkdtemp(prefix="llds-", dir="/tmp")
    try:
        done = subprocess.run(
            command,
            env=surroundings(mark, scratch),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    finally:
        end_marked(mark)
        shutil.rmtree(scratch, ignore_errors=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    said = done.stdout + done.stderr
    assert "LLDS: live in 1 of 2 optimizer steps of each rollout" in said
    assert "LLDS: search in embedded in each agent worker, 1 passages a search; up to 3 searches" in said
    result = json.loads(done.stdout[done.stdout.rindex('{\n  "folder"') :])
    assert result["finished"] is True
    rows = [json.loads(line)["data"] for line in Path(result["metrics"]).read_text().splitlines()]
    (trained,) = [row for row in rows if "actor/llds/loss" in row]
    assert trained["actor/llds/coef"] == 0.2
    assert trained["actor/llds/structural_zero"] == 0.5
    assert any(name.startswith("val-") for row in rows for name in row)
    assert (tmp_path / "r" / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert [event["event"] for event in read_lines(tmp_path / "r" / "events.jsonl")] == ["start", "finish"]
