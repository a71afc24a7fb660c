"""What is wrong with a file of questions or passages, all of it at once, and what it holds."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from llds.data.benchmarks import BENCHMARKS, Benchmark, benchmark_of
from llds.data.corpus import corpus_file, document_of
from llds.data.jsonl import read_rows
from llds.data.questions import Question, iter_questions, question_of
from llds.data.tables import read_table, shape_of
from llds.errors import LLDSError

#: Mistakes of one file that are told in full; the others are counted.
_MOST = 20
_WORDS = re.compile(r"\w+")


@dataclass
class Check:
    """What was found in one file.

    ``errors``: what keeps it from being read, in full for the first twenty of ``mistakes``. ``warnings``: what may
    be meant. ``facts``: what it holds.
    """

    path: str
    kind: str
    rows: int = 0
    mistakes: int = 0
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def wrong(self, sentence: str) -> None:
        """Add a mistake."""
        self.mistakes += 1
        if len(self.errors) < _MOST:
            self.errors.append(sentence)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return asdict(self)


def check_file(path: str | os.PathLike[str], training: frozenset[str] = frozenset()) -> Check:
    """Check a file of questions or passages; which of them is told by its first row.

    ``training``: what :func:`asked_in` returns of training questions; questions that are in it are a warning.
    Never raises for what is wrong with the file.
    """
    source = Path(path)
    try:
        if source.is_dir() or _is_corpus(source):
            return check_corpus(source)
        return check_questions(source, training)
    except LLDSError as error:
        check = Check(str(source), "unknown")
        check.wrong(str(error))
        return check


def check_questions(path: Path, training: frozenset[str] = frozenset()) -> Check:
    """Check a file of questions; raises :class:`LLDSError` where it can't be opened."""
    check = Check(str(path), f"questions ({shape_of(path)})")
    found = _Found()
    for where, row in _rows(path, check):
        try:
            found.add(question_of(row, where), where, check)
        except LLDSError as error:
            check.wrong(str(error))
    found.tell(check, training)
    _compare_with_published(check, path, found.sources)
    return check


def check_corpus(path: Path) -> Check:
    """Check a file of passages; raises :class:`LLDSError` where it can't be opened.

    Of every id a hash of eight bytes is kept, so 21 million passages take about 2 GB.
    """
    source = corpus_file(path)
    check = Check(str(path), "passages")
    seen: set[int] = set()
    characters = longest = empty = 0
    for where, row in _guarded(read_rows(source), check):
        check.rows += 1
        try:
            document = document_of(row, where)
        except LLDSError as error:
            check.wrong(str(error))
            continue
        key = _hash(document["id"])
        if key in seen:
            check.wrong(
                f'{where}: the id "{document["id"]}" occurs twice: give each passage an id of its own.'
            )
        seen.add(key)
        length = len(document["contents"].partition("\n")[2])
        characters, longest, empty = characters + length, max(longest, length), empty + (length == 0)
    check.facts = {
        "mean_characters": round(characters / check.rows, 1) if check.rows else 0,
        "longest_characters": longest,
        "title_alone": empty,
    }
    return check


def asked_in(path: str | os.PathLike[str]) -> frozenset[str]:
    """Return the questions of a file, each reduced to its words in lower case; raises as ``read_questions``."""
    return frozenset(reduced(question.question) for _, question in iter_questions(path))


def reduced(question: str) -> str:
    """Return a question as its words in lower case, so that spelling does not hide that two are the same."""
    return " ".join(_WORDS.findall(question.lower()))


@dataclass
class _Found:
    """What the good rows of a file of questions add up to."""

    ids: set[str] = field(default_factory=set)
    asked: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    longest: int = 0
    most_answers: int = 0

    def add(self, question: Question, where: str, check: Check) -> None:
        if question.id in self.ids:
            check.wrong(f'{where}: the id "{question.id}" occurs twice: give each question an id of its own.')
        self.ids.add(question.id)
        self.asked[reduced(question.question)] += 1
        if source := question.metadata.get("data_source"):
            self.sources[str(source)] += 1
        self.answers += len(question.golden_answers)
        self.most_answers = max(self.most_answers, len(question.golden_answers))
        self.longest = max(self.longest, len(question.question))

    def tell(self, check: Check, training: frozenset[str]) -> None:
        count = self.asked.total()
        check.facts = {
            "answers_per_question": round(self.answers / count, 2) if count else 0,
            "most_answers": self.most_answers,
            "longest_question_characters": self.longest,
            "data_sources": dict(self.sources),
        }
        repeated = sum(times - 1 for times in self.asked.values())
        if repeated:
            check.warnings.append(
                f"{repeated} questions are asked more than once (by their words, in lower case)."
            )
        leaked = sum(times for question, times in self.asked.items() if question in training)
        if leaked:
            check.warnings.append(f"{leaked} of {count} questions are in the training questions too.")


def _compare_with_published(check: Check, path: Path, sources: Counter[str]) -> None:
    """Warn where a benchmark has not as many rows as the published one; training splits are left alone."""
    stem = path.name.split(".")[0].lower()
    if "train" in stem:
        return
    counts = {one.name: count for name, count in sources.items() if (one := benchmark_of(name))}
    named = _by_path(path, stem)
    if not counts and named is not None:
        counts = {named.name: check.rows}
    for name, count in counts.items():
        published = BENCHMARKS[name].published
        check.facts.setdefault("benchmarks", {})[name] = {"questions": count, "published": published}
        if count != published:
            check.warnings.append(
                f"{BENCHMARKS[name].title} has {count} questions here and {published} in the published "
                f"{BENCHMARKS[name].split} set, so scores don't compare."
            )


def _by_path(path: Path, stem: str) -> Benchmark | None:
    """Return the benchmark that a file is named after, or its folder if the file is named after a split."""
    names = [stem, re.sub("[-_](test|dev)$", "", stem)]
    if stem in {"test", "dev"}:
        names.append(path.parent.name)
    return next((one for name in names if (one := benchmark_of(name))), None)


def _rows(path: Path, check: Check) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, row in _guarded(read_table(path), check):
        check.rows += 1
        yield where, row


def _guarded(
    rows: Iterator[tuple[str, dict[str, Any]]], check: Check
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pass rows on until the file itself is at fault, which is the last mistake that is told."""
    try:
        yield from rows
    except LLDSError as error:
        check.wrong(f"{error} Nothing behind this place was checked.")


def _is_corpus(source: Path) -> bool:
    for _, row in read_table(source):
        return not {"golden_answers", "reward_model", "question"} & row.keys() and bool(
            {"contents", "text"} & row.keys()
        )
    return False


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def format_check(check: Check) -> str:
    """Return what was found, as text for people."""
    lines = [f"{check.path}: {check.rows} rows, {check.kind}"]
    for name, value in check.facts.items():
        if value not in ({}, None):
            lines.append(f"  {name.replace('_', ' ')}: {_shown(value)}")
    lines += [f"  warning: {warning}" for warning in check.warnings]
    lines += [f"  error: {error}" for error in check.errors]
    if check.mistakes > len(check.errors):
        lines.append(f"  … and {check.mistakes - len(check.errors)} errors more")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(one)}" for key, one in value.items())
    return str(value)


def total_mistakes(checks: Sequence[Check]) -> int:
    """Return how many mistakes there are in all files together."""
    return sum(check.mistakes for check in checks)
