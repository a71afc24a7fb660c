"""Everything that can be said of stored series, as Markdown and pictures. Nothing is typed in by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llds.errors import LLDSError
from llds.evaluation.statistics import Estimate
from llds.files import atomic_write_text
from llds.lab import figures
from llds.lab.analysis import (
    SIGNALS,
    WINDOWS,
    Roc,
    Summary,
    judge,
    monitor_point,
    paired,
    roc,
    summarise,
    windows,
)
from llds.lab.arms import ARMS
from llds.lab.regimes import ABLATIONS, REGIMES, Regime
from llds.lab.series import Store, StoredRun
from llds.training.records import read_lines

#: Arms in the main figure, as far as they are there.
MAIN_ARMS = ("grpo", "llds", "llds-anchor", "kl100", "llds+kl100")
#: Ablations in which more arms than plain GRPO are worth a table.
SEVERAL_ARMS = ("low-lr", "slow", "long")
#: Mark of a block -> the picture above it, and its caption.
_SHOWN_IN = {
    **{f"findings {name}": (f"lab_{name}", f"Series of the main arms, regime {name}") for name in REGIMES},
    **{
        f"results {name}": (f"lab_{name}_arms", f"Final reward of every arm, regime {name}")
        for name in REGIMES
    },
    "ablations": ("lab_ablations", "Final reward of plain GRPO with one property changed"),
    "roc": ("lab_roc", "ROC of every signal"),
}
#: What stands where there is nothing to show.
_NOTHING = "There are not enough runs for this in the series yet; `llds lab sweep` makes them.\n"
#: What was tried before the regimes were fixed, beside the folder of the series.
SEARCH_RECORD = "search.jsonl"
#: Runs of either kind that a ROC needs.
_LEAST_RUNS = 5

Runs = Mapping[str, Sequence[StoredRun]]


def write_report(store: Store, page: Path) -> list[Path]:
    """Write tables into ``page`` and pictures beside it, in ``figures/``; return what was written.

    A page that is there keeps what stands outside the marked blocks; a new one gets all blocks. Raises
    ``LLDSError`` when nothing is stored, or the page lacks the end of a block.
    """
    runs = read_all(store)
    if not runs:
        raise LLDSError(f"{store.folder} holds no series; make some with `llds lab sweep`.")
    pictures = all_figures(runs)
    written = []
    for name, picture in pictures.items():
        path = page.parent / "figures" / f"{name}.svg"
        atomic_write_text(path, picture)
        written.append(path)
    blocks = all_tables(runs)
    record = store.folder.parent / SEARCH_RECORD
    if record.exists():
        blocks["search"] = search_table(read_lines(record))
    for mark, (name, caption) in _SHOWN_IN.items():
        if name in pictures:
            blocks[mark] = f"![{caption}](figures/{name}.svg)\n\n{blocks[mark]}"
    content = page.read_text("utf-8") if page.exists() else _new_page(blocks)
    for mark, block in blocks.items():
        content = replaced(content, mark, block, page)
    atomic_write_text(page, content)
    return [*written, page]


def read_all(store: Store) -> dict[str, Runs]:
    """Return all stored runs: regime -> arm -> runs, in the order in which they are shown."""
    found = set(store.names())
    orders = [name for name in (*REGIMES, *ABLATIONS) if any(regime == name for regime, _ in found)]
    return {
        regime: {arm: store.read(regime, arm) for arm in ARMS if (regime, arm) in found} for regime in orders
    }


def replaced(page: str, mark: str, content: str, path: Path) -> str:
    """Return ``page`` with ``content`` between the comments named by ``mark``, if it has them."""
    start, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
    if start not in page:
        return page
    before, _, rest = page.partition(start)
    _, found, after = rest.partition(end)
    if not found:
        raise LLDSError(f"{path} has '{start.strip()}' but no '{end}' after it; restore the line.")
    return before + start + content + end + after


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in lines)


# --- tables


def all_tables(runs: Mapping[str, Runs]) -> dict[str, str]:
    """Return every block of the page by its mark."""
    blocks = {"regimes": regimes_table(), "arms": arms_table()}
    for regime in REGIMES:
        arms = runs.get(regime, {})
        makers = (
            ("findings", findings),
            ("phases", phases_table),
            ("anatomy", anatomy),
            ("why", why_table),
            ("results", results_table),
        )
        blocks |= {f"{name} {regime}": maker(arms) if arms else _NOTHING for name, maker in makers}
    for regime in SEVERAL_ARMS:
        blocks[f"results {regime}"] = results_table(runs[regime]) if regime in runs else _NOTHING
    is_ablated = any(name in runs for name in ABLATIONS)
    blocks["ablations"] = ablations_table(runs) if is_ablated else _NOTHING
    rocs = all_rocs(runs)
    blocks["roc"] = _NOTHING if rocs is None else roc_table(rocs)
    blocks["coverage"] = coverage(runs)
    return blocks


def search_table(tried: Sequence[Mapping[str, Any]]) -> str:
    """Return what was tried to find the regimes: one run a line, in the order in which they were made."""
    head = (
        "arm",
        "organism",
        "wrong demonstrations",
        "noise",
        "lr",
        "warm-up",
        "seed",
        "mean reward, by ten rollouts",
    )
    rows = [
        (
            f"`{one['arm']}`",
            one["body"],
            f"{one['wrong']:.0%}",
            f"{one['noise']:g}",
            f"{one['lr']:g}",
            f"{one['warmup']}",
            f"{one['seed']}",
            ", ".join(f"{reward:.2f}".removeprefix("0") for reward in one["reward"]),
        )
        for one in tried
    ]
    return f"{len(rows)} runs.\n\n" + table(head, rows)


def regimes_table() -> str:
    """Return what is fixed in each regime."""
    head = (
        "regime",
        "what it is",
        "lr",
        "noise",
        "responses a rollout",
        "updates a rollout",
        "rollouts",
        "wrong demonstrations",
    )
    return table(head, (_regime_row(name, regime) for name, regime in {**REGIMES, **ABLATIONS}.items()))


def _regime_row(name: str, regime: Regime) -> tuple[str, ...]:
    return (
        f"`{name}`",
        regime.about,
        f"{regime.lr:g}",
        f"{regime.task.noise:g}",
        f"{regime.questions} × {regime.group_size}",
        str(regime.updates),
        str(regime.rollouts),
        f"{regime.start.wrong:.0%}",
    )


def arms_table() -> str:
    """Return what each arm is, by what differs from plain GRPO."""
    rows = []
    for name, arm in ARMS.items():
        settings = ", ".join(f"{key} = {value}" for key, value in arm.settings().items())
        rows.append((f"`{name}`", arm.about, settings or "kl = 0.001"))
    return table(("arm", "what it is", "settings that differ"), rows)


def findings(arms: Runs) -> str:
    """Return what the runs of one regime say, in sentences."""
    summaries = {name: summarise(runs) for name, runs in arms.items()}
    lines = [f"- {_fate_told(name, summaries[name])}" for name in MAIN_ARMS if name in summaries]
    plain = arms.get("grpo", [])
    differences = {name: paired(plain, runs) for name, runs in arms.items() if name != "grpo"}
    sure = {name: one for name, one in differences.items() if one is not None and one.count >= _LEAST_RUNS}
    better = [name for name, one in sure.items() if one.low > 0]
    worse = [name for name, one in sure.items() if one.high < 0]
    if sure:
        rest = [name for name in sure if name not in (*better, *worse)]
        lines.append(
            f"- Of the arms with {_LEAST_RUNS} seeds or more in common with plain GRPO, the interval of the "
            f"difference in final reward lies above 0 for {_listed(better)}, below 0 for {_listed(worse)}, and "
            f"holds 0 for {_listed(rest)}."
        )
    ranked = sorted(summaries, key=lambda name: -summaries[name].final.value)
    known = [name for name in ranked if summaries[name].runs >= _LEAST_RUNS]
    if len(known) > 1:
        lines.append(f"- Highest final reward among those with {_LEAST_RUNS} seeds or more: `{known[0]}`.")
    for first, second in (("kl100", "llds"), ("kl100", "llds+kl100"), ("half-lr", "llds")):
        difference = paired(arms.get(first, []), arms.get(second, []))
        if difference is not None:
            lines.append(
                f"- `{second}` less `{first}`, final reward, {difference.count} seeds: {_interval(difference, '+.3f')}."
            )
    return "\n".join(lines) + "\n"


def _fate_told(name: str, summary: Summary) -> str:
    dead = round(summary.collapsed.value * summary.runs)
    gradual = f", {summary.gradual} of them gradually" if dead else ""
    drop = "" if summary.drop is None else f", losing half at rollout {summary.drop:.0f} (median)"
    return (
        f"`{name}`: {dead} of {summary.runs} collapsed{gradual}{drop}; final reward {_interval(summary.final)}, "
        f"best {summary.best.value:.3f}."
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def results_table(arms: Runs) -> str:
    """Return how the arms of one regime did, best final reward first."""
    summaries = {name: summarise(runs) for name, runs in arms.items()}
    plain = arms.get("grpo", [])
    head = (
        "arm", "seeds", "final reward", "against GRPO", "best reward", "collapsed", "faded", "dipped", "drop at",
        "phase II at", "phase III at", "displacement", "searches at the end", "CPU s a run",
    )  # fmt: skip
    ordered = sorted(summaries, key=lambda name: -summaries[name].final.value)
    return table(head, (_result_row(name, summaries[name], paired(plain, arms[name])) for name in ordered))


def _result_row(name: str, summary: Summary, difference: Estimate | None) -> tuple[str, ...]:
    collapsed = summary.collapsed
    return (
        f"`{name}`",
        str(summary.runs),
        _interval(summary.final),
        "" if difference is None or name == "grpo" else _interval(difference, "+.3f"),
        _interval(summary.best),
        f"{round(collapsed.value * summary.runs)} of {summary.runs} ({collapsed.low:.0%} to {collapsed.high:.0%})",
        str(summary.faded),
        str(summary.dipped),
        _number(summary.drop, ".0f"),
        _number(summary.phase_two, ".0f"),
        _number(summary.phase_three, ".0f"),
        _number(summary.displacement, ".4f"),
        f"{summary.searches:.2f}",
        f"{summary.cpu_seconds:.0f}",
    )


#: Arms that hold or spare one thing at a time, and the series that tell what that did.
_ONE_THING = (
    "grpo", "llds", "llds-ref", "spare-prefix", "spare-wrong", "kl100-preserved", "kl100-wrong", "kl100", "half-lr",
)  # fmt: skip
_TELLING = (
    ("displacement_correct", "displacement of correct", "+.4f"),
    ("displacement_wrong", "displacement of wrong", "+.4f"),
    ("kl", "KL to the start", ".3f"),
    ("policy_entropy", "entropy", ".3f"),
    ("nll_round_1", "NLL after feedback", ".3f"),
)


def why_table(arms: Runs) -> str:
    """Return what each of the arms that change one thing did while plain GRPO went down, and where it ended.

    The series are means over seeds and the ten rollouts before the median drop of plain GRPO.
    """
    drop = summarise(arms["grpo"]).drop if arms.get("grpo") else None
    if drop is None:
        return _NOTHING
    window = slice(max(0, int(drop) - 10), int(drop))
    rows = []
    for name in (one for one in _ONE_THING if one in arms):
        summary = summarise(arms[name])
        means = (np.nanmean([run[series][window] for run in arms[name]]) for series, _, _ in _TELLING)
        told = (f"{mean:{form}}" for mean, (_, _, form) in zip(means, _TELLING, strict=True))
        collapsed = f"{round(summary.collapsed.value * summary.runs)} of {summary.runs}"
        rows.append((f"`{name}`", *told, _interval(summary.final), collapsed))
    head = ("arm", *(heading for _, heading, _ in _TELLING), "final reward", "collapsed")
    return f"Series: rollouts {window.start} to {window.stop - 1}.\n\n" + table(head, rows)


#: Series in the table of phases: name, heading, how the number is written.
_IN_PHASES = (
    ("reward", "reward", ".3f"),
    ("logprob_correct", "log-prob of correct", ".3f"),
    ("displacement_correct", "displacement of correct", "+.4f"),
    ("displacement_wrong", "displacement of wrong", "+.4f"),
    ("lld_responses_correct", "correct responses displaced", ".0%"),
    ("hidden_similarity", "cosine of hidden states", ".3f"),
    ("policy_entropy", "entropy", ".3f"),
    ("grad_norm", "gradient norm", ".2f"),
    ("searches", "searches", ".2f"),
    ("action_tokens", "tokens", ".1f"),
    ("nll_round_0", "NLL before feedback", ".3f"),
    ("nll_round_2", "NLL after two rounds", ".3f"),
    ("first_search_shared", "wrong with a right first search", ".0%"),
)


def phases_table(arms: Runs) -> str:
    """Return what the series of plain GRPO were on the way to collapse, means over seeds and ten rollouts."""
    runs = [run for run in arms.get("grpo", []) if judge(run).drop is not None]
    if not runs:
        return _NOTHING
    rows = []
    for name, heading, form in _IN_PHASES:
        found = [windows(run, name) for run in runs]
        means = (np.nanmean([one[window] for one in found]) for window in WINDOWS)
        rows.append((heading, *(f"{mean:{form}}" for mean in means)))
    return table(("series", *WINDOWS), rows)


def anatomy(arms: Runs) -> str:
    """Return how plain GRPO collapsed in a regime, seed by seed."""
    head = (
        "seed", "start", "best", "final", "fate", "drop at", "searches kept", "tokens kept", "gradual",
        "alarm at", "onset told", "phase II at", "phase III at",
    )  # fmt: skip
    rows = []
    for run in arms.get("grpo", []):
        one = judge(run)
        kept = ("", "") if one.kept is None else tuple(f"{share:.0%}" for share in one.kept)
        places = (one.alarm, one.onset, one.phase_two, one.phase_three)
        rows.append(
            (
                str(one.seed),
                f"{one.start:.3f}",
                f"{one.best:.3f}",
                f"{one.final:.3f}",
                one.fate,
                _number(one.drop, "d"),
                *kept,
                "yes" if one.is_gradual else "no",
                *(_number(place, "d") for place in places),
            )
        )
    return table(head, rows)


def ablations_table(runs: Mapping[str, Runs]) -> str:
    """Return what plain GRPO does when one property of the far regime is changed."""
    rows = []
    for name in ("far", *ABLATIONS):
        arms = runs.get(name, {})
        if arms.get("grpo"):
            about = REGIMES["far"].about if name == "far" else ABLATIONS[name].about
            rows.append(_ablation_row(f"`{name}`", about, summarise(arms["grpo"])))
    if runs.get("far", {}).get("spare-prefix"):
        rows.append(
            _ablation_row(
                "`spare-prefix` (arm)", ARMS["spare-prefix"].about, summarise(runs["far"]["spare-prefix"])
            )
        )
    head = (
        "regime",
        "what differs from far",
        "seeds",
        "start",
        "best",
        "final",
        "collapsed",
        "gradual",
        "drop at",
    )
    return table(head, rows)


def _ablation_row(name: str, about: str, summary: Summary) -> tuple[str, ...]:
    return (
        name,
        about,
        str(summary.runs),
        f"{summary.start.value:.3f}",
        f"{summary.best.value:.3f}",
        _interval(summary.final),
        f"{round(summary.collapsed.value * summary.runs)} of {summary.runs}",
        str(summary.gradual),
        _number(summary.drop, ".0f"),
    )


@dataclass(frozen=True)
class Signals:
    """Which signal knew first: the ROC of each, and the monitor's points by what counts as its alarm."""

    rocs: Sequence[Roc]
    monitor: Mapping[str, tuple[float, float, float]]
    collapsed: int
    held: int


