"""What an engine that writes elsewhere costs and keeps, and what intervals cost; ratios within one run.

``python benchmarks/bench_evaluation.py [--questions 200]``: greedy episodes of the shipped model by transformers,
and by a completions server over the same model, once with token ids and once with text alone; how many episodes
are the same. Then the bootstrap of a benchmark of 14,267 questions, by drawing questions and by drawing counts.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from completion_server import CompletionTestServer
from llds.data.embedded import load_questions
from llds.evaluation.statistics import bootstrap_mean, stratified_mean
from llds.inference.engine import Engine, Game
from llds.inference.local import TransformersEngine
from llds.inference.server import CompletionServer
from llds.inference.writing import ConcurrentEngine
from llds.search.sampling import GREEDY
from llds.search.trajectory import Episode
from llds.training.environment import prepare_environment
from llds.training.inputs import make_limits, make_protocol, make_retriever
from llds.training.policy import load_policy, load_reader, saved_recipe


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--model", default="tiny")
    options = parser.parse_args()
    prepare_environment()
    torch.set_num_threads(1)
    engines(options.model, options.questions)
    intervals()


def engines(model: str, count: int) -> None:
    """Compare engines on ``count`` embedded test questions."""
    recipe = saved_recipe(model, [])
    policy, reader = load_policy(recipe.model), load_reader(model)
    game = Game(make_retriever(recipe.retrieval), make_protocol(recipe), make_limits(recipe))
    questions = load_questions("test")[:count]
    prompts = [game.protocol.prompt_ids(policy.tokenizer, one.question) for one in questions]
    local, seconds = played(TransformersEngine(policy.model, policy.tokenizer, 64), prompts, game)
    print(f"{count} greedy episodes of {model}")
    print(f"  transformers, 64 at a time: {seconds:.1f} s")
    for dialect, title in (("vllm", "token ids"), ("plain", "text alone")):
        server = CompletionTestServer(policy.model, policy.tokenizer, dialect)
        client = CompletionServer(server.url, None, policy.tokenizer)
        engine = ConcurrentEngine(client, policy.tokenizer, reader.eos, client.positions, 8)
        episodes, _ = played(engine, prompts, game)
        server.close()
        tokens = sum(a.response_ids == b.response_ids for a, b in zip(episodes, local, strict=True))
        text = sum(a.response == b.response for a, b in zip(episodes, local, strict=True))
        answers = sum(a.answer == b.answer for a, b in zip(episodes, local, strict=True))
        print(f"  server, {title}: same tokens {tokens}, same text {text}, same answer {answers}")


def played(engine: Engine, prompts: list[list[int]], game: Game) -> tuple[list[Episode], float]:
    """Return the episodes in order, and how long they took."""
    began = time.perf_counter()
    found = [pair for part in engine.play(prompts, game, GREEDY, [0] * len(prompts)) for pair in part]
    return [one for _, one in sorted(found, key=lambda pair: pair[0])], time.perf_counter() - began


def intervals() -> None:
    """Compare two ways to the same bootstrap."""
    values = np.random.default_rng(0).random(14_267) < 0.4
    times = []
    for way in (bootstrap_mean, lambda sample: stratified_mean([sample])):
        began = time.perf_counter()
        estimate = way(values.astype(float))
        times.append(time.perf_counter() - began)
        print(
            f"bootstrap of 14,267 questions: [{estimate.low:.4f}, {estimate.high:.4f}] in {times[-1]:.3f} s"
        )
    print(f"  by counts {times[0] / times[1]:.0f} times as fast")


if __name__ == "__main__":
    main()
