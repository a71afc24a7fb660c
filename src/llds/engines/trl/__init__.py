"""LLDS for TRL's ``GRPOTrainer``: the same objective, no copied TRL code, no second forward pass.

New scripts use :class:`LLDSGRPOTrainer` with :class:`LLDSGRPOConfig`. A script that has its trainer already,
or a trainer class of its own, adds two lines::

    from llds.engines.trl import attach_llds
    attach_llds(trainer, coef=0.2)

Read with TRL 1.16. Only public names of TRL are imported; the methods that are wrapped are listed in
:mod:`trainer`.
"""

from importlib.util import find_spec

if find_spec("trl") is None:
    raise ImportError('llds.engines.trl needs TRL, which is not installed: pip install "llds[trl]"')

from llds.engines.trl.checks import LLDSStatus, dropout_warnings, structural_status
from llds.engines.trl.config import LLDSGRPOConfig, LLDSOptions
from llds.engines.trl.rollout import ANSWER_MASK, TOOL_FAILED, VALID_SEARCHES
from llds.engines.trl.runtime import LLDSRuntime
from llds.engines.trl.trainer import LLDSGRPOTrainer, LLDSMixin, attach_llds
from llds.engines.trl.window import StepRecord

__all__ = [
    "ANSWER_MASK",
    "TOOL_FAILED",
    "VALID_SEARCHES",
    "LLDSGRPOConfig",
    "LLDSGRPOTrainer",
    "LLDSMixin",
    "LLDSOptions",
    "LLDSRuntime",
    "LLDSStatus",
    "StepRecord",
    "attach_llds",
    "dropout_warnings",
    "structural_status",
]
