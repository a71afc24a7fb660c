"""The losses in verl's real registry: their value and gradient are those of the objective."""

from itertools import pairwise

import pytest
import torch
from batches import actor_config, make_batch, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn

from llds.engines.verl import plugin
from llds.errors import LLDSError
from llds.objective import llds_loss

#: What a base needs beside its defaults.
NEEDS = {"dro": {"dro_beta": 0.1}}
#: bypass_mode wants a rollout correction of its own; see test_in_place.
BASES = [name for name in plugin.base_names() if name != "bypass_mode"]


def call(config, batch, loss_mode=None):
    loss, told = get_policy_loss_fn(loss_mode or config.policy_loss.loss_mode)(
        **batch, loss_agg_mode="token-mean", config=config, rollout_is_weights=None
    )
    (gradient,) = torch.autograd.grad(loss, batch["log_prob"])
    return loss.detach(), gradient, told


def objective(batch, **options):
    output = llds_loss(
        batch["log_prob"], batch["old_log_prob"], batch["advantages"], batch["response_mask"], **options
    )
    (gradient,) = torch.autograd.grad(output.loss, batch["log_prob"])
    return output.loss.detach(), gradient


def with_needs(config, base):
    for name, value in NEEDS.get(base, {}).items():
        object.__setattr__(config.policy_loss, name, value)
    return config


def test_the_bases_of_the_issue_are_there():
    assert {"vanilla", "gspo", "cispo", "dppo_tv", "dppo_kl", "sapo", "geo_mean"} <= set(BASES)
    assert {"llds", "llds_vanilla", "llds_gspo"} <= set(POLICY_LOSS_REGISTRY)


@pytest.mark.parametrize("base", BASES)
def test_value_and_gradient_are_base_plus_objective(base):
    batch = make_batch(requires_grad=True)
    config = with_needs(actor_config(base=base), base)
    torch.manual_seed(0)
    value, gradient, told = call(config, batch)
    torch.manual_seed(0)
    plain, plain_gradient, plain_told = call(config, batch, base)
    term, term_gradient = objective(batch, coef=0.2)
    assert term > 0
    torch.testing.assert_close(value, plain + term, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, plain_gradient + term_gradient, rtol=1e-12, atol=1e-14)
    assert told["llds/loss"] == pytest.approx(float(term))
    assert plain_told.items() <= told.items()
    assert all(type(number) is float for name, number in told.items() if name.startswith("llds/"))


@pytest.mark.parametrize("base", BASES)
def test_coef_0_is_the_base_bit_for_bit(base):
    batch = make_batch(requires_grad=True)
    config = with_needs(actor_config(base=base, coef=0.0), base)
    torch.manual_seed(0)
    value, gradient, told = call(config, batch)
    torch.manual_seed(0)
    plain, plain_gradient, _ = call(config, batch, base)
    assert torch.equal(value, plain)
    assert torch.equal(gradient, plain_gradient)
    assert told["llds/loss"] == 0
    assert told["llds/penalty"] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"gate": "response"},
        {"gate": "token"},
        {"preserve": "positive"},
        {"dead_zone": 0.05},
        {"penalty": "huber", "huber_width": 0.2},
        {"compat": "authors"},
        {"coef": 0.01, "advantage_tol": 0.3},
    ],
)
def test_options_reach_the_objective(options):
    batch = make_batch(requires_grad=True)
    value, gradient, _ = call(actor_config(**options), batch)
    plain, plain_gradient, _ = call(actor_config(coef=0.0), batch)
    term, term_gradient = objective(batch, **{"coef": 0.2, **options})
    torch.testing.assert_close(value - plain, term)
    torch.testing.assert_close(gradient - plain_gradient, term_gradient)


def test_a_mode_that_names_its_base():
    batch = make_batch(requires_grad=True)
    assert torch.equal(call(actor_config("llds_gspo"), batch)[0], call(actor_config(base="gspo"), batch)[0])


def test_arguments_by_position():
    batch = make_batch(requires_grad=True)
    config = actor_config()
    by_position, _ = get_policy_loss_fn("llds")(*batch.values(), "token-mean", config)
    assert torch.equal(by_position.detach(), call(config, batch)[0])


