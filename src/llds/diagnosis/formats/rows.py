"""A row of a log, and what all readers need to read numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llds.diagnosis.vocabulary import STEP_KEYS

_WRAPPED = re.compile(r"^(?:np|numpy|torch)\.\w+\((.*?)(?:,.*)?\)$")
_NUMBER = re.compile(r"^[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?$")
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "+inf": math.inf, "infinity": math.inf}
_SPECIAL |= {"-infinity": -math.inf, "true": 1.0, "false": 0.0, "-nan": math.nan}


@dataclass(frozen=True)
class Row:
    """What a log says of one step. ``step``: None where the log does not number them. ``decimals``: key ->
    digits after the point as printed, None with an exponent or where the format prints full precision.
    """

    step: int | None
    values: Mapping[str, float]
    decimals: Mapping[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Bad:
    """A line that should hold a row and can't be read. ``line``: counted from 1."""

    line: int
    reason: str


def read_number(text: str) -> float | None:
    """Return the number in ``text``, as Python, NumPy or torch print it; None if there is none."""
    text = text.strip().strip("'\"")
    if match := _WRAPPED.match(text):
        text = match.group(1).strip()
    if _NUMBER.match(text):
        return float(text)
    return _SPECIAL.get(text.lower())


def decimals_of(text: str) -> int | None:
    """Return the digits after the point in ``text``; None with an exponent or a wrapper, which print all."""
    text = text.strip().strip("'\"")
    if not _NUMBER.match(text) or "e" in text.lower():
        return None
    return len(text.partition(".")[2])


def flatten(content: Mapping[str, Any], prefix: str = "", depth: int = 0) -> dict[str, float]:
    """Return the numbers of a mapping by key, inner ones as ``outer/inner``; texts that are numbers too."""
    numbers: dict[str, float] = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, bool):
            numbers[name] = float(value)
        elif isinstance(value, int | float):
            numbers[name] = _as_float(value)
        elif isinstance(value, str):
            number = read_number(value) if len(value) < 40 else None
            if number is not None:
                numbers[name] = number
        elif isinstance(value, Mapping) and depth < 4:
            numbers |= flatten(value, f"{name}/", depth + 1)
    return numbers


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def row_of(content: Mapping[str, Any]) -> Row | None:
    """Make a row of a mapping such as a JSON object; None if it holds no number beside the step."""
    values = flatten(content)
    step, step_keys = find_step(content, values)
    rest = {key: value for key, value in values.items() if key not in step_keys}
    return Row(step, rest) if rest else None


def find_step(content: Mapping[str, Any], values: Mapping[str, float]) -> tuple[int | None, set[str]]:
    """Return the step that a mapping names, and its keys that name one."""
    keys = {key for key in STEP_KEYS if key in content or key in values}
    for key in STEP_KEYS:
        value = content.get(key, values.get(key))
        if isinstance(value, str) and "/" in value:
            value = read_number(value.partition("/")[0])
        elif isinstance(value, str):
            value = read_number(value)
        if isinstance(value, int | float) and math.isfinite(value) and 0 <= value < 2**53:
            return int(value), keys
    return None, keys
