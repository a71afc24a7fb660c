"""The preflight of a recipe: its settings, and what the trainer's own loss does on its first real batch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from llds.engines.trl.preflight import RolloutMasks, preflight, probe_trainer, setup_of_args
from llds.engines.trl.restore import undisturbed
from llds.errors import LLDSError
from llds.preflight import Report, Setup, check_setup
from llds.search.episode import EpisodeRunner
from llds.search.sampling import Sampling
from llds.training.environment import silence_libraries
from llds.training.inputs import make_limits, make_protocol, make_retriever, training_questions
from llds.training.plan import make_plan
from llds.training.progress import Display
from llds.training.recipe import Recipe
from llds.training.records import RunFolder
from llds.training.rollback import Rollbacks
from llds.training.trainer import SearchTrainer, make_trainer, trainer_config
from llds.training.warm import starting_policy

NAMES = {
    "steps_per_rollout": "grpo.steps_per_rollout, grpo.passes",
    "coef": "llds.coef",
    "gate": "llds.gate",
    "normalizer": "llds.normalizer",
    "baseline": "llds.baseline",
    "preserve": "llds.preserve",
    "answer_weight": "llds.mask_answer",
    "group_size": "grpo.responses",
    "kl_in_loss": "grpo.beta",
}


def recipe_setup(recipe: Recipe, processes: int = 1) -> Setup:
    """Return what a recipe says, as the trainer's own configuration has it."""
    plan = make_plan(recipe, processes)
    args = trainer_config(recipe, plan, RunFolder(Path(recipe.run.folder) / recipe.run.name))
    return replace(
        setup_of_args(args, args.llds_options(), is_attached=True),
        engine="llds",
        masks_feedback=True,
        is_multi_turn=recipe.episode.max_turns > 0,
        has_answer_mask=True,
        names=NAMES,
        live_advice='set grpo.steps_per_rollout=2 or grpo.passes=2, or llds.baseline="anchor"',
    )


def check_recipe(recipe: Recipe, processes: int = 1) -> Report:
    """Look for every fault that the settings of a recipe show."""
    return check_setup(recipe_setup(recipe, processes))


def probe_recipe(recipe: Recipe, display: Display) -> Report:
    """Make the first rollout of a recipe and probe the trainer's loss on it; leaves no run behind."""
    silence_libraries()
    questions = training_questions(recipe)
    plan, protocol = make_plan(recipe), make_protocol(recipe)
    with display.phase("opening the corpus", 1):
        retriever = make_retriever(recipe.retrieval)
    policy = starting_policy(recipe, questions, retriever, protocol, display)
    sampling = Sampling(recipe.sampling.temperature, recipe.sampling.top_p, recipe.sampling.top_k)
    runner = EpisodeRunner(policy.model, policy.tokenizer, retriever, protocol, make_limits(recipe), sampling)
    with tempfile.TemporaryDirectory(prefix="llds-preflight-") as folder:
        run = RunFolder(Path(folder))
        trainer, _ = make_trainer(recipe, plan, run, policy, runner, questions, Rollbacks(run))
        with display.phase("probing the first rollout", 1):
            return preflight(trainer)


def probe_once(trainer: SearchTrainer, heed: Callable[[Report], None]) -> None:
    """Let the trainer probe its first micro-batch before it trains on it, and tell ``heed``.

    ``heed`` is called on every process.
    """

    masks = RolloutMasks(trainer)
    masks.start()

    def look(inputs: dict[str, Any]) -> None:
        masks.stop()
        if trainer.llds.options.coef > 0:
            with undisturbed(trainer):
                report = probe_trainer(trainer, inputs, masks)
            heed(report)

    trainer.before_first_batch = look


class Gate:
    """Heeds the reports of a run: records them, shows what was found, and refuses on a certain fault."""

    def __init__(self, run: RunFolder, display: Display, accelerator: Any, force: bool) -> None:
        self._run = run
        self._display = display
        self._accelerator = accelerator
        self._force = force

    def __call__(self, report: Report) -> None:
        """Raise :class:`LLDSError`, on every process, if any found a certain fault and ``force`` is off."""
        if self._accelerator.is_main_process:
            content = report.to_json()
            del content["notes"]
            self._run.event("preflight", forced=self._force, **content)
            for finding in report.findings:
                self._display.note(f"Preflight: {finding.text}")
        flag = torch.tensor([bool(report.certain)], device=self._accelerator.device)
        if bool(self._accelerator.gather(flag).any()) and not self._force:
            raise LLDSError(refusal(report))


def refusal(report: Report) -> str:
    """Return the sentence with which a run is refused."""
    if not report.certain:
        return "The preflight of another process found a certain fault; see its output, or pass --force."
    first = report.certain[0]
    return (
        f"The preflight found {first.fault}: {first.evidence}; {first.change} ({first.setting}). "
        "Pass --force to train anyway."
    )
