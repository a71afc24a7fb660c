"""The command line: thin commands over the other rooms."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from llds.errors import LLDSError

# What the extras "search" and "train" bring, by the names that are imported.
_SEARCH = ("typer", "rich", "numpy", "requests", "bm25s", "Stemmer")
_TRAIN = ("yaml", "transformers", "tokenizers", "safetensors", "accelerate", "datasets", "trl", "gguf")
# Commands for a machine that only serves passages.
_RETRIEVAL = ("index", "serve", "search")


def main() -> None:
    """Run the command line. A user's mistake is one sentence on stderr and exit code 2, never a traceback."""
    try:
        check_installed(sys.argv[1] if len(sys.argv) > 1 else None)
        from llds.cli.app import app

        app(prog_name="llds")
    except LLDSError as error:
        sys.stderr.write(f"llds: {error}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def check_installed(command: str | None) -> None:
    """Raise :class:`LLDSError` when a package of the extra that ``command`` needs is missing."""
    extra, needed = ("serve", _SEARCH) if command in _RETRIEVAL else ("train", (*_SEARCH, *_TRAIN))
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise LLDSError(f"{missing[0]} is not installed; run: pip install 'llds[{extra}]'")
