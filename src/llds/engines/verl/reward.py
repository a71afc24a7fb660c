"""The reward of a search episode as verl's custom reward function: exact match, as Search-R1 scores it.

``reward.custom_reward_function.path=pkg://llds.engines.verl.reward`` and ``.name=compute_score``. Weights go under
``reward.custom_reward_function.reward_kwargs``. The response alone is scored, never the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llds.errors import LLDSError
from llds.search import rewards

#: Keys in the ``extra_fields`` of this package's agent loop. The answer: the text of the policy's own final
#: action, or None; never what a passage holds.
ANSWER = "llds_answer"
SEARCHES = "llds_searches"
VALID_FORMAT = "llds_valid_format"


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    exact_match: float = 1.0,
    f1: float = 0.0,
    valid_format: float = 0.0,
    **others: Any,
) -> dict[str, float]:
    """Score one response: a weighted sum under ``score``, and what it is made of.

    ``exact_match``, ``f1``, ``valid_format``: the weights.
    ``solution_str``: the response as text. ``ground_truth``: ``{"target": answers}`` as in Search-R1's tables, or
    the answers; one as text or several as a list. ``extra_info``: what the agent loop told of the episode; without
    it the last ``<answer>…</answer>`` of the response counts. ``others``: what else verl hands over.

    The others are ``exact_match``, ``f1``, ``valid_format``, ``answered`` (0 or 1) and, from this package's agent loop,
    ``searches``. verl averages them in validation (``val-aux/<data_source>/<name>``). None is called ``acc``, for
    verl counts that of an episode that was left out as 0.

    Raises :class:`LLDSError` for a ground truth of another shape.
    """
    told = extra_info or {}
    golden = golden_answers(ground_truth)
    answer = told[ANSWER] if ANSWER in told else rewards.extract_answer(solution_str)
    is_valid = told[VALID_FORMAT] if VALID_FORMAT in told else rewards.valid_format(solution_str)
    parts = {
        "exact_match": rewards.exact_match(answer, golden),
        "f1": rewards.f1_score(answer, golden),
        "valid_format": float(is_valid),
        "answered": float(answer is not None),
    }
    if SEARCHES in told:
        parts["searches"] = float(told[SEARCHES])
    score = exact_match * parts["exact_match"] + f1 * parts["f1"] + valid_format * parts["valid_format"]
    return {"score": score, **parts}


def golden_answers(ground_truth: Any) -> list[str]:
    """Return the right answers of a ground truth: text, a list or array of texts, or either under ``target``.

    Raises :class:`LLDSError` for anything else.
    """
    target: Any = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    # Tables come back from parquet with arrays.
    if hasattr(target, "tolist"):
        target = target.tolist()
    listed = [target] if isinstance(target, str) else target
    if not isinstance(listed, (list, tuple)) or not listed or not all(isinstance(one, str) for one in listed):
        raise LLDSError(
            f"The ground truth of a question is {ground_truth!r}: write the right answers as text or as a list of "
            'texts, or {"target": …} with either.'
        )
    return list(listed)
