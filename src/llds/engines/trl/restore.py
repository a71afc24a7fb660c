"""Trying a trainer out without leaving a trace in it."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

from torch import nn

from llds.dynamics.probe import kept_random

_PutBack = Callable[[], None]


@contextmanager
def undisturbed(trainer: Any) -> Iterator[None]:
    """Put the trainer back to what it was at the end, whatever happens inside; meanwhile it is in training.

    That is: attributes of the trainer, of its state, arguments and LLDS, with what their lists, dictionaries and
    sets hold; modes and gradients of the model; ``sync_gradients``; all random generators. Observers and step
    hooks are not called. What a rollout, a reward or a tool remembers is not put back.
    """
    owners = [trainer, trainer.state, trainer.args]
    runtime = getattr(trainer, "llds", None)
    owners += [] if runtime is None else [runtime]
    put_back = [_attributes(owner) for owner in owners] + [_modes_and_gradients(trainer.model)]
    gradient_state = trainer.accelerator.gradient_state
    syncs = gradient_state.sync_gradients
    trainer._metrics = {mode: defaultdict(list) for mode in ("train", "eval")}
    if runtime is not None:
        runtime.step_hooks, runtime.observers, runtime.verdicts = [], [], Counter()
        # λ at its full size, and log-probs that can be chosen, whatever is held.
        runtime.options = replace(runtime.options, warmup_steps=0, baseline="old")
    trainer.model.train()
    try:
        with kept_random():
            yield
    finally:
        for put in reversed(put_back):
            put()
        gradient_state._set_sync_gradients(syncs)
        if runtime is not None:
            runtime.reset_step()


def draw_rows(trainer: Any) -> list[dict[str, Any]]:
    """Return the rows of the data set that this process's first rollout is made of."""
    data, processes = trainer.train_dataset, trainer.accelerator.num_processes
    if processes == 1 and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        count = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
        return [dict(data[index]) for index in islice(iter(trainer._get_train_sampler()), count)]
    loader = trainer.get_train_dataloader()
    try:
        rows: list[dict[str, Any]] = next(iter(loader))
    finally:
        # accelerate would keep a loader that is left in the middle for the one in use.
        loader.end()
        trainer.accelerator._dataloaders.remove(loader)
    return rows


def _attributes(owner: Any) -> _PutBack:
    """Remember the attributes of an object, and what is in its containers."""
    had = dict(vars(owner))
    refills: dict[int, _PutBack] = {}
    for name, value in had.items():
        if not name.endswith("_dataset"):
            _remember(value, refills)

    def put() -> None:
        vars(owner).clear()
        vars(owner).update(had)
        for refill in refills.values():
            refill()

    return put


def _remember(value: Any, refills: dict[int, _PutBack]) -> None:
    """Note how to refill ``value``, if it is a container, and those inside it."""
    if id(value) in refills or not isinstance(value, (list, deque, dict, set)):
        return
    held = dict(value) if isinstance(value, dict) else list(value)

    def refill() -> None:
        value.clear()
        if isinstance(value, (dict, set)):
            value.update(held)
        else:
            value.extend(held)

    refills[id(value)] = refill
    for inner in held.values() if isinstance(held, dict) else held:
        _remember(inner, refills)


def _modes_and_gradients(model: nn.Module) -> _PutBack:
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]

    def put() -> None:
        for module, training in modes:
            module.training = training
        for parameter, gradient in gradients:
            parameter.grad = gradient

    return put
