"""The canonical series of a log, and how the engines call them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from llds.dynamics.vocabulary import LOG_PREFIX
from llds.dynamics.vocabulary import SERIES as DYNAMICS


@dataclass(frozen=True)
class LogSeries:
    """A series that a log may hold.

    ``keys``: what engines call it, most exact first; ``*`` stands for any text, and where several keys match
    their mean is taken.
    """

    name: str
    unit: str
    meaning: str
    keys: tuple[str, ...] = ()


def _row(name: str, unit: str, meaning: str, *keys: str) -> LogSeries:
    return LogSeries(name, unit, meaning, keys)


_ROWS = (
    _row(
        *(
            "reward",
            "reward",
            "mean reward of the sampled responses",
            "critic/score/mean",
            "critic/rewards/mean",
        ),
        *("reward", "rewards/mean", "reward/mean", "reward_mean", "mean_reward", "rollout/reward", "score"),
        *("env/reward", "rollout/raw_reward", "reward/avg_raw_reward", "avg_reward", "train/reward_mean"),
    ),
    _row("reward_std", "reward", "spread of reward", "reward_std", "critic/score/std", "rewards/std"),
    _row(
        *(
            "validation",
            "reward",
            "figure of merit on held-out questions",
            "val-core/*/mean@*",
            "val/test_score/*",
        ),
        *(
            "val-core/*",
            "eval_reward",
            "eval/reward",
            "eval_score",
            "validation/accuracy",
            "eval/all/avg_score",
            "val-aux/*/reward/mean@*",
            "val-aux/*/score/mean@*",
        ),
    ),
    _row(
        *("zero_signal", "share", "share of groups whose responses all got the same reward"),
        *("frac_reward_zero_std", "groups_without_signal"),
    ),
    _row(
        *(
            "response_tokens",
            "tokens/response",
            "length of a response, tool feedback included where it counts",
        ),
        *("response_length/mean", "completions/mean_length", "completion_length", "action_tokens"),
        *("response_length", "generate/avg_num_tokens", "rollout/response_len/mean", "mean_response_length"),
    ),
    _row(
        *(
            "response_tokens_max",
            "tokens",
            "longest response",
            "response_length/max",
            "completions/max_length",
        ),
        *("action_tokens_max", "max_response_length"),
    ),
    _row(
        *(
            "response_tokens_min",
            "tokens",
            "shortest response",
            "response_length/min",
            "completions/min_length",
        ),
        *("action_tokens_min",),
    ),
    _row(
        *("truncated", "share", "share of responses cut off at the limit", "response_length/clip_ratio"),
        *("completions/clipped_ratio", "cut_off", "truncated_ratio", "rollout/truncated_ratio"),
    ),
    _row("aborted", "share", "share of responses that were given up", "response/aborted_ratio"),
    _row("prompt_tokens", "tokens/prompt", "length of a prompt", "prompt_length/mean"),
    _row(
        *("turns", "turns/response", "turns of a response (all roles in verl, actions elsewhere)"),
        *("num_turns/mean", "turns", "env/number_of_actions/mean", "num_turns", "num_turns_mean"),
    ),
    _row(
        *("searches", "calls/response", "tool calls of a response", "rollout/tool_calls_avg", "searches"),
        *("tools/call_frequency", "env/number_of_valid_search", "tool_calls/mean", "tool_calls_avg"),
    ),
    _row(
        *("tool_success", "share", "share of tool calls that worked", "rollout/tool_success_rate"),
        *("valid_search_share", "tool_success_rate", "env/ratio_of_valid_action"),
    ),
    _row("tool_failed", "episodes", "episodes whose tool failed", "tool/failed_episodes"),
    _row(
        *("entropy", "nats/token", "entropy of the policy", "actor/entropy", "actor/entropy_loss", "entropy"),
        *("policy/entropy", "llds/policy_entropy", "policy_entropy", "entropy/mean"),
    ),
    _row(
        *("grad_norm", "1", "norm of the gradient before clipping", "actor/grad_norm", "grad_norm"),
        *("policy/grad_norm", "raw_grad_norm", "gradient_norm"),
    ),
    _row("learning_rate", "1", "learning rate", "actor/lr", "learning_rate", "policy/lr", "lr"),
    _row("loss", "1", "whole loss; near 0 by construction in GRPO", "actor/loss", "loss"),
    _row(
        "policy_loss",
        "1",
        "policy-gradient loss alone",
        "actor/pg_loss",
        "policy_loss",
        "policy/loss",
        "pg_loss",
    ),
    _row(
        *("kl_ref", "nats/token", "distance to the frozen reference policy", "actor/kl_loss"),
        *("actor/reward_kl_penalty", "critic/kl", "kl", "objective/kl", "kl_loss", "policy/kl_loss"),
    ),
    _row(
        *(
            "kl_old",
            "nats/token",
            "distance to the policy that sampled",
            "actor/ppo_kl",
            "policy/approxkl_avg",
        ),
        *("approx_kl", "ppo_kl"),
    ),
    _row(
        *("clip_share", "share", "share of tokens clipped", "actor/pg_clipfrac", "clip_ratio/region_mean"),
        *("clip_ratio", "clip_share", "clipfrac", "policy/clipfrac_avg", "ppo_clip_ratio"),
    ),
    _row("ratio_max", "1", "largest importance ratio", "actor/ratio_max", "policy/ratio_max"),
    _row("advantage_mean", "1", "mean advantage", "critic/advantages/mean"),
    _row("advantage_max", "1", "largest advantage", "critic/advantages/max"),
    _row("advantage_min", "1", "smallest advantage", "critic/advantages/min"),
    _row(
        "nll",
        "nats/token",
        "mean negative log-prob of the sampled tokens",
        "actor/nll",
        "nll",
        "actor/nll_loss",
    ),
    _row(
        *(
            "mismatch",
            "1",
            "distance between inference engine and trainer",
            "training/rollout_probs_diff_mean",
        ),
        *("sampling/sampling_logp_difference/mean", "rollout_corr/kl"),
    ),
    _row(
        *("generation_seconds", "s", "time of generation", "timing_s/gen", "timing_s/generate_sequences"),
        *("timing/generate", "generation_time"),
    ),
    _row(
        *(
            "tool_seconds",
            "s",
            "time of tool calls",
            "timing_s/agent_loop/tool_calls/mean",
            "timing_s/tool_calls",
        ),
    ),
    _row(
        *("step_seconds", "s", "time of a whole step", "timing_s/step", "perf/time_per_step", "step_time"),
        *("seconds", "timing/step_total"),
    ),
    _row("llds_loss", "1", "LLDS term as it was added", "llds/loss", "actor/llds/loss", "actor/llds_loss"),
    _row("llds_coef", "1", "λ", "llds/coef", "actor/llds/coef"),
    _row(
        *("structural_zero", "0 or 1", "1 where the penalty was zero by construction"),
        *("llds/structural_zero", "actor/llds/structural_zero"),
    ),
)
#: Name -> series. The series of :data:`llds.dynamics.SERIES` that LLDS logs are canonical too, by their names.
SERIES: Mapping[str, LogSeries] = {
    **{
        name: LogSeries(name, one.unit, one.meaning, (one.key, f"actor/{one.key}"))
        for name, one in DYNAMICS.items()
        if one.source != "trainer" and name != "policy_entropy"
    },
    **{row.name: row for row in _ROWS},
}

#: What the keys of a step are called, most exact first.
STEP_KEYS = (
    *("step", "global_step", "training/global_step", "train/global_step", "_step", "trainer/global_step"),
    *("global_step/max_steps", "iteration", "iter", "update", "Step", "steps"),
)
_PREFIXES = ("train/", "training/")


def canonical_names(keys: Iterable[str]) -> dict[str, list[str]]:
    """Say which keys of a log are which series: name -> its keys, one unless a ``*`` matched several.

    Every key is taken once, by the first series and pattern that wants it.
    """
    known = list(keys)
    plain = {key: key for key in known}
    for key in known:
        for prefix in _PREFIXES:
            if key.startswith(prefix):
                plain.setdefault(key.removeprefix(prefix), key)
    found: dict[str, list[str]] = {}
    taken: set[str] = set()
    for name, series in SERIES.items():
        for pattern in (name, *series.keys):
            matching = [key for key in _matching(pattern, plain) if key not in taken]
            if matching:
                found[name] = matching
                taken.update(matching)
                break
    return found


def _matching(pattern: str, plain: Mapping[str, str]) -> list[str]:
    if "*" not in pattern:
        return [plain[pattern]] if pattern in plain else []
    expression = re.compile(".*".join(re.escape(part) for part in pattern.split("*")))
    return [key for short, key in plain.items() if expression.fullmatch(short)]


def averaging_note(key: str) -> str:
    """Return in words over what an engine averages a key, where that is not what the name says."""
    if key.startswith("actor/") and not key.startswith(f"actor/{LOG_PREFIX}"):
        return "verl takes the plain mean over micro-batches of masked means"
    return ""
