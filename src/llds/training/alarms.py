"""What a run does about what its monitor says: tell of it, and between rollouts stop or go back."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from llds.dynamics import AlarmPolicy, Event, decide
from llds.training.plan import Plan
from llds.training.progress import Display
from llds.training.recipe import DynamicsSettings, Recipe
from llds.training.records import RunFolder
from llds.training.rollback import Rollbacks, checkpoint_steps

#: Exit code of a run that an alarm stopped.
STOPPED_BY_ALARM = 3
# A decline is noticed some tens of optimizer steps after it began; checkpoints reach back this far.
_REACH = 100

Reaction = Literal["none", "stop", "rollback"]
_REACTIONS: tuple[Reaction, ...] = ("none", "stop", "rollback")


def alarm_policy(settings: DynamicsSettings) -> AlarmPolicy:
    """Return what the recipe wants to be done on an alarm."""
    return AlarmPolicy(
        on_alarm=settings.on_alarm,
        act_from=settings.act_from,
        coef_factor=settings.coef_factor,
        coef_start=settings.coef_start,
        coef_limit=settings.coef_limit,
        max_rollbacks=settings.max_rollbacks,
    )


def checkpoints_to_keep(recipe: Recipe, plan: Plan) -> int:
    """Return how many checkpoints to keep: with rollback enough to reach back before most onsets."""
    if recipe.dynamics.on_alarm != "rollback" or recipe.run.save_every == 0:
        return recipe.run.keep
    apart = recipe.run.save_every * plan.steps_per_rollout
    return max(recipe.run.keep, math.ceil(_REACH / apart) + 1)


class AlarmDesk:
    """Hears the events of a run's monitor. ``reaction``: what was settled last."""

    def __init__(
        self, recipe: Recipe, run: RunFolder, display: Display, rollbacks: Rollbacks, trainer: Any
    ) -> None:
        self._policy = alarm_policy(recipe.dynamics)
        self._run = run
        self._display = display
        self._rollbacks = rollbacks
        self._trainer = trainer
        self._pending: list[Event] = []
        self.reaction: Reaction = "none"

    def hear(self, event: Event) -> None:
        """Write an event down and show it; a hook of the trainer's monitor."""
        details = event.as_dict()
        self._run.event(details.pop("kind"), **details)
        title = f"ALARM ({event.severity})" if event.kind == "alarm" else "Likelihood"
        self._display.note(f"{title}, step {event.step}: {event.text}")
        self._pending.append(event)

    def settle(self, step: int) -> Reaction:
        """Decide between two rollouts, after optimizer step ``step``; carry out a rollback. Collective."""
        accelerator = self._trainer.accelerator
        mine = self._decide(step) if accelerator.is_main_process else "none"
        code = torch.tensor([_REACTIONS.index(mine)], device=accelerator.device)
        self.reaction = _REACTIONS[int(accelerator.gather(code).max())]
        return self.reaction

    def _decide(self, step: int) -> Reaction:
        events, self._pending = self._pending, []
        coef = self._trainer.llds.options.coef
        decision = decide(
            self._policy,
            events,
            checkpoints=checkpoint_steps(self._run.checkpoints),
            coef=coef,
            rollbacks=len(self._rollbacks),
        )
        if decision.action == "rollback":
            assert decision.checkpoint is not None
            to_step, coef = decision.checkpoint, coef if decision.coef is None else decision.coef
            self._run.event("rollback", step=step, to_step=to_step, coef=coef, reason=decision.reason)
            self._display.note(decision.reason)
            self._rollbacks.go_back(step, to_step, coef, decision.reason)
            return "rollback"
        if decision.action == "stop":
            self._run.event("alarm_stop", step=step, reason=decision.reason)
            self._display.note(decision.reason)
            return "stop"
        return "none"
