"""Every series by name: what it is, its unit, its equation. The one table that all other rooms read.

Symbols: d = log π_old − log π_new of a token, A the advantage of its response, Δ = −Σ d over the tokens of an
action or a response. "Correct", "neutral" and "wrong" are the responses with A > 0, A = 0 and A < 0.
Equation, figure and definition numbers are those of arXiv 2512.04220 v2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from llds.dynamics.cells import ROUNDS, SIGNS, choose

#: Two families are independent measurements: one may be out of order while the other is not.
Family = Literal["likelihood", "reward", "entropy-gradient", "behaviour"]
#: Who measures a series: the accumulator, the one-update probe, the phase monitor, or the trainer itself.
Source = Literal["batch", "probe", "monitor", "trainer"]

#: What is summed per cell; see :func:`llds.dynamics.series.measure`.
FIELDS = (
    "tokens",
    "logprob",
    "displacement",
    "actions",
    "lld_actions",
    "open_actions",
    "responses",
    "lld_responses",
    "penalised_tokens",
    "penalty",
)
#: What is summed over a whole batch.
TOTALS = (
    "displacement_abs",
    "moved_tokens",
    "spiked_tokens",
    "entropy",
    "entropy_tokens",
    "fresh_displacement_abs",
    "fresh_tokens",
    "updates",
    "updates_responses",
    "first_search_shared",
    "first_search_compared",
    "nonfinite_tokens",
    "nonfinite_entropies",
    "dropped_responses",
    "empty_responses",
    "micro_batches",
)

#: Put before the name of a series in logs, unless the trainer logs it itself.
LOG_PREFIX = "llds/"


@dataclass(frozen=True)
class Quotient:
    """One sum divided by another; a plain sum when ``bottom`` is empty.

    ``top``, ``bottom``: names among :data:`FIELDS`, summed over ``cells``, or among :data:`TOTALS`.
    ``bottom_cells``: where ``bottom`` is summed, if elsewhere. ``scale``: factor on the value.
    """

    top: str
    bottom: str = ""
    cells: tuple[int, ...] = choose()
    bottom_cells: tuple[int, ...] | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class Series:
    """One series.

    ``healthy``, ``sick``: what it looks like in a run that learns, and in one on its way to collapse.
    ``quotient``: how it is read from the sums of a step, where it is measured on batches.
    """

    name: str
    unit: str
    meaning: str
    equation: str
    healthy: str
    sick: str
    source: Source = "batch"
    family: Family | None = None
    quotient: Quotient | None = None

    @property
    def key(self) -> str:
        """The name under which it is logged."""
        return self.name if self.source == "trainer" else LOG_PREFIX + self.name


_CONDITION = {"correct": "A > 0", "neutral": "A = 0", "wrong": "A < 0"}
_PARTS = {
    "": "",
    "_first": " in the first action",
    "_second": " in the second action",
    "_later": " in the third action and later",
    "_answer": " in the answer span",
}
_PART_ROUNDS = {"_first": ROUNDS[:1], "_second": ROUNDS[1:2], "_later": ROUNDS[2:]}
_PRESERVED = choose(("correct", "neutral"))
_LOGPROB_LOOKS = {
    "correct": (
        "flat or rising; a dip while reward rises is exploration",
        "falls for tens of steps, then plunges",
    ),
    "neutral": ("goes the way of the correct ones", "falls too, though nothing pushes it"),
    "wrong": ("below the correct ones, falls slowly", "falls together with the correct ones"),
}
_DISPLACEMENT_LOOKS = {
    "correct": ("0 right after a rollout, then mostly below 0", "mostly above 0, more with every update"),
    "neutral": ("scatters round 0", "above 0"),
    "wrong": ("above 0: wrong responses are pushed down", "above 0 while the correct ones are too"),
}


def _likelihood() -> Iterator[Series]:
    for sign in SIGNS:
        for part, where in _PARTS.items():
            in_answer = True if part == "_answer" else None
            cells = choose((sign,), _PART_ROUNDS.get(part, ROUNDS), in_answer)
            over = f"over tokens with {_CONDITION[sign]}{where}"
            yield Series(
                f"logprob_{sign}{part}",
                "nats/token",
                f"mean log-prob of {sign} responses{where}, under the policy being trained",
                f"Σ log π_new / n {over}",
                *_LOGPROB_LOOKS[sign],
                family="likelihood",
                quotient=Quotient("logprob", "tokens", cells),
            )
            yield Series(
                f"displacement_{sign}{part}",
                "nats/token",
                f"what {sign} responses lost{where} since they were sampled; below 0: gained",
                f"Σ d / n {over}",
                *_DISPLACEMENT_LOOKS[sign],
                family="likelihood",
                quotient=Quotient("displacement", "tokens", cells),
            )


def _displaced() -> Iterator[Series]:
    looks = {
        "correct": ("well below one half", "one half and more, rising"),
        "neutral": ("about one half or less", "rising"),
        "wrong": ("one half and more", "no different"),
    }
    for sign in SIGNS:
        for unit in ("actions", "responses"):
            yield Series(
                f"lld_{unit}_{sign}",
                "share",
                f"share of the {unit} of {sign} responses whose log-prob changed by ε or less, ε = −0.01",
                f"#(Δ ≤ ε) / n over {unit} with {_CONDITION[sign]} (Def. 4.1)",
                *looks[sign],
                family="likelihood",
                quotient=Quotient(f"lld_{unit}", unit, choose((sign,))),
            )


def _regulariser() -> Iterator[Series]:
    yield Series(
        "gate_rate",
        "share",
        "share of the actions to preserve behind an open gate",
        "#(Σ d > 0) / n over actions with A ≥ 0 (Eq. 4)",
        "0 right after a rollout, then up to about one half",
        "near 1; or 0 in every step: it cannot fire",
        quotient=Quotient("open_actions", "actions", _PRESERVED),
    )
    yield Series(
        "preserved_share",
        "share",
        "share of the policy's tokens that belong to responses to preserve",
        "#(A ≥ 0) / n over tokens",
        "steady or rising with the success rate",
        "near 1 once every response fails: nothing is left to learn from",
        quotient=Quotient("tokens", "tokens", _PRESERVED, choose()),
    )
    yield Series(
        "penalised_share",
        "share",
        "share of the tokens to preserve that a penalty falls on",
        "#(gate open, d > 0) / n over tokens with A ≥ 0 (Eq. 4)",
        "small",
        "rising",
        quotient=Quotient("penalised_tokens", "tokens", _PRESERVED),
    )
    yield Series(
        "penalty",
        "nats/token",
        "penalty mass per token to preserve, before λ and answer weight",
        "Σ gate · max(0, d) / n over tokens with A ≥ 0 (Eq. 4)",
        "small against the mean log-prob",
        "rising",
        quotient=Quotient("penalty", "tokens", _PRESERVED),
    )


def _rounds() -> Iterator[Series]:
    for rounds in ROUNDS:
        more = " or more" if rounds == ROUNDS[-1] else ""
        yield Series(
            f"nll_round_{rounds}",
            "nats/token",
            f"mean negative log-prob of what was written after {rounds}{more} rounds of feedback",
            f"−Σ log π_new / n over tokens after {rounds}{more} rounds (Fig. 6)",
            "rises a little with the number of rounds",
            "late rounds rise first and fastest",
            quotient=Quotient("logprob", "tokens", choose(rounds=(rounds,)), scale=-1.0),
        )


def _whole() -> Iterator[Series]:
    yield Series(
        "first_search_shared",
        "share",
        "share of wrong responses whose first search found what that of a correct one of their group found",
        "#(same result) / n over wrong responses beside a correct one (Fig. 5)",
        "any; it says how much right conduct is punished with the wrong",
        "high: one half and more in the paper",
        quotient=Quotient("first_search_shared", "first_search_compared"),
    )
    yield Series(
        "ratio_spikes",
        "share",
        "share of tokens whose importance ratio left [1/ρ, ρ]; ρ = 2",
        "#(|d| > log ρ) / n over tokens",
        "0 or nearly so",
        "rising before the gradient does",
        quotient=Quotient("spiked_tokens", "tokens"),
    )
    yield Series(
        "displacement_abs",
        "nats/token",
        "mean distance that a token's log-prob moved since the rollout",
        "Σ |d| / n over tokens",
        "grows with the updates since the rollout, the same way each time",
        "grows from rollout to rollout",
        quotient=Quotient("displacement_abs", "tokens"),
    )
    yield Series(
        "moved_share",
        "share",
        "share of tokens that moved at all",
        "#(d ≠ 0) / n over tokens",
        "0 right after a rollout, then about 1",
        "0 in every step: old and new policy are the same, nothing can be seen or penalised",
        quotient=Quotient("moved_tokens", "tokens"),
    )
    yield Series(
        "noise_floor",
        "nats/token",
        "that distance in the first optimizer step after a rollout, where only rounding moves a token",
        "Σ |d| / n over tokens, where updates_since_rollout = 0",
        "0, or far below the later distances",
        "as large as them: dropout, other kernels, or another policy's log-probs",
        quotient=Quotient("fresh_displacement_abs", "fresh_tokens"),
    )
    yield Series(
        "policy_entropy",
        "nats/token",
        "mean entropy of the policy where it wrote a token",
        "Σ H / n over tokens",
        "falls, or humps while reward rises",
        "calm in phases I and II, surges in III",
        family="entropy-gradient",
        quotient=Quotient("entropy", "entropy_tokens"),
    )
    yield Series(
        "updates_since_rollout",
        "updates",
        "optimizer steps between sampling the responses and this one",
        "mean over responses",
        "0, 1, 2, … and again from 0",
        "0 in every step: see moved_share",
        quotient=Quotient("updates", "updates_responses"),
    )


def _counts() -> Iterator[Series]:
    steady, none, some = "steady", "0", "above 0: the other series speak of the rest only"
    rows = [
        (
            "tokens",
            "tokens",
            "tokens that the policy wrote and that count",
            steady,
            "jumps with response length",
        ),
        ("actions", "actions", "actions that count", steady, "falls: searching is given up"),
        ("nonfinite_tokens", "tokens", "policy tokens with a log-prob or advantage not finite", none, some),
        ("nonfinite_entropies", "tokens", "policy tokens with an entropy not finite", none, some),
        (
            "dropped_responses",
            "responses",
            "responses with a nonfinite token, left out as a whole",
            none,
            some,
        ),
        (
            "empty_responses",
            "responses",
            "padded rows without a token that the policy wrote",
            none,
            "above 0",
        ),
        ("micro_batches", "micro-batches", "micro-batches of the step, over all ranks", steady, "changes"),
    ]
    for name, unit, meaning, healthy, sick in rows:
        yield Series(name, unit, meaning, "count", healthy, sick, quotient=Quotient(name))
    looks = {
        "correct": ("steady or rising", "falls in phase III"),
        "neutral": (
            "groups of equal reward: few, more as questions are solved",
            "all, once every response fails",
        ),
        "wrong": ("steady or falling", "0, once every response fails"),
    }
    for sign in SIGNS:
        yield Series(
            f"responses_{sign}",
            "responses",
            f"responses with {_CONDITION[sign]}",
            "count",
            *looks[sign],
            quotient=Quotient("responses", cells=choose((sign,))),
        )


def _probed() -> Iterator[Series]:
    yield Series(
        "probe_gain_correct",
        "nats/response",
        "what correct responses of the probe set gain by one update from the current weights",
        "mean of log π_new − log π over correct responses (Eq. 3, Fig. 3a)",
        "above 0",
        "below 0",
        source="probe",
        family="likelihood",
    )
    yield Series(
        "probe_lld_responses",
        "share",
        "share of the probe set's correct responses whose log-prob changed by ε or less",
        "#(Δ ≤ ε) / n (Def. 4.1)",
        "well below one half",
        "one half and more",
        source="probe",
        family="likelihood",
    )
    yield Series(
        "hidden_similarity",
        "cosine",
        "likeness of correct and wrong responses inside the model, on the probe set",
        "cos(mean h of correct, mean h of wrong) (c of Def. A.3)",
        "any",
        "high while both kinds lose likelihood",
        source="probe",
    )
    yield Series(
        "probe_groups",
        "groups",
        "groups of the probe set with right and wrong responses; the others say nothing",
        "count",
        "most of the set",
        "falls: a question is always or never answered",
        source="probe",
    )


def _monitored() -> Iterator[Series]:
    yield Series(
        "phase",
        "phase",
        "−1 warm-up, 0 likelihood rises, 1 stagnation, 2 steady decay, 3 acceleration",
        "see Phases and alarms",
        "0 or 1",
        "2, then 3",
        source="monitor",
    )


def _trained() -> Iterator[Series]:
    grows, falls = "rises, then levels off", "still rises in phase II, falls in III"
    rows: list[tuple[str, str, str, Family | None, str, str]] = [
        ("reward", "reward", "mean reward of the sampled responses", "reward", grows, falls),
        ("exact_match", "share", "share of sampled responses with the right answer", "reward", grows, falls),
        (
            "entropy",
            "nats/token",
            "entropy as the trainer logs it",
            "entropy-gradient",
            "falls or humps",
            "surges",
        ),
        (
            "grad_norm",
            "1",
            "norm of the gradient before clipping",
            "entropy-gradient",
            "single spikes",
            "surges",
        ),
        ("searches", "searches/response", "searches asked for", "behaviour", "steady", "falls, late"),
        ("turns", "actions/response", "actions of a response", "behaviour", "steady", "falls, late"),
        ("action_tokens", "tokens/response", "tokens the policy wrote", "behaviour", "steady", "jumps, late"),
        ("kl", "nats/token", "distance to the frozen reference policy", None, "grows slowly", "surges, late"),
        ("learning_rate", "1", "learning rate", None, "as set", "as set"),
        ("loss", "1", "loss that was minimised", None, "round 0", "round 0: it tells nothing"),
    ]
    for name, unit, meaning, family, healthy, sick in rows:
        yield Series(name, unit, meaning, "as the trainer logs it", healthy, sick, "trainer", family)


_GROUPS = (_likelihood, _displaced, _regulariser, _rounds, _whole, _counts, _probed, _monitored, _trained)
#: Name -> series, in the order of the documentation.
SERIES: Mapping[str, Series] = {series.name: series for group in _GROUPS for series in group()}
