"""A whole evaluation: everybody's answers to the same questions, as JSON and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llds.data.benchmarks import BENCHMARKS
from llds.evaluation.evaluate import EvalResult, best_constant_guess, hop_name
from llds.evaluation.folder import AGENT
from llds.evaluation.paired import Change, PairedComparison, compare_rows
from llds.evaluation.report import p_value, percent, points
from llds.evaluation.rows import AnswerRow
from llds.evaluation.summary import Score, SetScore, Summary, summarize
from llds.evaluation.tasks import QuestionSet

FORMAT = 1


@dataclass(frozen=True)
class Outcome:
    """What an evaluation came to.

    ``rows``: by contestant, in the order of the tasks. ``settings``: what it was made with, of which nothing but
    the contestants may differ when it goes on.
    """

    label: str
    settings: Mapping[str, Any]
    sets: Sequence[QuestionSet]
    rows: Mapping[str, Sequence[AnswerRow]]

    @cached_property
    def summaries(self) -> dict[str, Summary]:
        """The scores of every contestant."""
        return {name: summarize(rows, self.sets) for name, rows in self.rows.items()}

    @cached_property
    def gains(self) -> dict[str, PairedComparison]:
        """The agent against every baseline."""
        if AGENT not in self.rows:
            return {}
        others = [name for name in self.rows if name != AGENT]
        return {name: compare_rows(self.rows[name], self.rows[AGENT]) for name in others}

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; with one set and one answer each also those of :class:`EvalResult`."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "label": self.label,
            "settings": dict(self.settings),
            "contestants": {name: summary.to_json() for name, summary in self.summaries.items()},
            "gains": {name: gain.to_json() for name, gain in self.gains.items()},
        }
        if self._alone and AGENT in self.rows:
            content |= EvalResult(tuple(self.rows[AGENT])).to_json()
        return content

    @property
    def _alone(self) -> bool:
        return len(self.sets) == 1 and self.settings["samples"] == 1

    def to_text(self) -> str:
        """Return a table for people."""
        samples, temperature = self.settings["samples"], self.settings["sampling"]["temperature"]
        asked = sum(len(one.questions) for one in self.sets)
        drawn = f"at temperature {temperature:g}" if temperature else "greedily"
        times = "once" if samples == 1 else f"{samples} times"
        lines = [
            f"{self.label}: {asked:,} questions, each answered {times}, {drawn}; intervals are 95 %.",
            "",
            *_columns([_HEADS, *(row for name in self.rows for row in self._block(name))]),
        ]
        for name, gain in self.gains.items():
            lines += ["", f"agent against {name}, in points of exact match:", *format_gains(gain)]
        return "\n".join([*lines, "", *self._remarks()])

    def _block(self, name: str) -> list[tuple[str, ...]]:
        """Return the lines of one contestant."""
        summary = self.summaries[name]
        lines: list[tuple[str, ...]] = [(name, *[""] * (len(_HEADS) - 1))] if len(self.sets) > 1 else []
        for set_name, scores in summary.sets.items():
            title = title_of(set_name) if len(self.sets) > 1 else name
            lines.append(_set_line(title, scores))
            lines += _pass_lines(scores.score)
        if len(self.sets) == 1:
            lines += _hop_lines(self.rows[name], self.sets[0])
        for macro, score in summary.macros.items():
            lines.append((f"  {macro}", *_scores(score), *[""] * 4))
            lines += _pass_lines(score)
        return lines

    def _remarks(self) -> list[str]:
        remarks = []
        if self._alone and AGENT in self.rows:
            guess = best_constant_guess([row for row in self.rows[AGENT] if not row.tool_failed])
            remarks.append(f"The best constant guess would score {100 * guess:.1f} %.")
        failed = sum(row.tool_failed for rows in self.rows.values() for row in rows)
        if failed:
            remarks.append(
                f"The search tool failed in {failed} answers, which are left out; with --out the same command asks "
                "them again."
            )
        return remarks


def format_gains(gain: PairedComparison) -> list[str]:
    """Return a comparison as lines, one per set and average."""
    several = len(gain.sets) > 1
    heads = ("", "change", "questions better, worse", "p", "p, adjusted" if several else "")
    changes = [*gain.sets.items(), *gain.macros.items()]
    return _columns([heads, *(_gain_line(title_of(name), change, several) for name, change in changes)])


def title_of(name: str) -> str:
    """Return a set's name as tables have it, indented."""
    return f"  {BENCHMARKS[name].title if name in BENCHMARKS else name}"


def _gain_line(title: str, change: Change, several: bool) -> tuple[str, ...]:
    adjusted = p_value(change.p_adjusted) if several and title.strip() != "Avg" else ""
    return (
        f"{title} ({change.exact_match.count})",
        points(change.exact_match),
        f"{change.gains}, {change.losses}",
        p_value(change.p_value),
        adjusted,
    )


_HEADS = ("", "exact match", "F1", "substring", "searches", "valid", "cut", "tokens")


def _set_line(title: str, scores: SetScore) -> tuple[str, ...]:
    return (
        f"{title} ({scores.score.exact_match.count})",
        *_scores(scores.score),
        f"{scores.searches:.2f}",
        f"{100 * scores.valid_format:.0f} %",
        f"{100 * scores.truncated:.0f} %",
        f"{scores.tokens:.0f}",
    )


def _scores(score: Score) -> tuple[str, str, str]:
    return percent(score.exact_match), percent(score.f1), percent(score.substring_match)


def _pass_lines(score: Score) -> list[tuple[str, ...]]:
    return [
        (f"    pass@{k}", percent(estimate), *[""] * (len(_HEADS) - 2))
        for k, estimate in score.pass_at.items()
    ]


def _hop_lines(rows: Sequence[AnswerRow], one: QuestionSet) -> list[tuple[str, ...]]:
    hops = sorted({row.hops for row in rows if row.hops})
    if len(hops) < 2:
        return []
    return [
        _set_line(f"  {hop_name(count)}", scores)
        for count in hops
        for scores in summarize([row for row in rows if row.hops == count], [one]).sets.values()
    ]


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
