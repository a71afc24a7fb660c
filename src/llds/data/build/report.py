"""Figures about a set of questions: how many, what a constant guess scores, what one search and gold queries find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from llds.data.build.facts import mentions, normalise
from llds.data.build.retrieval import Index
from llds.data.corpus import Document
from llds.data.questions import Question, gold_queries


def report(corpus: Sequence[Document], splits: Mapping[str, Sequence[Question]]) -> dict[str, Any]:
    """Return for each split: counts by kind and answer relation, baselines and coverage as shares of the questions."""
    contents = [document["contents"] for document in corpus]
    index = Index(contents)
    return {split: _figures(questions, index, contents) for split, questions in splits.items()}


def table(figures: Mapping[str, Any]) -> str:
    """Return the figures as a Markdown table, one row for each split and number of hops."""
    head = "| split | hops | questions | majority | one search, top 3 | gold queries, top 1 | gold queries, top 3 |"
    rows = [
        f"| {split} | {hops} | {row['questions']} | {row['majority']:.1%} | {row['verbatim_top3']:.1%} "
        f"| {row['gold_top1']:.1%} | {row['gold_top3']:.1%} |"
        for split, body in figures.items()
        for hops, row in body["by_hops"].items()
    ]
    return "\n".join([head, "|---|---|---|---|---|---|---|", *rows])


def majority(questions: Sequence[Question]) -> float:
    """Return the share of ``questions`` that the best constant answer gets right by exact match."""
    votes = Counter(
        answer for question in questions for answer in {normalise(text) for text in question.golden_answers}
    )
    return max(votes.values()) / len(questions)


def _figures(questions: Sequence[Question], index: Index, contents: Sequence[str]) -> dict[str, Any]:
    index.prepare([question.question for question in questions])
    index.prepare([query for question in questions for query in gold_queries(question)])
    groups: dict[str, list[Question]] = {}
    for question in sorted(questions, key=lambda each: int(each.metadata["hops"])):
        groups.setdefault(str(question.metadata["hops"]), []).append(question)
    return {
        "questions": len(questions),
        "by_kind": dict(sorted(Counter(str(question.metadata["kind"]) for question in questions).items())),
        "by_relation": dict(
            sorted(Counter(str(question.metadata["chain"][-1][1]) for question in questions).items())
        ),
        "by_hops": {hops: _coverage(group, index, contents) for hops, group in groups.items()},
    }


def _coverage(questions: Sequence[Question], index: Index, contents: Sequence[str]) -> dict[str, float]:
    def share(hits: Sequence[bool]) -> float:
        return round(sum(hits) / len(hits), 4)

    return {
        "questions": len(questions),
        "majority": round(majority(questions), 4),
        "verbatim_top3": share(
            [_finds(index, contents, each.question, each.golden_answers, 3) for each in questions]
        ),
        "gold_top1": share([_finds_all(index, contents, each, 1) for each in questions]),
        "gold_top3": share([_finds_all(index, contents, each, 3) for each in questions]),
    }


def _finds_all(index: Index, contents: Sequence[str], question: Question, k: int) -> bool:
    goals = [(link[2],) for link in question.metadata["chain"]]
    return all(
        _finds(index, contents, query, goal, k)
        for query, goal in zip(gold_queries(question), goals, strict=True)
    )


def _finds(index: Index, contents: Sequence[str], query: str, answers: Sequence[str], k: int) -> bool:
    return any(mentions(contents[place], answer) for place in index.top(query)[:k] for answer in answers)
