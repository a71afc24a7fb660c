"""The supervised warm start: imitate traces, with the loss on what the demonstrator wrote alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from llds.training.traces import Trace

IGNORED = -100
Draw = Callable[[int], tuple[str, Trace]]
"""Return the prompt and the trace with the given number; the same number gives the same trace."""
OnStep = Callable[[int, float], None]
"""Told after each optimizer step: its number from 1, and its loss in nats per token."""


@dataclass(frozen=True)
class WarmStartPlan:
    """How to imitate. ``learning_rate``: peak of a linear rise (a tenth of the steps) and a cosine fall."""

    steps: int
    batch: int
    learning_rate: float
    optimizer: Literal["adamw", "muon"] = "adamw"
    seed: int = 0


def encode(tokenizer: Any, prompt: str, trace: Trace) -> tuple[list[int], list[int]]:
    """Return token ids and labels (ids where the demonstrator wrote, −100 elsewhere) of equal length.

    Each segment is tokenised by itself, as in an episode, where a tool's text never merges with the policy's.
    """
    ids = list(tokenizer(prompt, add_special_tokens=False).input_ids)
    labels = [IGNORED] * len(ids)
    for segment in trace:
        piece = tokenizer(segment.text, add_special_tokens=False).input_ids
        ids += piece
        labels += piece if segment.written else [IGNORED] * len(piece)
    return ids, labels


def collate(examples: Sequence[tuple[list[int], list[int]]], pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Right-pad to [B, T] int64 tensors: ids, attention mask, labels."""
    width = max(len(ids) for ids, _ in examples)
    ids = torch.tensor([ids + [pad_id] * (width - len(ids)) for ids, _ in examples])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in examples])
    labels = torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in examples])
    return ids, mask, labels


def imitation_loss(model: Any, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy (0-dim, nats per token) over labelled tokens.

    The vocabulary projection runs on labelled positions alone, which are half of a trace: for a small model
    it is half of the work.
    """
    hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state[:, :-1]
    wanted = labels[:, 1:]
    kept = wanted != IGNORED
    return nn.functional.cross_entropy(model.lm_head(hidden[kept]).float(), wanted[kept])


def warm_start(
    model: nn.Module, tokenizer: Any, draw: Draw, plan: WarmStartPlan, on_step: OnStep | None = None
) -> None:
    """Train ``model`` in place for ``plan.steps`` optimizer steps on traces 0, 1, 2, … of ``draw``."""
    torch.manual_seed(plan.seed)
    optimizers = _optimizers(model, plan)
    model.train()
    for step, batch in enumerate(_batches(model, tokenizer, draw, plan), start=1):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * _schedule(step, plan.steps)
        loss = imitation_loss(model, *batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if on_step:
            on_step(step, float(loss.detach()))
    model.eval()


def _batches(
    model: nn.Module, tokenizer: Any, draw: Draw, plan: WarmStartPlan
) -> Iterator[tuple[Tensor, ...]]:
    device = next(model.parameters()).device
    for step in range(plan.steps):
        numbers = range(step * plan.batch, (step + 1) * plan.batch)
        examples = [encode(tokenizer, *draw(number)) for number in numbers]
        yield tuple(part.to(device) for part in collate(examples, tokenizer.pad_token_id))


def _schedule(step: int, steps: int) -> float:
    rise = max(1, steps // 10)
    if step <= rise:
        return step / rise
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def _optimizers(model: nn.Module, plan: WarmStartPlan) -> list[torch.optim.Optimizer]:
    """AdamW, or Muon for the matrices inside the blocks: from random weights it needs far fewer steps."""
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    inner = [
        weight for name, weight in named if plan.optimizer == "muon" and weight.ndim == 2 and "layers" in name
    ]
    ids = {id(weight) for weight in inner}
    rest = [weight for _, weight in named if id(weight) not in ids]
    adamw = torch.optim.AdamW(rest, lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    optimizers: list[torch.optim.Optimizer] = [adamw]
    if inner:
        optimizers.append(torch.optim.Muon(inner, lr=_MUON_RATIO * plan.learning_rate, weight_decay=0.01))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


_MUON_RATIO = 20 / 3
