"""What a ``rollout_func`` may say about its completions beyond their tokens, and what follows from it.

Extra keys of its answer, each a list with one entry per completion:

- ``tool_failed`` (bool): the tool broke down in this episode. That isn't the policy's fault, so the episode
  is left out: its rewards don't enter its group's mean and standard deviation, its advantage is 0, and no
  token of it is in a loss. (Loss types that average over responses still count it as one, as TRL does with
  truncated ones.) Reward functions are called for it; what they return is not used.
- ``answer_mask`` (list of 0 and 1, one per completion token): the tokens of the final answer.
- ``valid_searches`` (int): searches that were well formed and answered.
- ``first_search`` (text or None): what the first search returned, such as its passage ids in a row; None
  without a search. From it comes the share of wrong responses that began like a correct one (Fig. 5).

A completion needs at least one token, an episode that failed before its first too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llds.dynamics import compare_first_searches
from llds.engines.trl.config import LLDSOptions
from llds.errors import LLDSError
from llds.objective import answer_weight_from_searches

TOOL_FAILED = "tool_failed"
ANSWER_MASK = "answer_mask"
VALID_SEARCHES = "valid_searches"
FIRST_SEARCH = "first_search"
FAILED_METRIC = "tool/failed_episodes"

#: Keys that are added to the inputs of a training batch.
ROLLOUT_STEP = "llds_rollout_step"
ROW_ANSWER_MASK = "llds_answer_mask"
ROW_ANSWER_WEIGHT = "llds_answer_weight"
ROW_FIRST_SEARCH = "llds_first_search"

Rows = Sequence[dict[str, Any]]


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating point type of a device, for sums over many tokens."""
    return torch.float32 if device.type == "mps" else torch.float64


def exclude_failed(accelerator: Any, rows: Rows, rewards: Tensor) -> tuple[Tensor, int | None]:
    """Set the rewards of failed episodes to NaN, which TRL leaves out of every mean and standard deviation.

    ``rows``: this process's rows; ``rewards`` [all rows of all processes, F]. Returns the rewards and the
    number of failed episodes of all processes, None if no row says ``tool_failed``. Collective. Raises
    ``LLDSError`` on every process if a row of any says something else than true or false.
    """
    known = {None: -1, False: 0, True: 1}
    flags = [row.get(TOOL_FAILED) for row in rows]
    codes = [known[flag] if flag is None or isinstance(flag, bool) else 2 for flag in flags]
    states = accelerator.gather(torch.tensor(codes, device=accelerator.device))
    if (states == 2).any():
        raise LLDSError(
            f"rollout_func must return {TOOL_FAILED!r} as a list of true or false, one per completion."
        )
    if (states == -1).all():
        return rewards, None
    failed = states == 1
    return rewards.masked_fill(failed.unsqueeze(1), torch.nan), int(failed.sum())


def mask_failed(accelerator: Any, rows: Rows, batch: dict[str, Any]) -> None:
    """Take the tokens of failed episodes out of every loss and out of the batch's token count. Collective."""
    failed = torch.tensor([row.get(TOOL_FAILED) is True for row in rows], device=accelerator.device)
    mask = batch["completion_mask"]
    # tool_mask and not completion_mask, which is the attention mask too.
    batch["tool_mask"] = batch.get("tool_mask", torch.ones_like(mask)) * ~failed.unsqueeze(1)
    if "num_items_in_batch" in batch:
        count = accelerator.gather((mask * batch["tool_mask"]).sum()).sum()
        batch["num_items_in_batch"] = count.to(batch["num_items_in_batch"].dtype)


@dataclass(frozen=True)
class _Answers:
    """This process's answer masks, what is wrong with them, and the searches of its valid episodes."""

    mask: Tensor
    missing: int
    wrong: int
    searches: float
    episodes: int


