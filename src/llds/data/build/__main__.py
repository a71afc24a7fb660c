"""Build the shipped data from its sources, or print the figures of docs/data.md."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from llds.data import embedded
from llds.data.build.compose import compose
from llds.data.build.report import report, table
from llds.data.build.sources import HOW_TO_GET, gather
from llds.data.build.writing import write_assets
from llds.errors import LLDSError


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.report:
            _report(as_json=options.json)
        else:
            _build(options.sources, options.out)
    except LLDSError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _build(sources: Path, out: Path) -> None:
    material = gather(sources)
    splits = compose(material.facts, material.passages, material.names)
    manifest = write_assets(out, material.passages, splits)
    for name, entry in manifest["files"].items():
        sys.stdout.write(f"{out / name}: {entry['rows']} rows, {entry['bytes']} bytes\n")


def _report(as_json: bool) -> None:
    figures = report(
        embedded.load_corpus(), {split: embedded.load_questions(split) for split in embedded.SPLITS}
    )
    sys.stdout.write((json.dumps(figures, indent=2) if as_json else table(figures)) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m llds.data.build",
        description=__doc__,
        epilog=f"Get the sources with:\n{HOW_TO_GET}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sources", type=Path, metavar="DIR", help="folder with the four packages")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write to")
    parser.add_argument(
        "--report", action="store_true", help="print the figures of the shipped data and write nothing"
    )
    parser.add_argument(
        "--json", action="store_true", help="with --report: as JSON, with counts by kind and relation"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
