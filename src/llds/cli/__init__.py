"""The command line: thin commands over the other rooms."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from llds.cli.mistakes import sentence_for
from llds.errors import LLDSError

# What the extra "train" brings, by the names that are imported.
_NEEDED = (
    *("typer", "rich", "yaml", "numpy", "requests", "bm25s", "Stemmer"),
    *("transformers", "tokenizers", "safetensors", "accelerate", "datasets", "trl", "gguf"),
)


def main() -> None:
    """Run the command line.

    A user's mistake or a fault of the machine is one sentence on stderr and exit code 2, not a traceback.
    """
    try:
        check_installed()
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


def check_installed() -> None:
    """Raise :class:`LLDSError` when a package of the extra that the command line needs is missing."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise LLDSError(f"{missing[0]} is not installed; run: pip install 'llds[train]'")
