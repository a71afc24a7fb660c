"""What grows with what: memory and time of the regulariser against tokens, actions and responses.

Run it as ``python benchmarks/bench_scale.py``; it takes about a minute. Memory is what one pass allocates on top of
its inputs at its highest, in bytes per token, by torch's own profiler, so it is the same on every machine. Time is a
ratio to the smallest size of the same row. Beside it stands what verl's own loss takes for the same batch.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from llds import llds_loss
from llds.dynamics import Measure, StepAccumulator
from llds.objective import LLDSOutput, grpo_policy_loss

ROUNDS = 7


def make_batch(rows: int, length: int, action: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probs, old log-probs, advantages, and a mask of actions of ``action`` tokens between feedback."""
    torch.manual_seed(0)
    old = -torch.rand(rows, length)
    logprobs = (old + 0.05 * torch.randn_like(old)).requires_grad_()
    mask = (torch.arange(length) // action % 2 == 0).expand(rows, length).contiguous()
    return logprobs, old, torch.randn(rows), mask


def gradient(loss: Callable[..., LLDSOutput], batch: tuple[Tensor, ...]) -> None:
    """Make one forward and backward pass."""
    torch.autograd.grad(loss(*batch).loss, batch[0])


def sums(batch: tuple[Tensor, ...]) -> None:
    """Make the sums of all series of one micro-batch."""
    logprobs, old, advantages, mask = batch
    accumulator = StepAccumulator(Measure())
    accumulator.add(logprobs.detach(), old, advantages, mask, updates=1)
    accumulator.sums()


def peak_bytes(call: Callable[[], None]) -> int:
    """Return how much a call has allocated at its highest."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def milliseconds(call: Callable[[], None]) -> float:
    """Return the median time of a call."""
    taken = []
    for _ in range(ROUNDS + 2):
        start = time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken[2:])


def main() -> None:
    """Print one line per size."""
    torch.set_num_threads(1)
    sizes = {
        "tokens": [(16, length, 64) for length in (512, 1024, 2048, 4096)],
        "responses": [(rows, 1024, 64) for rows in (4, 16, 64)],
        "actions": [(16, 2048, action) for action in (1024, 256, 64, 16, 4)],
    }
    print("varied     rows  length  actions  llds B/token  time   grpo B/token  series B/token")
    for name, shapes in sizes.items():
        first = None
        for rows, length, action in shapes:
            batch = make_batch(rows, length, action)
            tokens = rows * length
            calls = (
                partial(gradient, llds_loss, batch),
                partial(gradient, grpo_policy_loss, batch),
                partial(sums, batch),
            )
            llds, grpo, series = (peak_bytes(call) / tokens for call in calls)
            spent = milliseconds(calls[0])
            first = first or spent
            actions = rows * -(-length // (2 * action))
            cells = (f"{llds:13.1f}", f"{spent / first:5.2f}", f"{grpo:14.1f}", f"{series:15.1f}")
            print(f"{name:10} {rows:4} {length:7} {actions:8}", *cells)


if __name__ == "__main__":
    main()
