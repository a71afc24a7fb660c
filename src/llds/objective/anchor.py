"""Whose likelihood is held: the policies that ``old_logprobs`` of :func:`llds.llds_loss` may come from.

- **old**, the policy that sampled: the paper's choice. It needs more than one optimizer step per rollout; in
  the first one the new policy *is* the old one, and the penalty is structurally zero.
- **reference**, the frozen start of training: pass its log-probs. A one-sided, gated relative of the KL term,
  live in every step; with a KL term beside it the same drift is paid for twice.
- **lagged**, the policy some optimizer steps ago: for strictly on-policy training, one optimizer step per
  rollout. :class:`LaggedAnchor` keeps it; the price is a copy of the trained weights and one more forward
  pass.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from llds.errors import LLDSError
from llds.objective.checks import check_least

_STEPS = "llds.lagged_anchor.steps"


class LaggedAnchor:
    """A copy of a model's trained weights that trails the model by 1 to ``every`` optimizer steps.

    Call :meth:`before_step` right before each optimizer step; ahead of the first one the anchor equals the
    model (a lag of 0, so no penalty), after that it never does. Use it as::

        with anchor.applied():
            old_logprobs = token_logprobs(model, batch)

    Weights that do not require a gradient when the anchor is made are not copied, so a LoRA adapter costs
    only its own size. Buffers are shared with the model.

    Args:
        model: any module; weights shared between layers are kept once.
        every: optimizer steps between refreshes, at least 1.
        device: where the copy rests, for instance "cpu" to spare the accelerator; beside the weights if None.
    """

    def __init__(self, model: nn.Module, every: int = 8, device: torch.device | str | None = None) -> None:
        check_least(1, every=every)
        self.every = every
        self.steps = 0
        self._live = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._live:
            raise LLDSError("LaggedAnchor needs a model with weights to train, but none requires a gradient.")
        self._held = {name: _copy(p, device) for name, p in self._live.items()}
        self._is_applied = False

    @property
    def lag(self) -> int:
        """Optimizer steps between the anchor and the model: 0 before the first, then 1 to ``every``."""
        return 0 if self.steps == 0 else (self.steps - 1) % self.every + 1

    def before_step(self) -> None:
        """Note that an optimizer step follows, and take the present weights if a refresh is due."""
        self._check_not_applied()
        if self.steps % self.every == 0:
            for name, p in self._live.items():
                self._held[name].copy_(p.detach())
        self.steps += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the anchor's weights, without gradients; on leaving, its own return bit for bit.

        The weights trade places and nothing is written over, so a graph that was built before stays valid for
        its backward pass once the context is left.
        """
        self._check_not_applied()
        own = {name: p.data for name, p in self._live.items()}
        self._is_applied = True
        try:
            for name, p in self._live.items():
                p.data = self._held[name].to(p.device)
            with torch.no_grad():
                yield
        finally:
            for name, p in self._live.items():
                p.data = own[name]
            self._is_applied = False

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the anchor's weights by parameter name, and its step count."""
        steps = torch.tensor(self.steps, dtype=torch.int64)
        return {**{name: held.clone() for name, held in self._held.items()}, _STEPS: steps}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` returned; ``LLDSError`` if it belongs to another model."""
        self._check_not_applied()
        expected = {*self._held, _STEPS}
        if state.keys() != expected:
            odd = sorted(state.keys() ^ expected)
            raise LLDSError(
                f"The anchor's state does not belong to this model: {odd[0]} is in only one of them."
            )
        for name, held in self._held.items():
            if state[name].shape != held.shape:
                raise LLDSError(
                    f"The anchor's state does not belong to this model: {name} has shape "
                    f"{list(state[name].shape)} there and {list(held.shape)} here."
                )
        for name, held in self._held.items():
            held.copy_(state[name])
        self.steps = int(state[_STEPS])

    def _check_not_applied(self) -> None:
        if self._is_applied:
            raise LLDSError("The anchor's weights are in the model just now; leave anchor.applied() first.")


def _copy(parameter: nn.Parameter, device: torch.device | str | None) -> Tensor:
    return parameter.detach().to(device=device or parameter.device, copy=True)
