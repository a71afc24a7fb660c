"""The one-update probe: it sees what an update does, and nobody can tell afterwards that it was there."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from llds.dynamics import hidden_similarity, mean_hidden, probe_update
from llds.errors import LLDSError


class Net(nn.Module):
    """Tied weights, a buffer that changes in training, and dropout."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.drop(self.frozen(self.norm(self.embed(ids)))))


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.05), amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}
IDS = torch.arange(10)


def setup(name="adamw", steps=0):
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])
    for _ in range(steps):
        train(model, optimizer)
    return model, optimizer


def loss_of(model):
    return nn.functional.cross_entropy(model(IDS), (IDS + 1) % 11)


def likelihood_of(model):
    return -nn.functional.cross_entropy(model(IDS), (IDS + 1) % 11, reduction="none")


def train(model, optimizer):
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def snapshot(model, optimizer):
    return copy.deepcopy(
        {
            "model": model.state_dict(),
            "modes": [module.training for module in model.modules()],
            "grads": [p.grad for p in model.parameters()],
            "optimizer": optimizer.state_dict(),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
        }
    )


def assert_equal(a, b, path=""):
    """Compare nested states bit for bit."""
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor | np.ndarray):
        assert a.dtype == b.dtype, path
        assert (a == b).all(), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_equal(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for index, pair in enumerate(zip(a, b, strict=True)):
            assert_equal(*pair, f"{path}/{index}")
    else:
        assert a == b, path


def noisy_probe(model, optimizer=None, **options):
    """Probe with closures that draw from every generator."""

    def loss():
        random.random(), np.random.rand()
        return loss_of(model)

    return probe_update(model, loss, lambda: likelihood_of(model), optimizer=optimizer, **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 3])
def test_everything_is_put_back_bit_for_bit(name, steps):
    model, optimizer = setup(name, steps)
    model.norm.eval()
    before, tensors = snapshot(model, optimizer), [id(p) for p in model.parameters()]
    grads = [p.grad for p in model.parameters()]
    result = noisy_probe(model, optimizer)
    assert (result.gain != 0).all()
    assert_equal(snapshot(model, optimizer), before)
    assert [id(p) for p in model.parameters()] == tensors
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert not model.norm.training


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_nothing_had_happened(name):
    states = []
    for probed in (False, True):
        model, optimizer = setup(name, 2)
        for _ in range(3):
            loss_of(model).backward()  # in the midst of accumulating gradients
            if probed:
                noisy_probe(model, optimizer)
                noisy_probe(model, lr=0.1)
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(snapshot(model, optimizer))
    assert_equal(*states)


def test_the_gain_is_that_of_the_update_which_the_run_would_make():
    model, optimizer = setup("adamw", 2)
    result = probe_update(model, lambda: loss_of(model), lambda: likelihood_of(model), optimizer=optimizer)
    model.eval()
    assert torch.equal(result.before, likelihood_of(model).detach().double())
    model.train()
    optimizer.zero_grad()
    train(model, optimizer)
    model.eval()
    assert torch.equal(result.after, likelihood_of(model).detach().double())


def test_plain_gradient_descent_follows_the_gradient():
    model, _ = setup()
    model.drop.p = 0.0
    model.eval()
    lr = 1e-4
    watched = likelihood_of(model)
    rows = [torch.autograd.grad(value, model.embed.weight, retain_graph=True)[0] for value in watched]
    push = torch.autograd.grad(loss_of(model), [model.embed.weight, model.norm.weight, model.norm.bias])
    others = [
        torch.autograd.grad(v, [model.norm.weight, model.norm.bias], retain_graph=True) for v in watched
    ]
    expected = [
        -lr * sum((a * b).sum() for a, b in zip([row, *other], push, strict=True)).item()
        for row, other in zip(rows, others, strict=True)
    ]
    result = probe_update(model, lambda: loss_of(model), lambda: likelihood_of(model), lr=lr)
    assert result.gain.tolist() == pytest.approx(expected, abs=2e-6)


def test_it_puts_back_when_something_is_raised():
    model, optimizer = setup("adamw", 1)
    before = snapshot(model, optimizer)

    def fail():
        raise RuntimeError("broken")

    calls = []

    def fail_after_the_update():
        calls.append(1)
        return fail() if len(calls) == 2 else likelihood_of(model)

    for loss, likelihood in (
        (fail, lambda: likelihood_of(model)),
        (lambda: loss_of(model), fail),
        (lambda: loss_of(model), fail_after_the_update),
    ):
        with pytest.raises(RuntimeError, match="broken"):
            probe_update(model, loss, likelihood, optimizer=optimizer)
        assert_equal(snapshot(model, optimizer), before)


def test_series_of_the_probe():
    model, optimizer = setup("adamw", 1)
    result = noisy_probe(model, optimizer)
    series = result.series(epsilon=-0.02)
    assert series["probe_gain_correct"] == pytest.approx(result.gain.mean().item())
    assert series["probe_lld_responses"] == pytest.approx((result.gain <= -0.02).double().mean().item())


def test_likelihoods_that_are_not_finite_are_left_out():
    model, optimizer = setup("adamw", 1)

    def likelihood():
        return likelihood_of(model) + torch.tensor([float("-inf")] + [0.0] * 9)

    result = probe_update(model, lambda: loss_of(model), likelihood, optimizer=optimizer)
    assert result.series()["probe_gain_correct"] == pytest.approx(result.gain[1:].mean().item())
    nothing = probe_update(model, lambda: loss_of(model), lambda: likelihood()[:1], optimizer=optimizer)
    assert set(nothing.series().values()) == {None}


def test_an_exploded_loss_leaves_no_trace():
    model, optimizer = setup("adamw", 1)
    before = snapshot(model, optimizer)
    result = probe_update(
        model, lambda: loss_of(model) * float("inf"), lambda: likelihood_of(model), optimizer=optimizer
    )
    assert result.gain.isnan().all()
    assert_equal(snapshot(model, optimizer), before)


def test_wrong_use_is_told():
    model, optimizer = setup()
    for options in ({}, {"optimizer": optimizer, "lr": 0.1}):
        with pytest.raises(LLDSError, match="either an optimizer or lr"):
            noisy_probe(model, **options)
    with pytest.raises(LLDSError, match="lr must be above 0"):
        noisy_probe(model, lr=0.0)
    with pytest.raises(LLDSError, match="one number per response"):
        probe_update(model, lambda: loss_of(model), lambda: likelihood_of(model).sum(), lr=0.1)


def test_hidden_similarity_is_the_cosine_of_means():
    random_ = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 5, 7, generator=random_)
    mask = torch.tensor([[0, 1, 1, 0, 1]] * 5 + [[0] * 5])
    vectors = mean_hidden(hidden, mask)
    assert torch.allclose(vectors[2], hidden[2, [1, 2, 4]].double().mean(0))
    assert vectors[5].isnan().all()
    correct, wrong = torch.tensor([1, 1, 0, 0, 0, 1]), torch.tensor([0, 0, 1, 1, 1, 0])
    a, b = vectors[:2].mean(0), vectors[2:5].mean(0)
    expected = (a @ b / (a.norm() * b.norm())).item()
    assert hidden_similarity(vectors, correct, wrong).item() == pytest.approx(expected)
    assert hidden_similarity(vectors, torch.zeros(6), wrong).isnan()
    assert hidden_similarity(vectors[:2], torch.tensor([1, 0]), torch.tensor([1, 0])).item() == pytest.approx(
        1
    )
