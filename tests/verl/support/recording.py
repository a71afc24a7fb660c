"""A policy loss that is verl's own and keeps what it was called with: one file per call in ``$LLDS_RECORD``."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

from safetensors.torch import load_file, save_file
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla, register_policy_loss

NAME = "recorded"
TENSORS = ("log_prob", "old_log_prob", "advantages", "response_mask")

_calls = count()


@register_policy_loss(NAME)
def recorded(**call):
    folder = os.environ.get("LLDS_RECORD")
    if folder:
        tensors = {name: call[name].detach().contiguous() for name in TENSORS}
        save_file(tensors, Path(folder) / f"{os.environ['RANK']}-{next(_calls):06d}.safetensors")
    return compute_policy_loss_vanilla(**call)


def read(folder):
    """Return the calls of each rank, in order."""
    ranks = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        ranks.setdefault(int(path.name.partition("-")[0]), []).append(load_file(path))
    return [ranks[rank] for rank in sorted(ranks)]
