"""Proves before a run that the regulariser can fire: the faults L1 to L14, each with evidence and a remedy.

:mod:`static` reads a :class:`Setup`, what any engine's configuration comes to; :mod:`probe` asks a real loss
on a real batch. Where a finding comes from an engine, that engine's room makes the set-up and the batch.
"""

from llds.preflight.findings import FAULTS, Finding, Report, merge
from llds.preflight.probe import Intent, ProbeBatch, check_arrays, probe_term
from llds.preflight.setup import Setup
from llds.preflight.static import check_setup

__all__ = [
    "FAULTS",
    "Finding",
    "Intent",
    "ProbeBatch",
    "Report",
    "Setup",
    "check_arrays",
    "check_setup",
    "merge",
    "probe_term",
]
