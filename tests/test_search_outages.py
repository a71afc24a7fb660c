"""The client through outages: pauses, deadline, breaker, cache, token; and what it tells of them."""

import threading

import pytest

from llds.errors import LLDSError
from llds.search.remote import HTTPRetriever, RetrieverUnavailable, read_token
from llds.search.resilience import Backoff, Breaker, Cache
from llds.search.transport import Transport
from test_search_remote import DOCUMENT, FOUND, Server, answer


class Time:
    """A clock that moves when somebody sleeps."""

    def __init__(self):
        self.now = 100.0
        self.slept = []

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds

    def clock(self):
        return self.now


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    running = Server()
    yield running
    running.close()


@pytest.fixture
def play(server):
    """Return the client, the time it lives in and what it told."""

    def make(**settings):
        time, told = Time(), []
        client = HTTPRetriever(
            server.url,
            **{"timeout": 5.0, "sleep": time.sleep, "clock": time.clock, **settings},
            on_event=lambda kind, details: told.append((kind, details)),
        )
        return client, time, told

    return make


def kinds(told):
    return [kind for kind, _ in told]


def test_an_outage_is_told_once_at_each_end(server, play):
    client, _, told = play(tries=5)
    server.moves = [(500, ""), (500, ""), (503, ""), answer]
    assert client.search(["a"], 1) == [[FOUND]]
    assert client.search(["b"], 1) == [[FOUND]]
    assert kinds(told) == ["retriever_failing", "retriever_recovered"]
    assert told[0][1] == {"url": server.url, "reason": "answered with status 500"}
    assert told[1][1]["searches_given_up"] == 0


def test_a_search_given_up_is_told_with_its_reason(server, play):
    client, _, told = play(tries=2)
    server.moves = [(500, ""), (500, ""), answer]
    with pytest.raises(RetrieverUnavailable) as error:
        client.search(["a", "b"], 1)
    client.search(["a"], 1)
    assert kinds(told) == ["retriever_failing", "retriever_unavailable", "retriever_recovered"]
    assert told[1][1] == {"url": server.url, "queries": 2, "reason": str(error.value)}
    assert told[2][1]["searches_given_up"] == 1


def test_the_deadline_covers_all_tries_and_pauses(server, play):
    client, time, _ = play(tries=1000, backoff=1.0, deadline=20.0)
    server.moves = [(500, "")]
    with pytest.raises(RetrieverUnavailable, match=r"within its deadline of 20 s"):
        client.search(["a"], 1)
    assert sum(time.slept) < 20
    assert 3 < len(server.requests) < 1000


def test_an_answer_that_drips_is_given_up_at_the_deadline(server, play):
    client, time, _ = play(tries=1, deadline=10.0)

    def late(queries):
        time.now += 11
        return answer(queries)

    server.moves = [late]
    with pytest.raises(RetrieverUnavailable, match="did not finish its answer in time"):
        client.search(["a"], 1)


def test_the_breaker_leaves_the_server_alone_then_tries_once(server, play):
    client, time, told = play(tries=2, breaker=2, cooldown=60.0)
    server.moves = [(500, "")]
    for _ in range(2):
        with pytest.raises(RetrieverUnavailable, match="status 500"):
            client.search(["a"], 1)
    sent = len(server.requests)
    with pytest.raises(RetrieverUnavailable, match="left alone for another 60 s"):
        client.search(["a"], 1)
    assert len(server.requests) == sent
    assert kinds(told)[-1] == "retriever_left_alone"
    time.now += 61
    with pytest.raises(RetrieverUnavailable, match="tried once"):
        client.search(["a"], 1)
    with pytest.raises(RetrieverUnavailable, match="left alone"):
        client.search(["a"], 1)
    time.now += 61
    server.moves = [answer]
    assert client.search(["a"], 1) == [[FOUND]]
    assert client.search(["b"], 1) == [[FOUND]]
    assert kinds(told)[-1] == "retriever_recovered"


def test_a_search_broken_off_does_not_block_the_trial(server, play):
    client, time, _ = play(tries=1, breaker=1, cooldown=10.0)
    server.moves = [(500, "")]
    with pytest.raises(RetrieverUnavailable):
        client.search(["a"], 1)
    time.now += 11
    before, client._insist = client._insist, None
    with pytest.raises(TypeError):
        client.search(["a"], 1)
    client._insist = before
    server.moves = [answer]
    assert client.search(["a"], 1) == [[FOUND]]


def test_retry_after_is_heeded_within_bounds(server, play, monkeypatch):
    client, time, _ = play(tries=3, backoff=0.0, longest_pause=9.0)
    headers = iter(["4", "4000"])
    read = Transport._read_bounded

    def with_header(self, response, end):
        if response.status_code == 503:
            response.headers["retry-after"] = next(headers)
        return read(self, response, end)

    monkeypatch.setattr(Transport, "_read_bounded", with_header)
    server.moves = [(503, ""), (503, ""), answer]
    assert client.search(["a"], 1) == [[FOUND]]
    assert time.slept == [4.0, 9.0]


