"""``llds train``: from a recipe to a trained search agent, scored before and after."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from llds.engines.trl import dropout_warnings
from llds.errors import LLDSError
from llds.evaluation.evaluate import EvalResult, compare, load_evaluation
from llds.evaluation.report import format_comparison
from llds.files import atomic_write_text
from llds.search.episode import EpisodeRunner
from llds.search.retrieval import RetrieverUnavailable
from llds.search.sampling import Sampling
from llds.training.checkpoints import (
    atomic_folder,
    checkpoint_step,
    list_checkpoints,
    remove_unfinished,
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
from llds.training.interrupt import stop_on_signal
from llds.training.plan import Plan, make_plan
from llds.training.policy import Policy, pick_device
from llds.training.progress import Display
from llds.training.recipe import RECIPE_FILE, Recipe, first_difference, read_recipe_file
from llds.training.records import RunFolder, read_lines, write_json
from llds.training.scoring import AFTER, BEFORE, Scorer
from llds.training.settings import to_yaml
from llds.training.trainer import RunCallback, SearchTrainer, make_trainer
from llds.training.warm import starting_policy


@dataclass(frozen=True)
class RunResult:
    """What a call of :func:`train` came to.

    ``finished``: the run is done; otherwise it was stopped, and ``exit_code`` says by which signal.
    ``evaluations``: by name, as in the folder ``evaluations``. ``llds_steps``: the number of optimizer steps
    in which the penalty was "active", a "measured zero" and a "structural zero". ``seconds``: time in
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


def train(recipe: Recipe, display: Display) -> RunResult:
    """Train by ``recipe``, or go on with a run that was stopped, or return the result of one that is done.

    Raises :class:`LLDSError` for everything that the user can mend: settings, files, the model, the search
    tool, a run folder of another recipe.
    """
    silence_libraries()
    if recipe.run.threads:
        torch.set_num_threads(recipe.run.threads)
    # The first call decides whether the processes of a launcher find each other, and over what.
    PartialState(cpu=pick_device(recipe.model.device) == "cpu")
    run = RunFolder(Path(recipe.run.folder) / recipe.run.name)
    with display, run.locked() if PartialState().is_main_process else nullcontext():
        if run.result.exists():
            _check_same_recipe(run, recipe)
            display.note(f"{run.path} is finished; this is its result. Give another run.name to train anew.")
            return read_result(run)
        try:
            return _train(recipe, display, run)
        except KeyboardInterrupt:
            display.note("Stopped at once. Run the same command again to go on from the last checkpoint.")
            return read_result(run, exit_code=130)


def read_result(run: RunFolder, exit_code: int = 0) -> RunResult:
    """Return what the records of a run folder say, whether or not the run is finished."""
    rows = read_lines(run.metrics) if run.metrics.exists() else []
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
    counts = {"active": 0, "measured zero": 0, "structural zero": 0}
    for row in rows:
        structural = row.get("llds/structural_zero") == 1
        acted = "active" if row.get("llds/penalised_share") else "measured zero"
        counts["structural zero" if structural else acted] += 1
    return counts


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
            f'Look at the model: llds ask {result.folder} "{example}"',
        ]
    )


def _train(recipe: Recipe, display: Display, run: RunFolder) -> RunResult:
    questions, held_out = training_questions(recipe), held_out_questions(recipe)
    check_reporters(recipe.run.report_to)
    plan, protocol = make_plan(recipe, PartialState().num_processes), make_protocol(recipe)
    checkpoint = _open_run(run, recipe, display)
    with display.phase("opening the corpus", 1):
        retriever = make_retriever(recipe.retrieval, run.retriever_event)
    policy = starting_policy(recipe, questions, retriever, protocol, display)
    for note in policy.notes:
        display.note(note)
    check_prompts([*questions, *held_out], policy, protocol, recipe)
    scorer = Scorer(recipe, run, policy, held_out, retriever, protocol, display)
    scorer.score_both(BEFORE)
    sampling = Sampling(recipe.sampling.temperature, recipe.sampling.top_p, recipe.sampling.top_k)
    runner = EpisodeRunner(policy.model, policy.tokenizer, retriever, protocol, make_limits(recipe), sampling)
    trainer, sampler = make_trainer(recipe, plan, run, policy, runner, questions)
    _say_what_llds_can_do(trainer, run, display)

    def told() -> None:
        display.note("Stopping after this rollout and saving; press Ctrl-C again to stop at once.")

    with stop_on_signal(told) as stop:
        trainer.add_callback(
            RunCallback(recipe, plan, run, display, stop, sampler, trainer.accelerator, scorer.score_rollout)
        )
        _fit(trainer, plan, run, checkpoint, display)
    if trainer.state.global_step < plan.total_steps:
        if trainer.accelerator.is_main_process:
            run.event("stop", step=trainer.state.global_step)
        return read_result(run, exit_code=stop.exit_code)
    scorer.score_both(AFTER)
    return _finish(recipe, run, policy)


def _open_run(run: RunFolder, recipe: Recipe, display: Display) -> Path | None:
    """Make a new run folder, or take up the old one. Returns the checkpoint to go on from, if there is one.

    Raises :class:`LLDSError` when the folder holds a run of another recipe, or something else.
    """
    checkpoints = list_checkpoints(run.checkpoints)
    step = checkpoint_step(checkpoints[-1]) if checkpoints else 0
    if PartialState().is_main_process:
        started = run.config.exists()
        if started:
            _check_same_recipe(run, recipe)
        elif any(path.name != ".lock" for path in run.path.iterdir()):
            raise LLDSError(f"{run.path} exists and is not a run folder; choose another run.name.")
        else:
            atomic_write_text(run.config, to_yaml(recipe))
        remove_unfinished(run.checkpoints)
        run.cut_after(step)
        run.event("resume" if started else "start", step=step)
        if started:
            display.note(f"Going on with the run in {run.path} after {step} optimizer steps.")
    PartialState().wait_for_everyone()
    return checkpoints[-1] if checkpoints else None


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
    first = checkpoint_step(checkpoint) if checkpoint else 0
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
