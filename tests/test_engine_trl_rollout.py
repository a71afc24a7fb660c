"""Failed episodes are left out of their group exactly, and answers reach the loss or are asked for."""

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

import trl_toy as toy
from llds.engines.trl import LLDSGRPOConfig, LLDSGRPOTrainer
from llds.errors import LLDSError

FAILED = (1, 2)


def half(completions, score, **kwargs):
    """Reward: a second one, of another scale, that says nothing about some completions."""
    return [None if value == 0 else value / 2 + 0.1 for value in score]


def run(
    tmp_path, rollout, cls=LLDSGRPOTrainer, config=LLDSGRPOConfig, rewards=toy.score, steps=1, **overrides
):
    settings = config(**toy.settings(tmp_path, max_steps=steps, **overrides))
    trainer = toy.trainer(cls, settings, rollout=rollout, reward_funcs=rewards)
    trainer.train()
    return trainer


def rows_in_rollout_order(trainer):
    """TRL shuffles a rollout; sort its rows by prompt, then by place in the group, which the tokens tell."""
    batch = trainer._buffered_inputs[0]
    order = []
    for prompt in toy.dataset()["prompt"][:2]:
        for place in range(toy.GENERATIONS):
            wanted = trainer.rollout_func.episode(prompt, place)["completion_ids"]
            order += [
                i
                for i, row in enumerate(batch["completion_ids"].tolist())
                if row[: len(wanted)] == wanted and i not in order
            ][:1]
    assert sorted(order) == list(range(8))
    return {name: batch[name][order] for name in ("advantages", "completion_mask", "tool_mask")}, batch


def scores_without_failed():
    rollout = toy.Canned()
    return [
        [rollout.episode(p, i)["score"] if i not in FAILED else float("nan") for i in range(toy.GENERATIONS)]
        for p in toy.dataset()["prompt"][:2]
    ]


def std(values):
    kept = values[~values.isnan()]
    return kept.std() if len(kept) > 1 else torch.tensor(float("nan"))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_failed_episodes_are_left_out_of_their_group(tmp_path, scale):
    trainer = run(tmp_path, toy.Canned(failed=FAILED), scale_rewards=scale)
    rows, batch = rows_in_rollout_order(trainer)
    scores = torch.tensor(scores_without_failed())
    expected = []
    for group in scores:
        advantage = group - group.nanmean()
        if scale != "none":
            advantage = advantage / (std(group if scale == "group" else scores.flatten()) + 1e-4)
        expected.append(advantage.nan_to_num(0.0))
    torch.testing.assert_close(rows["advantages"], torch.cat(expected))
    assert rows["advantages"].abs().max() > 0

    failed = torch.tensor([i in FAILED for i in range(toy.GENERATIONS)] * 2)
    policy_tokens = (rows["completion_mask"] * rows["tool_mask"]).sum(1)
    assert (policy_tokens[failed] == 0).all()
    assert (policy_tokens[~failed] > 0).all()
    assert int(batch["num_items_in_batch"]) == int(policy_tokens.sum())
    assert batch["num_items_in_batch"].dtype == torch.int64
    log = next(entry for entry in trainer.state.log_history if "reward" in entry)
    assert log["tool/failed_episodes"] == len(FAILED) * 2
    assert log["reward"] == pytest.approx(float(scores.nanmean()))


def test_several_rewards_normalised_one_by_one(tmp_path):
    """With normalize_then_sum the advantages are those of a rollout in which the failed rows said nothing."""
    options = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]}
    trainer = run(tmp_path, toy.Canned(failed=FAILED), rewards=[toy.score, half], **options)
    rows, _ = rows_in_rollout_order(trainer)

    def none_if_failed(reward):
        def wrapped(completions, score, **kwargs):
            values = reward(completions, score)
            return [None if value == 100.0 else got for value, got in zip(score, values, strict=True)]

        wrapped.__name__ = reward.__name__
        return wrapped

    silent = [none_if_failed(toy.score), none_if_failed(half)]
    plain = run(
        tmp_path,
        toy.Canned(failed=FAILED, drop=("tool_failed",)),
        GRPOTrainer,
        GRPOConfig,
        rewards=silent,
        **options,
    )
    expected, _ = rows_in_rollout_order(plain)
    assert torch.equal(rows["advantages"], expected["advantages"])
    assert rows["advantages"].abs().max() > 0


