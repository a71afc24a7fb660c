"""The lagged anchor: a copy of the weights that trails the model."""

import pytest
import torch
from torch import nn

from llds import llds_loss
from llds.errors import LLDSError
from llds.objective import LaggedAnchor


class Tiny(nn.Module):
    """A bag-of-tokens model with tied weights, a frozen layer and dropout-free token log-probs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        logits = self.head(self.frozen(self.mix(self.embed(tokens)).tanh()))
        return logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)


TOKENS = torch.arange(24).view(3, 8) % 11


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def train(model, optimizer, anchor, steps):
    """Take optimizer steps that make the tokens less likely; return the weights as they were before each."""
    history = []
    for _ in range(steps):
        history.append(weights(model))
        optimizer.zero_grad()
        model(TOKENS).mean().backward()
        anchor.before_step()
        optimizer.step()
    return history


def test_it_trails_by_one_to_every_steps():
    model = Tiny()
    anchor = LaggedAnchor(model, every=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history, lags = [], []
    for step in range(8):
        with anchor.applied():
            held = weights(model)
        lags.append(anchor.lag)
        assert same(held, [*history, weights(model)][step - anchor.lag])
        history += train(model, optimizer, anchor, 1)
    assert lags == [0, 1, 2, 3, 1, 2, 3, 1]


def test_the_models_own_weights_return_bit_for_bit():
    model = Tiny()
    anchor = LaggedAnchor(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), anchor, 2)
    before, identities = weights(model), [p.data_ptr() for p in model.parameters()]
    with anchor.applied():
        assert not same(weights(model), before)
        assert model.head.weight is model.embed.weight
        assert not torch.is_grad_enabled()
    assert same(weights(model), before)
    assert [p.data_ptr() for p in model.parameters()] == identities
    with pytest.raises(RuntimeError, match="boom"), anchor.applied():
        raise RuntimeError("boom")
    assert same(weights(model), before)


def test_it_makes_the_penalty_live_on_policy_and_leaves_the_graph_intact():
    model = Tiny()
    anchor = LaggedAnchor(model, every=2)
    train(model, torch.optim.SGD(model.parameters(), lr=0.5), anchor, 3)
    mask, advantages = torch.ones(3, 7), torch.ones(3)

    logprobs = model(TOKENS)
    dead = llds_loss(logprobs, logprobs.detach(), advantages, mask)
    with anchor.applied():
        old = model(TOKENS)
    live = llds_loss(logprobs, old, advantages, mask)
    assert dead.metrics["moved_tokens"] == 0
    assert live.metrics["moved_tokens"] > 0
    live_gradient = torch.autograd.grad(live.loss, list(model.parameters())[:1], retain_graph=True)[0]

    again = llds_loss(model(TOKENS), old, advantages, mask)
    torch.testing.assert_close(live_gradient, torch.autograd.grad(again.loss, model.embed.weight)[0])


def test_only_trained_weights_are_kept():
    model = Tiny()
    state = LaggedAnchor(model).state_dict()
    assert {name for name in state if not name.startswith("llds.")} == {
        "embed.weight",
        "mix.weight",
        "mix.bias",
    }
    with pytest.raises(LLDSError, match="none requires a gradient"):
        LaggedAnchor(model.frozen)


def test_state_goes_through_a_checkpoint():
    model = Tiny()
    anchor = LaggedAnchor(model, every=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, anchor, 5)
    state = anchor.state_dict()
    saved = {name: tensor.clone() for name, tensor in state.items()}
    train(model, optimizer, anchor, 2)
    assert same(state, saved), "a state must not change with further training"

    restored = LaggedAnchor(model, every=3)
    restored.load_state_dict(state)
    assert restored.lag == 2
    assert same(restored.state_dict(), saved)
    odd = {name: tensor for name, tensor in state.items() if name != "mix.bias"}
    with pytest.raises(LLDSError, match=r"mix\.bias is in only one of them"):
        restored.load_state_dict(odd)
    with pytest.raises(LLDSError, match=r"mix\.bias has shape \[3\] there and \[8\] here"):
        restored.load_state_dict(state | {"mix.bias": torch.zeros(3)})
    assert same(restored.state_dict(), saved)


def test_misuse_is_named():
    model = Tiny()
    anchor = LaggedAnchor(model)
    with anchor.applied():
        for misuse in (
            anchor.before_step,
            lambda: anchor.load_state_dict({}),
            lambda: anchor.applied().__enter__(),
        ):
            with pytest.raises(LLDSError, match="leave"):
                misuse()
    with pytest.raises(LLDSError, match="every must be at least 1"):
        LaggedAnchor(model, every=0)
