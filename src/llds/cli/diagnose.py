"""``llds diagnose`` and ``llds watch``: what happened to a run, told from its log."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llds.errors import LLDSError

if TYPE_CHECKING:
    from llds.diagnosis.findings import Diagnosis
    from llds.diagnosis.table import Table
    from llds.diagnosis.watch import Change


class Level(StrEnum):
    """From which severity on the exit code is 1."""

    WARNING = "warning"
    CRITICAL = "critical"
    NEVER = "never"


_FORMAT = typer.Option(
    "--format", help="console, jsonl, csv, trainer-state or tensorboard; found out by default."
)
_PATTERN = typer.Option(
    "--pattern",
    help="For text of another shape: a regular expression with named groups, such as "
    "'(?P<step>\\d+).*reward=(?P<reward>\\S+)'.",
)
_FAIL_ON = typer.Option("--fail-on", help="Exit with 1 when the verdict is at least this severe.")
Logs = Annotated[
    list[str],
    typer.Argument(
        metavar="LOG...", help="Files, a folder, or - for standard input; several are one resumed run."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command(name="diagnose")(diagnose_logs)
    app.command(name="watch")(watch_log)


def diagnose_logs(
    logs: Logs,
    format: Annotated[str | None, _FORMAT] = None,
    pattern: Annotated[str | None, _PATTERN] = None,
    table: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Write the canonical table as .csv or .parquet; - prints it and stops."
        ),
    ] = None,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Write one self-contained page.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="The two logs are two runs: say where they part.")
    ] = False,
    fail_on: Annotated[Level, _FAIL_ON] = Level.NEVER,
    as_json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as JSON on stdout.")] = False,
) -> None:
    """Say what happened to a run from the log it left: verl, TRL, W&B, TensorBoard, ms-swift, llds, CSV, JSONL.

    Exit code 0: done; 1: the verdict is at or above --fail-on; 2: the log can't be read.
    """
    if compare:
        _compare(logs, format, pattern, as_json)
        return
    from llds.diagnosis.reading import table_csv, write_table
    from llds.diagnosis.verdict import diagnose

    read = _read(logs, format, pattern)
    if table == "-":
        sys.stdout.write(table_csv(read))
        return
    if table is not None:
        write_table(read, Path(table))
    diagnosis = diagnose(read)
    if html is not None:
        from llds.diagnosis.page import html_page
        from llds.files import atomic_write_text

        _writable(Path(html))
        atomic_write_text(Path(html), html_page(diagnosis, read))
    _tell(diagnosis, read, as_json)
    raise typer.Exit(_exit_code(diagnosis, fail_on))


def _writable(path: Path) -> None:
    if path.is_dir():
        raise LLDSError(f"{path} is a folder; name the file to write.")


def _exit_code(diagnosis: Diagnosis, fail_on: Level) -> int:
    if fail_on is Level.NEVER:
        return 0
    order = ["ok", "info", "warning", "critical"]
    return int(order.index(diagnosis.severity) >= order.index(fail_on.value))


def _tell(diagnosis: Diagnosis, table: Table, as_json: bool) -> None:
    if as_json:
        from llds.diagnosis.schema import to_json

        typer.echo(json.dumps(to_json(diagnosis, table), ensure_ascii=False, indent=2, allow_nan=False))
        return
    from rich.console import Console

    from llds.diagnosis.terminal import show

    show(diagnosis, table, Console())


def _read(logs: list[str], format: str | None, pattern: str | None) -> Table:
    """Read logs; show how far that is when it takes long."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from llds.diagnosis.reading import read_logs

    sizes = [Path(log).stat().st_size for log in logs if log != "-" and Path(log).is_file()]
    large = sum(sizes) > 64 << 20
    console = Console(stderr=True)
    if not large or not console.is_terminal:
        return read_logs(logs, format=format, pattern=pattern)
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=sum(sizes))
        return read_logs(logs, format=format, pattern=pattern, progress=lambda n: bar.advance(task, n))