class Garbled(toy.Canned):
    """Failed episodes with other tokens and another reward."""

    def episode(self, prompt, place):
        episode = super().episode(prompt, place)
        if place not in self.failed:
            return episode
        return {**episode, "completion_ids": [7] * (len(episode["completion_ids"]) - 1) + [1], "score": -3.0}


def test_what_a_failed_episode_holds_does_not_matter(tmp_path):
    options = {"steps": 8, "num_iterations": 4, "llds_coef": 1.0, "learning_rate": 0.05}
    first = run(tmp_path, toy.Canned(failed=FAILED), **options)
    second = run(tmp_path, Garbled(failed=FAILED), **options)
    kept = run(tmp_path, toy.Canned(), **options)
    other, unlike = toy.weights(second), toy.weights(kept)
    for name, p in toy.weights(first).items():
        torch.testing.assert_close(p, other[name], rtol=0, atol=1e-6)
    assert max(float((p - unlike[name]).abs().max()) for name, p in toy.weights(first).items()) > 1e-3


def test_rollout_in_which_every_episode_failed_moves_nothing(tmp_path):
    start = toy.weights(toy.trainer(GRPOTrainer, GRPOConfig(**toy.settings(tmp_path))))
    trainer = run(tmp_path, toy.Canned(failed=range(toy.GENERATIONS)), steps=4)
    batch = trainer._buffered_inputs[0]
    assert not batch["advantages"].any()
    assert not (batch["completion_mask"] * batch["tool_mask"]).any()
    for name, p in toy.weights(trainer).items():
        assert torch.equal(p, start[name])
    assert trainer.llds.last_step.verdict == "measured zero"
    assert trainer.llds.last_step.metrics["llds/loss"] == 0.0


def test_group_with_one_episode_left_has_advantage_zero(tmp_path):
    trainer = run(tmp_path, toy.Canned(failed=(0, 1, 2)))
    assert not trainer._buffered_inputs[0]["advantages"].any()


def test_evaluation_leaves_failed_episodes_out(tmp_path):
    config = LLDSGRPOConfig(**toy.settings(tmp_path, per_device_eval_batch_size=8))
    trainer = toy.trainer(
        LLDSGRPOTrainer, config, rollout=toy.Canned(failed=FAILED), eval_dataset=toy.dataset(2)
    )
    log = trainer.evaluate()
    assert log["eval_tool/failed_episodes"] == len(FAILED) * 2
    assert log["eval_reward"] == pytest.approx(float(torch.tensor(scores_without_failed()).nanmean()))


def test_rollout_without_the_flag_is_plain(tmp_path):
    trainer = run(tmp_path, toy.Canned(drop=("tool_failed",)))
    assert not any("tool/failed_episodes" in entry for entry in trainer.state.log_history)


class Wrong(toy.Canned):
    """An episode with one entry replaced."""

    def __init__(self, **entry):
        super().__init__()
        self.entry = entry

    def episode(self, prompt, place):
        return {**super().episode(prompt, place), **(self.entry if place == 2 else {})}


@pytest.mark.parametrize(
    ("rollout", "options", "sentence"),
    [
        (Wrong(tool_failed="yes"), {}, "'tool_failed' as a list of true or false"),
        (Wrong(answer_mask=[1, 0]), {"llds_answer_weight": 0.5}, "one 0 or 1 per completion token; 2 compl"),
        (
            Wrong(answer_mask=None),
            {"llds_answer_weight": 0.5},
            "returns 'answer_mask' for every completion; 2",
        ),
        (Wrong(valid_searches=None), {"llds_answer_weight": "auto"}, "'answer_mask' and 'valid_searches'"),
        (toy.Canned(drop=("answer_mask",)), {"llds_answer_weight": "0.5"}, "8 completions have none"),
    ],
)
def test_rollouts_that_say_too_little_or_nonsense(tmp_path, rollout, options, sentence):
    with pytest.raises(LLDSError, match=sentence):
        run(tmp_path, rollout, **options)
