import pytest
from hypothesis import given
from hypothesis import strategies as st

from llds.search.rewards import (
    exact_match,
    extract_answer,
    f1_score,
    normalize_answer,
    substring_match,
    valid_format,
)
from search_models import TAGS


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The Beatles", "beatles"),
        ("U.S.A.", "usa"),
        ("A.", ""),
        ("an apple a day", "apple day"),
        ("theatre", "theatre"),
        ("rock-and-roll", "rockandroll"),
        ("  New\tYork \n City ", "new york city"),
        ("Zürich", "zürich"),
        ("ÉCLAIR", "éclair"),
        ("«Le Monde»", "«le monde»"),
        ("“the” who", "“ ” who"),
        ("May 18 , 2018", "may 18 2018"),
        ("", ""),
        ("!?.", ""),
    ],
)
def test_normalisation(text, normalized):
    assert normalize_answer(text) == normalized


@pytest.mark.parametrize(
    ("answer", "golden", "score"),
    [
        ("the Nile", ["Nile"], 1.0),
        ("nile river", ["Nile"], 0.0),
        ("Barack Obama.", ["Obama", "barack obama"], 1.0),
        ("Obama", "obama", 1.0),
        ("O", ["obama"], 0.0),
        (None, ["x"], 0.0),
        (None, ["the"], 0.0),
        ("", ["x"], 0.0),
        ("", ["The"], 1.0),
        ("x", [], 0.0),
        ("3,000", ["3000"], 1.0),
        ("Sao Paulo", ["São Paulo"], 0.0),
        ("São Paulo", ["são paulo"], 1.0),
    ],
)
def test_exact_match(answer, golden, score):
    assert exact_match(answer, golden) == score


def test_substring_match():
    assert substring_match("in the Nile valley", ["Nile"]) == 1.0
    assert substring_match("Ni", ["Nile"]) == 0.0
    assert substring_match(None, ["Nile"]) == 0.0


@pytest.mark.parametrize(
    ("answer", "golden", "score"),
    [
        ("a b c d", ["b c"], 0.8),
        ("new york", ["York", "New York City"], 0.8),
        ("x x", ["x"], 2 / 3),
        ("x", ["y"], 0.0),
        ("the", ["a"], 1.0),
        ("the", ["y"], 0.0),
        (None, ["y"], 0.0),
        ("x", [], 0.0),
    ],
)
def test_f1(answer, golden, score):
    assert f1_score(answer, golden) == pytest.approx(score)


@given(st.text(max_size=12), st.lists(st.text(max_size=12), min_size=1, max_size=3))
def test_scores_agree_with_each_other(answer, golden):
    assert 0.0 <= exact_match(answer, golden) <= f1_score(answer, golden) <= 1.0
    assert exact_match(answer, golden) <= substring_match(answer, golden)
    assert exact_match(golden[0], golden) == f1_score(golden[0], golden) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer> Paris </answer>", "Paris"),
        ("<answer>a</answer> x <answer>b\nc</answer>", "b\nc"),
        ("<answer>a", None),
        ("a</answer>", None),
        ("", None),
    ],
)
def test_last_answer_of_the_response_alone(response, answer):
    assert extract_answer(response) == answer


THINK, SEARCH = "<think> t </think>\n", "<search> q </search>"
INFORMATION, ANSWER = '\n\n<information>Doc 1(Title: "T") x</information>\n\n', "<answer> a </answer>"


@pytest.mark.parametrize(
    ("response", "valid"),
    [
        (THINK + ANSWER, True),
        (f"  {THINK}{SEARCH}{INFORMATION}{THINK}{ANSWER}\n", True),
        ((THINK + SEARCH + INFORMATION) * 3 + THINK + ANSWER, True),
        (ANSWER, False),
        (SEARCH + INFORMATION + ANSWER, False),
        (THINK + SEARCH + THINK + ANSWER, False),
        (THINK + "so " + ANSWER, False),
        (THINK + ANSWER + "so", False),
        (THINK + ANSWER + ANSWER, False),
        (THINK + SEARCH + INFORMATION, False),
        ("<think> a <think> b </think>" + ANSWER, False),
        (THINK + "<answer> a", False),
        ("", False),
    ],
)
def test_format(response, valid):
    assert valid_format(response) == float(valid)


def test_format_without_thinking():
    assert (
        valid_format(SEARCH + INFORMATION + THINK + SEARCH + INFORMATION + ANSWER, require_think=False) == 1.0
    )
    assert valid_format(SEARCH + ANSWER, require_think=False) == 0.0


@given(st.lists(st.one_of(st.sampled_from(TAGS), st.text(max_size=3)), max_size=40).map("".join))
def test_format_never_raises_and_is_stricter_with_thinking(response):
    assert valid_format(response) <= valid_format(response, require_think=False)
