import pytest
import torch

from llds.errors import LLDSError
from llds.search.sampling import GREEDY, Sampling, draw_uniform, sample

LOGITS = torch.tensor([1.0, 3.0, 0.0, 2.0, -torch.inf])


def frequencies(sampling, logits=LOGITS, draws=40000):
    uniform = draw_uniform(draws, torch.Generator().manual_seed(0))
    tokens, _ = sample(logits.expand(draws, -1), sampling, uniform)
    return torch.bincount(tokens, minlength=len(logits)) / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_from_the_tempered_softmax(temperature):
    expected = (LOGITS / temperature).softmax(0)
    torch.testing.assert_close(frequencies(Sampling(temperature)), expected, atol=0.01, rtol=0)


def test_top_k_and_nucleus():
    two = torch.tensor([0, 3.0, 0, 2.0, 0]).exp().mul(torch.tensor([0, 1, 0, 1, 0]))
    expected = two / two.sum()
    torch.testing.assert_close(frequencies(Sampling(top_k=2)), expected, atol=0.01, rtol=0)
    # Shares .64, .24, .09, .03: two tokens reach .7, and the first alone does not.
    torch.testing.assert_close(frequencies(Sampling(top_p=0.7)), expected, atol=0.01, rtol=0)
    assert frequencies(Sampling(top_p=0.6)).tolist() == [0, 1, 0, 0, 0]
    # After top-k the nucleus is taken of what is left: .73 of the two reaches .7.
    assert frequencies(Sampling(top_k=2, top_p=0.7)).tolist() == [0, 1, 0, 0, 0]
    assert frequencies(Sampling(top_k=50)).equal(frequencies(Sampling()))


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-24])
def test_an_impossible_token_is_never_drawn(uniform):
    logits = torch.full((1, 50000), -torch.inf)
    logits[0, 77:40000] = torch.randn(40000 - 77, generator=torch.Generator().manual_seed(1))
    tokens, logprobs = sample(logits, Sampling(), torch.tensor([uniform]))
    assert 77 <= tokens.item() < 40000
    assert logprobs.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_tempered_whole_vocabulary(dtype):
    logits = torch.randn(64, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    uniform = draw_uniform(64, torch.Generator().manual_seed(1))
    tokens, logprobs = sample(logits, Sampling(0.7, top_p=0.5, top_k=5), uniform)
    expected = (logits.float() / 0.7).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)


def test_greedy():
    tokens, logprobs = sample(LOGITS[None], GREEDY, None)
    assert tokens.tolist() == [1]
    torch.testing.assert_close(logprobs, LOGITS.log_softmax(0)[1:2])


def test_same_generator_state_same_numbers():
    first, second = (draw_uniform(5, torch.Generator().manual_seed(3)) for _ in range(2))
    assert first.equal(second)
    torch.manual_seed(3)
    assert draw_uniform(5, None).equal(first)


@pytest.mark.parametrize(
    "settings",
    [{"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}],
)
def test_settings_out_of_range(settings):
    with pytest.raises(LLDSError):
        Sampling(**settings)
