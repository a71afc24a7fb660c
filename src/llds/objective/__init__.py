"""The mathematics of LLDS in pure torch: no I/O, no engine, no host synchronisation."""

from llds.objective.loss import LLDSOutput, llds_loss

__all__ = ["LLDSOutput", "llds_loss"]
