"""Checkpoints of safetensors and JSON alone: nothing is pickled, nothing is unpickled.

A checkpoint is an ordinary Hugging Face model folder (weights, config, tokenizer) with three more files:
``optimizer.safetensors`` and ``optimizer.json`` (optimizer and learning-rate schedule) and
``trainer_state.json``. It is written to a hidden temporary folder and renamed, so a crash never leaves half
a checkpoint. There is no random-number state in it: checkpoints fall between rollouts, and every rollout
seeds its own generators.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from llds.errors import LLDSError
from llds.files import atomic_folder, atomic_write_text
from llds.training.tokenizers import save_tokenizer

if TYPE_CHECKING:
    from transformers import Trainer as _TrainerBase
else:
    _TrainerBase = object

_PREFIX = "step-"


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint after optimizer step ``step`` lies."""
    return folder / f"{_PREFIX}{step:06d}"


def checkpoint_step(path: Path) -> int:
    """Return the optimizer step of a checkpoint folder."""
    return int(path.name.removeprefix(_PREFIX))


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the finished checkpoints in ``folder``, oldest first."""
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit())


def save_optimizer(optimizer: Any, scheduler: Any, folder: Path) -> None:
    """Write optimizer and schedule state to ``folder``; the tensors bit for bit, all else as JSON."""
    state = optimizer.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for index, entry in state["state"].items():
        for name, value in entry.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{index}.{name}"] = value.detach().cpu().contiguous()
            else:
                scalars.setdefault(str(index), {})[name] = value
    save_file(tensors, folder / "optimizer.safetensors")
    content = {"groups": state["param_groups"], "scalars": scalars, "schedule": scheduler.state_dict()}
    atomic_write_text(folder / "optimizer.json", json.dumps(content))


def load_optimizer(optimizer: Any, scheduler: Any, folder: Path) -> None:
    """Restore what :func:`save_optimizer` wrote.

    Raises :class:`LLDSError` when the files are missing or belong to a model with other parameters.
    """
    try:
        content = json.loads((folder / "optimizer.json").read_text("utf-8"))
        tensors = load_file(folder / "optimizer.safetensors")
    except (OSError, ValueError) as error:
        raise LLDSError(
            f"The optimizer state in {folder} can't be read ({error}); delete that checkpoint."
        ) from None
    state: dict[int, dict[str, Any]] = {
        int(index): dict(entry) for index, entry in content["scalars"].items()
    }
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    try:
        optimizer.load_state_dict({"state": state, "param_groups": content["groups"]})
    except (ValueError, KeyError) as error:
        raise LLDSError(f"The optimizer state in {folder} does not fit this model: {error}") from None
    scheduler.load_state_dict(content["schedule"])


class SafeCheckpointMixin(_TrainerBase):  # type: ignore[misc]  # transformers is not type-checked
    """Mix into a ``transformers.Trainer`` to write and read checkpoints as this module describes.

    Set :attr:`checkpoint_folder` and :attr:`checkpoints_to_keep` before training. FSDP and DeepSpeed shard
    the state and are not served: :meth:`check_checkpoints_possible` says so at the start.
    """

    checkpoint_folder: Path
    checkpoints_to_keep: int = 2

    def check_checkpoints_possible(self) -> None:
        """Raise :class:`LLDSError` when this launch shards the model, which checkpoints can't yet hold."""
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise LLDSError(
                "llds train can't write checkpoints under FSDP or DeepSpeed yet; "
                "launch it with plain data parallelism."
            )

    def save_checkpoint(self) -> None:
        """Write a checkpoint of the state as it is. Call it on every process, between rollouts."""
        if self.args.should_save:
            with atomic_folder(checkpoint_path(self.checkpoint_folder, self.state.global_step)) as folder:
                save_model_folder(self.accelerator.unwrap_model(self.model), self.processing_class, folder)
                save_optimizer(self.optimizer, self.lr_scheduler, folder)
                self.state.save_to_json(str(folder / "trainer_state.json"))
                self.save_extra(folder)
            for old in list_checkpoints(self.checkpoint_folder)[: -self.checkpoints_to_keep]:
                shutil.rmtree(old, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.save_checkpoint()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        try:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        except (OSError, ValueError, SafetensorError) as error:
            raise LLDSError(
                f"The weights in {resume_from_checkpoint} can't be read ({error}); delete that checkpoint."
            ) from None

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_optimizer(self.optimizer, self.lr_scheduler, Path(checkpoint))
            self.load_extra(Path(checkpoint))

    def save_extra(self, folder: Path) -> None:
        """Add files of a subclass to a checkpoint."""

    def load_extra(self, folder: Path) -> None:
        """Read what :meth:`save_extra` wrote."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Do nothing: every rollout seeds its own generators."""


def save_model_folder(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write weights (safetensors), config and tokenizer as a Hugging Face model folder."""
    # The Trainer turns the cache off for its own forward passes; who loads the folder wants it on.
    model.config.use_cache = True
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
