"""The canonical series of a log, and how the engines call them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LogSeries:
    """A series that a log may hold: its unit and meaning."""

    name: str
    unit: str
    meaning: str


_ROWS = (
    ("reward", "reward", "mean reward of the sampled responses"),
    ("reward_std", "reward", "spread of reward within a group or a batch"),
    ("validation", "reward", "figure of merit on held-out questions, where it was measured"),
    ("zero_signal", "share", "share of groups whose responses all got the same reward"),
    (
        "response_tokens",
        "tokens/response",
        "length of a response, tool feedback included where the engine does",
    ),
    ("response_tokens_max", "tokens", "longest response"),
    ("response_tokens_min", "tokens", "shortest response"),
    ("truncated", "share", "share of responses cut off at the limit"),
    ("aborted", "share", "share of responses that were given up"),
    ("prompt_tokens", "tokens/prompt", "length of a prompt"),
    ("turns", "turns/response", "turns of a response (all roles, as verl counts, or actions)"),
    ("searches", "calls/response", "tool calls of a response"),
    ("tool_success", "share", "share of tool calls that worked"),
    ("tool_failed", "episodes", "episodes whose tool failed"),
    ("entropy", "nats/token", "entropy of the policy"),
    ("grad_norm", "1", "norm of the gradient before clipping"),
    ("learning_rate", "1", "learning rate"),
    ("loss", "1", "whole loss; near 0 by construction in GRPO"),
    ("policy_loss", "1", "policy-gradient loss alone"),
    ("kl_ref", "nats/token", "distance to the frozen reference policy"),
    ("kl_old", "nats/token", "distance to the policy that sampled"),
    ("clip_share", "share", "share of tokens clipped"),
    ("ratio_max", "1", "largest importance ratio"),
    ("advantage_mean", "1", "mean advantage"),
    ("advantage_max", "1", "largest advantage"),
    ("advantage_min", "1", "smallest advantage"),
    ("nll", "nats/token", "mean negative log-prob of the sampled tokens"),
    ("mismatch", "1", "distance between the probabilities of the inference engine and the trainer"),
    ("generation_seconds", "s", "time of generation"),
    ("tool_seconds", "s", "time of tool calls"),
    ("step_seconds", "s", "time of a whole step"),
    ("llds_loss", "1", "LLDS term as it was added"),
    ("llds_coef", "1", "λ"),
)
#: Name → series. The series of :data:`llds.dynamics.SERIES` are canonical as well, under their own names.
SERIES: Mapping[str, LogSeries] = {row[0]: LogSeries(*row) for row in _ROWS}
