"""The paper's table (arXiv 2512.04220 v2), exact match, and the setup that its figures belong to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llds.data.benchmarks import BENCHMARKS

WIKI_18 = "wiki-18"
WIKI_18_PASSAGES = 21_015_324
_SETUP = {
    "protocol.topk": (3, "passages per search"),
    "limits.max_turns": (4, "turns with feedback"),
    "limits.max_action_tokens": (500, "tokens for an action"),
    "limits.max_observation_tokens": (500, "tokens for an observation"),
}


@dataclass(frozen=True)
class PaperRow:
    """One row: a model, how it was trained, and exact match by benchmark and by average."""

    model: str
    run: str
    exact_match: Mapping[str, float]


def _row(model: str, run: str, *figures: float) -> PaperRow:
    names = (
        "nq",
        "triviaqa",
        "popqa",
        "Gen",
        "hotpotqa",
        "2wikimultihopqa",
        "musique",
        "bamboogle",
        "MH",
        "Avg",
    )
    return PaperRow(model, run, dict(zip(names, figures, strict=True)))


PAPER_ROWS = (
    _row("Qwen2.5-3B", "GRPO", 0.421, 0.583, 0.413, 0.472, 0.297, 0.274, 0.066, 0.128, 0.191, 0.312),
    _row("Qwen2.5-3B", "GRPO + LLDS", 0.479, 0.627, 0.453, 0.520, 0.345, 0.323, 0.082, 0.210, 0.240, 0.360),
    _row(
        "Qwen2.5-3B", "GRPO + LLDS-MA", 0.483, 0.633, 0.474, 0.530, 0.452, 0.443, 0.197, 0.395, 0.372, 0.440
    ),
    _row("Qwen2.5-3B-Instruct", "GRPO", 0.397, 0.565, 0.391, 0.451, 0.331, 0.310, 0.124, 0.232, 0.249, 0.336),
    _row(
        "Qwen2.5-3B-Instruct",
        "GRPO + LLDS",
        0.462,
        0.627,
        0.468,
        0.519,
        0.443,
        0.447,
        0.197,
        0.444,
        0.383,
        0.441,
    ),
    _row("Qwen2.5-3B-Instruct", "GSPO", 0.376, 0.561, 0.374, 0.437, 0.332, 0.329, 0.098, 0.250, 0.252, 0.331),
    _row(
        "Qwen2.5-3B-Instruct",
        "GSPO + LLDS",
        0.489,
        0.640,
        0.483,
        0.537,
        0.466,
        0.456,
        0.215,
        0.403,
        0.385,
        0.451,
    ),
    _row("Qwen2.5-7B", "GRPO", 0.395, 0.560, 0.388, 0.448, 0.326, 0.297, 0.125, 0.360, 0.277, 0.350),
    _row("Qwen2.5-7B", "GRPO + LLDS", 0.512, 0.672, 0.480, 0.555, 0.486, 0.469, 0.232, 0.508, 0.424, 0.480),
    _row("Qwen2.5-7B-Instruct", "GRPO", 0.429, 0.623, 0.427, 0.493, 0.386, 0.346, 0.162, 0.400, 0.324, 0.396),
    _row(
        "Qwen2.5-7B-Instruct",
        "GRPO + LLDS",
        0.518,
        0.676,
        0.486,
        0.560,
        0.492,
        0.490,
        0.228,
        0.492,
        0.426,
        0.483,
    ),
    _row("Llama-3.2-3B", "GRPO", 0.233, 0.461, 0.220, 0.305, 0.196, 0.232, 0.044, 0.097, 0.142, 0.212),
    _row("Llama-3.2-3B", "GRPO + LLDS", 0.486, 0.643, 0.467, 0.532, 0.366, 0.298, 0.113, 0.242, 0.255, 0.374),
    _row(
        "Llama-3.2-3B", "GRPO + LLDS-MA", 0.493, 0.640, 0.480, 0.538, 0.449, 0.462, 0.164, 0.298, 0.343, 0.427
    ),
)


def paper_rows(model: str | None) -> list[PaperRow]:
    """Return the rows whose model has ``model`` in its name, whatever the case; all for None."""
    wanted = (model or "").lower()
    return [row for row in PAPER_ROWS if wanted in row.model.lower()]


def departures(settings: Mapping[str, Any]) -> list[str]:
    """Say why figures of an evaluation with these settings don't compare with the paper's; nothing when they do."""
    found = [_other_corpus(settings["retriever"]), _other_search(settings["retriever"])]
    for key, (theirs, what) in _SETUP.items():
        section, name = key.split(".")
        ours = settings[section][name]
        if ours != theirs:
            found.append(f"{what}: {ours}, in the paper {theirs}")
    if settings["protocol"]["style"] == "short":
        found.append("the prompt is the short one, not Search-R1's")
    if settings["protocol"]["snippet_words"] is not None:
        found.append("passages are cut to the words round the query")
    if settings["sampling"]["temperature"] > 0:
        found.append(
            f"answers are drawn at temperature {settings['sampling']['temperature']:g}; the figures are means over "
            f"{settings['samples']} of them"
        )
    found.append(_other_questions(settings["sets"]))
    return [sentence for sentence in found if sentence]


def _other_corpus(retriever: Mapping[str, Any]) -> str:
    if retriever.get("name") == WIKI_18 or retriever.get("passages") == WIKI_18_PASSAGES:
        return ""
    if retriever["kind"] == "none":
        return "the search tool is off"
    if retriever["kind"] == "server" and retriever.get("name") is None:
        return (
            f"the corpus behind {retriever['where']} is not known (say --corpus-name {WIKI_18} if it is that)"
        )
    size = f" of {retriever['passages']:,} passages" if retriever.get("passages") else ""
    named = retriever.get("name") or retriever["where"]
    return f"another corpus: {named}{size}, in the paper Wikipedia of 2018 ({WIKI_18_PASSAGES:,} passages)"


def _other_search(retriever: Mapping[str, Any]) -> str:
    """Say how passages are ranked, where that can be seen from here."""
    by_words = retriever.get("mode") == "bm25" or not retriever.get("encoder")
    ours = "BM25" if by_words else f"vectors of {retriever['encoder']}"
    seen = retriever["kind"] not in ("none", "server")
    return f"search by {ours}, in the paper by vectors of E5" if seen and "e5" not in ours.lower() else ""


def _other_questions(sets: Mapping[str, Any]) -> str:
    parts = [
        f"{BENCHMARKS[name].title} {about['questions']:,} of {about['published']:,}"
        for name, about in sets.items()
        if about["published"] is not None and about["questions"] != about["published"]
    ]
    return f"not the published questions: {', '.join(parts)}" if parts else ""
