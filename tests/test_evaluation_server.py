"""A completions server as engine: the episodes are those of transformers, and its faults are told in sentences."""

import dataclasses
import math
import re
import time

import pytest
import torch

from completion_server import NAME, CompletionTestServer
from llds.data.embedded import load_questions
from llds.errors import LLDSError
from llds.inference.engine import Game
from llds.inference.local import TransformersEngine
from llds.inference.server import CompletionServer, whole_text
from llds.inference.writing import ConcurrentEngine, Context
from llds.search.retrieval import RetrieverUnavailable
from llds.search.sampling import GREEDY, Sampling
from llds.training.environment import prepare_environment
from llds.training.inputs import make_limits, make_protocol, make_retriever
from llds.training.policy import load_policy, load_reader, saved_recipe

prepare_environment()
QUESTIONS = 50
# Actions and observations are cut, corrections are given, responses reach their longest length.
TIGHT = {"max_action_tokens": 22, "max_observation_tokens": 40, "max_response_tokens": 150}


@pytest.fixture(scope="module")
def tiny():
    torch.set_num_threads(1)
    recipe = saved_recipe("tiny", ["episode.max_turns=3"])
    policy = load_policy(recipe.model)
    game = Game(make_retriever(recipe.retrieval), make_protocol(recipe), make_limits(recipe))
    questions = load_questions("test")[:QUESTIONS]
    prompts = [game.protocol.prompt_ids(policy.tokenizer, one.question) for one in questions]
    return (
        policy,
        game,
        prompts,
        played(TransformersEngine(policy.model, policy.tokenizer, 25), prompts, game),
    )


@pytest.fixture(scope="module")
def local(tiny):
    """Return a game of other limits, and the episodes that transformers plays in it."""
    policy, game, prompts, episodes = tiny
    kept = {}

    def play(limits):
        if not limits:
            return game, episodes
        other = dataclasses.replace(game, limits=dataclasses.replace(game.limits, **limits))
        if str(limits) not in kept:
            kept[str(limits)] = played(TransformersEngine(policy.model, policy.tokenizer, 25), prompts, other)
        return other, kept[str(limits)]

    return play


@pytest.fixture(scope="module")
def memory():
    return {}


