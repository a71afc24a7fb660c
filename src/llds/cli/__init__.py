"""The command line: thin commands over the other rooms."""

from __future__ import annotations

import sys

from llds.errors import LLDSError

# Modules that extras bring, by the name they are imported under.
_EXTRAS = {
    **dict.fromkeys(("transformers", "trl", "accelerate", "datasets", "safetensors", "tokenizers"), "train"),
    **dict.fromkeys(("typer", "rich", "yaml", "gguf"), "train"),
    **dict.fromkeys(("bm25s", "Stemmer", "requests", "numpy"), "train"),
    "peft": "all",
}


def main() -> None:
    """Run the command line. A user's mistake is one sentence on stderr and exit code 2, never a traceback."""
    try:
        from llds.cli.app import app

        app(prog_name="llds")
    except LLDSError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        extra = _EXTRAS[missing]
        _fail(f"This command needs {missing}, which is not installed; run: pip install 'llds[{extra}]'")
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(sentence: str) -> None:
    sys.stderr.write(f"llds: {sentence}\n")
    sys.exit(2)
