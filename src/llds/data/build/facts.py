"""What the sources hand over: passages, and facts that stand in them word for word."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass


@dataclass(frozen=True)
class Passage:
    """A passage before it has an id. ``source`` is the package it comes from."""

    source: str
    title: str
    text: str


@dataclass(frozen=True)
class Fact:
    """``value`` is the ``relation`` of ``subject``, and stands word for word in the passage called ``title``.

    ``aliases``: other answers to accept. ``country``: the country that the fact hangs on, for the split; empty
    when there is none. ``kind``: the sort of subject, as the question wording needs it.
    """

    kind: str
    subject: str
    relation: str
    value: str
    title: str
    aliases: tuple[str, ...] = ()
    country: str = ""


def normalise(text: str) -> str:
    """Return ``text`` as exact match compares it: lower case, no punctuation, no articles, single spaces."""
    text = "".join(" " if letter in "-/" else letter for letter in text.lower())
    text = "".join(letter for letter in text if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def mentions(text: str, answer: str) -> bool:
    """Tell whether ``answer`` stands in ``text`` as whole words, both normalised; an empty answer never does."""
    needle = normalise(answer)
    return bool(needle) and f" {needle} " in f" {normalise(text)} "
