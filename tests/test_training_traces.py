"""Traces of the demonstrator: what they say, how often it errs, and that a disguise is consistent."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from llds.data.questions import Question
from llds.errors import LLDSError
from llds.search.passages import Passage
from llds.search.protocol import Answer, Protocol, Search, parse_action
from llds.search.retrieval import BM25Retriever
from llds.search.rewards import exact_match, extract_answer
from llds.training.traces import Habits, TraceSource, demonstrate, disguise, finds_its_answers

ONE = Question(
    "1",
    "What is the capital of France?",
    ("Paris",),
    {"hops": 1, "chain": [["France", "capital", "Paris"]]},
)
TWO = Question(
    "2",
    "What is the currency of the country whose capital is Tokyo?",
    ("yen",),
    {"hops": 2, "chain": [["Tokyo", "capital of", "Japan"], ["Japan", "currency", "yen"]]},
)
SHOWN = {
    "France capital": "\n\n<information>Capital: Paris.</information>\n\n",
    "Tokyo capital": "\n\n<information>Tokyo is the capital of Japan.</information>\n\n",
    "Japan currency": "\n\n<information>Currency: yen.</information>\n\n",
    TWO.question: "\n\n<information>Doc 1(Title: Tokyo) Tokyo is the capital of Japan.</information>\n\n",
    ONE.question: "\n\n<information>Doc 1(Title: France) Capital: Paris.</information>\n\n",
}
CORPUS = [
    Passage("a", "France: Capital", "Capital: Paris."),
    Passage("b", "Japan: Currency", "Currency: yen."),
]
CORPUS += [Passage("c", "Tokyo", "Tokyo is the capital of Japan.")]


def trace_of(question: Question, habits: Habits = Habits(), seed: int = 0):  # noqa: B008 - a frozen value
    return demonstrate(question, SHOWN.__getitem__, habits, random.Random(seed))


def written(trace) -> list[str]:
    return [segment.text for segment in trace if segment.written]


def test_a_faultless_demonstrator_searches_hop_by_hop_and_is_right():
    actions = [parse_action(text) for text in written(trace_of(TWO))]
    assert actions == [Search("Tokyo capital"), Search("Japan currency"), Answer("yen")]
    assert [segment.written for segment in trace_of(TWO)] == [True, False, True, False, True]


@pytest.mark.parametrize(
    ("habits", "question", "searches", "answer"),
    [
        (Habits(stop_early=1), TWO, ["Tokyo capital"], "Japan"),
        (Habits(stop_early=1), ONE, ["France capital"], "Paris"),
        (Habits(verbatim=1), TWO, [TWO.question], "Tokyo"),
        (Habits(verbatim=1), ONE, [ONE.question], "Paris"),
        (Habits(guess=1), TWO, [], "yen"),
    ],
)
def test_each_habit_shows(habits, question, searches, answer):
    trace = trace_of(question, habits)
    actions = [parse_action(text) for text in written(trace)]
    assert actions == [*map(Search, searches), Answer(answer)]
    assert extract_answer("".join(segment.text for segment in trace)) == answer


def test_habits_come_as_often_as_they_say():
    habits = Habits(stop_early=0.5, verbatim=0.2, guess=0.1)
    counts = Counter(len(written(trace_of(TWO, habits, seed))) for seed in range(2000))
    assert counts[1] / 2000 == pytest.approx(0.1, abs=0.03)
    assert counts[3] / 2000 == pytest.approx(0.7 * 0.5, abs=0.04)


def test_a_disguise_renames_everywhere_and_keeps_the_answer_readable():
    for seed in range(50):
        prompt, trace = disguise(
            TWO.question, trace_of(TWO), TWO, ["Ada Lovelace", "Lake Como"], random.Random(seed)
        )
        whole = prompt + "".join(segment.text for segment in trace)
        assert not {"Tokyo", "Japan", "yen"} & set(whole.replace(".", " ").split())
        answer = extract_answer(whole)
        assert answer
        assert answer in trace[-2].text


def test_no_two_entities_get_one_name():
    for seed in range(300):
        prompt, trace = disguise("Tokyo|Japan|yen", (), TWO, ["Tokyo", "Lima"], random.Random(seed))
        assert trace == ()
        assert len({*prompt.split("|"), "Tokyo", "Japan", "yen"}) == 6


def test_a_country_code_stays_a_country_code():
    question = Question(
        "3", "Q?", (".fr",), {"hops": 1, "chain": [["France", "internet country code", ".fr"]]}
    )
    shown = "<information>Internet country code: .fr.</information>"
    trace = demonstrate(question, lambda query: shown, Habits(), random.Random(0))
    _, hidden = disguise("Q?", trace, question, ["Ada"], random.Random(1))
    answer = extract_answer("".join(segment.text for segment in hidden))
    assert answer is not None
    assert answer.startswith(".")
    assert len(answer) == 3


def test_questions_whose_answer_is_not_shown_are_left_out():
    assert finds_its_answers(TWO, SHOWN.__getitem__)
    assert not finds_its_answers(TWO, {**SHOWN, "Japan currency": "nothing"}.__getitem__)


def test_a_source_repeats_itself_and_takes_hops_equally_often():
    retriever = BM25Retriever(CORPUS)
    source = TraceSource([ONE, *[TWO] * 9], retriever, Protocol("short", topk=1), Habits())
    assert source(7) == source(7)
    hops = Counter(len(written(source(number)[1])) - 1 for number in range(400))
    assert hops[1] / 400 == pytest.approx(0.5, abs=0.1)
    assert all(exact_match(extract_answer(source(n)[1][-1].text), ["Paris", "yen"]) for n in range(20))


def test_without_chains_the_source_says_what_to_do():
    bare = Question("4", "What?", ("x",))
    with pytest.raises(LLDSError, match=r"warm_start\.steps=0"):
        TraceSource([bare], BM25Retriever(CORPUS), Protocol("short"), Habits())
