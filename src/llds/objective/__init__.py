"""The mathematics of LLDS in pure torch: no I/O, no engine, no host synchronisation.

One idea per module: :mod:`loss` is the regulariser, :mod:`policy` the losses it is added to,
:mod:`advantages` and :mod:`answer` make their inputs, :mod:`anchor` says whose likelihood is held,
:mod:`normalizers` what a coefficient means, :mod:`metrics` what adds up; :mod:`spans`, :mod:`layout` and
:mod:`checks` are what they stand on.
"""

from llds.objective.advantages import grpo_advantages
from llds.objective.anchor import LaggedAnchor
from llds.objective.answer import answer_weight_from_searches, authors_answer_weight
from llds.objective.loss import llds_loss
from llds.objective.metrics import RATIOS, LLDSOutput, merge_metrics, with_ratios
from llds.objective.normalizers import NORMALIZERS, convert_coef, normalizer_count
from llds.objective.policy import grpo_policy_loss, gspo_policy_loss, k3_kl
from llds.objective.spans import segment_ids_from_cu_seqlens

__all__ = [
    "NORMALIZERS",
    "RATIOS",
    "LLDSOutput",
    "LaggedAnchor",
    "answer_weight_from_searches",
    "authors_answer_weight",
    "convert_coef",
    "grpo_advantages",
    "grpo_policy_loss",
    "gspo_policy_loss",
    "k3_kl",
    "llds_loss",
    "merge_metrics",
    "normalizer_count",
    "segment_ids_from_cu_seqlens",
    "with_ratios",
]