@st.composite
def cut(draw, rows=8):
    """Draw how a mini-batch lies on ranks and in micro-batches: indices per rank, per micro-batch."""
    ranks = draw(st.sampled_from([1, 2, 4]))
    order = draw(st.permutations(range(rows)))
    per_rank = rows // ranks
    parts = []
    for rank in range(ranks):
        own = order[rank * per_rank : (rank + 1) * per_rank]
        bounds = sorted(draw(st.sets(st.integers(1, per_rank - 1), max_size=3))) if per_rank > 1 else []
        edges = [0, *bounds, per_rank]
        parts.append([list(own[a:b]) for a, b in pairwise(edges)])
    return parts


@settings(max_examples=40, deadline=None)
@given(cut(), st.sampled_from(["all", "response"]), st.integers(0, 100))
def test_the_term_does_not_depend_on_how_a_mini_batch_is_cut(parts, normalizer, seed):
    whole = make_batch(seed=seed, requires_grad=True)
    count = {"all": int(whole["response_mask"].sum()), "response": 8}[normalizer]
    expected, expected_gradient = objective(whole, coef=0.2, token_count=count)
    gradient = torch.zeros_like(expected_gradient)
    total = 0.0
    for rank in parts:
        config = actor_config(
            mini_batch=8,
            ranks=len(parts),
            tokens=int(whole["response_mask"].sum()),
            normalizer=normalizer,
        )
        for index, batch in zip(rank, leaves(whole, rank), strict=True):
            value, mine, _ = call(config, batch)
            plain, base, _ = call(config, batch, "vanilla")
            # verl averages gradients over ranks.
            gradient[index] += (mine - base) / len(parts)
            total += float(value - plain) / len(parts)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)
    assert total == pytest.approx(float(expected), rel=1e-9)


def test_the_authors_count_is_that_of_each_micro_batch():
    whole = make_batch(requires_grad=True)
    config = actor_config(mini_batch=8, tokens=int(whole["response_mask"].sum()), normalizer="authors")
    parts = [[0, 1, 2], [3, 4, 5, 6, 7]]
    found = sum(
        float(call(config, part)[0] - call(config, part, "vanilla")[0]) for part in leaves(whole, parts)
    )
    means = [float(objective(part, coef=0.2)[0]) for part in leaves(whole, parts)]
    assert found == pytest.approx((3 * means[0] + 5 * means[1]) / 8)


def leaves(whole, parts):
    for index in parts:
        batch = {name: value.detach() for name, value in rows_of(whole, index).items()}
        batch["log_prob"].requires_grad_()
        yield batch


# --- in place


def test_in_place_adds_to_any_loss_that_is_called(restored_registry):
    originals = {name: restored_registry[name] for name in BASES}
    batch = make_batch(requires_grad=True)
    config = actor_config("vanilla", wrap_registry=True)
    plugin.wrap_registry()  # once more does no harm
    for base in ("vanilla", "gspo", "cispo"):
        plain, _ = originals[base](**batch, loss_agg_mode="token-mean", config=config)
        term, _ = objective(batch, coef=0.2)
        torch.testing.assert_close(call(config, batch, base)[0], plain.detach() + term)
        torch.testing.assert_close(call(config, batch, f"llds_{base}")[0], plain.detach() + term)


def test_in_place_holds_when_a_trainer_puts_bypass_mode_in(restored_registry):
    batch = make_batch(requires_grad=True)
    config = actor_config("llds", wrap_registry=True)
    # What verl's apply_bypass_mode does to a configuration.
    object.__setattr__(config.policy_loss, "loss_mode", "bypass_mode")
    value, _, told = call(config, batch)
    plain, _, _ = call(actor_config("llds", coef=0.0), batch, "vanilla")
    torch.testing.assert_close(value - plain, objective(batch, coef=0.2)[0])
    assert told["llds/loss"] > 0
    assert any(name.startswith("rollout_corr/") for name in told)


def test_in_place_leaves_other_actors_alone(restored_registry):
    batch = make_batch(requires_grad=True)
    actor_config("vanilla", wrap_registry=True)
    plain_config = actor_config("llds")
    _, _, told = call(plain_config, batch, "vanilla")
    assert not any(name.startswith("llds/") for name in told)


def test_a_mode_that_a_trainer_overwrote_is_an_error_without_it():
    with pytest.raises(LLDSError, match="Nothing would call LLDS: loss_mode is 'bypass_mode'"):
        actor_config("bypass_mode")


def test_called_for_something_else_than_an_actor():
    with pytest.raises(LLDSError, match="a loss for verl's actor"):
        get_policy_loss_fn("llds")(**make_batch(), config=None)
