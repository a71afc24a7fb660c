"""Typed settings: a tree of dataclasses read from YAML and ``key=value``, with one sentence for every
mistake.

The tree has two levels, sections and their settings, and is handled as a flat table of dotted keys
(``grpo.learning_rate``). So one small checker serves YAML files, overrides, ``--help`` and
``--print-config``.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

import yaml

from llds.errors import LLDSError

Root = TypeVar("Root")


@dataclass(frozen=True)
class Setting:
    """One row of the flat table of settings. ``kind`` is the annotated type."""

    key: str
    kind: Any
    default: Any
    help: str
    unit: str
    low: float | None
    high: float | None


def setting(
    default: Any, text: str, unit: str = "", low: float | None = None, high: float | None = None
) -> Any:
    """Declare a dataclass field that is a setting: its default, help text, unit and range (both ends
    allowed).
    """
    return field(default=default, metadata={"help": text, "unit": unit, "low": low, "high": high})


def sections(root: type) -> dict[str, Any]:
    """Return the dataclass of every section of ``root`` by its name."""
    kinds = typing.get_type_hints(root)
    return {item.name: kinds[item.name] for item in dataclasses.fields(root)}


def settings_table(root: type) -> dict[str, Setting]:
    """Return every setting of ``root`` by its dotted key, in the order of the dataclasses."""
    table: dict[str, Setting] = {}
    for name, cls in sections(root).items():
        kinds = typing.get_type_hints(cls)
        for item in dataclasses.fields(cls):
            key = f"{name}.{item.name}"
            table[key] = Setting(key, kinds[item.name], item.default, **item.metadata)
    return table


def build(root: type[Root], values: Mapping[str, Any]) -> Root:
    """Build ``root`` from checked values by dotted key; absent settings keep their defaults."""
    groups: dict[str, dict[str, Any]] = {name: {} for name in sections(root)}
    for key, value in values.items():
        head, _, name = key.partition(".")
        groups[head][name] = value
    return root(**{name: cls(**groups[name]) for name, cls in sections(root).items()})


def flat_values(tree: Any) -> dict[str, Any]:
    """Return the values of a settings tree by dotted key."""
    pairs = ((key, key.partition(".")) for key in settings_table(type(tree)))
    return {key: getattr(getattr(tree, head), name) for key, (head, _, name) in pairs}


def to_yaml(tree: Any) -> str:
    """Return a settings tree as YAML with a comment per setting; reading it back gives an equal tree."""
    lines: list[str] = []
    values = flat_values(tree)
    for name in sections(type(tree)):
        lines.append(f"{name}:")
        for key, item in settings_table(type(tree)).items():
            head, _, leaf = key.partition(".")
            if head == name:
                unit = f" [{item.unit}]" if item.unit else ""
                lines.append(f"  {leaf}: {show_value(values[key])}  # {item.help}{unit}")
    return "\n".join(lines) + "\n"


def read_yaml(root: type, text: str, where: str) -> dict[str, Any]:
    """Return the checked values in YAML ``text`` by dotted key; ``where`` names the file in error messages.

    Raises :class:`LLDSError` for bad YAML, unknown keys, and values of the wrong type or out of range.
    """
    values: dict[str, Any] = {}
    for name, inner in _parse_yaml(text, where).items():
        if name not in sections(root):
            raise _unknown_key(root, str(name), where)
        if inner is not None and not isinstance(inner, dict):
            raise LLDSError(
                f"'{name}' in {where} is a section: write its settings on indented lines below it."
            )
        for leaf, value in (inner or {}).items():
            values[f"{name}.{leaf}"] = _check(root, f"{name}.{leaf}", value, where)
    return values


def read_override(root: type, text: str) -> tuple[str, Any]:
    """Return the key and the checked value of ``key=value``; raises :class:`LLDSError` as :func:`read_yaml`
    does.
    """
    key, equals, raw = text.partition("=")
    where = f"'{text}'"
    if not equals:
        raise LLDSError(f"{where} is not a setting: write key=value, for example grpo.learning_rate=1e-4.")
    if key not in settings_table(root):
        raise _unknown_key(root, key, where)
    kind, optional = _without_none(settings_table(root)[key].kind)
    if optional and raw in {"null", ""}:
        return key, None
    return key, _check(root, key, raw if kind is str else _scalar(raw), where)


def show_value(value: Any) -> str:
    """Return a value as it is written in YAML."""
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("...\n").strip()


def describe_kind(kind: Any) -> str:
    """Say in a few words which values a setting takes."""
    kind, optional = _without_none(kind)
    if typing.get_origin(kind) is Literal:
        text = " | ".join(typing.get_args(kind))
    else:
        text = _NAMES_OF_KINDS.get(kind, "names separated by commas")
    return f"{text} | null" if optional else text


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Return ``": did you mean 'x'?"`` with the nearest known word, or nothing when none is near.

    Of dotted keys the last part is compared too, since people forget or mistake the section.
    """
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    if not near:
        by_leaf = {key.rpartition(".")[2]: key for key in reversed(known)}
        leaves = difflib.get_close_matches(word.rpartition(".")[2], by_leaf, n=1, cutoff=0.7)
        near = [by_leaf[leaf] for leaf in leaves] or difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f": did you mean '{near[0]}'?" if near else ""


