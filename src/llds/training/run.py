"""``llds train``: from a recipe to a trained search agent, scored before and after."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from accelerate import PartialState

from llds.data.questions import Question
from llds.engines.trl import dropout_warnings
from llds.errors import LLDSError
from llds.evaluation.evaluate import EvalResult, compare, load_evaluation
from llds.evaluation.report import format_comparison
from llds.files import atomic_folder, atomic_write_text, remove_unfinished
from llds.preflight import Report, merge
from llds.search.episode import EpisodeRunner
from llds.search.retrieval import RetrieverUnavailable
from llds.search.sampling import Sampling
from llds.training.alarms import STOPPED_BY_ALARM, AlarmDesk, Reaction
from llds.training.checkpoints import (
    checkpoint_step,
    list_checkpoints,
    save_model_folder,
)
from llds.training.environment import silence_libraries
from llds.training.inputs import (
    check_prompts,
    check_reporters,
    held_out_questions,
    make_limits,
    make_protocol,
    make_retriever,
    training_questions,
)
from llds.training.interrupt import StopRequest, stop_on_signal
from llds.training.plan import Plan, check_enough, make_plan
from llds.training.policy import Policy, pick_device
from llds.training.preflight import Gate, check_recipe, probe_once, refusal
from llds.training.probe import RunProbe
from llds.training.progress import Display
from llds.training.recipe import RECIPE_FILE, Recipe, first_difference, read_recipe_file
from llds.training.records import RunFolder, read_metrics, what_llds_did, write_json
from llds.training.rollback import Rollbacks
from llds.training.scoring import AFTER, BEFORE, Scorer
from llds.training.settings import to_yaml
from llds.training.trainer import RunCallback, SearchTrainer, make_trainer
from llds.training.warm import starting_policy

# How long processes wait for the first one, which converts, warm-starts and scores alone.
_PATIENCE = timedelta(hours=12)


@dataclass(frozen=True)
class RunResult:
    """What a call of :func:`train` came to.

    ``finished``: the run is done; otherwise it was stopped, and ``exit_code`` says by which signal.
    ``evaluations``: by name, as in the folder ``evaluations``. ``llds_steps``: the number of optimizer steps
    in which the penalty was "active", a "measured zero", a "structural zero" and "off". ``seconds``: time in
    optimizer steps, rollouts included.
    """

    folder: Path
    finished: bool
    exit_code: int
    steps: int
    seconds: float
    evaluations: Mapping[str, EvalResult]
    llds_steps: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON values."""
        content: dict[str, Any] = {
            "folder": str(self.folder),
            "finished": self.finished,
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
            "llds_steps": dict(self.llds_steps),
            "evaluations": {name: result.to_json() for name, result in self.evaluations.items()},
        }
        if {BEFORE, AFTER} <= self.evaluations.keys():
            gain = compare(self.evaluations[BEFORE], self.evaluations[AFTER])
            content["gain"] = {name: dataclasses.asdict(change) for name, change in gain.items()}
        return content


def train(recipe: Recipe, display: Display, force: bool = False) -> RunResult:
    """Train by ``recipe``, or go on with a run that was stopped, or return the result of one that is done.

    ``force``: train even if the preflight finds that the penalty can't work as meant.

    Raises :class:`LLDSError` for everything that the user can mend: settings, files, the model, the search
    tool, a run folder of another recipe.
    """
    silence_libraries()
    if recipe.run.threads:
        torch.set_num_threads(recipe.run.threads)
    # The first call decides whether the processes of a launcher find each other, and over what.
    PartialState(cpu=pick_device(recipe.model.device) == "cpu", timeout=_PATIENCE)
    run = RunFolder(Path(recipe.run.folder) / recipe.run.name)
    with display, run.locked() if PartialState().is_main_process else nullcontext():
        if run.result.exists():
            _check_same_recipe(run, recipe)
            display.note(f"{run.path} is finished; this is its result. Give another run.name to train anew.")
            return read_result(run)
        try:
            return _train(recipe, display, run, force)
        except KeyboardInterrupt:
            display.note("Stopped at once. Run the same command again to go on from the last checkpoint.")
            return read_result(run, exit_code=130)


