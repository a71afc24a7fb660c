"""The chemical elements, from the database in the package mendeleev (MIT)."""

from __future__ import annotations

import re
import sqlite3
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llds.data.build.facts import Fact, Passage
from llds.data.build.text import clean, pack

SOURCE = "elements"
Element = dict[str, Any]

_DATABASE = "mendeleev/elements.db"
_COLUMNS = (
    "atomic_number, name, symbol, group_id, period, block, description, discoverers, discovery_year, "
    "discovery_location, name_origin, sources, uses"
)


def read_elements(wheel: Path) -> list[Element]:
    """Return the elements by atomic number; raises ``OSError``, ``KeyError`` or ``sqlite3.Error`` if unreadable."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        connection = sqlite3.connect(archive.extract(_DATABASE, folder))
        connection.row_factory = sqlite3.Row
        try:
            rows = connection.execute(f"SELECT {_COLUMNS} FROM elements ORDER BY atomic_number").fetchall()
        finally:
            connection.close()
    return [
        {key: clean(value) if isinstance(value, str) else value for key, value in row.items()}
        for row in map(dict, rows)
    ]


def passages(element: Element) -> Iterator[Passage]:
    """Yield the element as short passages: its place in the table, its discovery, then each longer text."""
    name = element["name"]
    yield Passage(SOURCE, f"{name}: Chemical element", _place(element))
    if element["discoverers"]:
        yield Passage(SOURCE, f"{name}: Discovery", _discovery(element))
    for heading in ("description", "name_origin", "sources", "uses"):
        if element[heading]:
            label = heading.replace("_", " ").capitalize()
            for text in pack([f"{label}: {element[heading]}"]):
                yield Passage(SOURCE, f"{name}: {label}", text)


def facts(element: Element, countries: frozenset[str]) -> Iterator[Fact]:
    """Yield atomic number, discoverer and country of discovery, where each is one thing and not several."""
    name, place = element["name"], element["discovery_location"] or ""
    country = place if place in countries else ""
    yield Fact(
        "element",
        name,
        "atomic number",
        str(element["atomic_number"]),
        f"{name}: Chemical element",
        (),
        country,
    )
    discoverer = element["discoverers"] or ""
    if (
        re.fullmatch(r"(?:Sir )?[A-Z][\w'-]+(?: [A-Z][\w'.-]*)+", discoverer)
        and "Universit" not in discoverer
    ):
        plain = discoverer.removeprefix("Sir ")
        aliases = tuple({plain} - {discoverer})
        yield Fact("element", name, "discovered by", discoverer, f"{name}: Discovery", aliases, country)
    if country:
        yield Fact("element", name, "discovered in", country, f"{name}: Discovery", (), country)


def _place(element: Element) -> str:
    group = f", group {element['group_id']}" if element["group_id"] else ""
    return (
        f"{element['name']}: chemical element with atomic number {element['atomic_number']}, "
        f"symbol {element['symbol']}{group}, period {element['period']}, {element['block']}-block."
    )


def _discovery(element: Element) -> str:
    when = f" in {element['discovery_year']}" if element["discovery_year"] else ""
    where = f" in {element['discovery_location']}" if element["discovery_location"] else ""
    who = element["discoverers"].rstrip(".")
    start = who if who.startswith("Known") else f"Discovered by {who}"
    return f"{start}{where}{when}."