def _compare(logs: list[str], format: str | None, pattern: str | None, as_json: bool) -> None:
    from llds.diagnosis.compare import compare
    from llds.diagnosis.schema import to_json
    from llds.diagnosis.telling import headline
    from llds.diagnosis.verdict import diagnose

    if len(logs) != 2:
        raise LLDSError(f"--compare takes two logs, one of each run, not {len(logs)}.")
    tables = [_read([log], format, pattern) for log in logs]
    verdicts = [diagnose(table) for table in tables]
    partings = compare(*tables)
    if as_json:
        content: dict[str, Any] = {
            "runs": [to_json(verdict, table) for verdict, table in zip(verdicts, tables, strict=True)],
            "partings": [
                {"series": one.series, "step": one.step, "first": one.first, "second": one.second}
                for one in partings
            ],
        }
        typer.echo(json.dumps(content, ensure_ascii=False, indent=2, allow_nan=False))
        return
    for name, verdict in zip("AB", verdicts, strict=True):
        log = logs["AB".index(name)]
        typer.echo(f"{name}  {verdict.severity.upper()}: {headline(verdict)}  ({log})")
    if not partings:
        typer.echo("The runs have no step with a series in common.")
    for one in partings:
        where = f"part at step {one.step}" if one.step is not None else "do not part"
        typer.echo(f"  {one.series:<22} {where:<22} A {one.first:.4g}   B {one.second:.4g}")


def watch_log(
    log: Annotated[str, typer.Argument(metavar="LOG", help="A log that grows; it need not be there yet.")],
    format: Annotated[str | None, _FORMAT] = None,
    pattern: Annotated[str | None, _PATTERN] = None,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay", help="Go through a finished log row by row, and tell how early the alarm was."
        ),
    ] = False,
    until_idle: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Stop when nothing came for so long.")
    ] = None,
    fail_on: Annotated[Level, _FAIL_ON] = Level.NEVER,
    as_json: Annotated[bool, typer.Option("--json", help="Print each change as a line of JSON.")] = False,
) -> None:
    """Follow a growing log, and tell of a change of verdict as it happens. Ctrl-C stops."""
    from llds.diagnosis.watch import follow

    def told(change: Change) -> None:
        _told(change, as_json)

    if replay:
        _replay(log, format, pattern, as_json)
        return
    if not Path(log).exists():
        typer.echo(f"Waiting for {log}.", err=True)
    last = follow(Path(log), told, format=format, pattern=pattern, until_idle=until_idle)
    raise typer.Exit(_exit_code(last, fail_on) if last is not None else 0)


def _told(change: Change, as_json: bool) -> None:
    from llds.diagnosis.watch import change_text

    if not as_json:
        typer.echo(change_text(change))
        return
    now = change.diagnosis
    content = {
        "step": change.step,
        "before": change.before,
        "verdict": now.verdict,
        "severity": now.severity,
        "onset_step": now.onset_step,
    }
    typer.echo(json.dumps(content))


def _replay(log: str, format: str | None, pattern: str | None, as_json: bool) -> None:
    from llds.diagnosis.watch import lead_of, replay

    table = _read([log], format, pattern)
    for change in replay(table):
        _told(change, as_json)
    lead = lead_of(table)
    if as_json:
        typer.echo(
            json.dumps({"alarm_step": lead.alarm_step, "visible_step": lead.visible_step, "lead": lead.steps})
        )
    elif lead.alarm_step is None:
        typer.echo("No alarm.")
    elif lead.steps is None:
        typer.echo(
            f"First alarm at step {lead.alarm_step}; the reward did not fall and the gradient did not surge."
        )
    else:
        typer.echo(
            f"First alarm at step {lead.alarm_step}, {lead.steps} steps before the reward fell or the gradient surged "
            f"(step {lead.visible_step})."
        )
