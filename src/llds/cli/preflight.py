"""``llds preflight``: looks for the faults that keep LLDS from working, before a run."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llds.errors import LLDSError

if TYPE_CHECKING:
    from llds.preflight import Report


class Worst(StrEnum):
    """From which severity on the exit code is 1."""

    LIKELY = "likely"
    CERTAIN = "certain"
    NEVER = "never"


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="preflight")(preflight)


def preflight(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help="A recipe (tiny, smollm2 or a YAML file), or a YAML or JSON file with the arguments of a TRL "
            "GRPOConfig or with a verl configuration; - for none, with a verl command's key=value words.",
        ),
    ] = "tiny",
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings laid over the file's.")
    ] = None,
    static: Annotated[
        bool, typer.Option("--static", help="Look at the settings only; make no rollout of the recipe.")
    ] = False,
    fail_on: Annotated[
        Worst, typer.Option(help="Exit with 1 when a finding is at least this severe.")
    ] = Worst.CERTAIN,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON on stdout.")] = False,
) -> None:
    """Prove before a run that LLDS can fire: look for fourteen faults in a configuration.

    For a recipe the first rollout is made too, and the trainer's own loss is probed on it. Exit code 0: nothing;
    1: a finding at or above --fail-on; 2: the configuration can't be read.
    """
    words = overrides or []
    if "=" in config:
        config, words = "tiny", [config, *words]
    report = _report(config, words, static)
    typer.echo(json.dumps(report.to_json(), ensure_ascii=False, indent=2) if as_json else report.text)
    bad = {
        Worst.NEVER: False,
        Worst.CERTAIN: bool(report.certain),
        Worst.LIKELY: not report.is_clean,
    }[fail_on]
    raise typer.Exit(int(bad))


def _report(config: str, words: list[str], static: bool) -> Report:
    from llds.preflight import check_setup
    from llds.preflight.verl import is_verl, setup_of_verl, with_overrides

    content = {} if config == "-" else _content(config)
    if content is not None and (config == "-" or is_verl(content)):
        return check_setup(setup_of_verl(with_overrides(content, words)))
    if content is not None and _is_trl(content):
        return _trl_report(content, words, config)
    return _recipe_report(config, words, static)


def _content(config: str) -> dict[str, Any] | None:
    """Return what a file holds; None for the name of a recipe."""
    import yaml

    path = Path(config)
    if path.suffix not in {".yaml", ".yml", ".json"}:
        return None
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise LLDSError(f"The configuration {path} can't be read: {error}.") from None
    except RecursionError:
        raise LLDSError(f"{path} is nested too deeply to be a configuration.") from None
    except yaml.YAMLError as error:
        raise LLDSError(f"{path} is neither YAML nor JSON: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        raise LLDSError(f"{path} must hold settings by name, not {type(content).__name__}.")
    return content


def _is_trl(content: dict[str, Any]) -> bool:
    from llds.training.recipe import Recipe
    from llds.training.settings import settings_table

    sections = {key.partition(".")[0] for key in settings_table(Recipe)}
    return bool(content) and not sections & content.keys()


def _trl_report(content: dict[str, Any], words: list[str], where: str) -> Report:
    """Let TRL itself read the arguments."""
    import dataclasses

    from llds.training.environment import prepare_environment, silence_libraries

    prepare_environment()
    silence_libraries()
    from llds.engines.trl import LLDSGRPOConfig
    from llds.engines.trl.preflight import setup_of_args
    from llds.preflight import Report, check_setup, merge
    from llds.training.settings import did_you_mean, parse_word

    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise LLDSError(f"'{word}' is no setting; write key=value, such as num_iterations=2.")
        content[key] = parse_word(value)
    known = [item.name for item in dataclasses.fields(LLDSGRPOConfig) if item.init]
    for key in content:
        if key not in known:
            near = did_you_mean(key, known) or "; it is no argument of TRL's GRPOConfig nor of LLDS."
            raise LLDSError(f"{where} has '{key}'{near}")
    # What the machine at hand can't do does not matter here.
    content = {"output_dir": "preflight", **content, "use_cpu": True, "bf16": False, "fp16": False}
    content |= {"report_to": "none"}
    try:
        args = LLDSGRPOConfig(**content)
    except (ValueError, TypeError) as error:
        raise LLDSError(f"TRL does not take the arguments of {where}: {error}") from None
    report = check_setup(setup_of_args(args, args.llds_options()))
    if any(key.startswith("llds_") for key in content):
        return report
    note = (
        f"{where} has no setting llds_…: this is what attach_llds(trainer) would meet; give llds_coef=0 for a "
        "run without LLDS."
    )
    return merge([report, Report(notes=(note,))])


def _recipe_report(config: str, words: list[str], static: bool) -> Report:
    from llds.preflight import merge
    from llds.training.recipe import load_recipe

    recipe = load_recipe(config, words)
    if recipe.run.engine == "verl":
        from llds.training.verl_command import check_verl_recipe

        return check_verl_recipe(recipe)
    from llds.training.environment import prepare_environment, silence_libraries

    prepare_environment()
    silence_libraries()
    from llds.training.preflight import check_recipe, probe_recipe
    from llds.training.progress import make_display

    report = check_recipe(recipe)
    if static:
        return report
    display = make_display(sys.stderr)
    with display:
        return merge([report, probe_recipe(recipe, display)])
