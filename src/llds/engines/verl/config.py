"""The settings of LLDS inside verl's configuration, checked in the driver before Ray starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.workers.config import PolicyLossConfig

from llds.engines.verl import plugin
from llds.engines.verl.batch import expose_batches
from llds.engines.verl.options import LLDSOptions, RunFacts
from llds.errors import LLDSError


@dataclass
class LLDSPolicyLossConfig(PolicyLossConfig):
    """``PolicyLossConfig`` of verl and the settings of :class:`~llds.engines.verl.options.LLDSOptions`.

    Name it as ``policy_loss._target_`` (``+llds@_global_=default`` does): verl builds it in the driver, where a mistake
    stops the command, and again in every worker, where it registers the losses. ``llds_run`` is what the
    loss needs to know of the schedule; see :class:`~llds.engines.verl.options.RunFacts`.

    Raises ``LLDSError`` for a value that can't be meant, for an unknown base, and where nothing would call
    LLDS.
    """

    llds_coef: float = 0.2
    llds_base: str | None = None
    llds_gate: str = "action"
    llds_normalizer: str = "all"
    llds_baseline: str = "old"
    llds_preserve: str = "nonnegative"
    llds_advantage_tol: float = 1e-3
    llds_dead_zone: float = 0.0
    llds_penalty: str = "relu"
    llds_huber_width: float = 0.1
    llds_answer_weight: Any = None
    llds_answer_searches: float = 2.0
    llds_compat: str | None = None
    llds_lld_epsilon: float = -0.01
    llds_wrap_registry: bool = False
    llds_preflight: str = "warn"
    llds_run: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        options = self.llds_options()
        RunFacts.of(self.llds_run)
        check_mode(self.loss_mode, options)
        if options.wrap_registry:
            plugin.wrap_registry()
        if options.reads_batch:
            expose_batches()

    def llds_options(self) -> LLDSOptions:
        """Return the settings of LLDS, checked."""
        return LLDSOptions.of(self)


def check_mode(loss_mode: str, options: LLDSOptions) -> None:
    """Raise ``LLDSError`` where nothing would call LLDS, or where it is said twice what it is added to."""
    if str(loss_mode).startswith(plugin.NAME):
        plugin.base_of(loss_mode, options.base)
    elif not options.wrap_registry:
        raise LLDSError(
            f"Nothing would call LLDS: loss_mode is {loss_mode!r}. Set it to 'llds' (and llds_base to "
            f"{loss_mode!r}), or set llds_wrap_registry=true to add LLDS to whichever loss is called."
        )
    elif options.base is not None:
        raise LLDSError(
            f"llds_base={options.base!r} goes with loss_mode=llds; with llds_wrap_registry LLDS is added to "
            f"the loss that is called, {loss_mode!r}."
        )
