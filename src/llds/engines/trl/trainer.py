"""``GRPOTrainer`` with LLDS: a mixin that looks over TRL's shoulder and adds one term to its loss.

Wrapped methods of TRL, none of them copied: ``_get_per_token_logps_and_entropies`` (its log-probs are kept
while a loss is computed), ``compute_loss`` (the term is added), ``_calculate_rewards`` and
``_generate_and_score_completions`` (failed episodes, answer spans, first searches), ``log`` (the monitor),
``_save_checkpoint`` and ``_load_optimizer_and_scheduler`` (the anchor, and what the monitor remembers).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from trl import GRPOTrainer

from llds.engines.trl import rollout
from llds.engines.trl.checks import LLDSStatus
from llds.engines.trl.config import LLDSGRPOConfig, LLDSOptions
from llds.engines.trl.runtime import LLDSRuntime
from llds.errors import LLDSError

if TYPE_CHECKING:
    _Base: TypeAlias = GRPOTrainer
else:
    _Base = object


class LLDSMixin(_Base):
    """LLDS for a trainer class made of ``GRPOTrainer``: ``class Mine(LLDSMixin, MyTrainer)``.

    The trainer must get an :class:`LLDSGRPOConfig`. Each optimizer step of training adds λ · Σ penalty / N to
    the loss, N counted over the whole optimizer batch; evaluation is left alone. Logged as ``llds/…``, once
    per optimizer step. ``trainer.llds`` is the :class:`LLDSRuntime`.

    Raises ``LLDSError`` for another config and for a baseline that the trainer cannot give; in training,
    ``RuntimeError`` if the log-probs cannot be seen, for LLDS would then do nothing and nobody would know.
    """

    llds: LLDSRuntime
    _llds_failed: int | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.args, LLDSGRPOConfig):
            raise LLDSError(
                f"{type(self).__name__} needs args=LLDSGRPOConfig(...), but got {type(self.args).__name__}; "
                "to keep it, make a GRPOTrainer and call attach_llds(trainer, coef=0.2)."
            )
        self.llds = LLDSRuntime(self, self.args.llds_options())

    @property
    def llds_status(self) -> LLDSStatus:
        """Whether LLDS can act under this configuration, and what to change if not."""
        return self.llds.status

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return self.llds.observe_forward(super()._get_per_token_logps_and_entropies, model, args, kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return TRL's loss, in training with the LLDS term."""
        if not self.model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)
        with self.llds.capturing() as captured:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
        return self.llds.add_term(loss, inputs, captured)

    def _calculate_rewards(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        rewards = super()._calculate_rewards(inputs, *args, **kwargs)
        rewards, self._llds_failed = rollout.exclude_failed(self.accelerator, inputs, rewards)
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self._llds_failed = None
        training = self.model.training
        batch = super()._generate_and_score_completions(inputs)
        self.llds.annotate(inputs, batch, failed=self._llds_failed, training=training)
        return batch

    def log(self, logs: Any, *args: Any, **kwargs: Any) -> None:
        """Log as TRL does, after the monitor had a look."""
        if self.model.training:
            self.llds.monitor.before_log(logs)
        super().log(logs, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            self.llds.save(
                str(Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}"))
            )

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.llds.load(checkpoint)


class LLDSGRPOTrainer(LLDSMixin, GRPOTrainer):
    """``GRPOTrainer`` with LLDS; takes what that takes, and ``args`` must be an ``LLDSGRPOConfig``."""


def attach_llds(trainer: Any, coef: float = 0.2, gate: str = "action", **options: Any) -> Any:
    """Add LLDS to a ``GRPOTrainer`` that exists already, of whatever subclass; returns the trainer.

    ``options``: further settings by the names of :class:`LLDSOptions`, for instance ``baseline="anchor"``.
    Call it before ``trainer.train()``.

    The object's class is exchanged for a new one made of :class:`LLDSMixin` and the class it had. So methods
    that a user's class overrides keep working and keep calling each other through ``super()``; methods bound
    to the object would hide the class's own and have no ``super()``.

    Raises ``LLDSError`` for an object of another kind, for a trainer that has LLDS already (the penalty would
    be counted twice), and for a setting that does not exist or cannot be meant.
    """
    if not isinstance(trainer, GRPOTrainer):
        raise LLDSError(f"attach_llds needs a trl.GRPOTrainer, but got {type(trainer).__name__}.")
    if isinstance(trainer, LLDSMixin):
        raise LLDSError(
            f"This {type(trainer).__name__} has LLDS already; a second one would count the penalty twice."
        )
    if isinstance(trainer.args, LLDSGRPOConfig):
        raise LLDSError(
            "The trainer's config is an LLDSGRPOConfig, whose llds_ settings only LLDSGRPOTrainer reads; "
            "use that trainer, or give this one a GRPOConfig."
        )
    runtime = LLDSRuntime(trainer, LLDSOptions.of(coef=coef, gate=gate, **options))
    had = type(trainer)
    trainer.__class__ = type(f"LLDS{had.__name__}", (LLDSMixin, had), {"__module__": had.__module__})
    trainer.llds = runtime
    return trainer
