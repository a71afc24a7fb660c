"""The commands. Each imports what it needs when it runs, so that ``--help`` is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from llds._version import __version__
from llds.cli import data, diagnose, evaluation, lab, preflight, reporting, retrieval
from llds.cli.output import AsJson, dumps
from llds.errors import LLDSError

if TYPE_CHECKING:
    from llds.training.recipe import Recipe

app = typer.Typer(
    name="llds",
    help="Train language models to search, by GRPO + LLDS, and keep the runs from collapsing.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings, e.g. evaluation.batch=32")
]
MODEL_HELP = "A run folder, a model folder, tiny, smollm2, or a model name on the Hub."


class TrainCommand(TyperCommand):
    """Adds the list of all settings to the help of ``llds train``."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the usual help, then every setting with its default, values, unit and meaning."""
        super().format_help(ctx, formatter)
        formatter.write(settings_help())


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Options of the program itself."""
    if version:
        typer.echo(f"llds {__version__}")
        raise typer.Exit


@app.command(cls=TrainCommand)
def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [KEY=VALUE]...",
            help="A recipe (tiny, smollm2 or a YAML file; tiny when absent), then settings that differ.",
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the resolved recipe and stop.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Train although the preflight found that LLDS can't work as meant."),
    ] = False,
    prepare: Annotated[
        bool,
        typer.Option(
            "--prepare", help="With engine=verl: write the run folder and its command.sh, and stop."
        ),
    ] = False,
    verl: Annotated[
        list[str] | None,
        typer.Option(
            "--verl", metavar="KEY=VALUE", help="With engine=verl: a setting of verl's own; repeatable."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a search agent by GRPO + LLDS and score it on held-out questions before and after.

    The run goes to runs/NAME; calling the same command again resumes it, or shows its result once it is done.
    With engine=verl the same recipe runs in verl on a Ray cluster.
    """
    from llds.training.recipe import load_recipe
    from llds.training.settings import to_yaml

    words = arguments or []
    source = words[0] if words and "=" not in words[0] else None
    recipe = load_recipe(source, words[1:] if source else words)
    if print_config:
        typer.echo(to_yaml(recipe), nl=False)
        return
    from llds.training.environment import prepare_environment

    prepare_environment()
    if recipe.run.engine == "verl":
        _train_with_verl(recipe, verl or [], prepare, force, as_json)
    if prepare or verl:
        raise LLDSError("--prepare and --verl are for engine=verl; add engine=verl, or leave them out.")
    from llds.cli.reporting import report_after_training
    from llds.training.progress import is_first_process, make_display
    from llds.training.run import format_result
    from llds.training.run import train as train_recipe

    result = train_recipe(recipe, make_display(sys.stderr), force)
    if is_first_process():
        typer.echo(dumps(result.to_json()) if as_json else format_result(result))
        told = report_after_training(result.folder)
        if told:
            typer.echo(told, err=as_json)
    raise typer.Exit(result.exit_code)


def _train_with_verl(recipe: Recipe, words: list[str], prepare: bool, force: bool, as_json: bool) -> NoReturn:
    from llds.training.progress import make_display
    from llds.training.records import RunFolder
    from llds.training.verl_run import prepare as write_files
    from llds.training.verl_run import train_with_verl

    if prepare:
        run = RunFolder(Path(recipe.run.folder) / recipe.run.name)
        with run.locked():
            launch = write_files(recipe, words, run)
        typer.echo(f"Wrote {launch.folder}; start it with: sh {launch.folder}/command.sh")
        raise typer.Exit
    result = train_with_verl(recipe, words, make_display(sys.stderr), force)
    if as_json:
        typer.echo(dumps(result.to_json()))
    else:
        typer.echo(f"verl ended with exit code {result.exit_code}; its numbers are in {result.metrics}.")
    raise typer.Exit(result.exit_code)


@app.command()
def ask(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="The question, in quotes.")],
    overrides: Overrides = None,
    no_retriever: Annotated[bool, typer.Option("--no-retriever", help="Switch the search tool off.")] = False,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Ask a model one question and watch it think, search and answer."""
    from llds.training.environment import prepare_environment

    prepare_environment()
    from llds.cli.asking import run_question

    answer = run_question(model, question, overrides or [], no_retriever, temperature, quiet=as_json)
    if as_json:
        typer.echo(dumps(answer))


data.register(app)
diagnose.register(app)
evaluation.register(app)
lab.register(app)
preflight.register(app)
reporting.register(app)
retrieval.register(app)


def settings_help() -> str:
    """Return every setting of a recipe as two lines: key, default, values and unit; then the meaning."""
    from llds.training.recipe import Recipe
    from llds.training.settings import describe_kind, settings_table, show_value

    lines = ["", "Settings, with their defaults (a recipe may set others; see --print-config):", ""]
    for key, item in settings_table(Recipe).items():
        values = describe_kind(item.kind) + (f", {item.unit}" if item.unit else "")
        lines += [f"  {key}={show_value(item.default)}  ({values})", f"      {item.help}"]
    return "\n".join(lines) + "\n"
