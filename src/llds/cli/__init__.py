"""The command line: thin commands over the other rooms."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from io import TextIOWrapper

from llds.cli.mistakes import sentence_for
from llds.errors import LLDSError

# What the extras "search" and "train" bring, by the names that are imported; TRL is asked for where it is used.
_SEARCH = ("typer", "rich", "numpy", "requests", "bm25s", "Stemmer")
_TRAIN = ("yaml", "transformers", "tokenizers", "safetensors", "accelerate", "datasets")
# Commands for a machine that only serves passages.
_RETRIEVAL = ("index", "serve", "search")


def main() -> None:
    """Run the command line.

    A user's mistake or a fault of the machine is one sentence on stderr and exit code 2, not a traceback.
    """
    make_streams_safe()
    try:
        check_arguments()
        check_installed(sys.argv[1] if len(sys.argv) > 1 else None)
        from llds.cli.app import app

        app(prog_name="llds")
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        sentence = sentence_for(error)
        if sentence is None:
            raise
        sys.stderr.write(f"llds: {sentence}\n")
        sys.exit(2)


def make_streams_safe() -> None:
    """Let no terminal stop the program: one that is closed, lacks a letter, or claims to have no columns."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the end
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if os.environ.get("COLUMNS") == "0":
        del os.environ["COLUMNS"]


def check_arguments() -> None:
    """Raise :class:`LLDSError` for an argument that was typed or passed in another encoding than UTF-8."""
    for number, text in enumerate(sys.argv[1:], start=1):
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise LLDSError(
                f"Argument {number} isn't UTF-8 text; use a UTF-8 locale, such as LC_ALL=C.UTF-8."
            )


def check_installed(command: str | None) -> None:
    """Raise :class:`LLDSError` when a package of the extra that ``command`` needs is missing."""
    extra, needed = ("serve", _SEARCH) if command in _RETRIEVAL else ("train", (*_SEARCH, *_TRAIN))
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise LLDSError(f"{missing[0]} is not installed; run: pip install 'llds[{extra}]'")
