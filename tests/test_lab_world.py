"""The world of the laboratory: facts, questions, and a tool that errs as often as it is told to."""

import numpy as np
import pytest

from llds.errors import LLDSError
from llds.lab.world import MARK, NO_HOP, NOTHING, QUESTION, Task, World


def test_answers_follow_the_facts():
    world = World(Task(entities=20, relations=3, noise=0.0))
    questions = world.ask(200, np.random.default_rng(0))
    for row in range(200):
        entity = questions.entity[row]
        for relation in (questions.inner[row], questions.outer[row]):
            entity = world.facts[relation, entity] if relation >= 0 else entity
        assert questions.gold[row] == entity
    share = (questions.outer >= 0).mean()
    assert 0.5 < share < 0.8


def test_prompt_holds_the_question():
    world = World(Task(entities=5, relations=3))
    questions = world.ask(30, np.random.default_rng(1))
    for row, prompt in enumerate(world.prompts(questions)):
        words = [world.vocabulary[token] for token in prompt]
        outer = "-" if questions.outer[row] < 0 else f"r{questions.outer[row]}"
        assert words == ["<q>", outer, f"r{questions.inner[row]}", f"e{questions.entity[row]}", "?"]
    assert tuple(world.vocabulary.index(word) for word in ("<q>", "-", "?")) == (QUESTION, NO_HOP, MARK)


def found(task, relation, entity, times=2000):
    world, draw = World(task), np.random.default_rng(2)
    tokens = [
        world.look_up(world.first_relation + relation, world.first_entity + entity, draw)
        for _ in range(times)
    ]
    return world, np.array(tokens) - world.first_entity


def test_the_tool_errs_as_often_as_told():
    world, answers = found(Task(noise=0.4), 1, 7)
    right = (answers == world.facts[1, 7]).mean()
    assert right == pytest.approx(0.6 + 0.4 / 96, abs=0.04)
    _, answers = found(Task(noise=0.0), 1, 7)
    assert len(set(answers)) == 1


def test_an_ambiguous_fact_has_two_values_and_a_question_accepts_either():
    task = Task(noise=0.0, ambiguity=1.0, two_hop=0.0)
    world, answers = found(task, 1, 7)
    values, counts = np.unique(answers, return_counts=True)
    assert len(values) == 2
    assert abs(counts[0] / counts.sum() - 0.5) < 0.05
    questions = world.ask(20000, np.random.default_rng(3))
    asked = (questions.inner == 1) & (questions.entity == 7)
    assert set(questions.gold[asked]) == set(values)


def test_a_query_that_is_none_finds_nothing():
    world, draw = World(Task(noise=0.0)), np.random.default_rng(0)
    r, e = world.first_relation, world.first_entity
    for query in ((e, r), (r, r), (e, e), (r, world.first_word), (r, world.vocabulary_size), (0, e)):
        assert world.look_up(*query, draw) == NOTHING
    assert world.look_up(r, e, draw) == e + world.facts[0, 0]


def test_shares_are_checked():
    with pytest.raises(LLDSError, match=r"noise is a share, from 0 to 1, but is 1\.5"):
        Task(noise=1.5)
