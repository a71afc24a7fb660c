"""What is said in the console before Ray starts: can the penalty act under this configuration?

A hydra callback, which ``+llds@_global_=default`` puts into ``hydra.callbacks``: it sees the whole configuration, once,
in the process that was started.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llds.engines.verl.config import check_mode
from llds.engines.verl.options import LLDSOptions
from llds.engines.verl.plugin import DEFAULT_BASE
from llds.errors import LLDSError
from llds.preflight import Report, Setup, check_setup
from llds.preflight.verl import setup_of_verl


class LLDSPreflight(Callback):
    """Prints the verdict; ends the command for settings that can't be meant, and for a certain fault where
    ``llds_preflight=stop``.
    """

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Look at the configuration of a run; hydra calls it before the command's own code."""
        plain = _plain(config)
        # hydra makes a warning of an exception here, so what is to stop has to leave by another door.
        try:
            settings = _policy_loss(plain)
            options = LLDSOptions.of(settings)
            check_mode(settings.get("loss_mode", DEFAULT_BASE), options)
            text, report = verdict(plain)
        except LLDSError as error:
            raise SystemExit(f"LLDS: {error}") from None
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        if report.certain and options.preflight == "stop":
            raise SystemExit("LLDS: stopped before training, since llds_preflight=stop.")


def verdict(config: Mapping[str, Any]) -> tuple[str, Report]:
    """Return what to say of a whole verl configuration, as text, and the findings behind it."""
    setup = setup_of_verl(config)
    report = check_setup(setup)
    lines = [f"LLDS: {_state(setup, report)}"]
    lines += [one.text for one in report.findings]
    lines += ["" if report.findings else f"No fault found; looked for {', '.join(report.checked)}."]
    return "\n".join(line for line in lines if line), report


def _state(setup: Setup, report: Report) -> str:
    """Return in one sentence whether the penalty can act."""
    faults = {one.fault for one in report.certain}
    if not setup.coef:
        return "off (llds_coef=0): its metrics are measured, nothing is added to the loss."
    if "L9" in faults:
        return "nothing calls the penalty in this configuration."
    if "L1" in faults:
        return "STRUCTURAL ZERO. The penalty cannot act in any optimizer step."
    if setup.baseline == "reference":
        return "live once the policy has left the reference."
    if setup.old_from_inference:
        return "live in every step, on drift and on the difference between inference engine and trainer."
    steps = setup.steps_per_rollout
    if steps is None or steps.denominator != 1:
        return "on; how many optimizer steps a rollout gets can't be told from this configuration."
    return (
        f"live in {steps - 1} of {steps} optimizer steps of each rollout; in the first one old and new policy are "
        "the same (llds/structural_zero says when)."
    )


def _plain(config: DictConfig) -> dict[str, Any]:
    """Return the configuration without hydra's part as plain values; what can't be resolved stays a reference."""
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    # A copy has lost what references into hydra's part stand for, and verl resolves them later anyway.
    try:
        plain = OmegaConf.to_container(own, resolve=True)
    except OmegaConfBaseException:
        plain = OmegaConf.to_container(own, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _policy_loss(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Any = config
    for name in ("actor_rollout_ref", "actor", "policy_loss"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}
