"""Scoring answers: rows, groups, comparison, tables, and files."""

import json

import pytest
import torch

from llds.data.questions import Question
from llds.errors import LLDSError
from llds.evaluation.evaluate import (
    EvalResult,
    best_constant_guess,
    compare,
    evaluate,
    load_evaluation,
    save_evaluation,
)
from llds.evaluation.report import format_comparison, format_evaluation
from llds.evaluation.rows import score
from llds.search.episode import Episode, EpisodeRunner, Limits, Turn
from llds.search.protocol import Answer, Protocol, Search
from llds.search.retrieval import NoRetriever, RetrieverUnavailable
from llds.search.sampling import GREEDY
from tiny_world import built_world, load


def question(number, answer="Paris", hops=1):
    return Question(f"q{number}", f"Question {number}?", (answer,), {"hops": hops})


def episode(answer, searches=1, valid=1, stop="answer"):
    turns = [
        Turn(
            Search("x"),
            "<think> t </think>\n<search> x </search>",
            0,
            1,
            () if k < valid else None,
            "\n\n<information></information>\n\n",
        )
        for k in range(searches)
    ]
    if answer is not None:
        turns.append(Turn(Answer(answer), f"<think> t </think>\n<answer> {answer} </answer>", 1, 2))
    return Episode([1], [2, 3], [1, 1], [0.0, 0.0], turns, answer, None, stop)


def rows(*answers, hops=None, failed=()):
    hops = hops or [1] * len(answers)
    scored = [
        score(question(k, hops=hops[k]), episode(answer, stop="tool_failed" if k in failed else "answer"))
        for k, answer in enumerate(answers)
    ]
    return EvalResult(tuple(scored))


def test_one_row():
    row = score(question(0, "the Eiffel Tower", hops=2), episode("Eiffel tower!", searches=3, valid=2))
    assert (row.exact_match, row.f1, row.searches, row.valid_searches, row.hops) == (1.0, 1.0, 3, 2, 2)
    assert row.valid_format == 1.0
    wrong = score(question(0), episode(None, searches=0, stop="length"))
    assert (wrong.exact_match, wrong.f1, wrong.answer, wrong.valid_format) == (0.0, 0.0, None, 0.0)


def test_groups_appear_when_hops_differ():
    alike = rows("Paris", "Rome")
    assert list(alike.groups) == ["all"]
    mixed = rows("Paris", "Rome", "Paris", hops=[1, 2, 2])
    assert list(mixed.groups) == ["all", "one-hop", "two-hop"]
    assert mixed.groups["all"].exact_match.value == pytest.approx(2 / 3)
    assert mixed.groups["two-hop"].exact_match.value == 0.5
    assert mixed.groups["two-hop"].exact_match.count == 2


def test_answers_without_a_tool_are_left_out_and_counted():
    result = rows("Paris", "Rome", "Rome", failed=[1])
    content = result.to_json()
    assert content["questions"] == 2
    assert content["left_out_since_tool_failed"] == 1
    assert content["groups"]["all"]["exact_match"]["value"] == 0.5
    assert "failed in 1 answers" in format_evaluation(result)


def test_the_constant_guess_counts_aliases_once():
    questions = [
        Question("1", "?", ("Paris", "paris"), {}),
        Question("2", "?", ("Paris",), {}),
        Question("3", "?", ("Rome",), {}),
        Question("4", "?", ("Oslo",), {}),
    ]
    assert best_constant_guess([score(one, episode("x")) for one in questions]) == 0.5
    assert best_constant_guess([]) == 0.0


def test_comparison_is_paired_and_per_group():
    before = rows("Rome", "Rome", "Paris", "Rome", hops=[1, 1, 2, 2])
    after = rows("Paris", "Rome", "Paris", "Paris", hops=[1, 1, 2, 2])
    change = compare(before, after)
    assert list(change) == ["all", "one-hop", "two-hop"]
    assert change["all"].exact_match.value == 0.5
    assert change["two-hop"].exact_match.value == 0.5
    assert change["all"].p_value == 0.5
    left_out = compare(before, rows("Paris", "Rome", "Paris", "Paris", hops=[1, 1, 2, 2], failed=[0]))
    assert left_out["all"].exact_match.count == 3
    with pytest.raises(ValueError, match="same questions"):
        compare(before, rows("Paris"))


def test_tables_hold_the_numbers():
    before, after = rows("Rome", "Rome", hops=[1, 2]), rows("Paris", "Paris", hops=[1, 2])
    off = rows("Rome", "Rome", hops=[1, 2])
    names = {
        "before": before,
        "after": after,
        "before-without-retriever": off,
        "after-without-retriever": off,
    }
    text = format_comparison(names)
    assert "all (2)" in text
    assert "0.0 %" in text
    assert "100.0 %" in text
    assert "+100.0 [+100.0, +100.0]" in text
    assert "search off" in text
    assert "search off" not in format_comparison({"before": before, "after": after})
    single = format_evaluation(after, off)
    assert "one-hop" in single
    assert "without the search tool: exact match 0.0 %" in single


def test_rows_survive_the_file(tmp_path):
    # A line ends with a line feed, not with what else Unicode calls a line's end.
    result = rows("Par\u2028is\x85", None, hops=[1, 2])
    path = tmp_path / "rows.jsonl"
    save_evaluation(path, result)
    assert load_evaluation(path) == result
    assert [json.loads(line)["id"] for line in path.read_text().split("\n")[:-1]] == ["q0", "q1"]
    path.write_text('{"id": 1}\n')
    with pytest.raises(LLDSError, match="is not an evaluation"):
        load_evaluation(path)


@pytest.fixture(scope="module")
def policy():
    from llds.training.policy import load_policy
    from llds.training.recipe import ModelSettings

    torch.set_num_threads(1)
    return load_policy(ModelSettings(path=str(built_world() / "model")))


def runner_of(policy, retriever):
    limits = Limits(3, 32, 32, 128, 64)
    return EpisodeRunner(
        policy.model, policy.tokenizer, retriever, Protocol(style="short", topk=1), limits, GREEDY
    )


def test_a_real_policy_is_scored_alike_in_any_batch_size(policy):
    from llds.data.corpus import read_corpus
    from llds.search.retrieval import BM25Retriever

    questions = load(built_world(), "test")
    retriever = BM25Retriever(read_corpus(built_world() / "corpus.jsonl"))
    told = []
    whole = evaluate(runner_of(policy, retriever), questions, batch_size=64, on_progress=told.append)
    parts = evaluate(runner_of(policy, retriever), questions, batch_size=3, on_progress=told.append)
    assert told == [8, 3, 6, 8]
    assert [row.response for row in whole.rows] == [row.response for row in parts.rows]
    assert whole.groups["all"].exact_match.value > 0
    without = evaluate(runner_of(policy, NoRetriever()), questions)
    assert without.groups["all"].exact_match.value < whole.groups["all"].exact_match.value
    assert all("<information></information>" in row.response for row in without.rows if row.valid_searches)


def test_a_dead_tool_or_no_questions_is_an_error(policy):
    class Dead:
        def search(self, queries, topk):
            raise RetrieverUnavailable("down")

    with pytest.raises(RetrieverUnavailable, match="failed for every question"):
        evaluate(runner_of(policy, Dead()), load(built_world(), "test")[:2])
    with pytest.raises(ValueError, match="at least one question"):
        evaluate(runner_of(policy, Dead()), [])
