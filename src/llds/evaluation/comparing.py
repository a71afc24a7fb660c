"""Two evaluations on disk, compared: what changed, whether it is chance, and what else differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llds.evaluation.folder import AGENT, EvalFolder, differences, read_rows
from llds.evaluation.outcome import format_gains
from llds.evaluation.paired import PairedComparison, compare_rows
from llds.evaluation.rows import AnswerRow

_NAMES = ("before", "after")


@dataclass(frozen=True)
class SavedComparison:
    """A comparison of two saved evaluations. ``others``: settings besides the model that differ."""

    names: tuple[str, str]
    comparison: PairedComparison
    others: Sequence[tuple[str, str, str]]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        keys = ("setting", *_NAMES)
        return {
            **dict(zip(_NAMES, self.names, strict=True)),
            **self.comparison.to_json(),
            "other_differences": [dict(zip(keys, one, strict=True)) for one in self.others],
        }

    def to_text(self) -> str:
        """Return a table for people."""
        lines = [
            f"{self.names[1]} minus {self.names[0]}, in points of exact match, on the same questions:",
            *format_gains(self.comparison),
            "",
            "Intervals are 95 %, by paired bootstrap over questions, within each set for averages. p is two-sided: the "
            "exact sign test, for averages random signs (20,000).",
        ]
        if len(self.comparison.sets) > 1:
            lines.append(
                "Adjusted is by Holm over the sets, and over Gen and MH: judge single rows by it. Avg is one test "
                "and stands as it is."
            )
        if self.comparison.left_out:
            lines.append(f"{self.comparison.left_out} questions are left out, since the search tool failed.")
        if self.others:
            told = "; ".join(f"{key} ({old}, {new})" for key, old, new in self.others)
            lines.append(f"More than the model differs: {told}.")
        return "\n".join(lines)


def compare_paths(before: Path, after: Path) -> SavedComparison:
    """Compare two folders of evaluations (their agents), or files of answers, or one of each.

    Raises :class:`~llds.errors.LLDSError` when one can't be read, is not finished, or they have other questions.
    """
    old, new = _rows(before), _rows(after)
    folders = [EvalFolder(path if path.is_dir() else path.parent) for path in (before, after)]
    others: list[tuple[str, str, str]] = []
    if all((folder.path / "settings.json").is_file() for folder in folders):
        found = differences(folders[0].settings(), folders[1].settings())
        others = [one for one in found if not one[0].startswith(("model.", "sets."))]
    return SavedComparison((str(before), str(after)), compare_rows(old, new), others)


def _rows(path: Path) -> list[AnswerRow]:
    if not path.is_dir():
        return read_rows(path)
    folder = EvalFolder(path)
    folder.summary()  # raises when it is not finished
    return read_rows(folder.rows_path(AGENT))
