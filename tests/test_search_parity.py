"""Scores against Search-R1's and FlashRAG's own scorers, on real and hostile answers."""

import gzip
import json
from pathlib import Path

import pytest

from llds.search.rewards import exact_match, f1_score, normalize_answer, substring_match

FILE = Path(__file__).parent / "fixtures" / "scoring" / "pairs.jsonl.gz"


@pytest.fixture(scope="module")
def pairs():
    return [json.loads(line) for line in gzip.decompress(FILE.read_bytes()).decode().splitlines()]


def test_there_are_enough_of_every_kind(pairs):
    assert len(pairs) >= 2000
    for name in ("em", "subem"):
        share = sum(pair[name] for pair in pairs) / len(pairs)
        assert 0.1 < share < 0.9
    assert sum(0 < pair["f1"] < 1 for pair in pairs) > 200
    assert sum(not pair["normalized"] for pair in pairs) > 50
    assert sum(any(ord(letter) > 127 for letter in pair["answer"]) for pair in pairs) > 200


def test_normalisation_is_search_r1s(pairs):
    assert [normalize_answer(pair["answer"]) for pair in pairs] == [pair["normalized"] for pair in pairs]


@pytest.mark.parametrize(("name", "score"), [("em", exact_match), ("subem", substring_match)])
def test_matches_are_search_r1s(pairs, name, score):
    different = [pair for pair in pairs if score(pair["answer"], pair["golden_answers"]) != pair[name]]
    assert different == []


def test_f1_is_flashrags(pairs):
    """But for one case: where nothing is left of answer and gold answer, they agree, as in SQuAD 2."""
    for pair in pairs:
        both_empty = not pair["normalized"] and any(
            not normalize_answer(one) for one in pair["golden_answers"]
        )
        wanted = 1.0 if both_empty else pair["f1"]
        assert f1_score(pair["answer"], pair["golden_answers"]) == pytest.approx(wanted, abs=1e-12), pair


def test_one_gold_answer_may_be_a_text(pairs):
    for pair in pairs:
        if len(pair["golden_answers"]) == 1:
            assert exact_match(pair["answer"], pair["golden_answers"][0]) == pair["em"]