def test_the_cache_is_bounded_and_by_topk(server, play):
    client, _, _ = play(cache=2)
    client.search(["a", "b", "a"], 1)
    client.search(["a", "b"], 1)
    assert [request["queries"] for request in server.requests] == [["a", "b"]]
    client.search(["a"], 2)  # pushes out ("a", 1)
    client.search(["b", "a"], 1)
    assert [request["queries"] for request in server.requests[1:]] == [["a"], ["a"]]
    client.probe()
    client.probe()
    assert len(server.requests) == 5


def test_long_batches_go_in_pieces_and_keep_their_order(server, play):
    client, _, _ = play(batch=3)
    server.moves = [
        lambda queries: {"result": [[{"document": {**DOCUMENT, "id": q}, "score": 1}] for q in queries]}
    ]
    queries = [f"q{i}" for i in range(8)]
    assert [found[0].id for found in client.search(queries, 1)] == queries
    assert [len(request["queries"]) for request in server.requests] == [3, 3, 2]


def test_a_refusal_tells_what_the_server_said(server, play):
    client, _, _ = play()
    server.moves = [(422, '{"detail": "Query 1 is not a text."}')]
    with pytest.raises(RetrieverUnavailable, match=r'status 422 \("Query 1 is not a text."\)'):
        client.search(["a"], 1)
    server.moves = [(401, "")]
    with pytest.raises(RetrieverUnavailable, match="LLDS_RETRIEVAL_TOKEN"):
        client.search(["a"], 1)
    server.moves = [(302, "")]
    with pytest.raises(RetrieverUnavailable, match="status 302"):
        client.search(["a"], 1)


def test_an_endless_answer_is_cut(server, play, monkeypatch):
    monkeypatch.setattr("llds.search.remote._LONGEST_ANSWER", 1000)
    client, _, _ = play()
    server.moves = [(200, "x" * 100_000)]
    with pytest.raises(RetrieverUnavailable, match="answered with more than"):
        client.search(["a"], 1)


def test_threads_share_a_client(server, play):
    client, _, _ = play(cache=10)
    server.moves = [
        lambda queries: {"result": [[{"document": {**DOCUMENT, "id": q}, "score": 1}] for q in queries]}
    ]
    wrong = []

    def ask(name):
        for number in range(10):
            query = f"{name}-{number}"
            if client.search([query], 1)[0][0].id != query:
                wrong.append(query)

    threads = [threading.Thread(target=ask, args=(f"t{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tokens(tmp_path, monkeypatch):
    monkeypatch.delenv("LLDS_RETRIEVAL_TOKEN", raising=False)
    assert read_token(None) is None
    monkeypatch.setenv("LLDS_RETRIEVAL_TOKEN", "from-environment")
    assert read_token(None) == "from-environment"
    path = tmp_path / "token"
    with pytest.raises(LLDSError, match="can't be read"):
        read_token(path)
    path.write_text(" \n")
    with pytest.raises(LLDSError, match="is empty"):
        read_token(path)
    path.write_text("secret\n")
    assert read_token(path) == "secret"
    with pytest.raises(LLDSError, match="visible ASCII"):
        HTTPRetriever("http://x", token="two\nlines")


@pytest.mark.parametrize(
    "settings",
    [{"deadline": 0}, {"cache": -1}, {"batch": 0}, {"breaker": 0}, {"cooldown": -1}, {"longest_pause": -1}],
)
def test_settings_out_of_range(settings):
    with pytest.raises(LLDSError, match="out of range"):
        HTTPRetriever("http://x", **settings)


def test_pauses_grow_to_their_bound_with_full_jitter():
    pauses = Backoff(1.0, 8.0)
    drawn = {tries: [pauses.pause(tries) for _ in range(300)] for tries in (1, 3, 9, 5000)}
    for tries, bound in ((1, 1), (3, 4), (9, 8), (5000, 8)):
        assert 0.9 * bound < max(drawn[tries]) <= bound
        assert min(drawn[tries]) < 0.1 * bound


def test_a_breaker_lets_one_try():
    time = Time()
    breaker = Breaker(2, 10.0, time.clock)
    assert breaker.wait() == 0
    assert not breaker.failed()
    assert breaker.wait() == 0
    assert breaker.failed()
    assert breaker.wait() == 10
    time.now += 10
    assert breaker.wait() == 0
    assert breaker.wait() > 0, "the trial is under way"
    breaker.succeeded()
    assert breaker.wait() == breaker.wait() == 0


def test_a_cache_keeps_what_was_used_last():
    cache = Cache(2)
    for key in "ab":
        cache.put(key, key)
    cache.get("a")
    cache.put("c", "c")
    assert [cache.get(key) for key in "abc"] == ["a", None, "c"]
