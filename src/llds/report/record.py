"""All that a run folder tells, read once. A run that is still going on is read as far as it got."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from llds.diagnosis.findings import Diagnosis
from llds.diagnosis.reading import read_logs
from llds.diagnosis.table import Table
from llds.diagnosis.verdict import diagnose
from llds.errors import LLDSError
from llds.evaluation.evaluate import EvalResult, load_evaluation
from llds.training.plan import make_plan
from llds.training.recipe import Recipe, read_recipe_file
from llds.training.records import RunFolder, read_lines, read_metrics, what_llds_did
from llds.training.settings import flat_values, show_value

BEFORE, AFTER = "before", "after"


@dataclass(frozen=True)
class Record:
    """One run.

    ``recipe``: None where this version of llds does not know all of its settings. ``rows``: lines of
    ``metrics.jsonl``, empty for a run in verl. ``table``: the numbers of the run under their canonical names, None
    before the first step. ``events``: lines of ``events.jsonl``. ``evaluations``: by name, as in the run folder.
    """

    folder: Path
    config: str
    recipe: Recipe | None
    rows: tuple[Mapping[str, Any], ...]
    table: Table | None
    events: tuple[Mapping[str, Any], ...]
    evaluations: Mapping[str, EvalResult]
    finished: bool

    @property
    def name(self) -> str:
        """What the run is called."""
        return self.folder.resolve().name

    @property
    def settings(self) -> dict[str, str]:
        """The settings of the recipe, by dotted key, as they are written."""
        return (
            {key: show_value(value) for key, value in flat_values(self.recipe).items()} if self.recipe else {}
        )

    @property
    def last_step(self) -> int:
        """The last optimizer step of which there are numbers; in verl the last rollout. 0 if there is none."""
        return int(self.table.steps[-1]) if self.table is not None else 0

    @property
    def planned_steps(self) -> int | None:
        """The optimizer steps that the recipe asks for on one process; None where that is not known."""
        if self.recipe is None or self.recipe.run.engine != "trl":
            return None
        return make_plan(self.recipe).total_steps

    @cached_property
    def diagnosis(self) -> Diagnosis | None:
        """What happened to the run, told from its numbers."""
        return None if self.table is None else diagnose(self.table)

    @property
    def penalty(self) -> dict[str, int]:
        """Optimizer steps by what the penalty did: active, a zero and of which kind, or off."""
        return dict(Counter(map(what_llds_did, self.rows)))

    def events_of(self, *kinds: str) -> list[Mapping[str, Any]]:
        """Return the events of these kinds, in order."""
        return [event for event in self.events if event.get("event") in kinds]


def read_record(folder: Path) -> Record:
    """Read a run folder; nothing in it is changed.

    Raises :class:`LLDSError` when ``folder`` is no run folder, or a file in it is damaged elsewhere than at its end.
    """
    run = RunFolder(folder)
    if not folder.is_dir() or not run.config.is_file():
        what = "is not a folder" if not folder.is_dir() else f"has no {run.config.name}"
        raise LLDSError(f"{folder} {what}; name a run folder, such as runs/tiny-seed0.")
    return Record(
        folder=folder,
        config=run.config.read_text("utf-8", errors="replace"),
        recipe=_recipe(run.config),
        rows=tuple(read_metrics(run.metrics)) if run.metrics.exists() else (),
        table=_table(run),
        events=tuple(read_lines(run.events)) if run.events.exists() else (),
        evaluations={path.stem: load_evaluation(path) for path in sorted(run.evaluations.glob("*.jsonl"))},
        finished=run.result.exists(),
    )


def _recipe(path: Path) -> Recipe | None:
    try:
        return read_recipe_file(path)
    except LLDSError:
        return None


def _table(run: RunFolder) -> Table | None:
    logs = (
        [run.metrics]
        if run.metrics.exists()
        else sorted((run.path / "verl").glob("metrics-*.jsonl"), key=_number)
    )
    full = [log for log in logs if log.stat().st_size]
    return read_logs(full) if full else None


def _number(path: Path) -> int:
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0
