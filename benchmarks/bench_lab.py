"""Why the laboratory has a loop of its own: one rollout and its updates there, and through TRL.

Run it as ``python benchmarks/bench_lab.py``. The policies are of one size (2 layers of width 64, 128 tokens),
responses are of the same number and length, and processor time is taken in turn within one run; the ratios
are what to compare. "Sampling" is the laboratory's against that of :class:`llds.search.episode.EpisodeRunner`,
"updates" ten optimizer steps of 16 responses against those of ``LLDSGRPOTrainer``, canned rollouts given.
"""

from __future__ import annotations

import logging
import os
import random
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from llds.engines.trl import LLDSGRPOConfig, LLDSGRPOTrainer
from llds.lab.arms import ARMS
from llds.lab.loop import Run
from llds.lab.organism import Organism
from llds.lab.regimes import REGIMES
from llds.lab.rollouts import roll_out
from llds.lab.world import World
from llds.search.episode import EpisodeRunner, Limits
from llds.search.protocol import OBSERVATION_CLOSE, OBSERVATION_OPEN, Protocol
from llds.search.retrieval import NoRetriever

REGIME = REGIMES["far"]
ROWS, UPDATES, LENGTH, TOKENS = REGIME.questions * REGIME.group_size, REGIME.updates, 40, 128
ROUNDS = 5


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words, with those of the protocol among them."""
    tags = [
        "<search>",
        "</search>",
        "<answer>",
        "</answer>",
        OBSERVATION_OPEN.strip(),
        OBSERVATION_CLOSE.strip(),
    ]
    words = ["<pad>", "<eos>", *tags, *(f"w{i}" for i in range(TOKENS - 8))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def qwen(eos: int | None) -> Qwen2ForCausalLM:
    """Return a model of transformers of the organism's size."""
    body = REGIME.body
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=TOKENS,
            hidden_size=body.width,
            intermediate_size=4 * body.width,
            num_hidden_layers=body.layers,
            num_attention_heads=body.heads,
            num_key_value_heads=body.heads,
            max_position_embeddings=64,
            eos_token_id=eos,
            bos_token_id=None,
            pad_token_id=0,
        )
    )


def lab_sampling() -> Callable[[], object]:
    """Return a rollout of an organism with random weights, which writes to the limit."""
    world, model = World(REGIME.task), Organism(TOKENS, REGIME.body)
    draw, sampling = np.random.default_rng(0), torch.Generator().manual_seed(0)

    def call() -> object:
        questions = world.ask(REGIME.questions, draw)
        return roll_out(model, world, questions, REGIME.group_size, REGIME.limits, sampling, draw)

    return call


def episode_sampling() -> Callable[[], object]:
    """Return as many episodes of the search room, of the same length."""
    limits = Limits(max_response_tokens=LENGTH, max_action_tokens=LENGTH, max_observation_tokens=4)
    runner = EpisodeRunner(qwen(None), word_tokenizer(), NoRetriever(), Protocol(style="short"), limits)
    prompts = [[10, 11, 12, 13, 14]] * ROWS
    return lambda: runner.run(prompts)


def lab_updates() -> Callable[[], object]:
    """Return what the laboratory does with a rollout, sampling left out."""
    run = Run(REGIME, ARMS["llds"], 0, Organism(TOKENS, REGIME.body))
    questions = run.world.ask(REGIME.questions, run._draw)
    kept = roll_out(
        run.model, run.world, questions, REGIME.group_size, REGIME.limits, run._sampling, run._draw
    )

    def call() -> object:
        batch, _ = run._batch(kept)
        order = torch.from_numpy(run._draw.permutation(ROWS))
        return [run._update(batch.rows(rows), age) for age, rows in enumerate(order.chunk(UPDATES))]

    return call


class Canned:
    """A ``rollout_func`` that costs nothing: random tokens with feedback in the middle."""

    def __call__(self, prompts: list[str], trainer: object) -> dict[str, object]:
        """Return one response for each prompt."""
        draw = random.Random(0)
        ids = [[draw.randrange(8, TOKENS) for _ in range(LENGTH)] for _ in prompts]
        mask = [1] * (LENGTH // 2) + [0] * 3 + [1] * (LENGTH - LENGTH // 2 - 3)
        return {
            "prompt_ids": [[10, 11, 12, 13, 14]] * len(prompts),
            "completion_ids": ids,
            "env_mask": [mask] * len(prompts),
            "logprobs": None,
            "score": [float(draw.random() < 0.3) for _ in prompts],
        }


class Clock(TrainerCallback):
    """Takes the processor time at every optimizer step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        """Note the time."""
        self.times.append(time.process_time())


def trl_seconds(folder: str) -> float:
    """Return the processor time of a rollout's updates through TRL, the median over rollouts."""
    clock = Clock()
    config = LLDSGRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        learning_rate=1e-4,
        beta=0.001,
        per_device_train_batch_size=ROWS // UPDATES,
        steps_per_generation=UPDATES,
        num_generations=REGIME.group_size,
        max_completion_length=LENGTH,
        max_steps=UPDATES * (ROUNDS + 1),
    )
    policy = qwen(1)
    policy.save_pretrained(f"{folder}/start")
    policy.config._name_or_path = f"{folder}/start"
    trainer = LLDSGRPOTrainer(
        model=policy,
        args=config,
        processing_class=word_tokenizer(),
        rollout_func=Canned(),
        reward_funcs=lambda completions, score, **_: score,
        train_dataset=Dataset.from_dict({"prompt": ["w2 w3 w4 w5 w6"] * 640}),
        callbacks=[clock],
    )
    trainer.train()
    ends = clock.times[UPDATES - 1 :: UPDATES]
    return sorted(b - a for a, b in pairwise(ends))[(len(ends) - 1) // 2]


def seconds(call: Callable[[], object]) -> float:
    """Return the median processor time of a call."""
    taken = []
    for _ in range(ROUNDS + 1):
        began = time.process_time()
        call()
        taken.append(time.process_time() - began)
    return sorted(taken[1:])[ROUNDS // 2]


def main() -> None:
    """Print both comparisons."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        rows = {
            "sampling": (seconds(lab_sampling()), seconds(episode_sampling())),
            "updates": (seconds(lab_updates()), trl_seconds(folder)),
        }
    print(f"{ROWS} responses of up to {LENGTH} tokens, {UPDATES} updates; CPU seconds a rollout")
    for name, (ours, theirs) in rows.items():
        print(f"{name:10} laboratory {ours:.3f}   llds.search / TRL {theirs:.3f}   ratio {theirs / ours:.1f}")


if __name__ == "__main__":
    main()
