"""The seven benchmarks of the paper: what they are called, how large they are, and where they lie in a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llds.data.questions import Question, iter_questions
from llds.data.tables import PARQUET, shape_of
from llds.errors import LLDSError

GENERAL, MULTI_HOP = "general", "multi-hop"
_ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".parquet")


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    ``title``: as in the paper's table. ``group``: over which average it counts. ``split``, ``published``: which part
    is asked, and how many questions it has. ``aliases``: further names, in lower case.
    """

    name: str
    title: str
    group: str
    split: str
    published: int
    aliases: tuple[str, ...] = ()


#: Name -> benchmark, in the order of the paper's table.
BENCHMARKS: Mapping[str, Benchmark] = {
    one.name: one
    for one in (
        Benchmark("nq", "NQ", GENERAL, "test", 3610, ("naturalquestions", "natural_questions", "nq_open")),
        Benchmark("triviaqa", "TriviaQA", GENERAL, "test", 11313, ("trivia_qa", "tqa")),
        Benchmark("popqa", "PopQA", GENERAL, "test", 14267),
        Benchmark("hotpotqa", "HotpotQA", MULTI_HOP, "dev", 7405, ("hotpot_qa", "hotpot")),
        Benchmark(
            "2wikimultihopqa", "2Wiki", MULTI_HOP, "dev", 12576, ("2wiki", "2wikimqa", "2wikimultihop")
        ),
        Benchmark("musique", "MuSiQue", MULTI_HOP, "dev", 2417),
        Benchmark("bamboogle", "Bamboogle", MULTI_HOP, "test", 125),
    )
}


def benchmark_of(name: str) -> Benchmark | None:
    """Return the benchmark that a ``data_source``, a folder or a file is named after; None if it is none of them.

    Case does not matter, and ``searchR1_nq`` is ``nq``.
    """
    word = name.lower().removeprefix("searchr1_")
    return next((one for one in BENCHMARKS.values() if word in (one.name, *one.aliases)), None)


def find_benchmarks(folder: str | os.PathLike[str]) -> dict[str, Path]:
    """Return where each benchmark lies below ``folder``, in the order of the paper's table.

    Looked for are ``nq/test.jsonl`` (FlashRAG's layout), ``nq_test.jsonl`` and ``nq.jsonl``, with any of a
    benchmark's names, also ``.json``, ``.parquet``, and packed (``.gz``, ``.zst``). Raises
    :class:`llds.errors.LLDSError` when there is no such folder, none of the seven in it, or one of them twice.
    """
    place = Path(folder)
    if not place.is_dir():
        raise LLDSError(f"There is no folder {place}; check the path.")
    found: dict[str, Path] = {}
    for one in BENCHMARKS.values():
        paths = [path for path in _candidates(place, one) if path.is_file()]
        if len(paths) > 1:
            raise LLDSError(
                f"{place} holds {one.title} twice, as {paths[0]} and {paths[1]}: keep one of them."
            )
        if paths:
            found[one.name] = paths[0]
    if not found:
        raise LLDSError(
            f"{place} holds none of the seven benchmarks: put them there as nq/test.jsonl, hotpotqa/dev.jsonl, … "
            f"({', '.join(BENCHMARKS)})."
        )
    return found


def load_benchmarks(path: str | os.PathLike[str], only: Sequence[str] = ()) -> dict[str, list[Question]]:
    """Return the questions of the benchmarks in a folder, or in one table with a column ``data_source``.

    ``only``: the names of those that are wanted; all that are there if empty. In the order of the paper's table.
    Raises :class:`llds.errors.LLDSError` as :func:`find_benchmarks` and
    :func:`~llds.data.questions.read_questions`, for an unknown name, and for one that is not there.
    """
    wanted = [_named(name).name for name in only]
    place = Path(path)
    if place.is_dir():
        files = find_benchmarks(place)
        _check_there(wanted, list(files), place)
        return {
            name: _unique(file, [name])[name] for name, file in files.items() if not wanted or name in wanted
        }
    sets = _unique(place, None)
    _check_there(wanted, list(sets), place)
    return {name: sets[name] for name in BENCHMARKS if name in sets and (not wanted or name in wanted)}


def _candidates(folder: Path, one: Benchmark) -> list[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise LLDSError(f"{folder} can't be read ({error.strerror}): check its permissions.") from None
    names = (one.name, *one.aliases)
    stems = {name for word in names for name in (word, f"{word}_{one.split}", f"{word}-{one.split}")}
    files = [entry for entry in entries if _stem(entry) in stems]
    for entry in entries:
        if entry.is_dir() and entry.name.lower() in names:
            files += [entry / f"{one.split}{ending}" for ending in _ENDINGS]
    return files


def _stem(path: Path) -> str | None:
    name = path.name.lower()
    ending = next((end for end in sorted(_ENDINGS, key=len, reverse=True) if name.endswith(end)), None)
    return None if ending is None else name.removesuffix(ending)


def _unique(path: Path, names: Sequence[str] | None) -> dict[str, list[Question]]:
    """Return the questions of a file by benchmark: all of the one in ``names``, or by ``data_source``."""
    sets: dict[str, dict[str, Question]] = {}
    for where, question in iter_questions(path):
        name = names[0] if names else _source(question, where, path)
        members = sets.setdefault(name, {})
        if question.id in members:
            raise LLDSError(
                f'{where}: the id "{question.id}" occurs twice: give each question an id of its own.'
            )
        members[question.id] = question
    return {name: list(members.values()) for name, members in sets.items()}


def _source(question: Question, where: str, path: Path) -> str:
    source = question.metadata.get("data_source")
    if source is None:
        kind = "table" if shape_of(path) == PARQUET else "file"
        raise LLDSError(
            f'{where}: the {kind} has no "data_source", so its benchmark is not known: give a folder with a file for '
            "each benchmark, or add the column."
        )
    one = benchmark_of(str(source))
    if one is None:
        raise LLDSError(
            f'{where}: the data_source "{source}" is none of {", ".join(BENCHMARKS)}: mend the column.'
        )
    return one.name


def _named(name: str) -> Benchmark:
    one = benchmark_of(name)
    if one is None:
        raise LLDSError(f"There is no benchmark {name!r}; choose among {', '.join(BENCHMARKS)}.")
    return one


def _check_there(wanted: Sequence[str], there: Sequence[str], place: Path) -> None:
    for name in wanted:
        if name not in there:
            raise LLDSError(f"{place} holds no {name}; it holds {', '.join(there)}.")
