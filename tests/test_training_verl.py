"""``llds train engine=verl`` as far as it goes without verl: words, files, refusals."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from llds.data.embedded import load_questions
from llds.errors import LLDSError
from llds.training.recipe import load_recipe, recipe_names
from llds.training.records import RunFolder, read_lines
from llds.training.settings import to_yaml
from llds.training.verl_command import Files, _written, look_at, mini_batch, verl_overrides
from llds.training.verl_run import prepare

FILES = Files("Qwen/Qwen2.5-3B", *(Path("/data") / name for name in ("a.parquet", "b.parquet", "ckpt")))
RECIPES = [name for name in recipe_names() if name.startswith("qwen")]
TINY = ["engine=verl", "model.device=cuda", "scale.gpus=2"]


def words_of(*overrides, recipe="qwen2.5-3b"):
    return verl_overrides(load_recipe(recipe, overrides), FILES)


def value(words, key):
    (found,) = [word.partition("=")[2] for word in words if word.partition("=")[0].lstrip("+").endswith(key)]
    return found


def test_there_are_recipes_of_the_paper():
    assert RECIPES == ["qwen2.5-3b", "qwen2.5-3b-instruct", "qwen2.5-7b", "qwen2.5-7b-instruct"]
    for name in RECIPES:
        recipe = load_recipe(name)
        assert (recipe.grpo.questions, recipe.grpo.responses, recipe.grpo.beta) == (512, 5, 0.001)
        assert (recipe.grpo.learning_rate, recipe.grpo.warmup, recipe.run.rollouts) == (1e-6, 0.285, 1005)
        assert recipe.llds.coef == (0.3 if name == "qwen2.5-7b-instruct" else 0.2)
        assert recipe.episode.prompt == ("search-r1-instruct" if "instruct" in name else "search-r1")


def test_a_rollout_is_cut_by_questions():
    assert mini_batch(load_recipe("qwen2.5-3b")) == 64
    words = words_of("grpo.steps_per_rollout=2", "grpo.passes=3")
    assert value(words, "ppo_mini_batch_size") == "256"
    assert value(words, "ppo_epochs") == "3"
    assert value(words, "data.train_batch_size") == "512"
    assert value(words, "rollout.n") == "5"


@pytest.mark.parametrize(
    ("override", "key", "wanted"),
    [
        ("grpo.beta=0", "use_kl_loss", "false"),
        ("grpo.clip_high=0.28", "clip_ratio_high", "0.28"),
        ("grpo.scale_rewards=none", "norm_adv_by_std_in_grpo", "false"),
        ("grpo.loss=dr_grpo", "loss_agg_mode", "seq-mean-token-sum-norm"),
        ("grpo.loss=cispo", "llds_base", "cispo"),
        ("grpo.importance=sequence", "llds_base", "gspo"),
        ("grpo.importance=sequence", "loss_agg_mode", "seq-mean-token-mean"),
        ("llds.coef=0", "llds_coef", "0.0"),
        ("llds.baseline=reference", "llds_baseline", "reference"),
        ("llds.mask_answer=true", "llds_answer_weight", "auto"),
        ("scale.nodes=4", "trainer.nnodes", "4"),
        ("scale.generator=sglang", "rollout.name", "sglang"),
        ("run.report_to=wandb", "trainer.logger", "[console,file,wandb]"),
        ("evaluation.every=0", "trainer.test_freq", "1005"),
        ("sampling.top_k=20", "rollout.top_k", "20"),
        ("model.dtype=float32", "mixed_precision", "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"),
    ],
)
def test_every_setting_reaches_verl(override, key, wanted):
    assert value(words_of(override), key) == wanted
    assert value(words_of(), key) != wanted


@pytest.mark.parametrize(
    "override",
    [
        "grpo.loss=vespo",
        "grpo.schedule=linear",
        "grpo.scale_rewards=batch",
        "llds.baseline=anchor",
        "llds.normalizer=preserved",
        "llds.warmup=5",
        "warm_start.steps=5",
        "dynamics.on_alarm=stop",
        "dynamics.probe_every=3",
        "model.device=cpu",
        "grpo.steps_per_rollout=5",
        "scale.gpus=7",
        "scale.tensor_parallel=3",
    ],
)
def test_what_verl_has_not_is_refused(override):
    key = override.partition("=")[0]
    with pytest.raises(LLDSError, match=re.escape(key)) as caught:
        words_of(override)
    assert "\n" not in str(caught.value)


def test_words_are_written_for_hydra():
    assert _written("/a b/it's.parquet") == "'/a b/it\\'s.parquet'"
    assert _written("low_var_kl") == "low_var_kl"
    assert _written({"a": [True, None, 1e-6]}) == "{a:[true,null,1e-06]}"
    assert _written("") == "''"


def test_the_preflight_reads_the_words():
    clean = look_at(words_of())
    assert not clean.certain
    inert = look_at(words_of("grpo.steps_per_rollout=1"))
    assert [finding.fault for finding in inert.certain] == ["L1"]
    assert "ppo_mini_batch_size" in inert.certain[0].setting


def test_prepare_writes_what_verl_reads(tmp_path):
    recipe = load_recipe("tiny", [*TINY, f"run.folder={tmp_path}", "run.name=a b", "evaluation.questions=7"])
    run = RunFolder(tmp_path / "a b")
    with run.locked():
        launch = prepare(recipe, ["trainer.logger=[console]"], run)
    training = pq.read_table(run.path / "data" / "train.parquet").to_pylist()
    assert len(training) == len(load_questions("train"))
    assert pq.read_table(run.path / "data" / "test.parquet").num_rows == 7
    first, row = load_questions("train")[0], training[0]
    assert row["reward_model"]["ground_truth"]["target"] == list(first.golden_answers)
    assert row["prompt"][0]["content"].startswith("Question: ")
    assert row["extra_info"]["question"] == first.question
    assert [row["extra_info"]["index"] for row in training] == list(range(len(training)))
    assert value(launch.words, "llds_search.max_turns") == "3"
    assert value(launch.words, "llds_search.corpus") == "embedded"
    assert launch.words[-1] == "trainer.logger=[console]"
    assert run.config.read_text() == to_yaml(recipe)


def test_the_script_gives_verl_the_words(tmp_path):
    """A shell reads the script; what it would start gets word for word what was meant."""
    recipe = load_recipe("tiny", [*TINY, f"run.folder={tmp_path}", "run.name=it's"])
    run = RunFolder(tmp_path / "it's")
    with run.locked():
        launch = prepare(recipe, [], run)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -c 'import sys, os, json;"
        ' print(json.dumps([os.environ["VERL_FILE_LOGGER_PATH"], *sys.argv[1:]]))\' "$@"\n'
    )
    python.chmod(0o755)
    shown = subprocess.run(
        ["sh", run.path / "command.sh", "trainer.test_freq=3"],
        env={**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert yaml.safe_load(shown.stdout) == [
        str(launch.metrics), "-m", "verl.trainer.main_ppo", *launch.words, "trainer.test_freq=3"
    ]  # fmt: skip


def test_every_start_has_a_file_of_numbers(tmp_path):
    recipe = load_recipe("tiny", [*TINY, f"run.folder={tmp_path}", "run.name=x"])
    run = RunFolder(tmp_path / "x")
    with run.locked():
        first = prepare(recipe, [], run).metrics
        first.parent.mkdir(parents=True, exist_ok=True)
        first.write_text("{}\n")
        assert prepare(recipe, [], run).metrics.name == "metrics-2.jsonl"
        with pytest.raises(LLDSError, match=r"another recipe: llds\.coef"):
            prepare(
                load_recipe("tiny", [*TINY, f"run.folder={tmp_path}", "run.name=x", "llds.coef=1"]), [], run
            )
    assert first.read_text() == "{}\n"


def program(tmp_path, *arguments, fake=None):
    path = [str(Path("src").resolve()), *([str(fake)] if fake else [])]
    return subprocess.run(
        [sys.executable, "-m", "llds.cli", "train", "tiny", *TINY, f"run.folder={tmp_path}", "run.name=r", *arguments],
        env={**os.environ, "PYTHONPATH": ":".join(path)}, capture_output=True, text=True,
    )  # fmt: skip


def test_the_command_says_that_verl_is_missing(tmp_path):
    result = program(tmp_path)
    assert result.returncode == 2
    assert result.stderr.strip().splitlines()[-1].endswith("run: pip install 'llds[verl]'")
    assert "Traceback" not in result.stderr
    wrong = program(tmp_path, "run.engine=trl", "--prepare")
    assert "add engine=verl" in wrong.stderr


@pytest.fixture
def verl(tmp_path):
    """A package of that name that writes down what it is given, waits, and ends as it is told to."""
    package = tmp_path / "fake" / "verl" / "trainer"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "main_ppo.py").write_text(
        "import os, sys, json, time\n"
        "words = dict(w.split('=', 1) for w in sys.argv[1:])\n"
        "open(os.environ['VERL_FILE_LOGGER_PATH'], 'w').write(json.dumps(sys.argv[1:]) + '\\n')\n"
        "print('begun', flush=True)\n"
        "time.sleep(float(words.get('wait', 0)))\n"
        "sys.exit(int(words.get('code', 0)))\n"
    )
    return tmp_path / "fake"


def test_verl_is_started_and_its_end_is_told(tmp_path, verl):
    good = program(tmp_path, "--json", fake=verl)
    assert good.returncode == 0, good.stderr
    events = read_lines(tmp_path / "r" / "events.jsonl")
    assert [event["event"] for event in events] == ["start", "finish"]
    assert "llds watch" in good.stderr
    bad = program(tmp_path, "--verl", "code=3", fake=verl)
    assert bad.returncode == 3
    assert "exit code 3" in bad.stdout
    assert (tmp_path / "r" / "verl" / "metrics-2.jsonl").exists()


def test_a_certain_fault_stops_it_before_verl_starts(tmp_path, verl):
    refused = program(tmp_path, "grpo.steps_per_rollout=1", fake=verl)
    assert refused.returncode == 2
    assert "L1" in refused.stderr
    assert not list((tmp_path / "r" / "verl").glob("*"))
    assert program(tmp_path, "grpo.steps_per_rollout=1", "--force", fake=verl).returncode == 0


def test_ctrl_c_ends_verl_and_leaves_nothing_behind(tmp_path, verl):
    process = subprocess.Popen(
        [sys.executable, "-m", "llds.cli", "train", "tiny", *TINY, f"run.folder={tmp_path}", "run.name=r",
         "--verl", "wait=100"],
        env={**os.environ, "PYTHONPATH": f"{Path('src').resolve()}:{verl}"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(2)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in told.replace("Traceback (most recent call last):\n  File", "", 1)
    left = subprocess.run(["pgrep", "-f", f"{tmp_path}.*wait=100"], capture_output=True, text=True)
    assert left.stdout == ""
