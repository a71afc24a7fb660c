"""Batches as verl's policy losses get them, and the averaging that verl does with what they report."""

from __future__ import annotations

import torch
from verl.utils.metric import AggregationType, Metric, reduce_metrics
from verl.utils.py_functional import append_to_dict
from verl.workers.config import FSDPActorConfig

from llds.engines.verl.config import LLDSPolicyLossConfig


def make_batch(rows=8, length=24, seed=0, requires_grad=False):
    """Return right-padded responses of three actions and two tool spans, log-probs before and after."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, length, dtype=torch.bool)
    for row in range(rows):
        mask[row, 5 + row % 2 : 9] = False
        mask[row, 14:17] = False
        mask[row, length - row % 5 :] = False
    old = -torch.rand(rows, length, generator=generator).double() - 0.1
    new = old + 0.3 * torch.randn(rows, length, generator=generator).double()
    values = torch.tensor([1.0, -1.0, 0.5, -0.5, 0.0, 1.0, -1.0, 0.25]).double()
    advantages = values.repeat(1 + rows // 8)[:rows, None] * mask
    return {
        "old_log_prob": old,
        "log_prob": new.requires_grad_(requires_grad),
        "advantages": advantages,
        "response_mask": mask,
    }


def actor_config(loss_mode="llds", mini_batch=None, ranks=1, tokens=None, **llds):
    """Return verl's actor configuration with what verl tells a loss of its optimizer batch."""
    settings = {f"llds_{name}": value for name, value in llds.items()}
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=4,
        policy_loss=LLDSPolicyLossConfig(loss_mode=loss_mode, **settings),
    )
    if mini_batch is not None:
        config.global_batch_info.update(
            dp_size=ranks, batch_num_tokens=tokens, global_batch_size=mini_batch, loss_scale_factor=None
        )
    return config


def rows_of(batch, index):
    return {name: value[index] for name, value in batch.items()}


def as_verl_averages(reports):
    """Return what verl's workers and trainer make of ``reports[rank][optimizer step][micro-batch]``."""
    steps = []
    for step in range(len(reports[0])):
        by_key = {}
        for rank in reports:
            collected = {}
            for told in rank[step]:
                append_to_dict(collected, Metric.from_dict(told, AggregationType.MEAN))
            for key, value in collected.items():
                by_key.setdefault(key, []).append(value)
        steps.append({key: Metric.aggregate_dp(values) for key, values in by_key.items()})
    logged = {}
    for step in steps:
        append_to_dict(logged, step)
    return reduce_metrics(logged)
