"""Starts verl's own ``main_ppo`` on Ray on this machine, and leaves no process of it behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

import llds
from llds.data.embedded import load_questions
from llds.data.search_r1 import write_search_r1
from llds.search.protocol import Protocol
from llds.training.tiny import tiny_folder

TESTS = Path(__file__).parents[1]
SOURCE = Path(llds.__file__).parents[1]
MARK = "LLDS_TEST_RUN"
SECONDS = 280

_MODEL = "actor_rollout_ref.model"
_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"

QUESTIONS, RESPONSES = 8, 4
LLDS = ["hydra.searchpath=[pkg://llds.engines.verl.conf]", "+llds@_global_=default"]
SEARCH = [
    "+llds_search@_global_=default",
    "llds_search.prompt=short",
    "llds_search.max_action=48",
    "llds_search.max_observation=96",
    "llds_search.passage_words=20",
    "llds_search.topk=2",
    # Few answers of the tiny model match whole, so that rewards would hardly differ.
    "+reward.custom_reward_function.reward_kwargs={exact_match:1.0,f1:1.0}",
]
TRAINING = [
    "algorithm.adv_estimator=grpo",
    f"data.train_batch_size={QUESTIONS}",
    "data.max_prompt_length=96",
    "data.max_response_length=320",
    "data.return_raw_chat=True",
    f"{_ACTOR}.optim.lr=1e-3",
    f"{_ACTOR}.ppo_mini_batch_size={QUESTIONS}",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu=8",
    f"{_ROLLOUT}.n={RESPONSES}",
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu=8",
    f"{_ROLLOUT}.calculate_log_probs=True",
    "trainer.total_epochs=10",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.resume_mode=disable",
    "trainer.logger=[console,file]",
]
ON_A_PROCESSOR = [
    f"{_MODEL}.use_remove_padding=False",
    f"{_MODEL}.enable_gradient_checkpointing=False",
    f"+{_MODEL}.override_config.attn_implementation=eager",
    f"{_ACTOR}.strategy=fsdp2",
    f"{_ACTOR}.fsdp_config.use_torch_compile=False",
    f"+{_ACTOR}.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}",
    f"{_ROLLOUT}.name=cpu",
    f"{_ROLLOUT}.tensor_model_parallel_size=1",
    f"{_ROLLOUT}.agent.num_workers=1",
    "reward.num_workers=1",
    "data.dataloader_num_workers=0",
    "trainer.device=cpu",
    "trainer.nnodes=1",
    # Ray is told of more than there is, since verl's parts ask for whole units of each.
    "ray_kwargs.ray_init.num_cpus=16",
    "+ray_kwargs.ray_init.include_dashboard=False",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
]


@dataclass(frozen=True)
class Inputs:
    """What all runs share. ``model``: a folder; ``train``, ``test``: tables in the shape of Search-R1's."""

    model: Path
    train: Path
    test: Path


@dataclass(frozen=True)
class Run:
    """What a run left. ``rows``: what verl logged of each training step. ``output``: all that was printed."""

    code: int
    output: str
    rows: list[dict]
    recorded: Path
    rollouts: Path

    def series(self, name):
        """Return one logged value per training step."""
        return [row[name] for row in self.rows]

    def dumped(self, step):
        """Return the responses of a training step, as verl dumps them."""
        return [json.loads(line) for line in (self.rollouts / f"{step}.jsonl").read_text().splitlines()]


def make_inputs(folder):
    model = folder / "model"
    shutil.copytree(tiny_folder(), model)
    # verl's reward worker asks for the tokenizer with code of the folder; see llds.training.tokenizers.
    code = "from transformers import PreTrainedTokenizerFast as Tokenizer  # noqa: F401\n"
    (model / "load_without_trust_remote_code.py").write_text(code)
    prompt = Protocol(style="short").prompt
    train, test = folder / "train.parquet", folder / "test.parquet"
    write_search_r1(train, load_questions("train")[:64], prompt, "train")
    write_search_r1(test, load_questions("validation")[:8], prompt, "test")
    return Inputs(model, train, test)


def launch(inputs, folder, *words, ranks=1, steps=2):
    """Run the command to its end; ``words`` go last. Fails with the end of the log when it takes too long."""
    recorded, rollouts = folder / "recorded", folder / "rollouts"
    recorded.mkdir(parents=True)
    metrics, log = folder / "metrics.jsonl", folder / "log.txt"
    command = [
        *(sys.executable, "-m", "verl.trainer.main_ppo"),
        *LLDS[:1],
        *TRAINING,
        *ON_A_PROCESSOR,
        f"{_MODEL}.path={inputs.model}",
        f"data.train_files={inputs.train}",
        f"data.val_files={inputs.test}",
        f"trainer.n_gpus_per_node={ranks}",
        f"+ray_kwargs.ray_init.num_gpus={ranks}",
        f"trainer.total_training_steps={steps}",
        f"trainer.rollout_data_dir={rollouts}",
        f"hydra.run.dir={folder / 'hydra'}",
        *words,
    ]
    mark = uuid.uuid4().hex
    # Sockets of Ray lie below it, whose paths must be short.
    scratch = tempfile.mkdtemp(prefix="llds-", dir="/tmp")
    environment = surroundings(mark, scratch) | {
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "LLDS_RECORD": str(recorded),
    }
    try:
        code = _run(command, environment, log)
    finally:
        end_marked(mark)
        shutil.rmtree(scratch, ignore_errors=True)
    output = log.read_text(errors="replace")
    assert code is not None, f"after {SECONDS} s it still ran; see {log}\n{output[-4000:]}"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    rows = [row["data"] for row in map(json.loads, lines) if "training/global_step" in row["data"]]
    return Run(code, output, rows, recorded, rollouts)


def surroundings(mark, scratch):
    """Return the environment of a command that is to find the stand-ins for GPUs; Ray's files go to ``scratch``."""
    return {
        **os.environ,
        MARK: mark,
        "PYTHONPATH": os.pathsep.join([str(SOURCE), str(TESTS)]),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "support.cpu_trainer,support.recording",
        "RAY_TMPDIR": scratch,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_DEDUP_LOGS": "0",
        "HYDRA_FULL_ERROR": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "NO_PROXY": "127.0.0.1",
    }


def _run(command, environment, log):
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=log.parent,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def marked(mark):
    """Return the ids of the processes that were started with a mark in their environment."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # gone, or somebody else's
                continue
            if wanted in variables:
                found.append(int(entry.name))
    return found


def end_marked(mark):
    """Kill what a run left behind, such as daemons of Ray, and nothing else."""
    for process in marked(mark):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