def all_rocs(runs: Mapping[str, Runs]) -> Signals | None:
    """Return the ROC of every signal over all runs; None while there are too few runs of either kind."""
    every = [run for arms in runs.values() for arm in arms.values() for run in arm]
    collapsed = [run for run in every if judge(run).drop is not None]
    held = [run for run in every if judge(run).fate == "held"]
    if min(len(collapsed), len(held)) < _LEAST_RUNS:
        return None
    points = {which: monitor_point(collapsed, held, which) for which in ("alarm", "critical")}
    return Signals([roc(signal, collapsed, held) for signal in SIGNALS], points, len(collapsed), len(held))


def roc_table(signals: Signals) -> str:
    """Return area, lead and catch of every signal."""
    head = (
        "signal",
        "area under the ROC",
        "with even exposure",
        "caught in time, ≤ 10 % false alarms",
        "median lead there, rollouts",
    )
    rows = [
        (one.signal, f"{one.area:.2f}", f"{one.even:.2f}", f"{one.caught:.0%}", f"{one.lead:.0f}")
        for one in sorted(signals.rocs, key=lambda one: -one.area)
    ]
    told = [f"{signals.collapsed} collapsed runs, {signals.held} runs that held."]
    for which, name in (("alarm", "any alarm"), ("critical", "critical alarms alone")):
        false, caught, lead = signals.monitor[which]
        told.append(
            f"The phase monitor as it stands, {name}: {caught:.0%} caught in time with a median lead of {lead:.0f} "
            f"rollouts, {false:.0%} false alarms."
        )
    return " ".join(told) + "\n\n" + table(head, rows)


