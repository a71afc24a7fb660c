"""What ``llds eval MODEL`` does: from the command line to answers, kept and scored."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch

from llds.data.embedded import load_manifest, load_questions
from llds.data.questions import Question, read_questions
from llds.errors import LLDSError
from llds.evaluation.answering import answer
from llds.evaluation.contestants import ONE_SHOT, Baseline, Contestant, make_agent, make_baseline
from llds.evaluation.folder import AGENT, EvalFolder, Journal
from llds.evaluation.outcome import Outcome
from llds.evaluation.tasks import QuestionSet, make_tasks
from llds.inference.engine import Engine, Game
from llds.search.indexfiles import ABOUT, is_index, read_about
from llds.search.retrieval import NoRetriever, Retriever
from llds.search.sampling import Sampling
from llds.training.environment import silence_libraries
from llds.training.inputs import (
    EMBEDDED,
    check_prompts,
    make_limits,
    make_protocol,
    make_retriever,
    sample_questions,
)
from llds.training.interrupt import StopRequest, stop_on_signal
from llds.training.policy import load_policy, load_reader, saved_recipe
from llds.training.progress import Display
from llds.training.recipe import Recipe
from llds.training.scoring import arithmetic

EngineName: TypeAlias = Literal["transformers", "openai", "vllm"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)

# Episodes as the paper evaluates them (arXiv 2512.04220); the prompt may still be the instruct one.
SEARCH_R1 = (
    "episode.prompt=search-r1",
    "episode.max_turns=4",
    "episode.max_prompt=2048",
    "episode.max_action=500",
    "episode.max_observation=500",
    "episode.max_response=4096",
    "episode.passage_words=0",
    "retrieval.topk=3",
)


@dataclass(frozen=True)
class Order:
    """What the command line asks for; see ``llds eval --help``."""

    model: str
    overrides: tuple[str, ...] = ()
    split: str | None = None
    questions: str | None = None
    benchmarks: str | None = None
    only: tuple[str, ...] = ()
    retriever: str | None = None
    no_retriever: bool = False
    corpus_name: str | None = None
    search_r1: bool = False
    baselines: tuple[Baseline, ...] = ()
    engine: EngineName = "transformers"
    url: str | None = None
    served_model: str | None = None
    concurrency: int = 32
    samples: int = 1
    temperature: float | None = None
    top_p: float = 1.0
    seed: int = 0
    out: str | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise LLDSError(f"--samples is {self.samples}: give at least 1.")
        if self.samples > 1 and not self.sampling.temperature:
            raise LLDSError(
                "Greedy answers to one question are all alike: give --samples a --temperature too."
            )
        if self.engine == "openai" and self.url is None:
            raise LLDSError("--engine openai needs the server's address: --url http://127.0.0.1:8000/v1.")
        if self.engine != "openai" and (self.url or self.served_model):
            raise LLDSError("--url and --served-model are for a server: add --engine openai.")
        if self.retriever and self.no_retriever:
            raise LLDSError("--retriever and --no-retriever exclude each other: give one of them.")
        if self.no_retriever and ONE_SHOT in self.baselines:
            raise LLDSError("The baseline one-shot searches once: take --no-retriever away.")

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn: greedily, unless told otherwise."""
        return Sampling(temperature=self.temperature or 0.0, top_p=self.top_p)

    @property
    def all_overrides(self) -> list[str]:
        """The settings that differ from the model's own; what is named last wins."""
        preset = SEARCH_R1 if self.search_r1 else ()
        return [*preset, *_retrieval_overrides(self.retriever), *self.overrides]


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
        engine, about_model = _engine(order, recipe, display)
        game = Game(retriever, make_protocol(recipe), make_limits(recipe))
        for one in sets:
            check_prompts(one.questions, engine.tokenizer, engine.positions, game.protocol, recipe)
        settings = _settings(order, recipe, game, sets, about_model)
        contestants = [
            make_agent(AGENT, engine.tokenizer, game),
            *(make_baseline(name, engine.tokenizer, game) for name in order.baselines),
        ]
        with folder.opened(settings) if folder else nullcontext():
            rows, exit_code = _answer_all(order, sets, contestants, engine, folder, display)
            if rows is None:
                return None, exit_code
            outcome = Outcome(order.label or order.model, settings, sets, rows)
            if folder:
                folder.write_summary(outcome.to_json())
    return outcome, 0


def _answer_all(
    order: Order,
    sets: Sequence[QuestionSet],
    contestants: Sequence[Contestant],
    engine: Engine,
    folder: EvalFolder | None,
    display: Display,
) -> tuple[dict[str, Any] | None, int]:
    """Return the rows of every contestant, or None and the exit code of the signal that stopped it."""
    tasks = make_tasks(sets, order.samples)
    rows: dict[str, Any] = {}

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