def add_answers(accelerator: Any, options: LLDSOptions, rows: Rows, batch: dict[str, Any]) -> None:
    """Add the answer mask to a training batch, and with ``answer_weight`` the weight. Collective.

    Without that setting the mask only serves the series of the answer span, and is left out unless every
    completion has one. Raises ``LLDSError`` on every process if any process's rollouts don't say what the
    setting needs, or something wrong.
    """
    found = _read_answers(rows, batch["completion_mask"], needs_searches=options.answer_weight == "auto")
    counts = [found.missing, found.wrong, found.searches, found.episodes]
    device = accelerator.device
    total = accelerator.reduce(torch.tensor(counts, dtype=sum_dtype(device), device=device), "sum")
    missing, wrong, searches, episodes = total.tolist()
    if missing and options.answer_weight is None:
        return
    if missing:
        names = (
            f"{ANSWER_MASK!r} and {VALID_SEARCHES!r}"
            if options.answer_weight == "auto"
            else repr(ANSWER_MASK)
        )
        raise LLDSError(
            f"answer_weight={options.answer_weight!r} needs a rollout_func that returns {names} for every "
            f"completion; {missing:.0f} completions have none."
        )
    if wrong:
        raise LLDSError(
            f"rollout_func must return {ANSWER_MASK!r} with one 0 or 1 per completion token; {wrong:.0f} "
            "completions have another length."
        )
    batch[ROW_ANSWER_MASK] = found.mask
    if options.answer_weight is None:
        return
    weight = torch.tensor(options.answer_weight if options.answer_weight != "auto" else 1.0, device=device)
    if options.answer_weight == "auto":
        mean = torch.tensor(searches / max(episodes, 1.0), device=device)
        weight = answer_weight_from_searches(mean, options.answer_searches)
    batch[ROW_ANSWER_WEIGHT] = weight


def add_first_searches(
    accelerator: Any, group_size: int, tol: float, rows: Rows, batch: dict[str, Any]
) -> None:
    """Add to a training batch, per response, whether it is wrong and began like a correct one. Collective.

    ``group_size``: responses per group, which lie side by side over all processes, as TRL keeps them.
    ``tol``: as ``advantage_tol`` of :func:`llds.llds_loss`. Where no row says ``first_search`` nothing is
    added. Codes are those of :func:`llds.dynamics.compare_first_searches`.
    """
    advantages = batch["advantages"]
    if advantages.dim() > 1:
        advantages = advantages[:, 0]
    found = torch.tensor([_digest(row.get(FIRST_SEARCH)) for row in rows], device=accelerator.device)
    told = torch.tensor([FIRST_SEARCH in row for row in rows], device=accelerator.device)
    all_found, all_told = accelerator.gather(found), accelerator.gather(told)
    all_advantages = accelerator.gather(advantages).tolist()
    if not all_told.any():
        return
    results = [number or None for number in all_found.tolist()]
    groups = [index // group_size for index in range(len(results))]
    codes = compare_first_searches(results, all_advantages, groups, tol)
    first = accelerator.process_index * len(rows)
    batch[ROW_FIRST_SEARCH] = torch.tensor(codes[first : first + len(rows)], device=accelerator.device)


def _digest(result: str | None) -> int:
    """Return a number that stands for what a search returned, 0 for no search; it must cross processes."""
    if result is None:
        return 0
    return int.from_bytes(hashlib.blake2b(result.encode(), digest_size=8).digest(), signed=True) or 1


def _read_answers(rows: Rows, completion_mask: Tensor, *, needs_searches: bool) -> _Answers:
    lengths = completion_mask.sum(1).tolist()
    mask = torch.zeros_like(completion_mask)
    missing = wrong = episodes = 0
    searches = 0.0
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        answer = row.get(ANSWER_MASK)
        if answer is None or (needs_searches and row.get(VALID_SEARCHES) is None):
            missing += 1
            continue
        # A truncated completion may be masked as a whole; then its length is not to be seen here.
        if len(answer) > mask.size(1) or (length > 0 and len(answer) != length):
            wrong += 1
            continue
        mask[i, : len(answer)] = torch.tensor(answer, dtype=mask.dtype, device=mask.device)
        if needs_searches and row.get(TOOL_FAILED) is not True:
            searches += float(row[VALID_SEARCHES])
            episodes += 1
    return _Answers(mask, missing, wrong, searches, episodes)
