"""Which wrong responses began like a correct one: their first search returned the same (paper, Fig. 5)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from llds.errors import LLDSError


def compare_first_searches(
    found: Sequence[Hashable | None],
    advantages: Sequence[float],
    groups: Sequence[Hashable],
    tol: float = 1e-3,
) -> list[int]:
    """Say of each response whether it is wrong and its first search returned what a correct one's returned.

    Call it on whole groups, right after the rollout: a micro-batch may hold a part of a group only.

    Args:
        found: per response, what its first search returned, such as a tuple of passage ids; None when it did
            not search.
        advantages: per response; correct is above ``tol``, wrong below −``tol``.
        groups: per response, its question.
        tol: as ``advantage_tol`` of :func:`llds.llds_loss`.

    Returns:
        Per response: 1 if wrong and the result was shared, 0 if wrong and it was not (also without a search),
        −1 if there is nothing to compare: the response is not wrong, or no correct one of its group searched.

    Raises:
        LLDSError: the lengths differ.
    """
    if not len(found) == len(advantages) == len(groups):
        raise LLDSError(
            "found, advantages and groups must have one entry per response, but have "
            f"{len(found)}, {len(advantages)} and {len(groups)}."
        )
    right: dict[Hashable, set[Hashable]] = {}
    for result, advantage, group in zip(found, advantages, groups, strict=True):
        if advantage > tol and result is not None:
            right.setdefault(group, set()).add(result)
    return [
        int(result in right[group]) if advantage < -tol and group in right else -1
        for result, advantage, group in zip(found, advantages, groups, strict=True)
    ]
