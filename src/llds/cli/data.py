"""``llds data``: look at files of questions and passages, and turn one shape into another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, cast

import typer

data = typer.Typer(
    name="data",
    help="Check files of questions and passages, and convert them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.add_typer(data)


@data.command()
def check(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Questions, passages, or folders; .gz and .zst too."),
    ],
    train: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Training questions, which must not be in the other files."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Find every mistake in files of questions and passages, with its row, and tell what they hold.

    The shape is recognised: JSON lines, a JSON list or parquet; FlashRAG, Search-R1, verl, wiki-18 or BEIR. Exit
    code 0: no mistakes; 1: mistakes.
    """
    from llds.data.check import asked_in, check_file, format_check, total_mistakes

    training = asked_in(train) if train else frozenset()
    same = Path(train).resolve() if train else None
    checks = [check_file(path, frozenset() if path.resolve() == same else training) for path in _files(paths)]
    if as_json:
        typer.echo(json.dumps([one.to_json() for one in checks], indent=2))
    else:
        typer.echo("\n".join(format_check(one) for one in checks))
    raise typer.Exit(1 if total_mistakes(checks) else 0)


@data.command()
def convert(
    source: Annotated[
        str, typer.Argument(metavar="IN", help="Questions in any shape, or a folder of benchmarks.")
    ],
    target: Annotated[
        str, typer.Argument(metavar="OUT", help="A name that ends in .jsonl, .jsonl.gz or .parquet.")
    ],
    only: Annotated[str | None, typer.Option(help="Benchmarks to keep, e.g. nq,hotpotqa.")] = None,
    prompt: Annotated[
        str, typer.Option(help="For parquet: wording of the prompt, short, search-r1 or search-r1-instruct.")
    ] = "search-r1",
    split: Annotated[str, typer.Option(help="For parquet: what extra_info.split says.")] = "train",
) -> None:
    """Write questions in another shape: JSON lines as FlashRAG has them, or the table of Search-R1 and verl."""
    from llds.data.benchmarks import load_benchmarks
    from llds.data.convert import write_questions
    from llds.data.questions import read_questions
    from llds.search.protocol import Protocol

    said = Protocol(style=cast(Any, prompt)).prompt

    def worded(question: str) -> str:
        text = said(question)
        return text if isinstance(text, str) else str(text[0]["content"])

    if only or Path(source).is_dir():
        names = [name.strip() for name in (only or "").split(",") if name.strip()]
        questions = [one for members in load_benchmarks(source, names).values() for one in members]
    else:
        questions = read_questions(source)
    write_questions(Path(target), questions, worded, split)
    typer.echo(f"Wrote {len(questions)} questions to {target}.")


def _files(paths: list[str]) -> list[Path]:
    """Return the files to check: a folder stands for the benchmarks in it, or is a corpus of BEIR's shape."""
    from llds.data.benchmarks import find_benchmarks
    from llds.errors import LLDSError

    found: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir() or any(path.glob("corpus.jsonl*")):
            found.append(path)
            continue
        try:
            found += find_benchmarks(path).values()
        except LLDSError as error:
            raise LLDSError(f"{error} Or name the files themselves.") from None
    return found
