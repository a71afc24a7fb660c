"""Tables of text: CSV and TSV, as spreadsheets, pandas and W&B write them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator

from llds.diagnosis.formats.rows import Bad, Row, decimals_of, find_step, read_number

csv.field_size_limit(1 << 20)
_BOUNDS = ("__MIN", "__MAX")


def read_table(lines: Iterable[str]) -> Iterator[Row | Bad]:
    """Yield the rows of a table whose first line names the columns. W&B's bounds are left out, and so is the
    name of the run before `` - ``, where there is one run only.
    """
    stream = iter(lines)
    head = next((line for line in stream if line.strip()), "").lstrip("\ufeff")
    delimiter = max(",\t;", key=head.count)
    reader = csv.reader(stream, delimiter=delimiter)
    names = _names(next(csv.reader([head], delimiter=delimiter), []))
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield Bad(reader.line_num + 1, str(error))
            continue
        if not cells:
            continue
        if len(cells) != len(names):
            yield Bad(reader.line_num + 1, f"{len(cells)} cells under {len(names)} columns")
            continue
        yield from _row(names, cells)


def _names(cells: list[str]) -> list[str]:
    names = [cell.strip() for cell in cells]
    runs = {name.partition(" - ")[0] for name in names if " - " in name}
    if len(runs) == 1:
        names = [name.partition(" - ")[2] or name for name in names]
    return ["" if name.endswith(_BOUNDS) else name for name in names]


def _row(names: list[str], cells: list[str]) -> Iterator[Row]:
    texts = {name: cell for name, cell in zip(names, cells, strict=True) if name and cell.strip()}
    values = {name: figure for name, cell in texts.items() if (figure := read_number(cell)) is not None}
    step, step_keys = find_step(texts, values)
    rest = {name: value for name, value in values.items() if name not in step_keys}
    if rest:
        yield Row(step, rest, {name: decimals_of(texts[name]) for name in rest})