@pytest.fixture
def serve(tiny, memory, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    policy, servers = tiny[0], []

    def start(dialect="vllm", **options):
        servers.append(
            CompletionTestServer(policy.model, policy.tokenizer, dialect, memory=memory, **options)
        )
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def client_of(server, tiny, **options):
    settings = {"timeout": 120.0, "tries": 3, "backoff": 0.0, **options}
    return CompletionServer(server.url, options.pop("model", None), tiny[0].tokenizer, **settings)


def engine_of(client, tiny, workers=8):
    reader = load_reader("tiny")
    return ConcurrentEngine(client, tiny[0].tokenizer, reader.eos, client.positions, workers)


def played(engine, prompts, game, sampling=GREEDY):
    seeds = list(range(len(prompts)))
    found = [pair for finished in engine.play(prompts, game, sampling, seeds) for pair in finished]
    assert sorted(number for number, _ in found) == seeds
    return [episode for _, episode in sorted(found, key=lambda pair: pair[0])]


def without_logprobs(episode):
    return dataclasses.replace(episode, logprobs=[], question=None)


def as_text(episode):
    turns = [(turn.action, turn.text, turn.passages, turn.observation) for turn in episode.turns]
    return episode.response, episode.answer, episode.stop, turns


@pytest.mark.parametrize(
    ("dialect", "limits"), [("vllm", {}), ("vllm", TIGHT), ("sglang", {}), ("plain", {})]
)
def test_greedy_episodes_are_those_of_transformers(serve, tiny, local, dialect, limits):
    server = serve(dialect)
    client = client_of(server, tiny)
    assert client.exact == (dialect == "vllm")
    assert (client.model, client.positions) == (NAME, 2048)
    game, expected = local(limits)
    episodes = played(engine_of(client, tiny), tiny[2], game)
    # Text alone is tokenised again, so a token the model would not be given for its text becomes others.
    seen = without_logprobs if client.exact else as_text
    assert [seen(episode) for episode in episodes] == [seen(episode) for episode in expected]
    for episode in episodes:
        for logprob, mask in zip(episode.logprobs, episode.response_mask, strict=True):
            assert math.isnan(logprob) if mask else logprob == 0.0
    assert 1 < server.busiest <= 8
    extras = server.requests[-1].keys() & {"return_token_ids", "no_stop_trim"}
    assert bool(extras) == (dialect != "plain")
    assert all(request["temperature"] == 0.0 for request in server.requests)


def test_the_comparison_has_episodes_of_many_kinds(local):
    plain, tight = local({})[1], local(TIGHT)[1]
    assert len(plain) == len(tight) == QUESTIONS
    assert sum(episode.searches for episode in plain) >= QUESTIONS / 2
    assert {episode.stop for episode in tight} == {"answer", "length"}
    turns = [turn for episode in tight for turn in episode.turns]
    assert sum(turn.cut for turn in turns) >= 10
    assert sum("My previous action is invalid" in turn.observation for turn in turns) >= 5
    assert sum(turn.passages is not None and len(turn.observation) < 150 for turn in turns) >= 5


def test_sampled_requests_carry_their_own_seeds(serve, tiny):
    server = serve()
    client = client_of(server, tiny)
    _, game, prompts, _ = tiny
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=20)
    for _ in range(2):
        played(engine_of(client, tiny), prompts[:4], game, sampling)
    drawn = [request for request in server.requests if request["temperature"]]
    first, second = drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]
    seeds = {(tuple(request["prompt"]), request["seed"]) for request in first}
    assert seeds == {(tuple(request["prompt"]), request["seed"]) for request in second}
    assert len({seed for _, seed in seeds}) == len(seeds)
    assert all(0 <= seed < 2**31 for _, seed in seeds)
    assert {(one["temperature"], one["top_p"], one["top_k"]) for one in drawn} == {(0.7, 0.9, 20)}
    assert {(one["min_p"], one["repetition_penalty"]) for one in drawn} == {(0.0, 1.0)}


def test_faults_that_pass_change_nothing(serve, tiny):
    server = serve()
    _, game, prompts, local = tiny
    played(
        engine_of(client_of(server, tiny), tiny), prompts[:12], game
    )  # from here on it answers from memory
    client = client_of(server, tiny, timeout=0.7, tries=8)
    server.moves = [
        500,
        "cut",
        "not JSON",
        429,
        '{"choices": []}',
        "slow",
        "hang up",
        503,
        '{"choices": [{"text": 3}]}',
    ]
    episodes = played(engine_of(client, tiny, workers=4), prompts[:12], game)
    assert server.moves == []
    assert [one.response_ids for one in episodes] == [one.response_ids for one in local[:12]]


@pytest.mark.parametrize(
    ("move", "sentence"),
    [
        (500, "answered with status 500 (tried 3 times): check that it runs"),
        ("cut", "could not be reached"),
        ("hang up", "could not be reached"),
        ("<html>", "answered in another form than OpenAI's completions API (tried 3 times)"),
        ("slow", "did not answer within 0.3 s"),
        (400, 'refused the request with status 400 ("status 400"): it must take prompts as token ids'),
    ],
)
def test_faults_that_stay_are_one_sentence(serve, tiny, move, sentence):
    server = serve()
    client = client_of(server, tiny)
    client._timeout = 0.3
    server.moves = [move] * 3
    with pytest.raises(LLDSError) as raised:
        client.write([Context([5, 6], 3, 0)], GREEDY)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_aborted_action_is_asked_for_again(serve, tiny):
    server = serve()
    client = client_of(server, tiny)
    server.moves = ['{"choices": [{"text": "x", "finish_reason": "abort"}]}']
    (ids,) = client.write([Context(tiny[2][0], 5, 0)], GREEDY)
    assert len(ids) == 5


def test_a_deadline_ends_the_tries(serve, tiny):
    server = serve()
    client = client_of(server, tiny, tries=50, deadline=0.4, backoff=0.2, longest_pause=0.2)
    server.moves = [500] * 100
    began = time.monotonic()
    with pytest.raises(LLDSError, match=re.escape("within its deadline of 0.4 s")):
        client.write([Context([5, 6], 3, 0)], GREEDY)
    assert time.monotonic() - began < 5


