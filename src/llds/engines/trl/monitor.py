"""Where a TRL run stands on the way to collapse, told from what it logs, as it logs it."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from llds.dynamics import LOG_PREFIX, Event, PhaseMonitor
from llds.engines.trl.config import LLDSOptions
from llds.errors import LLDSError
from llds.files import atomic_write_text

logger = logging.getLogger("llds.engines.trl")

#: Called on the main process with everything that the monitor has to tell.
EventHook = Callable[[Event], None]

MONITOR_FILE = "llds_monitor.json"
EVENTS_FILE = "llds_events.jsonl"
PHASE_METRIC = LOG_PREFIX + "phase"

#: Canonical name of a series -> what TRL calls it.
_NAMES = {"searches": "tools/call_frequency", "action_tokens": "completions/mean_length"}
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.ERROR}


class RunMonitor:
    """Feeds a :class:`~llds.dynamics.PhaseMonitor` with what the trainer logs; ``trainer.llds.monitor``.

    It sees one step per log entry, so ``logging_steps=1`` gives the earliest alarm. ``hooks``: called on the
    main process with every :class:`~llds.dynamics.Event`. ``events``: all of this run so far.
    ``writes_events``: whether they are appended to ``llds_events.jsonl`` in the output folder.
    """

    def __init__(self, trainer: Any, options: LLDSOptions) -> None:
        self.hooks: list[EventHook] = []
        self.events: list[Event] = []
        self.writes_events = True
        self._trainer = trainer
        self._on_alarm = options.on_alarm
        self._phases = PhaseMonitor()
        self._is_loaded = False

    @property
    def phase(self) -> int:
        """The phase by number; names in :data:`llds.dynamics.PHASES`. Known on the main process."""
        return self._phases.phase

    @property
    def onset(self) -> int | None:
        """The optimizer step at which the present decline began, None while there is none."""
        return self._phases.onset

    def begin(self) -> None:
        """Start a run: forget the one before, unless a checkpoint was read for this one."""
        if not self._is_loaded:
            self._phases, self.events = PhaseMonitor(), []
        self._is_loaded = False

    def before_log(self, logs: Mapping[str, Any]) -> None:
        """Look at what is about to be logged, and add the phase to it. Collective with ``on_alarm="stop"``.

        ``logs``: what the trainer has beside the metrics that it keeps until they are logged.
        """
        if self._on_alarm == "ignore" or "loss" not in logs:
            return
        is_alarmed = False
        if self._trainer.accelerator.is_main_process:
            is_alarmed = self._look(logs)
        self._trainer._metrics["train"][PHASE_METRIC] = [float(self._phases.phase)]
        if self._on_alarm == "stop" and self._any(is_alarmed):
            self._trainer.control.should_training_stop = True

    def _look(self, logs: Mapping[str, Any]) -> bool:
        """Update the phases, tell what changed, and say whether there was an alarm."""
        series = {**_means(self._trainer._metrics["train"]), **logs}
        for name, theirs in _NAMES.items():
            if theirs in series:
                series.setdefault(name, series[theirs])
        events = self._phases.update(self._trainer.state.global_step, series)
        for event in events:
            self._tell(event)
        return any(event.kind == "alarm" for event in events)

    def _tell(self, event: Event) -> None:
        self.events.append(event)
        if event.kind != "phase":
            stops = self._on_alarm == "stop" and event.kind == "alarm"
            logger.log(
                _LEVELS[event.severity],
                "LLDS, step %d: %s%s",
                event.step,
                event.text,
                " Training stops, as on_alarm says." if stops else "",
            )
        if self.writes_events:
            folder = Path(self._trainer.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / EVENTS_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"time": round(time.time(), 3), **event.as_dict()}) + "\n")
        for hook in self.hooks:
            hook(event)

    def _any(self, flag: bool) -> bool:
        accelerator = self._trainer.accelerator
        return bool(accelerator.gather(torch.tensor([flag], device=accelerator.device)).any())

    def save(self, folder: str) -> None:
        """Write what the monitor remembers into a checkpoint folder, on the main process."""
        if self._on_alarm != "ignore" and self._trainer.accelerator.is_main_process:
            atomic_write_text(Path(folder, MONITOR_FILE), json.dumps(self._phases.state_dict()))

    def load(self, folder: str) -> None:
        """Go on with what a checkpoint remembers; without that, start anew and say so."""
        path = Path(folder, MONITOR_FILE)
        self._phases, self.events, self._is_loaded = PhaseMonitor(), [], True
        if self._on_alarm == "ignore" or not self._trainer.accelerator.is_main_process:
            return
        try:
            self._phases.load_state_dict(json.loads(path.read_text("utf-8")))
        except FileNotFoundError:
            logger.warning("LLDS: the checkpoint has no %s; the monitor starts anew.", MONITOR_FILE)
        except (LLDSError, KeyError, TypeError, ValueError) as error:
            self._phases = PhaseMonitor()
            logger.warning("LLDS: %s can't be used (%s); the monitor starts anew.", path, error)


def _means(metrics: Mapping[str, list[float]]) -> dict[str, float]:
    """Return what TRL will log of its metrics: the mean of each since the last log, without NaN."""
    found = {}
    for name, values in metrics.items():
        known = [value for value in values if value is not None and not math.isnan(value)]
        if known:
            found[name] = sum(known) / len(known)
    return found
