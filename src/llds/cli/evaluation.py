"""``llds eval``: answer and score, compare two evaluations, or put evaluations into the paper's table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from llds.cli.output import AsJson, dumps
from llds.errors import LLDSError

_MODEL_HELP = (
    "A run folder, a model folder, tiny, smollm2, or a model name on the Hub; then settings, KEY=VALUE. With "
    "--table and --compare: folders of evaluations."
)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(name="eval")(evaluate)


def evaluate(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL [KEY=VALUE]...", help=_MODEL_HELP)
    ] = None,
    questions: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|N",
            help="Questions of your own, JSONL; or a number: so many of each set, always the same ones.",
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Embedded questions to answer: test, validation or train. By default what the run held out."
        ),
    ] = None,
    benchmarks: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="The folder with the seven benchmarks, or some of them."),
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Only these benchmarks, such as nq,hotpotqa.")
    ] = None,
    retriever: Annotated[
        str | None,
        typer.Option(
            metavar="URL|PATH",
            help="What to search: a server of Search-R1's protocol, an index folder, a JSONL file, or embedded.",
        ),
    ] = None,
    corpus_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What the searched corpus is, where it can't be seen: wiki-18."),
    ] = None,
    no_retriever: Annotated[bool, typer.Option("--no-retriever", help="Switch the search tool off.")] = False,
    search_r1: Annotated[
        bool,
        typer.Option(
            "--search-r1",
            help="Episodes as in the paper: Search-R1's prompt, 3 passages, 4 turns, its limits of tokens.",
        ),
    ] = False,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Also let the model answer without searching (no-search), or after one search with the question "
            "(one-shot). May be given twice.",
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(help="What runs the model: transformers, openai (a server), or vllm in this process."),
    ] = "transformers",
    url: Annotated[
        str | None, typer.Option(help="With openai: the server's address, e.g. http://127.0.0.1:8000/v1.")
    ] = None,
    served_model: Annotated[
        str | None, typer.Option(help="With openai: the model's name there; not needed when there is one.")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="With openai: episodes at a time.")] = 32,
    samples: Annotated[int, typer.Option(help="Answers per question, for pass@k.")] = 1,
    temperature: Annotated[
        float | None, typer.Option(help="How answers are drawn; greedily by default.")
    ] = None,
    top_p: Annotated[float, typer.Option(help="Nucleus of sampling, 1 for all tokens.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of sampled answers.")] = 0,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Keep answers and summary there; the same command goes on after a stop."
        ),
    ] = None,
    label: Annotated[str | None, typer.Option(help="What tables call it; MODEL by default.")] = None,
    rows: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write one JSON line per answer of the agent.")
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Compare two evaluations of the same questions: folders of --out, or files of answers.",
        ),
    ] = False,
    table: Annotated[
        bool, typer.Option("--table", help="Show evaluations of --out as rows of the paper's table.")
    ] = False,
    paper: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="With --table: only the paper's rows of this model; none for none."
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="With --table: as Markdown.")] = False,
    as_json: AsJson = False,
) -> None:
    """Let a model answer questions and score it; or compare evaluations, or tabulate them.

    Greedy by default. The environment variable LLDS_API_KEY is the key for a server.
    """
    given = arguments or []
    if table and compare:
        raise LLDSError("--table and --compare are two things: give one of them.")
    if table:
        _show_table(given, paper, markdown, as_json)
        return
    if compare:
        _show_comparison(given, as_json)
        return
    if not given or "=" in given[0]:
        raise LLDSError(
            "llds eval needs a MODEL first: a run folder, a model folder, tiny, or a name on the Hub."
        )
    from llds.training.environment import prepare_environment

    prepare_environment()
    from llds.cli.evaluating import run_evaluation
    from llds.cli.orders import ENGINES, Order
    from llds.evaluation.contestants import BASELINES
    from llds.evaluation.folder import AGENT
    from llds.evaluation.rows import to_line
    from llds.files import atomic_write_text
    from llds.training.progress import make_display

    order = Order(
        model=given[0],
        overrides=tuple(given[1:]),
        split=split,
        questions=questions,
        benchmarks=benchmarks,
        only=_names(only),
        retriever=retriever,
        no_retriever=no_retriever,
        corpus_name=corpus_name,
        search_r1=search_r1,
        baselines=cast(Any, _checked("--baseline", baseline or [], BASELINES)),
        engine=cast(Any, _checked("--engine", [engine], ENGINES)[0]),
        url=url,
        served_model=served_model,
        concurrency=concurrency,
        samples=samples,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        out=out,
        label=label,
    )
    outcome, exit_code = run_evaluation(order, make_display(sys.stderr))
    if outcome is None:
        raise typer.Exit(exit_code)
    typer.echo(dumps(outcome.to_json()) if as_json else outcome.to_text())
    if rows:
        atomic_write_text(Path(rows), "".join(map(to_line, outcome.rows[AGENT])))


def _show_table(folders: list[str], paper: str | None, markdown: bool, as_json: bool) -> None:
    from llds.evaluation.folder import EvalFolder
    from llds.evaluation.paper import PAPER_ROWS, paper_rows
    from llds.evaluation.table import format_table, paper_table_row, rows_of, table_to_json

    if not folders:
        raise LLDSError("--table needs at least one folder of an evaluation, made with --out.")
    measured = [row for folder in folders for row in rows_of(EvalFolder(Path(folder)).summary())]
    theirs = [] if paper == "none" else paper_rows(paper)
    if paper and paper != "none" and not theirs:
        names = ", ".join(dict.fromkeys(row.model for row in PAPER_ROWS))
        raise LLDSError(f"The paper's table has no model {paper!r}: name one of {names}, or none.")
    table = [*measured, *map(paper_table_row, theirs)]
    typer.echo(dumps(table_to_json(table)) if as_json else format_table(table, markdown))


def _show_comparison(paths: list[str], as_json: bool) -> None:
    from llds.evaluation.comparing import compare_paths

    if len(paths) != 2:
        raise LLDSError(f"--compare takes two evaluations, the earlier one first, not {len(paths)}.")
    comparison = compare_paths(Path(paths[0]), Path(paths[1]))
    typer.echo(dumps(comparison.to_json()) if as_json else comparison.to_text())


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))


def _checked(option: str, values: list[str], known: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if value not in known:
            raise LLDSError(f"{option} {value} is unknown: choose {' or '.join(known)}.")
    return tuple(dict.fromkeys(values))
