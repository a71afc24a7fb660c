"""Traces to imitate: episodes of a demonstrator with known flaws, for the supervised warm start.

The demonstrator knows each question's chain of facts and searches hop by hop, but with the habits of
:class:`Habits` it often stops early, searches the question as it stands, or answers without reading. A model
that imitates it speaks the protocol and succeeds now and then, which leaves reinforcement learning something
to find out. :func:`disguise` then renames the entities of a trace throughout, passages and answer included,
so that the only way to fit the traces is to read the passages: nothing true is there to be memorised.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llds.data.questions import Question, gold_queries
from llds.errors import LLDSError
from llds.search.protocol import Protocol
from llds.search.retrieval import Retriever

Observe = Callable[[str], str]
"""Answer a query with the text that the model would be shown."""


@dataclass(frozen=True)
class Segment:
    """A piece of an episode. ``written``: by the policy (to be imitated), or by the prompt or the tool."""

    text: str
    written: bool


Trace = tuple[Segment, ...]


@dataclass(frozen=True)
class Habits:
    """How often the demonstrator errs; shares of questions.

    ``stop_early``: two-hop questions answered with the entity found by the first search.
    ``verbatim``: questions searched as they stand, once, and answered from whatever came back.
    ``guess``: questions answered without a search.
    """

    stop_early: float = 0.0
    verbatim: float = 0.0
    guess: float = 0.0


class TraceSource:
    """Numbered traces over the questions whose gold searches find their answers, hops equally often.

    ``names``: what a share ``disguised`` of the traces renames its entities to. ``render``: how a question
    becomes the text of a prompt; by default the protocol's own. Raises :class:`LLDSError` when no question
    qualifies.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        retriever: Retriever,
        protocol: Protocol,
        habits: Habits,
        *,
        names: Sequence[str] = (),
        disguised: float = 0.0,
        render: Callable[[str], str] | None = None,
        seed: int = 0,
    ) -> None:
        self._habits, self._names, self._disguised, self._seed = habits, names, disguised, seed
        self._render = render or (lambda question: str(protocol.prompt(question)))
        chained = [question for question in questions if question.metadata.get("chain")]
        self._shown = _observations(chained, retriever, protocol)
        good = [question for question in chained if finds_its_answers(question, self._shown.__getitem__)]
        if not good:
            raise LLDSError(
                'The warm start needs training questions with a "chain" in their metadata whose searches '
                "find the answers in this corpus, and there are none; set warm_start.steps=0."
            )
        hops = sorted({len(question.metadata["chain"]) for question in good})
        self._by_hops = [[one for one in good if len(one.metadata["chain"]) == count] for count in hops]

    def __call__(self, number: int) -> tuple[str, Trace]:
        """Return the prompt and the trace with this number; the same number gives the same ones."""
        rng = random.Random(f"{self._seed}/{number}")
        question = rng.choice(rng.choice(self._by_hops))
        prompt = self._render(question.question)
        trace = demonstrate(question, self._shown.__getitem__, self._habits, rng)
        if rng.random() < self._disguised:
            return disguise(prompt, trace, question, self._names, rng)
        return prompt, trace


def _observations(questions: Sequence[Question], retriever: Retriever, protocol: Protocol) -> dict[str, str]:
    queries = sorted({text for one in questions for text in (*gold_queries(one), one.question)})
    pairs = zip(queries, retriever.search(queries, protocol.topk), strict=True)
    return {query: protocol.format_observation(passages, query) for query, passages in pairs}


def demonstrate(question: Question, observe: Observe, habits: Habits, rng: random.Random) -> Trace:
    """Return one episode of the demonstrator for ``question``; the prompt is not part of it."""
    draw = rng.random()
    if draw < habits.guess:
        return (_answer(_last_object(question), "I think it is"),)
    if draw < habits.guess + habits.verbatim:
        return _verbatim(question, observe)
    hops = list(zip(gold_queries(question), _objects(question), strict=True))
    if len(hops) > 1 and rng.random() < habits.stop_early:
        hops = hops[:1]
    segments = [segment for query, _ in hops for segment in _search(query, observe, f"I need the {query}.")]
    return (*segments, _answer(hops[-1][1], "It is"))


def finds_its_answers(question: Question, observe: Observe) -> bool:
    """Tell whether every hop of the chain is answered by the passage shown for its gold query."""
    hops = zip(gold_queries(question), _objects(question), strict=True)
    return all(found.lower() in observe(query).lower() for query, found in hops)


def disguise(
    prompt: str, trace: Trace, question: Question, names: Sequence[str], rng: random.Random
) -> tuple[str, Trace]:
    """Rename the entities of the chain in the prompt and in every segment, consistently.

    Names come from ``names`` (real titles) or are made up from syllables; country codes stay country codes.
    """
    entities = sorted({entity for hop in question.metadata["chain"] for entity in (hop[0], hop[2])}, key=len)
    renamed: dict[str, str] = {}
    for entity in reversed(entities):
        renamed[entity] = _pseudonym(entity, names, rng, taken={*entities, *renamed.values()})
    pattern = re.compile("|".join(re.escape(entity) for entity in renamed))

    def rename(text: str) -> str:
        return pattern.sub(lambda found: renamed[found.group()], text)

    return rename(prompt), tuple(Segment(rename(segment.text), segment.written) for segment in trace)


_SYLLABLES = tuple(re.findall("..", "bakoritemaduveshlopigoanisteumarquzoelwifrajohycabe"))


def _pseudonym(entity: str, names: Sequence[str], rng: random.Random, taken: set[str]) -> str:
    """Return a name that no other entity has: two of one name could not be told apart."""
    while (name := _draw_name(entity, names, rng)) in taken:
        pass
    return name


def _draw_name(entity: str, names: Sequence[str], rng: random.Random) -> str:
    if re.fullmatch(r"\.[a-z]{2}", entity):
        return "." + "".join(rng.choices(string.ascii_lowercase, k=2))
    if rng.random() < 0.5:
        return rng.choice(names)
    words = (
        "".join(rng.choices(_SYLLABLES, k=rng.randint(2, 4))).capitalize()
        for _ in range(rng.choice((1, 1, 2)))
    )
    return " ".join(words)


def _objects(question: Question) -> list[str]:
    return [hop[2] for hop in question.metadata["chain"]]


def _last_object(question: Question) -> str:
    return _objects(question)[-1]


def _search(query: str, observe: Observe, thought: str) -> tuple[Segment, Segment]:
    written = Segment(f"<think> {thought} </think>\n<search> {query} </search>", written=True)
    return written, Segment(observe(query), written=False)


def _answer(answer: str, thought: str) -> Segment:
    return Segment(f"<think> {thought} {answer}. </think>\n<answer> {answer} </answer>", written=True)


def _verbatim(question: Question, observe: Observe) -> Trace:
    shown = observe(question.question)
    titles = re.findall(r"\(Title: (.*?)\)", shown)
    found = (
        _last_object(question)
        if _last_object(question).lower() in shown.lower()
        else (titles or ["unknown"])[0]
    )
    ask = Segment(
        f"<think> I search the question. </think>\n<search> {question.question} </search>", written=True
    )
    return ask, Segment(shown, written=False), _answer(found, "It is")
