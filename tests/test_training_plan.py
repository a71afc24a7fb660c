"""The arithmetic of a run."""

from collections import Counter

import pytest

from llds.errors import LLDSError
from llds.training.plan import make_plan, question_order, seed_of
from llds.training.recipe import load_recipe


def test_the_parts_of_a_rollout_add_up():
    for overrides, processes in [
        ([], 1),
        (["grpo.micro_batch=5"], 1),
        (["grpo.passes=2"], 2),
        (["grpo.responses=6"], 4),
    ]:
        recipe = load_recipe("tiny", overrides)
        plan = make_plan(recipe, processes)
        rollout = recipe.grpo.questions * recipe.grpo.responses
        assert plan.micro_batch <= recipe.grpo.micro_batch
        assert plan.micro_batch * plan.slices * processes == rollout
        assert plan.accumulation * recipe.grpo.steps_per_rollout == plan.slices
        assert plan.total_steps == recipe.run.rollouts * recipe.grpo.steps_per_rollout * recipe.grpo.passes
        assert [plan.rollout(step) for step in range(plan.steps_per_rollout + 1)][-2:] == [0, 1]
        assert plan.at_boundary(0)
        assert plan.at_boundary(plan.steps_per_rollout)
        assert not plan.at_boundary(1)


def test_a_rollout_that_does_not_divide_is_one_sentence():
    with pytest.raises(LLDSError, match="can't be divided"):
        make_plan(load_recipe("tiny"), processes=5)


def test_every_question_comes_once_before_any_comes_again():
    recipe = load_recipe("tiny", ["run.rollouts=10"])
    order = question_order(40, recipe)
    assert len(order) == 160
    for start in range(0, 160, 40):
        assert sorted(order[start : start + 40]) == list(range(40))
    assert order[:40] != order[40:80]
    assert set(Counter(order).values()) == {4}


def test_the_order_depends_on_the_seed_and_longer_runs_begin_alike():
    first = question_order(40, load_recipe("tiny", ["run.rollouts=5"]))
    longer = question_order(40, load_recipe("tiny", ["run.rollouts=7"]))
    other = question_order(40, load_recipe("tiny", ["run.rollouts=5", "run.seed=1"]))
    assert longer[: len(first)] == first
    assert other != first


def test_too_few_questions_is_one_sentence():
    with pytest.raises(LLDSError, match="15 training questions, fewer than"):
        question_order(15, load_recipe("tiny"))


def test_seeds_differ_by_every_part():
    seeds = {seed_of(seed, rollout, rank) for seed in range(5) for rollout in range(20) for rank in range(4)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**32 for seed in seeds)
