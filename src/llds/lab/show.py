"""A run as lines of text."""

from __future__ import annotations

from collections.abc import Mapping

#: Series on display: name, heading, how its number is written.
COLUMNS = (
    ("rollout", "rollout", "7.0f"),
    ("reward", "reward", "6.3f"),
    ("logprob_correct", "lp.correct", "10.3f"),
    ("displacement_correct", "displaced", "9.4f"),
    ("policy_entropy", "entropy", "7.3f"),
    ("grad_norm", "grad", "5.2f"),
    ("searches", "searches", "8.2f"),
    ("action_tokens", "tokens", "6.1f"),
    ("kl", "kl", "6.3f"),
    ("phase", "phase", "5.0f"),
)


def shown_row(row: Mapping[str, float | None] | None) -> str:
    """Return a row as a line of aligned columns, or their headings for None."""
    if row is None:
        return "  ".join(heading.rjust(int(form.split(".")[0])) for _, heading, form in COLUMNS)
    return "  ".join(_cell(row[name], form) for name, _, form in COLUMNS)


def _cell(value: float | None, form: str) -> str:
    return "–".rjust(int(form.split(".")[0])) if value is None else f"{value:{form}}"
