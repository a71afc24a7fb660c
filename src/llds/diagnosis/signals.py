"""Which changes are looked for in a log, and the series that they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from llds.diagnosis.findings import Signal
from llds.diagnosis.statistics import Rule, Track, follow, onset_of
from llds.diagnosis.table import Column, Table

#: Name of a signal -> its rule. Effects: half of the turns or tokens, three times the gradient, and so on.
RULES: Mapping[str, Rule] = {
    "reward down": Rule("reward", "reward", -1, effect=0.02, relative=0.15),
    "reward up": Rule("reward", "reward", +1, effect=0.02, relative=0.1),
    "validation down": Rule("validation", "reward", -1, effect=0.02, relative=0.2),
    "turns down": Rule("turns", "behaviour", -1, effect=1.6, ratio=True, least=0.4),
    "searches down": Rule("searches", "behaviour", -1, effect=2.0, ratio=True, least=0.3),
    "length down": Rule("response_tokens", "length", -1, effect=2.0, ratio=True),
    "length up": Rule("response_tokens", "length", +1, effect=1.5, ratio=True),
    "truncated up": Rule("truncated", "length", +1, effect=0.2),
    "entropy up": Rule("entropy", "entropy-gradient", +1, effect=0.15, relative=0.8),
    "entropy down": Rule("entropy", "entropy-gradient", -1, effect=4.0, ratio=True),
    "gradient up": Rule("grad_norm", "entropy-gradient", +1, effect=3.0, ratio=True),
    "KL up": Rule("kl_ref", "likelihood", +1, effect=3.0, ratio=True),
    "level down": Rule("logprob_correct", "likelihood", -1, effect=0.03, relative=0.3),
    "NLL up": Rule("nll", "likelihood", +1, effect=0.05, relative=0.3),
    "tool success down": Rule("tool_success", "behaviour", -1, effect=0.2),
}


@dataclass(frozen=True)
class Signals:
    """All signals of a log, by name; those whose series the log lacks are absent.

    ``table``: the log.
    """

    table: Table
    tracks: Mapping[str, Track]
    _onsets: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def is_on(self, name: str) -> bool:
        """Whether a signal came on at any time."""
        track = self.tracks.get(name)
        return track is not None and track.first is not None

    def holds(self, name: str) -> bool:
        """Whether a signal is on at the end."""
        track = self.tracks.get(name)
        return track is not None and track.holds

    def noticed(self, name: str) -> int:
        """Return the row at which a signal came on."""
        track = self.tracks[name]
        assert track.first is not None
        return int(track.rows[track.first])

    def onset(self, name: str) -> tuple[int, int, int]:
        """Return the row at which a signal's change began, and the first and last row where it may have."""
        if name not in self._onsets:
            track = self.tracks[name]
            places = onset_of(track)
            self._onsets[name] = (
                int(track.rows[places[0]]),
                int(track.rows[places[1]]),
                int(track.rows[places[2]]),
            )
        return self._onsets[name]

    def step(self, row: int) -> int:
        """Return the step of a row."""
        return int(self.table.steps[row])

    def describe(self, name: str) -> Signal:
        """Return a signal as evidence: where it began, from what to what."""
        track = self.tracks[name]
        row = self.onset(name)[0]
        first = track.first or 0
        end = min(len(track.level), first + max(8, first // 2))
        part = track.level[first:end]
        value = float(part.max() if track.rule.direction > 0 else part.min())
        best = float(track.best[first])
        went = "rose" if track.rule.direction > 0 else "fell"
        evidence = (
            f"{track.rule.series} {went} from {best:.4g} to {value:.4g}; it began at step {self.step(row)} and was "
            f"noticed at step {self.step(self.noticed(name))}"
        )
        return Signal(
            series=track.rule.series,
            family=track.rule.family,
            step=self.step(row),
            direction="up" if track.rule.direction > 0 else "down",
            baseline=best,
            value=value,
            evidence=evidence,
        )


def find_signals(table: Table) -> Signals:
    """Follow every rule whose series the log has."""
    tracks = {}
    for name, rule in RULES.items():
        column = table.columns.get(rule.series)
        if column is None or np.isfinite(column.values).sum() < 3:
            continue
        if rule.series in {"turns", "searches"}:
            rule = _above_floor(rule, column)
        half = 0.0 if column.decimals is None else 0.5 * 10.0**-column.decimals
        tracks[name] = follow(rule, column.values, half)
    return Signals(table, tracks)


def _above_floor(rule: Rule, column: Column) -> Rule:
    """verl counts the question and the answer as turns, so two of them are no tool call; elsewhere one is. A
    column that names no engine is taken for verl's where it never goes below two.
    """
    if rule.series == "searches":
        return rule
    known = column.values[np.isfinite(column.values)]
    is_verl = column.key.startswith("num_turns") or (column.key == "turns" and float(known.min()) >= 2)
    return replace(rule, floor=2.0 if is_verl else 1.0)
