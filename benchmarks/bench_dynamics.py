"""What watching costs: the accumulator and the monitor beside a training step of a small model.

Run it as ``python benchmarks/bench_dynamics.py``. First the parts alone, then all that watching adds to three
rollouts of ``llds train tiny``. All is timed within one run, on a CPU by the processor time used, so that a busy
machine hardly matters; the ratios are what to compare. The models are of the size of the tiny recipe's, so
this is the worst case: the cost of watching does not grow with the model.
"""

import io
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from llds.dynamics import PhaseMonitor, StepAccumulator, read_series, synthetic
from llds.objective import grpo_policy_loss

ROWS, WIDTH, LAYERS, VOCABULARY = 32, 128, 4, 4096
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOCK = time.perf_counter if DEVICE == "cuda" else time.process_time


def milliseconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median time of each call, in rounds, so that what slows the machine slows all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start = CLOCK()
            call()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            times[name].append(1e3 * (CLOCK() - start))
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def make_model() -> nn.Module:
    """Return a small transformer."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    parts = [
        nn.Embedding(VOCABULARY, WIDTH),
        nn.TransformerEncoder(layer, LAYERS),
        nn.Linear(WIDTH, VOCABULARY),
    ]
    return nn.Sequential(*parts).to(DEVICE)


def make_calls(length: int) -> dict[str, Callable[[], object]]:
    """Return a training step on one micro-batch, and what watching adds to it."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(VOCABULARY, (ROWS, length), device=DEVICE)
    mask = (torch.arange(length, device=DEVICE) // 20 % 2 == 0).long().expand(ROWS, length)
    advantages = torch.randn(ROWS, device=DEVICE)
    first_search = torch.ones(ROWS, dtype=torch.long, device=DEVICE)

    def logprobs() -> tuple[Tensor, Tensor]:
        logits = model(tokens).log_softmax(-1)
        return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), -(logits.exp() * logits).sum(-1)

    old, entropies = (values.detach() for values in logprobs())
    new = old + 0.01 * torch.randn_like(old)
    accumulator = StepAccumulator()

    def train() -> None:
        loss = grpo_policy_loss(logprobs()[0], old, advantages, mask).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def watch() -> None:
        accumulator.reset()
        accumulator.add(
            new,
            old,
            advantages,
            mask,
            entropies=entropies,
            answer_mask=mask,
            first_search=first_search,
            updates=1,
        )

    return {"training step": train, "accumulate": watch, "read": lambda: read_series(accumulator.sums())}


def monitor_milliseconds() -> float:
    """Return the mean time of one update of the monitor over a collapsing run, the onset search included."""
    run, monitor = synthetic.spiral(0), PhaseMonitor()
    start = CLOCK()
    for step, row in enumerate(run.rows):
        monitor.update(step, row)
    return 1e3 * (CLOCK() - start) / len(run.rows)


class Stopwatch:
    """Adds up the time that some functions take, whoever calls them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, owner: Any, name: str) -> None:
        """Time ``owner.name`` from now on."""
        called = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = CLOCK()
            try:
                return called(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + CLOCK() - start

        setattr(owner, name, timed)


def train_tiny(rollouts: int) -> Stopwatch:
    """Train by the tiny recipe; return what the parts of watching took, and ``train`` in all."""
    from llds.engines.trl import rollout, runtime, window
    from llds.engines.trl.monitor import RunMonitor
    from llds.training.environment import prepare_environment
    from llds.training.progress import PlainDisplay
    from llds.training.recipe import load_recipe
    from llds.training.run import train
    from llds.training.trainer import SearchTrainer

    prepare_environment()
    watch = Stopwatch()
    watch.wrap(runtime.LLDSRuntime, "_measure")
    watch.wrap(window, "read_series")
    watch.wrap(rollout, "add_first_searches")
    watch.wrap(RunMonitor, "before_log")
    watch.wrap(SearchTrainer, "train")
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"run.folder={folder}", f"run.rollouts={rollouts}", "run.save_every=0"]
        settings += ["evaluation.questions=2", "evaluation.without_retriever=false"]
        train(load_recipe("tiny", settings), PlainDisplay(io.StringIO()))
    return watch


def main() -> None:
    """Measure and print."""
    threads = torch.get_num_threads()
    print(f"{ROWS} responses, width {WIDTH}, {LAYERS} layers, {DEVICE}, {threads} threads")
    for length in (128, 512):
        times = milliseconds(make_calls(length), rounds=9)
        times["monitor"] = monitor_milliseconds()
        step = times.pop("training step")
        times["together"] = sum(times.values())
        print(f"{length} tokens a response: training step {step:.1f} ms")
        for name, taken in times.items():
            print(f"  {name:<11} {taken:7.3f} ms   {taken / step:7.3%} of the step")
    seconds = train_tiny(rollouts=3).seconds
    whole = seconds.pop("train")
    print(f"llds train tiny, 3 rollouts, 12 optimizer steps: {whole:.1f} s")
    for name, taken in {**seconds, "together": sum(seconds.values())}.items():
        print(f"  {name:<18} {1e3 * taken / 12:7.3f} ms a step   {taken / whole:7.3%} of training")


if __name__ == "__main__":
    main()
