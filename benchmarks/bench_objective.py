"""What the regulariser costs: llds_loss beside the GRPO policy loss, eager and compiled.

Run it as ``python benchmarks/bench_objective.py``; it takes less than two minutes. Times are medians of one
forward and backward pass; the ratios, all from this one run, are what to compare. The last ratio sets the
loss beside a small transformer on as many tokens: its share of a training step, smaller with a real model.
"""

# ruff: noqa: T201

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from llds import llds_loss
from llds.objective import LLDSOutput, grpo_policy_loss

ROWS, LENGTH, WIDTH, VOCABULARY = 32, 1024, 128, 4096
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probs, old log-probs, advantages, and a mask of actions of 60 tokens between feedback."""
    torch.manual_seed(0)
    old = -torch.rand(ROWS, LENGTH, device=DEVICE)
    logprobs = (old + 0.05 * torch.randn_like(old)).requires_grad_()
    mask = (torch.arange(LENGTH, device=DEVICE) // 60 % 2 == 0).expand(ROWS, LENGTH)
    return logprobs, old, torch.randn(ROWS, device=DEVICE), mask


def seconds(call: Callable[[], object], repeats: int = 15) -> float:
    """Return the median time of a call after two to warm up."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        call()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def step(loss: Callable[..., LLDSOutput], batch: tuple[Tensor, ...]) -> Callable[[], object]:
    """Return one forward and backward pass of a loss."""
    return lambda: torch.autograd.grad(loss(*batch).loss, batch[0])


def model_step() -> Callable[[], object]:
    """Return one forward and backward pass of a two-layer transformer over an eighth of the tokens."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    parts = [nn.Embedding(VOCABULARY, WIDTH), nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, VOCABULARY)]
    model = nn.Sequential(*parts).to(DEVICE)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH // 8), device=DEVICE)

    def run() -> None:
        logits = model(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()

    return run


def main() -> None:
    """Measure and print."""
    batch = make_batch()
    threads = torch.get_num_threads()
    print(f"{ROWS} x {LENGTH} tokens, float32, {DEVICE}, {threads} threads, torch {torch.__version__}")
    times = {}
    losses: dict[str, Callable[..., LLDSOutput]] = {
        "grpo_policy_loss": grpo_policy_loss,
        "llds_loss": llds_loss,
    }
    for name, loss in losses.items():
        times[name, "eager"] = seconds(step(loss, batch))
        times[name, "compiled"] = seconds(step(torch.compile(loss, fullgraph=True), batch))
        for mode in ("eager", "compiled"):
            print(f"{name:<17} {mode:<9} {1e3 * times[name, mode]:8.2f} ms")
    model = 8 * seconds(model_step(), repeats=3)
    print(f"{'transformer':<17} {'eager':<9} {1e3 * model:8.0f} ms")
    for mode in ("eager", "compiled"):
        ratio = times["llds_loss", mode] / times["grpo_policy_loss", mode]
        print(f"llds_loss / grpo_policy_loss, {mode}: {ratio:.2f}")
    for name in losses:
        print(f"{name}, eager / compiled: {times[name, 'eager'] / times[name, 'compiled']:.2f}")
    print(f"llds_loss / transformer, eager: {times['llds_loss', 'eager'] / model:.4f}")


if __name__ == "__main__":
    main()
