"""What commands print for programs."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


def dumps(content: Any) -> str:
    """Return JSON that stdout can show, whatever its encoding."""
    readable = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return json.dumps(content, ensure_ascii=not readable, indent=2)
