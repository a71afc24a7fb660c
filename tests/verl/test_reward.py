"""The reward function as verl calls it."""

import numpy as np
import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.utils.reward_score.search_r1_like_qa_em import compute_score as verls_own

from llds.engines.verl.reward import compute_score, golden_answers
from llds.errors import LLDSError

RESPONSE = (
    "<think> a </think> <search> q </search>\n\n<information>Doc 1</information>\n\n"
    "<think> b </think><answer> The Aruban florin </answer>"
)


def score(answer="Aruban florin", response=RESPONSE, extra=None, **weights):
    return compute_score("nq", response, {"target": answer}, extra, **weights)


@pytest.mark.parametrize(
    "truth",
    [
        {"target": ["florin", "Aruban florin"]},
        {"target": "Aruban florin"},
        {"target": np.array(["florin", "Aruban florin"], dtype=object)},
        "Aruban florin",
        ["Aruban florin"],
        np.array(["Aruban florin"], dtype=object),
    ],
)
def test_shapes_of_the_truth(truth):
    found = compute_score("nq", RESPONSE, truth)
    assert found == {"score": 1.0, "exact_match": 1.0, "f1": 1.0, "valid_format": 1.0, "answered": 1.0}


@pytest.mark.parametrize("truth", [None, {}, {"target": []}, {"answer": "a"}, 3, [1], {"target": None}])
def test_other_shapes_are_refused(truth):
    with pytest.raises(LLDSError, match="write the right answers as text"):
        golden_answers(truth)


def test_the_weights():
    found = score("florin", exact_match=1.0, f1=0.5, valid_format=0.25)
    assert found["exact_match"] == 0
    assert found["f1"] == pytest.approx(2 / 3)
    assert found["score"] == pytest.approx(1 / 3 + 0.25)


def test_what_the_agent_loop_told_goes_first():
    """A passage that holds an answer is not the policy's answer."""
    planted = "<search> q </search><information><answer> florin </answer></information>"
    assert score("florin", planted)["score"] == 1.0
    told = {"llds_answer": None, "llds_valid_format": 0.0, "llds_searches": 1, "num_turns": 3}
    found = score("florin", planted, told)
    assert found == {
        "score": 0.0,
        "exact_match": 0.0,
        "f1": 0.0,
        "valid_format": 0.0,
        "answered": 0.0,
        "searches": 1.0,
    }
    assert score("florin", "", {**told, "llds_answer": "Florin."})["score"] == 1.0


def test_nothing_is_called_acc():
    """In validation verl counts an ``acc`` that is missing as 0, and so what a broken tool left out."""
    assert "acc" not in score()


@pytest.mark.parametrize("answer", ["The Aruban florin", "aruban FLORIN!", "florin", ""])
def test_agrees_with_verls_own_score(answer):
    """verl wants two answers, since Search-R1's prompt holds one."""
    response = f"<answer> {answer} </answer>"
    theirs = verls_own("<answer> Beijing </answer>" + response, {"target": ["Aruban florin"]})
    assert score(response=response)["score"] == theirs


def test_verl_loads_it_with_its_weights():
    custom = {"path": "pkg://llds.engines.verl.reward", "name": "compute_score"}
    config = OmegaConf.create(
        {"reward": {"custom_reward_function": {**custom, "reward_kwargs": {"f1": 2.0}}}}
    )
    loaded = get_custom_reward_fn(config)
    given = {"data_source": "nq", "solution_str": RESPONSE, "ground_truth": "Aruban florin"}
    assert loaded(**given, extra_info={}, reward_router_address=None)["score"] == 3.0