_NAMES_OF_KINDS: dict[Any, str] = {int: "whole number", float: "number", bool: "true | false", str: "text"}
_WANTED: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key given twice is an error: silently taking the last one hides mistakes."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key '{key}' is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return cast("dict[Any, Any]", super().construct_mapping(node, deep))


def _parse_yaml(text: str, where: str) -> Mapping[str, Any]:
    try:
        content = yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise LLDSError(f"{where}{line} is not valid YAML: {error.problem}.") from None
    except RecursionError:
        raise LLDSError(f"{where} is nested too deeply: write sections, and settings below them.") from None
    except yaml.YAMLError as error:
        raise LLDSError(f"{where} is not valid YAML: {str(error).splitlines()[0]}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise LLDSError(
            f"{where} must hold sections with settings (model:, grpo:, …), not {_name_of(content)}."
        )
    return content


def _scalar(raw: str) -> Any:
    try:
        return yaml.safe_load(raw)
    except yaml.YAMLError:
        return raw


def _unknown_key(root: type, key: str, where: str) -> LLDSError:
    if key in sections(root):
        return LLDSError(f"'{key}' in {where} is a section: name one of its settings, as {key}.NAME=VALUE.")
    near = did_you_mean(key, list(settings_table(root)))
    return LLDSError(
        f"Unknown setting '{key}' in {where}{near or '; `llds train --help` lists all settings.'}"
    )


def _check(root: type, key: str, value: Any, where: str) -> Any:
    """Return ``value`` as the setting's type, or raise one sentence that names the key, the place and the
    type.
    """
    item = settings_table(root).get(key)
    if item is None:
        raise _unknown_key(root, key, where)
    kind, optional = _without_none(item.kind)
    if value is None and optional:
        return None
    checked = _coerce(kind, value)
    if checked is None:
        near = did_you_mean(str(value), typing.get_args(kind)) if typing.get_origin(kind) is Literal else ""
        raise LLDSError(
            f"'{key}' in {where} must be {_wanted(item.kind)}, not {_name_of(value)}{near or '.'}"
        )
    if kind is str and item.default and not checked.strip():
        raise LLDSError(f"'{key}' in {where} is empty: give a text, or leave the setting out.")
    _check_range(item, checked, where)
    return checked


def _check_range(item: Setting, value: Any, where: str) -> None:
    below = item.low is not None and value < item.low
    above = item.high is not None and value > item.high
    if below or above:
        bounds = [f"at least {item.low:g}" if item.low is not None else ""]
        bounds.append(f"at most {item.high:g}" if item.high is not None else "")
        raise LLDSError(
            f"'{item.key}' in {where} must be {' and '.join(filter(None, bounds))}, not {value:g}."
        )


def _coerce(kind: Any, value: Any) -> Any:
    """Return ``value`` as ``kind``, or None when it is something else."""
    if typing.get_origin(kind) is Literal:
        return value if value in typing.get_args(kind) else None
    if kind is float:
        return _coerce_float(value)
    if kind is int:
        return value if isinstance(value, int) and not isinstance(value, bool) else None
    if kind in {bool, str}:
        return value if isinstance(value, kind) else None
    return _coerce_names(value)


def _coerce_float(value: Any) -> float | None:
    # YAML 1.1 reads 1e-4 as text, so numbers may arrive as text.
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _coerce_names(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return ()
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return tuple(value)
    return None


def _without_none(kind: Any) -> tuple[Any, bool]:
    if typing.get_origin(kind) in {types.UnionType, typing.Union}:
        return next(part for part in typing.get_args(kind) if part is not type(None)), True
    return kind, False


def _wanted(kind: Any) -> str:
    kind, optional = _without_none(kind)
    if typing.get_origin(kind) is Literal:
        text = "one of " + ", ".join(typing.get_args(kind))
    else:
        text = _WANTED.get(kind, "a list of names")
    return f"{text} or null" if optional else text


def _name_of(value: Any) -> str:
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "empty"
    return str(value).lower() if isinstance(value, bool) else f"'{value}'"