def question_sets(order: Order, recipe: Recipe) -> tuple[list[QuestionSet], str]:
    """Return the questions to answer, and in words where they are from.

    What the options say goes first, then what the run held out.
    """
    count = int(order.questions) if order.questions and order.questions.isdecimal() else None
    file = None if count is not None else order.questions
    given = [name for name, value in _sources(order, file).items() if value]
    if len(given) > 1:
        raise LLDSError(f"{' and '.join(given)} name different questions: give one of them.")
    if order.only and not order.benchmarks:
        raise LLDSError("--only picks among benchmarks: give their folder with --benchmarks.")
    settings = recipe.evaluation
    if count is not None or order.benchmarks:
        # Benchmarks are asked whole unless a number is given.
        settings = dataclasses.replace(settings, questions=count or 0)
    if order.benchmarks:
        from llds.cli.benchmarks import benchmark_sets

        return benchmark_sets(order.benchmarks, order.only, settings), order.benchmarks
    source = file or (EMBEDDED if order.split else recipe.data.test)
    split = order.split or recipe.evaluation.split
    questions = load_questions(split) if source == EMBEDDED else read_questions(source)
    name = split if source == EMBEDDED else Path(source).name.partition(".")[0]
    return [make_set(name, questions, settings)], (
        f"the embedded {split} split" if source == EMBEDDED else source
    )


def make_set(
    name: str,
    questions: Sequence[Question],
    settings: Any,
    group: str | None = None,
    published: int | None = None,
) -> QuestionSet:
    """Return the part of ``questions`` that ``settings`` ask for, the same at every call."""
    asked = tuple(sample_questions(questions, settings))
    return QuestionSet(name, asked, len(questions), group, published)


def _sources(order: Order, file: str | None) -> dict[str, str | None]:
    return {"--split": order.split, "--questions FILE": file, "--benchmarks": order.benchmarks}


def _retrieval_overrides(retriever: str | None) -> list[str]:
    if retriever is None:
        return []
    if retriever.startswith(("http://", "https://")):
        return [f"retrieval.url={retriever}"]
    return ["retrieval.url=null", f"retrieval.corpus={retriever}"]


def _retriever(order: Order, recipe: Recipe, display: Display) -> Retriever:
    if order.no_retriever:
        return NoRetriever()
    with display.phase("opening the corpus", 1):
        return make_retriever(
            recipe.retrieval,
            lambda kind, details: display.note(f"{kind.replace('_', ' ')}: {details['url']}"),
        )


def _engine(order: Order, recipe: Recipe, display: Display) -> tuple[Engine, dict[str, Any]]:
    """Return the engine and what tells its model from another."""
    about: dict[str, Any] = {"engine": order.engine}
    if order.engine == "transformers":
        from llds.inference.local import TransformersEngine

        policy = load_policy(recipe.model)
        for note in policy.notes:
            display.note(note)
        about |= {"dtype": recipe.model.dtype, "device": policy.model.device.type}
        engine = TransformersEngine(
            policy.model,
            policy.tokenizer,
            recipe.evaluation.batch,
            lambda: arithmetic(policy.model, recipe.model),
        )
        return engine, about | {"batch": engine.batch, **_about_files(recipe.model.path)}
    reader = load_reader(recipe.model.path)
    for note in reader.notes:
        display.note(note)
    if order.engine == "openai":
        from llds.inference.server import CompletionServer, read_key
        from llds.inference.writing import ConcurrentEngine

        server = CompletionServer(order.url or "", order.served_model, reader.tokenizer, key=read_key())
        if not server.exact:
            display.note(
                f"The server at {server.url} returns text alone, which is tokenised again: its model may see "
                "other tokens than it wrote."
            )
        positions = server.positions or reader.positions
        about |= {"served": server.model, "token_ids": server.exact}
        return (
            ConcurrentEngine(server, reader.tokenizer, reader.eos, positions, order.concurrency),
            about | _about_files(recipe.model.path, weights=False),
        )
    from llds.inference.vllm import VLLMWriter
    from llds.inference.writing import BatchedEngine

    episode = recipe.episode
    length = episode.max_prompt + max(episode.max_response, episode.max_observation + episode.max_action)
    length = min(length, reader.positions or length)
    writer = VLLMWriter(recipe.model.path, length, recipe.model.dtype)
    batch = recipe.evaluation.batch
    about |= {"dtype": recipe.model.dtype, "batch": batch, **_about_files(recipe.model.path)}
    return BatchedEngine(writer, reader.tokenizer, reader.eos, length, batch), about


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
        passages = load_manifest()["passages"]
        count = sum(passages.values()) if isinstance(passages, dict) else passages
        return {"kind": "embedded", "where": "the embedded corpus", "passages": count, **name}
    if is_index(corpus):
        digest = hashlib.sha256((corpus / ABOUT).read_bytes()).hexdigest()[:16]
        return {
            "kind": "index",
            "where": str(corpus),
            "passages": read_about(corpus)["passages"],
            "mode": settings.mode,
            "digest": digest,
            **name,
        }
    return {"kind": "file", "where": str(corpus), "bytes": corpus.stat().st_size, "passages": None, **name}


_PROBED = 64  # places at which a file of weights is looked at
_PIECE = 64 << 10  # bytes


def _about_files(path: str, weights: bool = True) -> dict[str, Any]:
    """Return a digest of a model folder: of its small files whole, of its weights at many places."""
    folder = Path(path)
    if not folder.is_dir():
        return {"name": path}
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    for file in sorted(folder.glob("*.safetensors")) if weights else ():
        size = file.stat().st_size
        digest.update(f"{file.name}/{size}".encode())
        with file.open("rb") as stream:
            for place in range(_PROBED):
                stream.seek(place * max(0, size - _PIECE) // (_PROBED - 1))
                digest.update(stream.read(_PIECE))
    return {"digest": digest.hexdigest()[:16]}
