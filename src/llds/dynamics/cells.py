"""Where a token lies: the sign of its advantage, the rounds of feedback before it, in the answer or not.

These three cut the tokens of a batch into 30 cells. What is summed per cell adds up over micro-batches and
ranks, and every conditional mean is one sum over some cells divided by another.
"""

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from llds.objective import spans

#: Responses by the sign of their advantage: A > 0, A = 0, A < 0.
SIGNS = ("correct", "neutral", "wrong")
#: Rounds of feedback before a token; the last stands for all further ones.
ROUNDS = (0, 1, 2, 3, 4)
COUNT = len(SIGNS) * len(ROUNDS) * 2
#: The slot of a token that lies in no cell.
NOWHERE = COUNT


def cell_ids(kept: Tensor, advantage: Tensor, tol: float, rounds: Tensor, answer: Tensor) -> Tensor:
    """Return the cell of each token, all inputs and the result [N]; :data:`NOWHERE` where ``kept`` is off."""
    sign = 1 - (advantage > tol).long() + (advantage < -tol).long()
    cell = (sign * len(ROUNDS) + rounds.clamp(0, ROUNDS[-1])) * 2 + answer.long()
    return torch.where(kept, cell, NOWHERE)


def sum_over_cells(values: Tensor, ids: Tensor) -> Tensor:
    """Sum ``values`` [N] over each cell: [COUNT]."""
    return values.new_zeros(COUNT + 1).scatter_add(0, ids, values)[:COUNT]


def choose(
    signs: Sequence[str] = SIGNS, rounds: Sequence[int] = ROUNDS, in_answer: bool | None = None
) -> tuple[int, ...]:
    """Return the numbers of the cells with one of ``signs`` and ``rounds``; ``in_answer`` None takes both."""
    answers = (0, 1) if in_answer is None else (int(in_answer),)
    return tuple(
        (SIGNS.index(sign) * len(ROUNDS) + round_) * 2 + answer
        for sign, round_, answer in product(signs, rounds, answers)
    )


def rounds_before(actions: Tensor, responses: Tensor) -> Tensor:
    """Count the actions of the same response before each token's own: long [N], 0 in no action.

    ``actions``, ``responses``: numbers as :mod:`llds.objective.spans` gives them. Feedback lies between two
    actions, so this is the number of rounds of feedback before the token.
    """
    # float32 counts exactly to 2**24, more tokens than a micro-batch holds.
    first = -spans.group_max(-actions.float(), responses)
    return torch.where(actions > 0, actions - spans.spread(first, responses).nan_to_num(0, 0, 0).long(), 0)


def first_tokens(ids: Tensor) -> Tensor:
    """Mark the first token of each action, given action numbers [N]: bool [N]."""
    before = torch.cat([ids.new_zeros(1), ids[:-1]])[: ids.numel()]
    return (ids > 0) & (ids != before)
