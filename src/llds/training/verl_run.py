"""``llds train engine=verl``: lay out the files of a run, start verl's own trainer on it, and wait.

The run folder holds what was started (``config.yaml``, ``command.sh``, ``data/``), what came of it
(``verl/metrics-N.jsonl``, one file per start, and ``checkpoints/``) and ``events.jsonl``. verl itself goes on from
its last checkpoint when the same command is given again.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llds.data.questions import Question
from llds.data.search_r1 import write_search_r1
from llds.errors import LLDSError
from llds.files import atomic_write_text
from llds.training.inputs import held_out_questions, make_protocol, training_questions
from llds.training.interrupt import stop_on_signal
from llds.training.plan import check_enough
from llds.training.policy import model_source
from llds.training.progress import Display
from llds.training.recipe import Recipe, first_difference, read_recipe_file
from llds.training.records import RunFolder
from llds.training.settings import to_yaml
from llds.training.verl_command import Files, look_at, verl_overrides

#: Seconds that verl is given to end by itself after a signal.
_GRACE = 60.0


@dataclass(frozen=True)
class Launch:
    """A command that is ready to start. ``metrics``: the file that verl writes one line per rollout to."""

    folder: Path
    words: tuple[str, ...]
    metrics: Path

    @property
    def script(self) -> str:
        """The command as a shell script that can be run by hand, one setting a line."""
        lines = [
            f"VERL_FILE_LOGGER_PATH={shlex.quote(str(self.metrics))} \\",
            "python -m verl.trainer.main_ppo \\",
        ]
        lines += [f"  {shlex.quote(word)} \\" for word in self.words]
        return "#!/bin/sh\nset -e\n" + "\n".join(lines).removesuffix(" \\") + ' \\\n  "$@"\n'


@dataclass(frozen=True)
class VerlResult:
    """What a start of verl came to."""

    folder: Path
    metrics: Path
    exit_code: int

    def to_json(self) -> dict[str, object]:
        """Return it as plain JSON values."""
        return {
            "folder": str(self.folder),
            "metrics": str(self.metrics),
            "finished": self.exit_code == 0,
            "exit_code": self.exit_code,
        }


def train_with_verl(
    recipe: Recipe, extra: Sequence[str], display: Display, force: bool = False
) -> VerlResult:
    """Prepare the run of ``recipe``, start verl, and wait for it. ``extra``: further words of verl's own command.

    Raises :class:`LLDSError` when verl is not installed, for settings that verl has not, for missing or malformed
    files, for a run folder of another recipe, and when the preflight finds a certain fault and ``force`` is off.
    """
    run = RunFolder(Path(recipe.run.folder) / recipe.run.name)
    check_installed()
    with run.locked():
        launch = prepare(recipe, extra, run)
        report = look_at(launch.words)
        for finding in report.findings:
            display.note(f"Preflight: {finding.text}")
        if report.certain and not force:
            first = report.certain[0]
            raise LLDSError(
                f"The preflight found {first.fault}: {first.evidence}; {first.change} ({first.setting}). "
                "Pass --force to train anyway."
            )
        display.note(
            f"Starting verl. Watch it from another terminal: llds watch {shlex.quote(str(launch.metrics))}"
        )
        run.event("start", engine="verl", metrics=str(launch.metrics))
        code = _run(launch, display)
        run.event("stop" if code else "finish", engine="verl", exit_code=code)
    return VerlResult(run.path, launch.metrics, code)


def check_installed() -> None:
    """Raise :class:`LLDSError` when verl is not there."""
    if importlib.util.find_spec("verl") is None:
        raise LLDSError("engine=verl needs verl, which is not installed here; run: pip install 'llds[verl]'")


def prepare(recipe: Recipe, extra: Sequence[str], run: RunFolder) -> Launch:
    """Write all files of a run but verl's own, and return the command; starts nothing."""
    training, held_out = training_questions(recipe), held_out_questions(recipe)
    check_enough(len(training), recipe)
    _open(run, recipe)
    data = run.path.resolve() / "data"
    files = Files(
        model_source(recipe.model.path),
        _write_questions(data / "train.parquet", training, recipe, "train"),
        _write_questions(data / "test.parquet", held_out, recipe, "test"),
        run.checkpoints.resolve(),
    )
    words = (*verl_overrides(recipe, files), f"hydra.run.dir={run.path.resolve() / 'verl'}", *extra)
    launch = Launch(run.path, words, _next_metrics(run.path.resolve() / "verl"))
    atomic_write_text(run.path / "command.sh", launch.script)
    return launch


def _open(run: RunFolder, recipe: Recipe) -> None:
    """Take up the folder of a run by the same recipe, or an empty one."""
    if run.config.exists():
        difference = first_difference(read_recipe_file(run.config), recipe)
        if difference:
            raise LLDSError(
                f"{run.path} holds a run of another recipe: {difference}; choose another run.name."
            )
    elif not run.is_free():
        raise LLDSError(f"{run.path} exists and is not a run folder; choose another run.name.")
    atomic_write_text(run.config, to_yaml(recipe))


def _write_questions(path: Path, questions: Sequence[Question], recipe: Recipe, split: str) -> Path:
    protocol = make_protocol(recipe)

    def prompt(question: str) -> str:
        said = protocol.prompt(question)
        return said if isinstance(said, str) else str(said[0]["content"])

    write_search_r1(path, questions, prompt, split)
    return path


def _next_metrics(folder: Path) -> Path:
    """Return a file of its own for each start, for verl begins its file anew."""
    count = len(list(folder.glob("metrics-*.jsonl")))
    return folder / f"metrics-{count + 1}.jsonl"


def _run(launch: Launch, display: Display) -> int:
    """Run the command to its end; the first Ctrl-C is passed on to verl, the second kills all of it."""
    launch.metrics.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *launch.words]
    environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(launch.metrics)}
    notice = "Stopping verl; its last checkpoint stays."
    with stop_on_signal(lambda: display.note(notice)) as stop, _group(command, environment) as process:
        while (code := _wait(process, 0.5)) is None and not stop.requested:
            pass
        if code is None:
            os.killpg(process.pid, signal.SIGINT)
            _wait(process, _GRACE)
        return stop.exit_code or abs(code or 0)


@contextmanager
def _group(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a process group of its own, and leave none of it behind."""
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
