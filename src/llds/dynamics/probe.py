"""What one update from the current weights would do to the responses one wants to keep (Eq. 3, Fig. 3a).

The update is really made, looked at and undone. Afterwards parameters, buffers, gradients, the optimizer's
state and all random generators are what they were, bit for bit, also when something was raised on the way.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llds.errors import LLDSError
from llds.objective.checks import check_above


@dataclass(frozen=True)
class ProbeResult:
    """What one update did to the log-likelihood of each response, in nats per response.

    ``before``, ``after``, ``gain`` [R] on the CPU: gain is after − before; negative means that the response
    was displaced. NaN where a likelihood was not finite.
    """

    before: Tensor
    after: Tensor

    @property
    def gain(self) -> Tensor:
        """What each response gained, nats: Δ of Def. 4.1."""
        return self.after - self.before

    def series(self, epsilon: float = -0.01) -> dict[str, float | None]:
        """Return the probe's series by canonical name; ``epsilon`` is ε of Def. 4.1 in nats, per response."""
        gain = self.gain[self.gain.isfinite()]
        if not gain.numel():
            return {"probe_gain_correct": None, "probe_lld_responses": None}
        displaced = (gain <= epsilon).double().mean()
        return {"probe_gain_correct": gain.mean().item(), "probe_lld_responses": displaced.item()}


def probe_update(
    model: nn.Module,
    loss: Callable[[], Tensor],
    likelihood: Callable[[], Tensor],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    lr: float | None = None,
    max_grad_norm: float | None = None,
) -> ProbeResult:
    """Make one update, measure ``likelihood`` before and after it, and undo everything.

    Args:
        model: whose parameters are updated. Runs as it is in ``loss``, and in evaluation mode in
        ``likelihood``.
        loss: computes the loss of the update from the model, 0-dim: for Eq. 3 the GRPO loss of the probe set.
        likelihood: computes the log-likelihood of each response that is watched, [R], nats, summed over its
            action tokens. Runs without gradients.
        optimizer: steps with its own state, learning rate and moments, as the run would. Hooks on its
            ``step`` run too. A wrapper that may skip a step won't do; pass the optimizer inside it.
        lr: without an optimizer, one step of plain gradient descent with this learning rate.
        max_grad_norm: clip the gradient to this norm, as the run does; None leaves it alone.

    Costs a second copy of the trained parameters, of the buffers and of the optimizer's state for as long as
    it runs. With data parallelism call it on every rank, for ``loss`` may run collectives.

    Raises:
        LLDSError: neither or both of ``optimizer`` and ``lr`` are given, or ``likelihood`` is not one number
            per response.
    """
    if (optimizer is None) == (lr is None):
        raise LLDSError("probe_update needs either an optimizer or lr, and not both.")
    check_above(0.0, lr=lr, max_grad_norm=max_grad_norm)
    with _kept(model, optimizer):
        before = _measured(model, likelihood)
        with torch.enable_grad():
            loss().backward()  # type: ignore[no-untyped-call]
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        if optimizer is None:
            _descend(model, lr or 0.0)
        else:
            optimizer.step()
        return ProbeResult(before, _measured(model, likelihood))


def mean_hidden(hidden: Tensor, response_mask: Tensor) -> Tensor:
    """Average hidden states [B, T, D] over each response's own tokens (mask [B, T]): [B, D], NaN without
    any."""
    mask = response_mask.bool().unsqueeze(-1)
    return hidden.masked_fill(~mask, 0).double().sum(1) / mask.sum(1)


def hidden_similarity(hidden: Tensor, correct: Tensor, wrong: Tensor) -> Tensor:
    """Return the cosine between the mean hidden states of correct and of wrong responses: c of Def. A.3.

    ``hidden`` [B, D], one vector per response (:func:`mean_hidden`); ``correct``, ``wrong``: bool [B]. A
    response whose vector is not finite is left out. 0-dim; NaN if one side is empty.
    """
    finite = hidden.isfinite().all(-1)
    mean_correct, mean_wrong = (_mean_vector(hidden, side.bool() & finite) for side in (correct, wrong))
    return torch.nn.functional.cosine_similarity(mean_correct, mean_wrong, dim=-1)


def _mean_vector(hidden: Tensor, chosen: Tensor) -> Tensor:
    return hidden.double().masked_fill(~chosen.unsqueeze(-1), 0).sum(0) / chosen.sum()


def _measured(model: nn.Module, likelihood: Callable[[], Tensor]) -> Tensor:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            values = likelihood()
    finally:
        for module, training in modes:
            module.training = training
    if values.dim() != 1:
        raise LLDSError(
            f"likelihood must return one number per response, [R], but gave {list(values.shape)}."
        )
    return values.double().cpu()


@torch.no_grad()
def _descend(model: nn.Module, lr: float) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.sub_(parameter.grad, alpha=lr)


@contextmanager
def _kept(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Put everything back at the end: values in place, so that whoever holds a tensor still holds the right
    one."""
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    tensors = [p for p, _ in grads if p.requires_grad] + list(model.buffers())
    copies = [tensor.detach().clone() for tensor in tensors]
    state = None if optimizer is None else _OptimizerState(optimizer)
    with kept_random():
        for parameter, _ in grads:
            parameter.grad = None
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, copy in zip(tensors, copies, strict=True):
                    tensor.copy_(copy)
            for parameter, grad in grads:
                parameter.grad = grad
            if state is not None:
                state.restore()


class _OptimizerState:
    """The state of an optimizer, to be put back into the same tensors."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {key: dict(entry) for key, entry in optimizer.state.items()}
        self._copies = {key: _copy(entry) for key, entry in self._state.items()}
        self._groups = [{k: _copy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]

    def restore(self) -> None:
        state = self._optimizer.state
        for key in list(state):
            if key not in self._state:
                del state[key]
        for key, entry in self._state.items():
            state[key].clear()
            state[key].update(
                {name: _restored(value, self._copies[key][name]) for name, value in entry.items()}
            )
        for group, kept in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(kept)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, dict) else deepcopy(value)


def _restored(value: Any, copy: Any) -> Any:
    if isinstance(value, Tensor):
        with torch.no_grad():
            return value.copy_(copy)
    return copy


@contextmanager
def kept_random() -> Iterator[None]:
    """Leave Python's, NumPy's and torch's generators as they were, on the CPU and all CUDA devices."""
    python = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
