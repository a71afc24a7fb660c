"""vLLM in this process, as far as it can be checked without one: against a stand-in for the calls that are made."""

import dataclasses
import math
import sys

import pytest
import torch

import fake_vllm
from llds.data.embedded import load_questions
from llds.errors import LLDSError
from llds.inference.engine import Game
from llds.inference.local import TransformersEngine
from llds.inference.vllm import VLLMWriter
from llds.inference.writing import BatchedEngine, turn_seed
from llds.search.sampling import GREEDY, Sampling
from llds.training.environment import prepare_environment
from llds.training.inputs import make_limits, make_protocol, make_retriever
from llds.training.policy import load_policy, load_reader, saved_recipe

prepare_environment()


@pytest.fixture(scope="module")
def tiny():
    torch.set_num_threads(1)
    recipe = saved_recipe("tiny", ["episode.max_turns=2", "episode.max_action=22"])
    policy = load_policy(recipe.model)
    game = Game(make_retriever(recipe.retrieval), make_protocol(recipe), make_limits(recipe))
    prompts = [game.protocol.prompt_ids(policy.tokenizer, one.question) for one in load_questions("test")[:8]]
    return policy, game, prompts


def play(engine, tiny, sampling=GREEDY):
    numbers, episodes = zip(
        *(p for part in engine.play(tiny[2], tiny[1], sampling, range(8)) for p in part), strict=True
    )
    assert numbers == tuple(range(8))
    return episodes


@pytest.mark.parametrize("surplus", [0, 2])
def test_episodes_are_those_of_transformers(tiny, monkeypatch, surplus):
    policy, _, _ = tiny
    module, made = fake_vllm.make(policy.model, policy.tokenizer, surplus)
    monkeypatch.setitem(sys.modules, "vllm", module)
    reader = load_reader("tiny")
    writer = VLLMWriter("tiny", 600, "float32", tensor_parallel_size=2)
    engine = BatchedEngine(writer, reader.tokenizer, reader.eos, 2048, 3)
    mine = play(engine, tiny)
    theirs = play(TransformersEngine(policy.model, policy.tokenizer, 8), tiny)
    assert [dataclasses.replace(one, logprobs=[]) for one in mine] == [
        dataclasses.replace(one, logprobs=[]) for one in theirs
    ]
    assert any(one.truncated for one in mine)
    assert all(
        math.isnan(logprob)
        for one in mine
        for logprob, own in zip(one.logprobs, one.response_mask, strict=True)
        if own
    )
    assert made[0].options == {"tensor_parallel_size": 2}
    assert len(made[0].calls[0]) == 3  # all rows of a batch in one call
    params = made[0].calls[0][0]
    assert (params.seed, params.top_k, params.stop) == (None, -1, ["</search>", "</answer>"])
    assert params.include_stop_str_in_output
    assert not params.skip_special_tokens


def test_sampled_actions_have_seeds_of_their_own(tiny, monkeypatch):
    policy, _, _ = tiny
    module, made = fake_vllm.make(policy.model, policy.tokenizer)
    monkeypatch.setitem(sys.modules, "vllm", module)
    reader = load_reader("tiny")
    engine = BatchedEngine(VLLMWriter("tiny", 600), reader.tokenizer, reader.eos, 2048, 8)
    play(engine, tiny, Sampling(temperature=0.5, top_k=7))
    assert [params.seed for params in made[0].calls[0]] == [turn_seed(number, 0) for number in range(8)]
    assert {(params.temperature, params.top_k) for params in made[0].calls[0]} == {(0.5, 7)}
    assert made[0].calls[1][0].seed in {turn_seed(number, 1) for number in range(8)}


def test_what_goes_wrong_is_one_sentence(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(LLDSError, match=r"vLLM can't be imported .* take --engine transformers"):
        VLLMWriter("tiny", 600)
    module, _ = fake_vllm.make(tiny[0].model, tiny[0].tokenizer)
    monkeypatch.setitem(sys.modules, "vllm", module)
    with pytest.raises(LLDSError, match=r"^vLLM can't load tiny: Unknown dtype: float8\.$"):
        VLLMWriter("tiny", 600, "float8")
    with pytest.raises(LLDSError, match="has no end-of-text token"):
        BatchedEngine(VLLMWriter("tiny", 600), tiny[0].tokenizer, frozenset(), None, 4)
