"""What ``llds eval MODEL`` does: from the command line to answers, kept and scored."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from llds.cli.engines import make_engine
from llds.cli.orders import Order
from llds.cli.question_sets import question_sets
from llds.data.corpus import corpus_file
from llds.data.embedded import load_manifest
from llds.evaluation.answering import answer
from llds.evaluation.contestants import BASELINES, Baseline, Contestant, make_agent, make_baseline
from llds.evaluation.folder import AGENT, EvalFolder, Journal
from llds.evaluation.outcome import Outcome
from llds.evaluation.rows import AnswerRow
from llds.evaluation.tasks import QuestionSet, make_tasks
from llds.inference.engine import Engine, Game
from llds.retrieval.opening import read_info
from llds.search.indexfiles import ABOUT, is_index
from llds.search.retrieval import NoRetriever, Retriever
from llds.training.environment import silence_libraries
from llds.training.inputs import EMBEDDED, check_prompts, make_limits, make_protocol, make_retriever
from llds.training.interrupt import StopRequest, stop_on_signal
from llds.training.policy import saved_recipe
from llds.training.progress import Display
from llds.training.recipe import Recipe


def run_evaluation(order: Order, display: Display) -> tuple[Outcome | None, int]:
    """Evaluate, or go on with an evaluation in ``order.out``.

    Returns the outcome, or None and the exit code when it was stopped. Raises ``LLDSError`` for what the user
    can mend.
    """
    silence_libraries()
    recipe = saved_recipe(order.model, order.all_overrides)
    if recipe.run.threads:
        torch.set_num_threads(recipe.run.threads)
    sets, source = question_sets(order, recipe)
    folder = EvalFolder(Path(order.out)) if order.out else None
    with display:
        display.note(f"Answering {sum(len(one.questions) for one in sets)} questions of {source}.")
        retriever = _retriever(order, recipe, display)
        engine, about_model = make_engine(order, recipe, display)
        game = Game(retriever, make_protocol(recipe), make_limits(recipe))
        for one in sets:
            check_prompts(one.questions, engine.tokenizer, engine.positions, game.protocol, recipe)
        settings = _settings(order, recipe, game, sets, about_model)
        contestants = [
            make_agent(AGENT, engine.tokenizer, game),
            *(make_baseline(name, engine.tokenizer, game) for name in _baselines(order, folder)),
        ]
        with folder.opened(settings) if folder else nullcontext():
            try:
                rows, exit_code = _answer_all(order, sets, contestants, engine, folder, display)
            except KeyboardInterrupt:
                kept = f"What was answered is kept in {folder.path}." if folder else "Nothing is kept."
                display.note(f"Stopped at once. {kept}")
                return None, 130
            if rows is None:
                return None, exit_code
            outcome = Outcome(order.label or order.model, settings, sets, rows)
            if folder:
                folder.write_summary(outcome.to_json())
    return outcome, 0


def _baselines(order: Order, folder: EvalFolder | None) -> list[Baseline]:
    """Return the baselines that are asked for, and those that the folder has from before."""
    return [
        name
        for name in BASELINES
        if name in order.baselines or (folder is not None and folder.rows_path(name).exists())
    ]


def _answer_all(
    order: Order,
    sets: Sequence[QuestionSet],
    contestants: Sequence[Contestant],
    engine: Engine,
    folder: EvalFolder | None,
    display: Display,
) -> tuple[dict[str, list[AnswerRow]] | None, int]:
    """Return the rows of every contestant, or None and the exit code of the signal that stopped it."""
    tasks = make_tasks(sets, order.samples)
    rows: dict[str, list[AnswerRow]] = {}

    def told() -> None:
        display.note("Stopping after the answers under way; press Ctrl-C again to stop at once.")

    with stop_on_signal(told) as stop:
        for one in contestants:
            journal = Journal(folder.rows_path(one.name) if folder else None)
            with display.phase(f"answering ({one.name})", len(tasks)) as count:
                done = answer(
                    tasks,
                    one,
                    engine,
                    order.sampling,
                    order.seed,
                    journal,
                    count=count,
                    stopped=lambda: stop.requested,
                )
            if not done:
                _say_stopped(stop, journal, len(tasks), one.name, folder, display)
                return None, stop.exit_code
            rows[one.name] = journal.finish(tasks)
            if stop.requested and one is not contestants[-1]:
                _say_stopped(stop, journal, len(tasks), one.name, folder, display)
                return None, stop.exit_code
    return rows, 0


def _say_stopped(
    stop: StopRequest, journal: Journal, total: int, name: str, folder: EvalFolder | None, display: Display
) -> None:
    remedy = (
        f"they are kept in {folder.path}, and the same command goes on."
        if folder
        else "nothing is kept; with --out FOLDER an evaluation can go on."
    )
    display.note(f"Stopped with {len(journal.rows)} of {total} answers of {name}: {remedy}")


def _retriever(order: Order, recipe: Recipe, display: Display) -> Retriever:
    if order.no_retriever:
        return NoRetriever()
    with display.phase("opening the corpus", 1):
        return make_retriever(
            recipe.retrieval,
            lambda kind, details: display.note(f"{kind.replace('_', ' ')}: {details['url']}"),
        )


def _settings(
    order: Order, recipe: Recipe, game: Game, sets: Sequence[QuestionSet], model: dict[str, Any]
) -> dict[str, Any]:
    """Return all that the numbers depend on, as plain JSON values."""
    return {
        "model": model,
        "retriever": _about_retriever(order, recipe),
        "protocol": dataclasses.asdict(game.protocol),
        "limits": dataclasses.asdict(game.limits),
        "sampling": dataclasses.asdict(order.sampling),
        "samples": order.samples,
        "seed": order.seed if not order.sampling.greedy else None,
        "sets": {one.name: one.about() for one in sets},
    }


def _about_retriever(order: Order, recipe: Recipe) -> dict[str, Any]:
    settings = recipe.retrieval
    if order.no_retriever:
        return {"kind": "none"}
    name = {"name": order.corpus_name}
    if settings.url is not None:
        return {"kind": "server", "where": settings.url, "passages": None, **name}
    corpus = Path(settings.corpus)
    if settings.corpus == EMBEDDED:
        count = sum(load_manifest()["passages"].values())
        return {"kind": "embedded", "where": "the embedded corpus", "passages": count, **name}
    if is_index(corpus):
        info = read_info(corpus)
        digest = hashlib.sha256((corpus / ABOUT).read_bytes()).hexdigest()[:16]
        return {
            "kind": "index",
            "where": str(corpus),
            "passages": info.passages,
            "mode": settings.mode,
            "encoder": info.encoder,
            "digest": digest,
            **name,
        }
    return {
        "kind": "file",
        "where": str(corpus),
        "bytes": corpus_file(corpus).stat().st_size,
        "passages": None,
        **name,
    }
