"""The raw series of runs, kept small: one parquet file per regime and arm, with a row per seed and rollout.

Numbers are kept to four significant digits. Beside them lies what made them (the settings of regime and arm) and
what it cost; so a file explains itself, and a sweep goes on where it stopped.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from llds.errors import LLDSError
from llds.files import atomic_write_bytes
from llds.lab.arms import Arm
from llds.lab.regimes import Regime

_META = b"llds.lab"
#: Bits of a float32 that are rounded away; 13 of its 23 stay.
_DROPPED_BITS = 10


@dataclass(frozen=True, eq=False)
class StoredRun:
    """A run: its ``columns`` by name, [rollouts] each, NaN where there was nothing to measure.

    ``updates``: optimizer steps per rollout. ``cpu_seconds``: what it took.
    """

    seed: int
    columns: Mapping[str, NDArray[np.float64]]
    updates: int
    cpu_seconds: float

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        """Return a column; all NaN if it was not measured."""
        reward = self.columns["reward"]
        return self.columns.get(name, np.full_like(reward, np.nan))


class Store:
    """The files of a sweep below one folder: ``<regime>/<arm>.parquet``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, regime: str, arm: str) -> Path:
        """Return where the runs of an arm in a regime are kept."""
        return self.folder / regime / f"{arm}.parquet"

    def names(self) -> list[tuple[str, str]]:
        """Return regime and arm of every file, sorted."""
        return sorted((path.parent.name, path.stem) for path in self.folder.glob("*/*.parquet"))

    def seeds(self, regime: str, arm: str, settings: Mapping[str, Any] | None = None) -> set[int]:
        """Return the seeds that are stored; see :meth:`read` for ``settings``."""
        path = self.path(regime, arm)
        return {int(seed) for seed in _meta(path, settings)["runs"]} if path.exists() else set()

    def read(self, regime: str, arm: str, settings: Mapping[str, Any] | None = None) -> list[StoredRun]:
        """Return the runs of an arm in a regime, by seed; none if there is no file.

        Raises ``LLDSError`` for a broken file, and where ``settings`` are given and the file has others.
        """
        path = self.path(regime, arm)
        if not path.exists():
            return []
        meta = _meta(path, settings)
        table = pq.read_table(path)
        seeds = table["seed"].to_numpy()
        columns = {
            name: table[name].to_numpy().astype(np.float64) for name in table.column_names if name != "seed"
        }
        return [
            StoredRun(
                int(seed),
                {name: values[seeds == int(seed)] for name, values in columns.items()},
                meta["settings"]["regime"]["updates"],
                about["cpu_seconds"],
            )
            for seed, about in sorted(meta["runs"].items(), key=lambda item: int(item[0]))
        ]

    def add(
        self,
        regime: str,
        arm: str,
        settings: Mapping[str, Any],
        seed: int,
        rows: Sequence[Mapping[str, float | None]],
        cpu_seconds: float,
    ) -> None:
        """Add a run to the file of its arm, atomically; one with the same seed is replaced."""
        path = self.path(regime, arm)
        runs: dict[str, Any] = {}
        tables = []
        if path.exists():
            runs = _meta(path, settings)["runs"]
            before = pq.read_table(path)
            tables.append(before.filter(pa.compute.not_equal(before["seed"], seed)))
        tables.append(_table(seed, rows))
        runs[str(seed)] = {"cpu_seconds": round(cpu_seconds, 2)}
        table = pa.concat_tables(tables, promote_options="default")
        atomic_write_bytes(path, _file(table, {"settings": settings, "runs": runs}))


def settings_of(regime: Regime, arm: Arm) -> dict[str, Any]:
    """Return all that decides what a run does, beside its seed, as plain JSON.

    Of the arm only what differs from plain GRPO, so that a new setting does not put old files out of date.
    """
    settings = asdict(regime)
    del settings["about"]
    return {"regime": settings, "arm": arm.settings()}


def _table(seed: int, rows: Sequence[Mapping[str, float | None]]) -> pa.Table:
    names = [name for name in rows[0] if name != "rollout"]
    columns = {
        name: pa.array(_rounded([np.nan if row[name] is None else row[name] for row in rows]))
        for name in names
    }
    fixed = {
        "seed": pa.array([seed] * len(rows), pa.int32()),
        "rollout": pa.array(range(len(rows)), pa.int32()),
    }
    return pa.table({**fixed, **columns})


def _file(table: pa.Table, meta: Mapping[str, Any]) -> bytes:
    """Return the smallest parquet file: bytes of equal place side by side, nothing stored twice."""
    floats = [column.name for column in table.schema if column.type == pa.float32()]
    table = table.replace_schema_metadata({})
    buffer = io.BytesIO()
    with pq.ParquetWriter(
        buffer,
        table.schema,
        compression="zstd",
        compression_level=19,
        use_dictionary=False,
        use_byte_stream_split=floats,
        write_statistics=False,
        store_schema=False,
    ) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({_META.decode(): json.dumps(meta, separators=(",", ":"))})
    return buffer.getvalue()


def _rounded(values: Sequence[float | None]) -> NDArray[np.float32]:
    bits = np.asarray(values, np.float32).view(np.uint32)
    half, kept = np.uint32(1 << (_DROPPED_BITS - 1)), np.uint32(0xFFFFFFFF << _DROPPED_BITS & 0xFFFFFFFF)
    finite = np.isfinite(bits.view(np.float32))
    return np.where(finite, (bits + half) & kept, bits).astype(np.uint32).view(np.float32)


def _meta(path: Path, settings: Mapping[str, Any] | None) -> dict[str, Any]:
    try:
        found = pq.read_metadata(path).metadata or {}
        meta: dict[str, Any] = json.loads(found[_META])
    except (OSError, KeyError, ValueError, pa.ArrowInvalid):
        raise LLDSError(
            f"{path} is not a file of the laboratory; restore it, or delete it and sweep anew."
        ) from None
    if settings is not None and meta["settings"] != json.loads(json.dumps(settings)):
        name = _difference(meta["settings"], json.loads(json.dumps(settings)))
        raise LLDSError(
            f"{path} was made with another {name} than is set now; delete it to sweep anew, or write elsewhere."
        )
    return meta


def _difference(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> str:
    """Return the dotted name of the first setting that differs."""
    for name in sorted({*old, *new}):
        before, now = old.get(name), new.get(name)
        if before != now:
            if isinstance(before, dict) and isinstance(now, dict):
                return _difference(before, now, f"{prefix}{name}.")
            return prefix + name
    return "setting"
