"""What likelihood did in one optimizer step: sums per micro-batch, added up, read as conditional means.

Feed a :class:`StepAccumulator` every micro-batch, sum what it holds over the ranks once, and read the
series::

    accumulator = StepAccumulator()
    for micro_batch in step:
        accumulator.add(logprobs, old_logprobs, advantages, response_mask, updates=updates)
    sums = accumulator.sums()
    torch.distributed.all_reduce(sums)  # where there are several ranks
    series = read_series(sums)
    accumulator.reset()

The same batch gives the same series however it is cut into micro-batches and spread over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llds.dynamics import cells
from llds.dynamics.vocabulary import FIELDS, SERIES, TOTALS, Quotient
from llds.errors import LLDSError
from llds.objective import spans
from llds.objective.checks import check_above, check_choice, check_least
from llds.objective.layout import Layout

#: Length of the vector of sums.
SIZE = len(FIELDS) * cells.COUNT + len(TOTALS)


@dataclass(frozen=True)
class Measure:
    """How things are measured.

    ``lld_epsilon``: ε of Def. 4.1 in nats; an action or a response is displaced if its log-prob changed by ε
    or less. At 0 whatever did not move would count, so the default asks for a hundredth of a nat.
    ``advantage_tol``, ``gate``, ``dead_zone``: as in :func:`llds.llds_loss`; give those of the loss.
    ``spike_ratio``: an importance ratio above it or below its inverse is a spike.
    """

    lld_epsilon: float = -0.01
    advantage_tol: float = 1e-3
    gate: str = "action"
    dead_zone: float = 0.0
    spike_ratio: float = 2.0

    def __post_init__(self) -> None:
        check_least(-math.inf, lld_epsilon=self.lld_epsilon)
        check_least(0.0, advantage_tol=self.advantage_tol, dead_zone=self.dead_zone)
        check_choice(("action", "response", "token"), gate=self.gate)
        check_above(1.0, spike_ratio=self.spike_ratio)


class StepAccumulator:
    """Adds up the sums of one optimizer step; never waits for the device."""

    def __init__(self, how: Measure | None = None, device: torch.device | str = "cpu") -> None:
        """``device``: where the sums lie while nothing was added; afterwards they lie with the log-probs."""
        self.how = how or Measure()
        self._empty = torch.zeros(SIZE, dtype=_wide(torch.device(device)), device=device)
        self._sums = self._empty

    def add(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        *,
        answer_mask: Tensor | None = None,
        entropies: Tensor | None = None,
        first_search: Tensor | None = None,
        updates: int | None = None,
        segment_ids: Tensor | None = None,
    ) -> None:
        """Add one micro-batch; see :func:`measure`."""
        sums = measure(
            logprobs,
            old_logprobs,
            advantages,
            response_mask,
            answer_mask=answer_mask,
            entropies=entropies,
            first_search=first_search,
            updates=updates,
            segment_ids=segment_ids,
            how=self.how,
        )
        self._sums = sums if self._sums is self._empty else self._sums + sums

    def sums(self) -> Tensor:
        """Return a copy of the sums, [SIZE]: what the ranks add up, and :func:`read_series` reads."""
        return self._sums.clone()

    def reset(self) -> None:
        """Forget everything: the next optimizer step begins."""
        self._sums = self._empty


@torch.no_grad()
def measure(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    answer_mask: Tensor | None = None,
    entropies: Tensor | None = None,
    first_search: Tensor | None = None,
    updates: int | None = None,
    segment_ids: Tensor | None = None,
    how: Measure | None = None,
) -> Tensor:
    """Return the sums of one micro-batch: float64 [SIZE] on the device of the log-probs.

    A response with a token whose log-prob, old log-prob or advantage is not finite is left out as a whole,
    since its sums are unknown, and counted.

    Args:
        logprobs: as in :func:`llds.llds_loss`, and so are ``old_logprobs`` (of the policy that sampled),
            ``advantages``, ``response_mask``, ``answer_mask`` and ``segment_ids``. Where advantages are given
            per token, an action and a response count with the sign of their first token.
        entropies: nats, of the distribution that each token was drawn from; shape of ``logprobs``.
        first_search: per response, 1, 0 or −1; see :func:`llds.dynamics.sharing.compare_first_searches`.
        updates: optimizer steps since these responses were sampled. 0 in the first one, where old and new
            policy are the same.
        how: ε and the other settings.

    Raises:
        LLDSError: a shape or a dtype is wrong, or ``updates`` is negative.
    """
    how = how or Measure()
    check_least(0, updates=updates)
    layout = Layout.of(logprobs, response_mask, segment_ids)
    wide = _wide(logprobs.device)
    new = layout.tokens(logprobs=logprobs.detach()).to(wide)
    lost = layout.tokens(old_logprobs=old_logprobs.detach()).to(wide) - new
    advantage = layout.advantages(advantages).to(wide)
    answer = torch.zeros_like(layout.mask) if answer_mask is None else layout.flags(answer_mask=answer_mask)

    responses = layout.responses
    actions = spans.action_ids(layout.mask, layout.starts)
    rounds = cells.rounds_before(actions, responses)
    bad = ~(new.isfinite() & lost.isfinite() & advantage.isfinite())
    kept = layout.mask & (spans.spread(spans.group_sums(bad.long(), responses), responses) == 0)
    new, lost = new.masked_fill(~kept, 0), lost.masked_fill(~kept, 0)

    fields = _fields(new, lost, actions, responses, rounds, how)
    cell = cells.cell_ids(kept, advantage, how.advantage_tol, rounds, answer)
    table = [cells.sum_over_cells(fields[name].to(wide), cell) for name in FIELDS]
    found, counted = fields["responses"].sum(), (fields["responses"] & kept).sum()
    moved = lost.abs()
    totals = {
        "displacement_abs": moved.sum(),
        "moved_tokens": (moved > 0).sum(),
        "spiked_tokens": (moved > math.log(how.spike_ratio)).sum(),
        "nonfinite_tokens": bad.sum(),
        "dropped_responses": found - counted,
        # Packed padding has a segment id too, so there an empty response can't be told from it.
        "empty_responses": layout.shape[0] - found if segment_ids is None else found * 0,
        **_age(updates, moved.sum(), kept.sum(), counted),
        **_entropy(layout, entropies, kept, wide),
        **_first_search(first_search),
        "micro_batches": torch.ones_like(found),
    }
    nothing = torch.zeros_like(found)
    return torch.cat([*table, torch.stack([totals.get(name, nothing).to(wide) for name in TOTALS])])


def read_series(sums: Tensor | Sequence[float]) -> dict[str, float | None]:
    """Return every series that is measured on batches, by name; None where there was nothing to measure.

    ``sums`` [SIZE], of one accumulator or added over ranks. Waits for the device, once. A value is never NaN
    or infinite. Raises ``LLDSError`` for another length.
    """
    numbers = sums.tolist() if isinstance(sums, Tensor) else list(sums)
    if len(numbers) != SIZE:
        raise LLDSError(
            f"sums must hold {SIZE} numbers, as StepAccumulator.sums gives them, not {len(numbers)}."
        )
    return {
        name: _read(series.quotient, numbers)
        for name, series in SERIES.items()
        if series.quotient is not None
    }


def _fields(
    new: Tensor, lost: Tensor, actions: Tensor, responses: Tensor, rounds: Tensor, how: Measure
) -> dict[str, Tensor]:
    """Return what is summed per cell, each [N]; an action or a response is counted on its first token."""
    action_lost, response_lost = (
        spans.spread(spans.group_sums(lost, ids), ids) for ids in (actions, responses)
    )
    starts_action = cells.first_tokens(actions)
    starts_response = starts_action & (rounds == 0)
    excess = lost - how.dead_zone
    is_open = _is_open(excess, actions, responses, how)
    penalised = is_open & (excess > 0)
    return {
        "tokens": torch.ones_like(new),
        "logprob": new,
        "displacement": lost,
        "actions": starts_action,
        "lld_actions": starts_action & (-action_lost <= how.lld_epsilon),
        "open_actions": starts_action & is_open,
        "responses": starts_response,
        "lld_responses": starts_response & (-response_lost <= how.lld_epsilon),
        "penalised_tokens": penalised,
        "penalty": excess.masked_fill(~penalised, 0),
    }


def _is_open(excess: Tensor, actions: Tensor, responses: Tensor, how: Measure) -> Tensor:
    """Say of each token whether its gate would be open if its response were to preserve: bool [N]."""
    if how.gate == "token":
        return actions > 0
    ids = actions if how.gate == "action" else responses
    return spans.spread(spans.group_sums(excess, ids), ids) > 0


def _entropy(layout: Layout, entropies: Tensor | None, kept: Tensor, wide: torch.dtype) -> dict[str, Tensor]:
    if entropies is None:
        return {}
    values = layout.tokens(entropies=entropies.detach()).to(wide)
    good = kept & values.isfinite()
    return {
        "entropy": values.masked_fill(~good, 0).sum(),
        "entropy_tokens": good.sum(),
        "nonfinite_entropies": (layout.mask & ~values.isfinite()).sum(),
    }


def _first_search(first_search: Tensor | None) -> dict[str, Tensor]:
    if first_search is None:
        return {}
    return {
        "first_search_shared": (first_search == 1).sum(),
        "first_search_compared": (first_search >= 0).sum(),
    }


def _age(updates: int | None, moved: Tensor, tokens: Tensor, responses: Tensor) -> dict[str, Tensor]:
    """Return the sums that need to know how old the rollout is."""
    if updates is None:
        return {}
    age = {"updates": updates * responses, "updates_responses": responses}
    return age if updates else {**age, "fresh_displacement_abs": moved, "fresh_tokens": tokens}


def _read(quotient: Quotient, numbers: list[float]) -> float | None:
    top = read_sum(quotient.top, quotient.cells, numbers)
    if not quotient.bottom:
        return top if math.isfinite(top) else None
    bottom = read_sum(quotient.bottom, quotient.bottom_cells or quotient.cells, numbers)
    value = quotient.scale * top / bottom if bottom else math.nan
    return value if math.isfinite(value) else None


def read_sum(name: str, cell_numbers: tuple[int, ...], numbers: Sequence[float]) -> float:
    """Return one sum: of :data:`FIELDS` over some cells, or of :data:`TOTALS`; ``numbers`` [SIZE]."""
    if name in TOTALS:
        return numbers[len(FIELDS) * cells.COUNT + TOTALS.index(name)]
    first = FIELDS.index(name) * cells.COUNT
    return math.fsum(numbers[first + cell] for cell in cell_numbers)


def _wide(device: torch.device) -> torch.dtype:
    """Return the widest floating point type of a device, for sums over many tokens."""
    return torch.float32 if device.type == "mps" else torch.float64
