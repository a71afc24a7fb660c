"""Questions of one and two hops composed from facts, checked by retrieval, split by country, with answers capped."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from llds.data.build.facts import Fact, Passage, mentions, normalise
from llds.data.build.retrieval import Index
from llds.data.build.wording import WORDINGS, subject
from llds.data.corpus import join_contents
from llds.data.questions import Question

TOP = 3
"""A question is kept only if each gold query finds its passage among this many."""

SHARES = {"train": 0.65, "validation": 0.10, "test": 0.25}
"""Shares of the countries."""

SIZES = {"train": {1: 1400, 2: 3200}, "validation": {1: 150, 2: 150}, "test": {1: 500, 2: 500}}
"""Most questions of each split, by hops."""

ANSWER_CAPS = {"train": 12, "validation": 2, "test": 4}
"""How often an answer may occur among the questions of one split and number of hops."""


@dataclass(frozen=True)
class Hop:
    """One search: ``known`` is looked up, ``found`` is what its passage says. ``inverse``: from value to subject."""

    fact: Fact
    inverse: bool = False

    @property
    def known(self) -> str:
        """Return what is searched for."""
        return self.fact.value if self.inverse else self.fact.subject

    @property
    def found(self) -> str:
        """Return what the search finds."""
        return self.fact.subject if self.inverse else self.fact.value

    @property
    def link(self) -> list[str]:
        """Return the hop as a link of the chain."""
        return [self.known, f"{self.fact.relation}{' of' if self.inverse else ''}", self.found]

    @property
    def query(self) -> str:
        """Return the gold query."""
        return f"{self.known} {self.fact.relation}"


@dataclass(frozen=True)
class Candidate:
    """A chain of hops; the value of the last fact is the answer. ``country``: what the split goes by."""

    kind: str
    hops: tuple[Hop, ...]

    @property
    def key(self) -> str:
        """Return a text that tells this chain from every other."""
        return "|".join(part for hop in self.hops for part in hop.link)

    @property
    def answers(self) -> tuple[str, ...]:
        """Return the answer and its aliases, without those that are the same when normalised."""
        fact = self.hops[-1].fact
        unique = {normalise(text): text for text in reversed((fact.value, *fact.aliases)) if normalise(text)}
        return tuple(reversed(unique.values()))

    @property
    def anchor(self) -> str:
        """Return what the split goes by: the country of the chain, or its element where there is none."""
        return next((hop.fact.country for hop in self.hops if hop.fact.country), self.hops[-1].fact.subject)


def compose(
    facts: Sequence[Fact], passages: Sequence[Passage], names: Mapping[str, tuple[str, ...]]
) -> dict[str, list[Question]]:
    """Return the questions of each split.

    ``names``: all names of each country, so that no question names the country it leaves to be found.
    Everything that looks like chance is a hash of the text, so the same input gives the same questions.
    """
    index = Index([join_contents(passage.title, passage.text) for passage in passages])
    places = defaultdict(list)
    for place, passage in enumerate(passages):
        places[passage.title].append(place)
    candidates = [*_one_hop(facts), *_two_hop(facts)]
    index.prepare((hop.query for candidate in candidates for hop in candidate.hops), TOP)
    splits = split_of({candidate.anchor for candidate in candidates})
    pools: dict[tuple[str, int], list[tuple[Candidate, Question]]] = defaultdict(list)
    for candidate in sorted(candidates, key=lambda each: _hash("order", each.key)):
        ranks = [_rank(hop, index, places, passages) for hop in candidate.hops]
        if all(ranks):
            question = _question(candidate, ranks)
            if not _gives_away(candidate, question, names):
                pools[splits[candidate.anchor], len(candidate.hops)].append((candidate, question))
    return {
        split: _numbered(
            split, [_select(pools[split, hops], size, ANSWER_CAPS[split]) for hops, size in sizes.items()]
        )
        for split, sizes in SIZES.items()
    }


def split_of(anchors: Iterable[str]) -> dict[str, str]:
    """Return the split of each country (or element): a fixed shuffle, cut by :data:`SHARES`."""
    ordered = sorted(anchors, key=lambda anchor: _hash("split", anchor))
    bounds, total = [], 0.0
    for split, share in SHARES.items():
        total += share
        bounds.append((round(total * len(ordered)), split))
    return {
        anchor: next(split for bound, split in bounds if place < bound)
        for place, anchor in enumerate(ordered)
    }


def _one_hop(facts: Sequence[Fact]) -> Iterator[Candidate]:
    return (Candidate(fact.kind, (Hop(fact),)) for fact in facts)


def _two_hop(facts: Sequence[Fact]) -> Iterator[Candidate]:
    about: dict[tuple[str, str], list[Fact]] = defaultdict(list)
    for fact in facts:
        about[fact.kind, fact.subject].append(fact)
    shared = Counter((fact.relation, normalise(fact.value)) for fact in facts)
    for first in facts:
        if WORDINGS[first.relation].follow:
            for second in about["country", first.value]:
                yield Candidate(f"{first.kind}-country", (Hop(first), Hop(second)))
        if WORDINGS[first.relation].invert and shared[first.relation, normalise(first.value)] == 1:
            for second in about[first.kind, first.subject]:
                if second.relation != first.relation:
                    yield Candidate(f"{first.kind}-{first.kind}", (Hop(first, inverse=True), Hop(second)))


def _rank(hop: Hop, index: Index, places: Mapping[str, list[int]], passages: Sequence[Passage]) -> int:
    """Return the rank at which the gold query finds a passage of the fact that says it; 0 if it doesn't."""
    for rank, place in enumerate(index.top(hop.query, TOP), start=1):
        passage = passages[place]
        says = hop.fact.value in passage.text and mentions(
            join_contents(passage.title, passage.text), hop.found
        )
        if place in places[hop.fact.title] and says:
            return rank
    return 0


