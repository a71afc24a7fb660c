"""``llds report``: one page that tells a run, or several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llds.errors import LLDSError
from llds.files import atomic_write_text


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="report")(report_runs)


def report_runs(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Run folders: one, or up to four to compare.")
    ],
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Where the page goes: report.html in the run folder by default; needed for several.",
        ),
    ] = None,
) -> None:
    """Write one self-contained page: scores, series, phases, alarms, and what the policy wrote, token by token."""
    from llds.report import comparison_page, read_record, run_page
    from llds.training.records import RunFolder

    if len(runs) > 1 and out is None:
        raise LLDSError("Say where the page of several runs goes: --out comparison.html.")
    target = Path(out) if out is not None else RunFolder(Path(runs[0])).report
    if target.is_dir():
        raise LLDSError(f"{target} is a folder; name the file to write.")
    records = [read_record(Path(run)) for run in runs]
    page = run_page(records[0]) if len(records) == 1 else comparison_page(records)
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(target, page)
    typer.echo(f"Wrote {target}.")


def report_after_training(folder: Path) -> str:
    """Write the page of a run that was just trained, and return a sentence about it.

    A page that can't be written is no reason to call the training failed.
    """
    from llds.report import read_record, run_page
    from llds.training.records import RunFolder

    target = RunFolder(folder).report
    try:
        record = read_record(folder)
        if record.table is None:
            return ""
        atomic_write_text(target, run_page(record))
    except (LLDSError, OSError) as error:
        return f"There is no page of the run ({error})."
    return f"See the whole run: {target}"
