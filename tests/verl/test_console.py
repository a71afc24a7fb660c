"""What a user of verl's command sees: the verdict before Ray, and a clear error once the package is gone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import llds

HERE = Path(__file__).parent
SOURCE = Path(llds.__file__).parents[1]
LOSS = "actor_rollout_ref.actor.policy_loss"
SEARCH = "hydra.searchpath=[pkg://llds.engines.verl.conf]"
NEEDED = [
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.n=5",
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=512",
]


def python(*arguments, path=(), **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, path), str(SOURCE)]),
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )


def command(folder, *words, without=False):
    switch = ["--without-llds"] if without else []
    run = f"hydra.run.dir={folder}"
    done = python(str(HERE / "main_script.py"), *switch, run, *NEEDED, *words)
    return done.returncode, done.stdout


def test_the_verdict_comes_once_and_before_ray(tmp_path):
    code, said = command(tmp_path, SEARCH, "+llds@_global_=default")
    assert code == 0, said
    assert said.count("LLDS: live in 1 of 2 optimizer steps of each rollout;") == 1
    assert said.index("LLDS: live") < said.index("RAY WOULD START") < said.index("THE LOSS IS THERE")


def test_a_structural_zero_is_told_and_stops_where_asked_to(tmp_path):
    once = "actor_rollout_ref.actor.ppo_mini_batch_size=512"
    code, said = command(tmp_path, SEARCH, "+llds@_global_=gspo", once, f"{LOSS}.llds_preflight=stop")
    assert code == 1
    assert "LLDS: STRUCTURAL ZERO. The penalty cannot act in any optimizer step." in said
    assert "change: set actor.ppo_mini_batch_size to half of data.train_batch_size or less" in said
    assert "stopped before training" in said
    assert "RAY" not in said


def test_a_mistake_ends_the_command_with_one_sentence(tmp_path):
    code, said = command(tmp_path, SEARCH, "+llds@_global_=default", f"{LOSS}.llds_gate=acton")
    assert code == 1
    assert said.strip().splitlines()[-1] == (
        "LLDS: llds_gate must be one of 'action', 'response', 'token', but is 'acton'."
    )


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            [SEARCH, "+llds@_global_=default"],
            "looks like a config group override, but config group 'llds' does not exist",
        ),
        (
            [f"{LOSS}._target_=llds.engines.verl.config.LLDSPolicyLossConfig", f"{LOSS}.loss_mode=llds"],
            "Error locating target 'llds.engines.verl.config.LLDSPolicyLossConfig'",
        ),
        ([f"{LOSS}.loss_mode=llds"], "Unsupported loss mode: llds"),
    ],
)
def test_without_the_package_verl_says_what_is_missing(tmp_path, words, error):
    code, said = command(tmp_path, *words, without=True)
    assert code == 1
    assert error in said
    assert "THE LOSS IS THERE" not in said


def test_a_forgotten_search_path_is_no_silent_plain_run_either(tmp_path):
    code, said = command(tmp_path, "+llds@_global_=default")
    assert code == 1
    assert "config group 'llds' does not exist" in said


def test_verl_finds_the_plugin_by_its_entry_point(tmp_path):
    """As pip would install it, in any process that imports verl and never names this package."""
    info = tmp_path / "llds_under_test-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llds-under-test\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[verl.plugins]\nllds = llds.engines.verl.plugin\n")
    code = "import verl; from verl.trainer.ppo.core_algos import get_policy_loss_fn as f; f('llds_gspo')"
    found = python("-c", code, path=[tmp_path])
    assert found.returncode == 0, found.stdout
    off = python("-c", code, path=[tmp_path], VERL_USE_EXTERNAL_PLUGINS="none")
    assert "Unsupported loss mode: llds_gspo" in off.stdout
    named = python("-c", code, VERL_USE_EXTERNAL_MODULES="llds.engines.verl.plugin")
    assert named.returncode == 0, named.stdout


def test_importing_the_room_alone_does_not_import_verl():
    code = "import sys, llds.engines.verl, llds.engines.verl.options; sys.exit('verl' in sys.modules)"
    assert python("-c", code).returncode == 0