def _question(candidate: Candidate, ranks: list[int]) -> Question:
    *bridges, last = candidate.hops
    ask = _choose(WORDINGS[last.fact.relation].ask, "ask", candidate.key)
    template, name = ask, subject(last.fact.kind, last.fact.subject)
    for bridge in bridges:
        wording = WORDINGS[bridge.fact.relation]
        describe = _choose(wording.invert if bridge.inverse else wording.follow, "describe", candidate.key)
        name = describe.format(x=subject(bridge.fact.kind, bridge.known), v=bridge.known)
        template = ask.replace("{x}", describe)
    metadata = {
        "kind": candidate.kind,
        "hops": len(candidate.hops),
        "chain": [hop.link for hop in candidate.hops],
        "template": template,
        "gold_ranks": ranks,
    }
    return Question(candidate.key, ask.format(x=name), candidate.answers, metadata)


def _gives_away(candidate: Candidate, question: Question, names: Mapping[str, tuple[str, ...]]) -> bool:
    """Tell whether the question names its answer, or the thing between its hops."""
    bridges = [hop.found for hop in candidate.hops[:-1]]
    hidden = [*candidate.answers, *(name for bridge in bridges for name in names.get(bridge, (bridge,)))]
    return any(mentions(question.question, text) for text in hidden)


def _select(pool: Sequence[tuple[Candidate, Question]], size: int, cap: int) -> list[Question]:
    """Take up to ``size`` questions, kind and relation in turn, no answer more than ``cap`` times."""
    queues: dict[tuple[str, str], list[Question]] = defaultdict(list)
    for candidate, question in reversed(pool):
        queues[candidate.kind, candidate.hops[-1].fact.relation].append(question)
    taken: list[Question] = []
    used: Counter[str] = Counter()
    while queues and len(taken) < size:
        for key in sorted(queues):
            fresh = _next_fresh(queues[key], used, cap)
            if fresh is None:
                del queues[key]
            elif len(taken) < size:
                taken.append(fresh)
                used.update(map(normalise, fresh.golden_answers))
    return taken


def _next_fresh(queue: list[Question], used: Counter[str], cap: int) -> Question | None:
    while queue:
        question = queue.pop()
        if all(used[normalise(answer)] < cap for answer in question.golden_answers):
            return question
    return None


def _numbered(split: str, groups: Iterable[list[Question]]) -> list[Question]:
    ordered = sorted(
        (question for group in groups for question in group), key=lambda each: _hash("final", each.id)
    )
    return [
        Question(f"{split}_{number}", question.question, question.golden_answers, question.metadata)
        for number, question in enumerate(ordered)
    ]


def _choose(options: Sequence[str], salt: str, key: str) -> str:
    return options[int(_hash(salt, key), 16) % len(options)]


def _hash(salt: str, text: str) -> str:
    return hashlib.sha256(f"{salt}|{text}".encode()).hexdigest()
