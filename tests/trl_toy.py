"""A tiny model, a tokenizer of words and canned rollouts: TRL trains on them in well under a second."""

import os
import random

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed

WORDS = ["<pad>", "<eos>", *(f"w{i}" for i in range(46))]
GENERATIONS = 4


def tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def model(seed=0, **overrides):
    set_seed(seed)
    settings = {
        "vocab_size": len(WORDS),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.3,
    }
    return Qwen2ForCausalLM(Qwen2Config(**settings | overrides))


def dataset(prompts=8):
    return Dataset.from_dict({"prompt": [f"w{i} w{i + 1} w40" for i in range(prompts)]})


class Canned:
    """A ``rollout_func``: the completion of a prompt is fixed by the prompt and by its place in the group.

    action (2–4 tokens), feedback (2), action (1–3), answer (1–2), end. ``failed``: places whose tool broke
    down.
    """

    def __init__(self, failed=(), generations=GENERATIONS, drop=()):
        self.failed = failed
        self.generations = generations
        self.drop = drop

    def __call__(self, prompts, trainer):
        offset = trainer.accelerator.process_index * len(prompts)
        episodes = [self.episode(p, (offset + i) % self.generations) for i, p in enumerate(prompts)]
        names = [key for key in episodes[0] if key not in self.drop]
        return {"logprobs": None, **{name: [episode[name] for episode in episodes] for name in names}}

    def episode(self, prompt, place):
        draw = random.Random(f"{prompt}/{place}")
        parts = [
            (draw.randint(2, 4), 1, 0),
            (2, 0, 0),
            (draw.randint(1, 3), 1, 0),
            (draw.randint(1, 2), 1, 1),
        ]
        ids, policy, answer = [], [], []
        for length, wrote, answers in parts:
            ids += [draw.randrange(2, len(WORDS)) for _ in range(length)]
            policy += [wrote] * length
            answer += [answers] * length
        searches, score = draw.randint(0, 3), draw.choice([0.0, 0.0, 1.0])
        return {
            "prompt_ids": [WORDS.index(word) for word in prompt.split()],
            "completion_ids": [*ids, 1],
            "env_mask": [*policy, 1],
            "answer_mask": [*answer, 0],
            "valid_searches": searches,
            "first_search": f"page {searches % 2}" if searches else None,
            "score": 100.0 if place in self.failed else score,
            "tool_failed": place in self.failed,
        }


def score(completions, score, **kwargs):
    """Reward: what the canned rollout says."""
    return score


def settings(output_dir, **overrides):
    """Keywords of a GRPOConfig: two optimizer steps of 8 completions on each rollout, plain SGD."""
    return {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "optim": "sgd",
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "loss_type": "dapo",
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "num_iterations": 2,
        "num_generations": GENERATIONS,
        "max_completion_length": 16,
        "shuffle_dataset": False,
        "max_steps": 4,
    } | overrides


def trainer(cls, config, *, policy=None, rollout=None, **kwargs):
    """Make a trainer of ``cls`` on canned rollouts."""
    kwargs.setdefault("reward_funcs", score)
    kwargs.setdefault("train_dataset", dataset())
    return cls(
        model=policy or model(),
        args=config,
        processing_class=tokenizer(),
        rollout_func=rollout or Canned(),
        **kwargs,
    )


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
