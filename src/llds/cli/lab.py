"""``llds lab``: the collapse laboratory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

lab = typer.Typer(
    name="lab",
    help="Watch GRPO collapse on a laptop, and compare what keeps it from it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

SERIES_HELP = "Folder of the raw series, one parquet file per regime and arm."
STARTS_HELP = "Folder of the warm starts; one that is absent is trained."
Series = Annotated[Path, typer.Option("--series", metavar="FOLDER", help=SERIES_HELP)]
Starts = Annotated[Path, typer.Option("--starts", metavar="FOLDER", help=STARTS_HELP)]
SERIES, STARTS = Path("lab/series"), Path("lab/starts")


def register(app: typer.Typer) -> None:
    """Add the commands of the laboratory to the program."""
    app.add_typer(lab)


@lab.command()
def run(
    regime: Annotated[str, typer.Option(help="Regime; `llds lab list` shows them.")] = "far",
    arm: Annotated[str, typer.Option(help="Arm; `llds lab list` shows them.")] = "grpo",
    seed: Annotated[int, typer.Option(min=0, help="Seed of questions, sampling and tool noise.")] = 0,
    starts: Starts = STARTS,
) -> None:
    """Make one run and watch it, a line per rollout; nothing is stored."""
    from llds.lab.arms import arm_named
    from llds.lab.loop import Run
    from llds.lab.regimes import regime_named
    from llds.lab.show import shown_row
    from llds.lab.starts import load_start

    setting, remedy = regime_named(regime), arm_named(arm)
    typer.echo(shown_row(None))
    going = Run(setting, remedy, seed, load_start(starts, setting))
    result = going.finish(lambda row: typer.echo(shown_row(row)))
    for event in result.events:
        typer.echo(f"rollout {event.step}: {event.text}")


@lab.command()
def sweep(
    regimes: Annotated[str, typer.Option(help="Names separated by commas, or all.")] = "far,near",
    arms: Annotated[str, typer.Option(help="Names separated by commas, or all.")] = "all",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0, 1, … of each arm.")] = 10,
    workers: Annotated[int, typer.Option(min=1, help="Processes, of one thread each.")] = 2,
    series: Series = SERIES,
    starts: Starts = STARTS,
) -> None:
    """Make every run that is not stored yet; may be stopped and called again at any time."""
    from llds.lab.arms import ARMS
    from llds.lab.regimes import every_regime
    from llds.lab.series import Store
    from llds.lab.sweep import sweep as make_all
    from llds.training.progress import make_display

    result = make_all(
        Store(series),
        starts,
        _names(regimes, list(every_regime())),
        _names(arms, list(ARMS)),
        range(seeds),
        workers,
        make_display(sys.stderr),
    )
    typer.echo(f"{result.made} runs made, {result.stored} were stored already; series in {series}.")
    raise typer.Exit(result.exit_code)


@lab.command()
def report(
    series: Series = SERIES,
    page: Annotated[
        Path, typer.Option(metavar="FILE", help="Markdown page whose marked blocks are written anew.")
    ] = Path("docs/lab.md"),
) -> None:
    """Write tables and figures from the stored series; makes no run."""
    from llds.lab.report import write_report
    from llds.lab.series import Store

    for path in write_report(Store(series), page):
        typer.echo(f"wrote {path}")


@lab.command(name="list")
def list_all() -> None:
    """List regimes and arms."""
    from llds.lab.arms import ARMS
    from llds.lab.regimes import every_regime

    typer.echo("Regimes:")
    for name, regime in every_regime().items():
        typer.echo(f"  {name:16} {regime.about}")
    typer.echo("Arms:")
    for name, arm in ARMS.items():
        typer.echo(f"  {name:20} {arm.about}")


def _names(given: str, known: list[str]) -> list[str]:
    return known if given == "all" else [name.strip() for name in given.split(",") if name.strip()]
