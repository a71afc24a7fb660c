"""A passage of a corpus, and the part of it that is worth showing."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_WORD = re.compile(r"\w+")
_STEM = 5
_SMALL = (
    "a an and are as at be by for from has have how in is it its of on or that the this to was were what "
    "when where which who whom whose will with"
)
_SMALL_WORDS = frozenset(_SMALL.split())


@dataclass(frozen=True)
class Passage:
    """One passage. ``score`` is the retriever's own and compares only within one query."""

    id: str
    title: str
    text: str
    score: float = 0.0

    @property
    def contents(self) -> str:
        """The passage as corpora hold it: the title in quotes on the first line, then the text."""
        return f'"{self.title}"\n{self.text}'

    @classmethod
    def from_contents(cls, id: str, contents: str, score: float = 0.0) -> Passage:
        """Read ``contents``: the first line is the title, with or without quotes round it."""
        title, _, text = contents.partition("\n")
        if len(title) >= 2 and title.startswith('"') and title.endswith('"'):
            title = title[1:-1]
        return cls(id, title, text, score)

    def with_score(self, score: float) -> Passage:
        """Return this passage with another score."""
        return replace(self, score=score)


def snippet(text: str, query: str, words: int) -> str:
    """Return about ``words`` words of ``text``, where most words of ``query`` meet.

    Words are compared by their first letters, so that ``currencies`` finds ``currency``. The cut starts a
    quarter before a query word, since what is asked for tends to follow it. Without a match it is the
    beginning.
    """
    tokens = text.split()
    if len(tokens) <= words:
        return text
    wanted = _stems(query)
    hits = [_stems(token) & wanted for token in tokens]
    starts = {max(0, min(i - words // 4, len(tokens) - words)) for i, hit in enumerate(hits) if hit}
    start = max(sorted(starts), key=lambda first: _merit(hits[first : first + words]), default=0)
    return " ".join(tokens[start : start + words])


def _merit(hits: list[set[str]]) -> tuple[int, int]:
    """Different query words first, then how often any of them occurs."""
    return len(set().union(*hits)), sum(map(bool, hits))


def _stems(text: str) -> set[str]:
    return {word[:_STEM] for word in _WORD.findall(text.lower()) if word not in _SMALL_WORDS}
