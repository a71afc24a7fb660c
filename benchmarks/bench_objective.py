"""What the regulariser costs: llds_loss beside the GRPO policy loss, eager and compiled.

Run it as ``python benchmarks/bench_objective.py``; it takes less than two minutes. Times are medians of one
forward and backward pass; the ratios, all from this one run, are what to compare. The last ratio sets the
loss beside a small transformer on as many tokens: its share of a training step, smaller with a real model.
"""

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


def milliseconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median time of each call, in rounds, so that a busy machine slows all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 2):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(taken[2:]) for name, taken in times.items()}


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
    losses: dict[str, Callable[..., LLDSOutput]] = {"grpo": grpo_policy_loss, "llds": llds_loss}
    calls = {f"{name} eager": step(loss, batch) for name, loss in losses.items()}
    calls |= {
        f"{name} compiled": step(torch.compile(loss, fullgraph=True), batch) for name, loss in losses.items()
    }
    times = milliseconds(calls, rounds=60)
    times |= {"model": 8 * milliseconds({"model": model_step()}, rounds=3)["model"]}

    threads = torch.get_num_threads()
    print(f"{ROWS} x {LENGTH} tokens, float32, {DEVICE}, {threads} threads, torch {torch.__version__}")
    for name, taken in times.items():
        print(f"{name:<14} {taken:9.2f} ms")
    for above, below in (
        ("llds eager", "grpo eager"),
        ("llds compiled", "grpo compiled"),
        ("llds eager", "llds compiled"),
        ("llds eager", "model"),
    ):
        print(f"{above} / {below}: {times[above] / times[below]:.4g}")


if __name__ == "__main__":
    main()