def test_wrong_model_key_and_address(serve, tiny, monkeypatch):
    server = serve(key="secret")
    client = client_of(server, tiny, key="secret")
    assert client.model == NAME
    with pytest.raises(LLDSError, match="has no model 'qwen', but tiny; name it with --served-model"):
        CompletionServer(server.url, "qwen", tiny[0].tokenizer, key="secret")
    for key in (None, "wrong"):
        with pytest.raises(LLDSError, match=r"status 401.*wants another key; set LLDS_API_KEY"):
            CompletionServer(server.url, None, tiny[0].tokenizer, key=key)
    with pytest.raises(LLDSError, match=r"refused the request with status 404.*ends in /v1"):
        CompletionServer(server.url.removesuffix("/v1"), NAME, tiny[0].tokenizer, key="secret")
    with pytest.raises(LLDSError, match="is not a URL"):
        CompletionServer("127.0.0.1:8000", NAME, tiny[0].tokenizer)
    with pytest.raises(LLDSError, match="visible ASCII"):
        CompletionServer(server.url, NAME, tiny[0].tokenizer, key="two\nlines")
    server.close()
    with pytest.raises(LLDSError, match=r"could not be reached .*tried 2 times"):
        CompletionServer(server.url, NAME, tiny[0].tokenizer, tries=2, backoff=0.0)


def test_a_failing_server_stops_the_evaluation_and_all_workers(serve, tiny):
    server = serve()
    engine = engine_of(client_of(server, tiny), tiny, workers=4)
    server.moves = [500] * 1000
    with pytest.raises(LLDSError, match="answered with status 500"):
        played(engine, tiny[2][:20], tiny[1])
    time.sleep(0.3)
    asked = len(server.requests)
    time.sleep(0.3)
    assert len(server.requests) == asked


def test_closing_early_asks_for_nothing_more(serve, tiny):
    server = serve()
    engine = engine_of(client_of(server, tiny), tiny, workers=2)
    game = engine.play(tiny[2], tiny[1], GREEDY, list(range(QUESTIONS)))
    first = next(game)
    game.close()
    assert 1 <= len(first) < QUESTIONS
    time.sleep(0.5)
    asked = len(server.requests)
    time.sleep(0.3)
    assert len(server.requests) == asked


def test_an_outage_of_the_search_tool_is_no_fault_of_the_model(serve, tiny):
    class Dead:
        def search(self, queries, topk):
            raise RetrieverUnavailable("down")

    _, game, prompts, local = tiny
    dead = dataclasses.replace(game, retriever=Dead())
    episodes = played(engine_of(client_of(serve(), tiny), tiny), prompts[:6], dead)
    for mine, theirs in zip(episodes, local, strict=False):
        assert mine.tool_failed == bool(theirs.queries)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"text": "<search> a", "finish_reason": "stop"}, ("<search> a</search>", False)),
        ({"text": "<search> a </search>", "finish_reason": "stop"}, ("<search> a </search>", False)),
        ({"text": "<answer> a", "finish_reason": "stop"}, ("<answer> a</answer>", False)),
        ({"text": "<answer> a", "finish_reason": "length"}, ("<answer> a", False)),
        ({"text": "so be it", "finish_reason": "stop"}, ("so be it", True)),
        (
            {"text": "<think> <search> ", "finish_reason": "stop", "stop_reason": None},
            ("<think> <search> ", True),
        ),
        ({"text": "<answer> a", "finish_reason": "stop", "matched_stop": 2}, ("<answer> a", True)),
        (
            {"text": "<search> a <answer> b", "finish_reason": "stop", "matched_stop": "</search>"},
            ("<search> a <answer> b</search>", False),
        ),
        (
            {"text": "<search> a <answer> b", "finish_reason": "stop"},
            ("<search> a <answer> b</answer>", False),
        ),
    ],
)
def test_what_stopped_an_action(choice, expected):
    assert whole_text(choice) == expected