def read_result(run: RunFolder, exit_code: int = 0) -> RunResult:
    """Return what the records of a run folder say, whether or not the run is finished."""
    rows = read_metrics(run.metrics) if run.metrics.exists() else []
    evaluations = {path.stem: load_evaluation(path) for path in sorted(run.evaluations.glob("*.jsonl"))}
    return RunResult(
        folder=run.path,
        finished=run.result.exists(),
        exit_code=exit_code,
        steps=rows[-1]["step"] if rows else 0,
        seconds=sum(row.get("seconds", 0.0) for row in rows),
        evaluations=evaluations,
        llds_steps=count_llds_steps(rows),
    )


def count_llds_steps(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Count the optimizer steps by what LLDS did in them."""
    counts = Counter(what_llds_did(row) for row in rows)
    return {name: counts[name] for name in ("active", "measured zero", "structural zero", "off")}


def format_result(result: RunResult) -> str:
    """Return the result as text for people."""
    if not result.finished:
        return f"Stopped after {result.steps} optimizer steps. Run the same command again to go on."
    told = ", ".join(f"{name} in {count}" for name, count in result.llds_steps.items() if count)
    example = next(iter(result.evaluations[AFTER].rows)).question
    return "\n".join(
        [
            format_comparison(result.evaluations),
            f"{result.steps} optimizer steps in {result.seconds / 60:.1f} minutes; LLDS penalty {told}.",
            f"Look at the model: llds ask {quote(str(result.folder))} {quote(example)}",
        ]
    )


def _train(recipe: Recipe, display: Display, run: RunFolder, force: bool) -> RunResult:
    questions, held_out = training_questions(recipe), held_out_questions(recipe)
    check_reporters(recipe.run.report_to)
    check_enough(len(questions), recipe)
    plan, protocol = make_plan(recipe, PartialState().num_processes), make_protocol(recipe)
    static = check_recipe(recipe, plan.processes)
    if static.certain and not force:
        raise LLDSError(refusal(static))
    _open_run(run, recipe, display)
    # What one process puts into the cache of a machine, the others find there.
    with PartialState().local_main_process_first():
        with display.phase("opening the corpus", 1):
            retriever = make_retriever(recipe.retrieval, run.retriever_event)
        policy = starting_policy(recipe, questions, retriever, protocol, display)
    for note in policy.notes:
        display.note(note)
    check_prompts([*questions, *held_out], policy.tokenizer, policy.positions, protocol, recipe)
    scorer = Scorer(recipe, run, policy, held_out, retriever, protocol, display)
    scorer.score_both(BEFORE)
    sampling = Sampling(recipe.sampling.temperature, recipe.sampling.top_p, recipe.sampling.top_k)
    runner = EpisodeRunner(policy.model, policy.tokenizer, retriever, protocol, make_limits(recipe), sampling)

    def told() -> None:
        display.note("Stopping after this rollout and saving; press Ctrl-C again to stop at once.")

    with stop_on_signal(told) as stop:
        reaction: Reaction = "rollback"
        while reaction == "rollback":
            parts = _Parts(recipe, plan, run, policy, runner, questions, scorer, stop, display, static, force)
            reaction, steps = _attempt(parts)
    if reaction == "stop":
        return read_result(run, exit_code=STOPPED_BY_ALARM)
    if steps < plan.total_steps:
        if PartialState().is_main_process:
            run.event("stop", step=steps)
        return read_result(run, exit_code=stop.exit_code)
    scorer.score_both(AFTER)
    return _finish(recipe, run, policy)


@dataclass(frozen=True)
class _Parts:
    """All that one attempt is made of."""

    recipe: Recipe
    plan: Plan
    run: RunFolder
    policy: Policy
    runner: EpisodeRunner
    questions: list[Question]
    scorer: Scorer
    stop: StopRequest
    display: Display
    static: Report
    force: bool


def _attempt(parts: _Parts) -> tuple[Reaction, int]:
    """Train from the last checkpoint to the end, to a stop, or until the run went back to a checkpoint.

    Returns how an alarm ended it, if one did, and the number of optimizer steps that are done.
    """
    recipe, run, display = parts.recipe, parts.run, parts.display
    PartialState().wait_for_everyone()
    rollbacks = Rollbacks(run)
    trainer, sampler = make_trainer(
        recipe, parts.plan, run, parts.policy, parts.runner, parts.questions, rollbacks
    )
    _say_what_llds_can_do(trainer, run, display)
    alarms = AlarmDesk(recipe, run, display, rollbacks, trainer)
    trainer.llds.monitor.hooks.append(alarms.hear)
    gate = Gate(run, display, trainer.accelerator, parts.force)
    probe_once(trainer, lambda report: gate(merge([parts.static, report])))
    trainer.add_callback(
        RunCallback(
            recipe=recipe,
            plan=parts.plan,
            run=run,
            display=display,
            stop=parts.stop,
            sampler=sampler,
            trainer=trainer,
            alarms=alarms,
            probe=RunProbe(recipe, parts.runner, parts.questions, run.path / "probe.json"),
            evaluate=parts.scorer.score_rollout,
            attempt=len(rollbacks),
        )
    )
    _fit(trainer, parts.plan, run, _latest(run), display)
    return alarms.reaction, trainer.state.global_step


def _open_run(run: RunFolder, recipe: Recipe, display: Display) -> None:
    """Make a new run folder, or take up the old one at its last checkpoint.

    Raises :class:`LLDSError` when the folder holds a run of another recipe, or something else.
    """
    if PartialState().is_main_process:
        started = run.has_begun()
        if started:
            _check_same_recipe(run, recipe)
        elif not run.is_free():
            raise LLDSError(f"{run.path} exists and is not a run folder; choose another run.name.")
        else:
            atomic_write_text(run.config, to_yaml(recipe))
        remove_unfinished(run.path)
        Rollbacks(run).finish()
        step = _step_of(_latest(run))
        run.cut_after(step)
        run.event("resume" if started else "start", step=step)
        if started:
            display.note(f"Going on with the run in {run.path} after {step} optimizer steps.")
    PartialState().wait_for_everyone()


def _latest(run: RunFolder) -> Path | None:
    checkpoints = list_checkpoints(run.checkpoints)
    return checkpoints[-1] if checkpoints else None


def _step_of(checkpoint: Path | None) -> int:
    return checkpoint_step(checkpoint) if checkpoint else 0


def _check_same_recipe(run: RunFolder, recipe: Recipe) -> None:
    difference = first_difference(read_recipe_file(run.config), recipe)
    if difference is not None:
        raise LLDSError(
            f"{run.path} holds a run of another recipe ({difference}); choose another run.name, "
            "or delete that folder."
        )


def _say_what_llds_can_do(trainer: SearchTrainer, run: RunFolder, display: Display) -> None:
    if not trainer.accelerator.is_main_process:
        return
    status = trainer.llds_status
    run.event("llds", status=status.kind, text=status.text)
    for sentence in [status.text, *dropout_warnings(trainer.model)]:
        display.note(sentence)


def _fit(
    trainer: SearchTrainer, plan: Plan, run: RunFolder, checkpoint: Path | None, display: Display
) -> None:
    first = _step_of(checkpoint)
    with display.training(first, plan.total_steps):
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except RetrieverUnavailable as error:
            # Nothing was learnt from the rollout that failed: the state is that after the one before.
            if trainer.state.global_step > first:
                trainer.save_checkpoint()
            if trainer.accelerator.is_main_process:
                run.event("failed", step=trainer.state.global_step, reason=str(error))
            raise


def _finish(recipe: Recipe, run: RunFolder, policy: Policy) -> RunResult:
    """Write the trained model and the result. The result comes last: it marks the run as finished."""
    if PartialState().is_main_process:
        with atomic_folder(run.model) as folder:
            save_model_folder(policy.model, policy.tokenizer, folder)
            atomic_write_text(folder / RECIPE_FILE, to_yaml(recipe))
        result = dataclasses.replace(read_result(run), finished=True)
        run.event("finish", step=result.steps)
        write_json(run.result, result.to_json())
    PartialState().wait_for_everyone()
    return read_result(run)
