"""Warm starts on disk: made once, then the same for every arm, seed and session."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from llds.errors import LLDSError
from llds.files import atomic_write_bytes
from llds.lab.organism import Organism
from llds.lab.regimes import Regime
from llds.lab.warm import warm_start
from llds.lab.world import World

#: Parts of a task that demonstrations do not depend on: they are given by a tool that never errs.
_OF_THE_TOOL = ("noise", "ambiguity")


def start_path(folder: Path, regime: Regime) -> Path:
    """Return where the start of a regime is kept; regimes that differ elsewhere share it."""
    task = {name: value for name, value in asdict(regime.task).items() if name not in _OF_THE_TOOL}
    made_of = json.dumps([task, asdict(regime.body), asdict(regime.start)], sort_keys=True)
    return folder / f"{hashlib.sha256(made_of.encode()).hexdigest()[:12]}.safetensors"


def load_start(folder: Path, regime: Regime, told: Callable[[int], None] = lambda done: None) -> Organism:
    """Return the start of a regime from ``folder``; it is trained and written there if absent.

    ``told`` is called with the steps that are done. Raises ``LLDSError`` for a broken file.
    """
    path = start_path(folder, regime)
    world = World(regime.task)
    if not path.exists():
        made = warm_start(world, regime.body, regime.start, told)
        atomic_write_bytes(path, save(made.state_dict()))
    model = Organism(world.vocabulary_size, regime.body)
    try:
        model.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError):
        raise LLDSError(f"{path} is broken; delete it, and it is made anew.") from None
    return model