def coverage(runs: Mapping[str, Runs]) -> str:
    """Return which runs are stored, and what they cost."""
    every = [run for arms in runs.values() for one in arms.values() for run in one]
    hours = sum(run.cpu_seconds for run in every) / 3600
    lines = [f"{len(every)} runs, {hours:.2f} CPU hours.\n\n"]
    rows = [
        (f"`{regime}`", ", ".join(f"`{arm}` {len(one)}" for arm, one in arms.items()))
        for regime, arms in runs.items()
    ]
    return "".join(lines) + table(("regime", "arms and their seeds"), rows)


def _interval(estimate: Estimate, form: str = ".3f") -> str:
    return f"{estimate.value:{form}} ({estimate.low:{form}} to {estimate.high:{form}})"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


# --- pictures


def all_figures(runs: Mapping[str, Runs]) -> dict[str, str]:
    """Return every picture by its name."""
    pictures = {}
    for regime in REGIMES:
        arms = runs.get(regime, {})
        main = {arm: arms[arm] for arm in MAIN_ARMS if arm in arms}
        if main:
            pictures[f"lab_{regime}"] = figures.curves(f"Regime {regime}: {REGIMES[regime].about}", main)
        if len(arms) > 1:
            pictures[f"lab_{regime}_arms"] = _forest(f"Final reward, regime {regime}", arms)
    ablated = {name: runs[name]["grpo"] for name in ("far", *ABLATIONS) if runs.get(name, {}).get("grpo")}
    if len(ablated) > 1:
        pictures["lab_ablations"] = _forest("Final reward of plain GRPO, one property changed", ablated)
    rocs = all_rocs(runs)
    if rocs is not None:
        pictures["lab_roc"] = figures.roc_curves(
            "Which signal knows first? Area under the ROC", rocs.rocs, rocs.monitor["alarm"][:2]
        )
    return pictures


def _forest(title: str, arms: Runs) -> str:
    content = {name: (summarise(one), [judge(run).final for run in one]) for name, one in arms.items()}
    return figures.forest(title, dict(sorted(content.items(), key=lambda item: -item[1][0].final.value)))


def _new_page(blocks: Mapping[str, str]) -> str:
    parts = [f"## {mark.capitalize()}\n\n<!-- {mark} -->\n<!-- end of {mark} -->\n" for mark in blocks]
    return "\n".join(["# Report of the collapse laboratory\n", *parts])
