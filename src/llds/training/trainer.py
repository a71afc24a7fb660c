"""The trainer: TRL's GRPO with LLDS, fed by search episodes, with checkpoints and records of every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, set_seed
from transformers.trainer_callback import PrinterCallback

from llds.data.questions import Question
from llds.dynamics import SERIES
from llds.engines.trl import LLDSGRPOConfig, LLDSGRPOTrainer
from llds.errors import LLDSError
from llds.files import atomic_write_text
from llds.search.episode import EpisodeRunner
from llds.training.alarms import AlarmDesk, checkpoints_to_keep
from llds.training.checkpoints import SafeCheckpointMixin
from llds.training.interrupt import StopRequest
from llds.training.plan import Plan, question_order, rollout_seed
from llds.training.policy import Policy, first_not_finite, pick_device
from llds.training.probe import RunProbe
from llds.training.progress import Display
from llds.training.recipe import RECIPE_FILE, Recipe
from llds.training.records import RunFolder, append_line, canonical_metrics
from llds.training.rollback import Rollbacks
from llds.training.rollout import Rollouts, make_reward
from llds.training.settings import to_yaml
from llds.training.trajectories import TrajectorySampler

FAILED_EPISODES = "tool/failed_episodes"


class SearchTrainer(SafeCheckpointMixin, LLDSGRPOTrainer):
    """TRL's GRPO trainer with the LLDS term and safetensors checkpoints.

    ``before_first_batch``: called with the first micro-batch of training, before anything is learnt from it.
    """

    recipe_text: str
    before_first_batch: Callable[[dict[str, Any]], None] | None = None

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of a micro-batch."""
        look, self.before_first_batch = self.before_first_batch, None
        if look is not None:
            look(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def save_extra(self, folder: Path) -> None:
        """Add the recipe, and what LLDS and its monitor remember."""
        atomic_write_text(folder / RECIPE_FILE, self.recipe_text)
        self.llds.save(str(folder))

    def load_extra(self, folder: Path) -> None:
        """Read what LLDS and its monitor remember."""
        self.llds.load(str(folder))


def make_trainer(
    recipe: Recipe,
    plan: Plan,
    run: RunFolder,
    policy: Policy,
    runner: EpisodeRunner,
    questions: Sequence[Question],
    rollbacks: Rollbacks,
) -> tuple[SearchTrainer, TrajectorySampler]:
    """Build the trainer of a recipe and the sampler of its trajectories.

    ``questions``: those to train on. ``rollbacks``: how often the run went back before. Raises
    :class:`~llds.errors.LLDSError` for settings that the trainer can't serve.
    """
    from datasets import Dataset

    sampler = TrajectorySampler(recipe.run.trajectories, recipe.llds, policy.tokenizer)
    order = question_order(len(questions), recipe)
    trainer = SearchTrainer(
        model=policy.model,
        reward_funcs=make_reward(recipe.reward, questions, sampler.learn),
        args=trainer_config(recipe, plan, run),
        train_dataset=Dataset.from_dict(
            {"prompt": [questions[index].question for index in order], "question_index": order}
        ),
        processing_class=policy.tokenizer,
        rollout_func=Rollouts(runner, recipe, plan, attempt=len(rollbacks)),
    )
    trainer.llds.set_coef(rollbacks.coef(recipe.llds.coef))
    # The run's own records take them.
    trainer.llds.monitor.writes_events = False
    trainer.remove_callback(PrinterCallback)
    trainer.check_checkpoints_possible()
    trainer.checkpoint_folder = run.checkpoints
    trainer.checkpoints_to_keep = checkpoints_to_keep(recipe, plan)
    trainer.recipe_text = to_yaml(recipe)
    if trainer.accelerator.is_main_process and recipe.run.trajectories:
        trainer.llds.observers.append(sampler.observe)
    return trainer, sampler


def trainer_config(recipe: Recipe, plan: Plan, run: RunFolder) -> LLDSGRPOConfig:
    """Translate a recipe into the configuration of :class:`SearchTrainer`."""
    grpo = recipe.grpo
    return LLDSGRPOConfig(
        output_dir=str(run.path),
        seed=recipe.run.seed,
        max_steps=plan.total_steps,
        per_device_train_batch_size=plan.micro_batch,
        gradient_accumulation_steps=plan.accumulation,
        steps_per_generation=plan.slices,
        num_iterations=grpo.passes,
        num_generations=grpo.responses,
        learning_rate=grpo.learning_rate,
        lr_scheduler_type="constant_with_warmup" if grpo.schedule == "constant" else grpo.schedule,
        warmup_steps=round(grpo.warmup * plan.total_steps),
        weight_decay=grpo.weight_decay,
        max_grad_norm=grpo.max_grad_norm,
        loss_type=grpo.loss,
        importance_sampling_level=grpo.importance,
        epsilon=grpo.clip_low,
        epsilon_high=grpo.clip_high,
        scale_rewards=grpo.scale_rewards,
        beta=grpo.beta,
        temperature=recipe.sampling.temperature,
        max_completion_length=recipe.episode.max_response,
        disable_dropout=True,
        bf16=recipe.model.dtype == "bfloat16",
        use_cpu=pick_device(recipe.model.device) == "cpu",
        gradient_checkpointing=recipe.model.gradient_checkpointing,
        # The order of questions is ours, so that it depends on the recipe alone; see llds.training.plan.
        shuffle_dataset=False,
        remove_unused_columns=False,
        save_strategy="no",
        logging_steps=1,
        # TRL would replace a loss of NaN by the mean of the others in the log.
        logging_nan_inf_filter=False,
        report_to=list(recipe.run.report_to),
        run_name=recipe.run.name,
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        **_llds_config(recipe),
    )


def _llds_config(recipe: Recipe) -> dict[str, Any]:
    llds = recipe.llds
    return {
        "llds_coef": llds.coef,
        "llds_warmup_steps": llds.warmup,
        "llds_gate": llds.gate,
        "llds_normalizer": llds.normalizer,
        "llds_baseline": llds.baseline,
        "llds_anchor_every": llds.anchor_every,
        "llds_preserve": llds.preserve,
        "llds_dead_zone": llds.dead_zone,
        "llds_penalty": llds.penalty,
        "llds_huber_width": llds.huber_width,
        "llds_answer_weight": "auto" if llds.mask_answer else None,
        "llds_answer_searches": llds.answer_searches,
        "llds_lld_epsilon": recipe.dynamics.lld_epsilon,
        # What an alarm does is settled between rollouts; see llds.training.alarms.
        "llds_on_alarm": "warn",
    }


class RunCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not type-checked
    """Seeds every rollout, records every step, and stops, saves, probes and evaluates between rollouts.

    ``evaluate`` is called with the number of finished rollouts, on the main process alone. ``attempt``: how
    often the run went back before.
    """

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        run: RunFolder,
        display: Display,
        stop: StopRequest,
        sampler: TrajectorySampler,
        trainer: SearchTrainer,
        alarms: AlarmDesk,
        probe: RunProbe,
        evaluate: Callable[[int], None],
        attempt: int = 0,
    ) -> None:
        self._recipe = recipe
        self._plan = plan
        self._run = run
        self._display = display
        self._stop = stop
        self._sampler = sampler
        self._trainer = trainer
        self._alarms = alarms
        self._probe = probe
        self._evaluate = evaluate
        self._attempt = attempt

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Probe, and seed everything random in the rollout that begins, so that checkpoints need no generator
        states.
        """
        if not self._plan.at_boundary(state.global_step):
            return
        rollout = self._plan.rollout(state.global_step)
        if self._probe.is_due(rollout):
            with self._display.phase("probing one update", 1):
                found = self._probe.measure(self._trainer, rollout)
            for name, value in found.items():
                self._trainer._metrics["train"][SERIES[name].key].append(value)
        process = self._trainer.accelerator.process_index
        set_seed(rollout_seed(self._recipe.run.seed, "step", rollout, process, self._attempt))

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Between rollouts, decide whether to save and to stop."""
        if not self._plan.at_boundary(state.global_step):
            return
        done = self._plan.rollout(state.global_step)
        last = state.global_step >= self._plan.total_steps
        every = self._recipe.run.save_every
        control.should_training_stop = last or self._stop_is_agreed()
        control.should_save = control.should_training_stop or (every > 0 and done % every == 0)

    def _stop_is_agreed(self) -> bool:
        """Say whether any process was asked to stop; all processes say the same."""
        accelerator = self._trainer.accelerator
        asked = torch.tensor([self._stop.requested], device=accelerator.device)
        return bool(accelerator.gather(asked).any())

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **others: Any) -> None:
        """Write the line of an optimizer step; between rollouts, heed alarms and evaluate when it is time."""
        if "loss" not in logs:
            return
        if state.is_world_process_zero:
            self._record(state.global_step, logs)
        self._check_alive(state, logs)
        if not self._plan.at_boundary(state.global_step):
            return
        reaction = self._alarms.settle(state.global_step)
        if reaction != "none":
            control.should_training_stop = True
            control.should_save = reaction == "stop"
        elif state.is_world_process_zero:
            self._evaluate_between(state)

    def _check_alive(self, state: Any, logs: Mapping[str, Any]) -> None:
        """Stop a run whose weights are lost before they take the place of good ones in the checkpoints."""
        suspicious = not all(math.isfinite(logs.get(name, 0.0)) for name in ("loss", "grad_norm"))
        due = suspicious or self._plan.at_boundary(state.global_step)
        if not due or first_not_finite(self._trainer.model) is None:
            return
        reason = (
            f"The weights became NaN or infinite in optimizer step {state.global_step}; nothing can be learnt "
            "from there. Lower grpo.learning_rate or llds.coef, and give another run.name."
        )
        if state.is_world_process_zero:
            self._run.event("failed", step=state.global_step, reason=reason)
        raise LLDSError(reason)

    def _record(self, step: int, logs: Mapping[str, Any]) -> None:
        row = metrics_row(step, self._plan, logs)
        append_line(self._run.metrics, row)
        self._display.step(row)
        if self._recipe.run.trajectories:
            self._run.write_trajectories(step, self._sampler.take())
        if failed := logs.get(FAILED_EPISODES):
            self._run.event("tool_failed", step=step, episodes=int(failed))
            self._display.note(f"The search tool failed in {int(failed)} episodes; they are left out.")

    def _evaluate_between(self, state: Any) -> None:
        every = self._recipe.evaluation.every
        done = self._plan.rollout(state.global_step)
        due = every > 0 and done % every == 0
        if due and state.global_step < self._plan.total_steps:
            self._evaluate(done)


def metrics_row(step: int, plan: Plan, logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the line of ``metrics.jsonl`` for optimizer step ``step``, counted from 1."""
    row = {"step": step, "rollout": plan.rollout(step - 1) + 1, **canonical_metrics(logs)}
    if row.get("searches"):
        row["valid_search_share"] = row["valid_searches"] / row["searches"]
    return row
