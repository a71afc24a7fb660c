"""What likelihood does over training: conditional means of a step, the one-update probe, phases, alarms.

One idea per module: :mod:`vocabulary` names every series, :mod:`series` measures them, :mod:`sharing`
compares first searches, :mod:`probe` tries one update, :mod:`phases` judges by :mod:`detectors`,
:mod:`alarms` says what to do, :mod:`control` moves λ, :mod:`synthetic` makes runs of known truth.
"""

from llds.dynamics.alarms import AlarmPolicy, Decision, decide
from llds.dynamics.control import CoefControl, controlled_coef, warmup_coef
from llds.dynamics.phases import PHASES, Event, PhaseMonitor, PhaseSettings
from llds.dynamics.probe import ProbeResult, hidden_similarity, mean_hidden, probe_update
from llds.dynamics.series import Measure, StepAccumulator, measure, read_series
from llds.dynamics.sharing import compare_first_searches
from llds.dynamics.vocabulary import LOG_PREFIX, SERIES, Series

__all__ = [
    "LOG_PREFIX",
    "PHASES",
    "SERIES",
    "AlarmPolicy",
    "CoefControl",
    "Decision",
    "Event",
    "Measure",
    "PhaseMonitor",
    "PhaseSettings",
    "ProbeResult",
    "Series",
    "StepAccumulator",
    "compare_first_searches",
    "controlled_coef",
    "decide",
    "hidden_similarity",
    "mean_hidden",
    "measure",
    "probe_update",
    "read_series",
    "warmup_coef",
]
