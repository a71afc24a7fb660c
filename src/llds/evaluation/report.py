"""Evaluations as text for people: one policy, or before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llds.evaluation.evaluate import ALL, EvalResult, best_constant_guess, compare
from llds.evaluation.statistics import Estimate


def format_evaluation(result: EvalResult, without_retriever: EvalResult | None = None) -> str:
    """Return the scores of one policy as a small table; all intervals are 95 %."""
    lines = [f"{len(result.scored)} questions, each answered once, greedily; intervals are 95 %."]
    for name, group in result.groups.items():
        lines.append(
            f"  {name:<9} exact match {percent(group.exact_match):<22} F1 {percent(group.f1):<22} "
            f"searches {group.searches:.2f}"
        )
    if without_retriever is not None:
        lines.append(f"  without the search tool: exact match {percent(_exact_match(without_retriever))}")
    return "\n".join(lines + _remarks([result]))


def format_comparison(results: Mapping[str, EvalResult]) -> str:
    """Return before, after and gain as a table.

    ``results``: evaluations by name: ``before`` and ``after``, and with the search tool off
    ``before-without-retriever`` and ``after-without-retriever`` where they were made.
    """
    before, after = results["before"], results["after"]
    rows = [("exact match", "before", "after", "gain in points")]
    for name, change in compare(before, after).items():
        gain = change.exact_match
        rows.append(
            (
                f"  {name} ({gain.count})",
                percent(before.groups[name].exact_match),
                percent(after.groups[name].exact_match),
                f"{points(gain)}, {p_value(change.p_value)}",
            )
        )
    off = [results.get(f"{name}-without-retriever") for name in ("before", "after")]
    if off[0] is not None and off[1] is not None:
        rows.append(("  search off", percent(_exact_match(off[0])), percent(_exact_match(off[1])), ""))
    rows.append(
        ("searches", f"{_searches(before):.2f} per question", f"{_searches(after):.2f} per question", "")
    )
    rows.append(("  valid", share(before.valid_search_share), share(after.valid_search_share), ""))
    title = f"{len(after.rows)} held-out questions, each answered once, greedily; intervals are 95 %."
    return "\n".join([title, *_columns(rows), *_remarks([before, after])])


def percent(estimate: Estimate) -> str:
    """Return an estimate in per cent with its interval."""
    return f"{100 * estimate.value:.1f} % [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def points(estimate: Estimate) -> str:
    """Return a difference of shares in percentage points with its interval."""
    return f"{100 * estimate.value:+.1f} [{100 * estimate.low:+.1f}, {100 * estimate.high:+.1f}]"


def share(value: float | None) -> str:
    """Return a share in per cent, or a dash when there was nothing to take a share of."""
    return "—" if value is None else f"{100 * value:.0f} %"


def p_value(value: float) -> str:
    """Return a p-value as people write it."""
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def _exact_match(result: EvalResult) -> Estimate:
    return result.groups[ALL].exact_match


def _searches(result: EvalResult) -> float:
    return result.groups[ALL].searches


def _remarks(results: Sequence[EvalResult]) -> list[str]:
    lines = [f"The best constant guess would score {100 * best_constant_guess(results[-1].scored):.1f} %."]
    failed = sum(len(result.rows) - len(result.scored) for result in results)
    if failed:
        lines.append(f"The search tool failed in {failed} answers, which are left out.")
    return lines


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
