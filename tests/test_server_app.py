"""The application within this process: time limits, a full queue, failing searches, batching."""

import asyncio
import json
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llds.errors import LLDSError
from llds.search.passages import Passage
from llds.server.app import create_app
from llds.server.batching import Batcher, Busy
from llds.server.reading import Refused, parse
from llds.server.settings import ServerSettings


class Echo:
    """Finds for every query passages that name it."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds
        self.calls = []

    def search(self, queries, topk):
        self.calls.append((list(queries), topk))
        time.sleep(self.seconds)
        if "boom" in queries:
            raise RuntimeError("inner secret")
        if "damage" in queries:
            raise LLDSError("The search index is damaged: build it anew.")
        return [[Passage(f"{query}/{rank}", "t", "x") for rank in range(topk)] for query in queries]


async def request(app, body, path="/retrieve", method="POST", headers=(), parts=None):
    """Send one request straight into the application; return the status and the JSON."""
    messages = parts or [{"type": "http.request", "body": body, "more_body": False}]
    queue = list(messages)
    sent = []

    async def receive():
        if queue:
            message = queue.pop(0)
            if isinstance(message, float):
                await asyncio.sleep(message)
                return await receive()
            return message
        await asyncio.sleep(3600)

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "scheme": "http",
        "root_path": "",
    }
    await app(scope, receive, send)
    content = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], content


def play(retriever, scene, **limits):
    """Run ``scene(ask)`` with the application alive; ``ask`` sends a body."""
    app = create_app(retriever, ServerSettings("x", **limits))

    async def run():
        async with app.router.lifespan_context(app):

            async def ask(body=None, **more):
                status, content = await request(app, json.dumps(body).encode(), **more)
                return status, json.loads(content)

            return await scene(ask)

    return asyncio.run(run())


def test_a_search_that_takes_too_long():
    async def scene(ask):
        return await ask({"queries": ["a"]})

    status, content = play(Echo(0.5), scene, seconds=0.05)
    assert status == 504
    assert "took longer than 0.05 s" in content["detail"]


def test_a_body_that_takes_too_long():
    async def scene(ask):
        parts = [{"type": "http.request", "body": b"{", "more_body": True}, 5.0]
        return await ask(parts=parts)

    status, content = play(Echo(), scene, body_seconds=0.05)
    assert status == 408
    assert "did not arrive within 0.05 s" in content["detail"]


def test_a_body_that_breaks_off():
    async def scene(ask):
        return await ask(parts=[{"type": "http.disconnect"}])

    assert play(Echo(), scene)[0] == 400


@pytest.mark.parametrize("length", ["1e3", "-5", "9" * 30, "abc"])
def test_lengths_that_make_no_sense(length):
    async def scene(ask):
        return await ask({"queries": []}, headers=[("content-length", length)])

    assert play(Echo(), scene)[0] == 413


def test_a_full_queue_is_told_and_empties():
    retriever = Echo(0.2)

    async def scene(ask):
        first = asyncio.create_task(ask({"queries": ["a"] * 4}))
        await asyncio.sleep(0.05)
        second = await ask({"queries": ["b"]})
        return await first, second, await ask({"queries": ["c"]})

    first, second, third = play(retriever, scene, max_pending=4)
    assert [first[0], second[0], third[0]] == [200, 503, 200]
    assert "try again in a moment" in second[1]["detail"]


def test_failures_do_not_tell_secrets_nor_spread():
    retriever = Echo(0.1)

    async def scene(ask):
        warm = asyncio.create_task(ask({"queries": ["warm"]}))
        await asyncio.sleep(0.03)  # these three are then searched together
        told = await asyncio.gather(
            ask({"queries": ["good"], "topk": 1, "return_scores": True}),
            ask({"queries": ["damage"], "topk": 1}),
            ask({"queries": ["fine"], "topk": 1}),
        )
        await warm
        return told

    good, damage, fine = play(retriever, scene)
    assert (["good", "damage", "fine"], 1) in retriever.calls
    assert good[1]["result"][0][0]["document"]["id"] == "good/0"
    assert fine[0] == 200
    assert damage[0] == 500
    assert damage[1]["detail"] == "The search index is damaged: build it anew."


def test_an_unforeseen_failure_is_a_sentence_too():
    app = create_app(Echo(), ServerSettings("x"))

    async def run():
        async with app.router.lifespan_context(app):
            with pytest.raises(RuntimeError):  # for the server's log, after the answer was sent
                await request(app, b'{"queries": ["boom"]}')

    asyncio.run(run())


def test_requests_of_another_topk_are_searched_apart():
    retriever = Echo(0.05)

    async def scene(ask):
        return await asyncio.gather(*(ask({"queries": [f"q{i}"], "topk": 1 + i % 2}) for i in range(6)))

    answers = play(retriever, scene)
    for number, (_, content) in enumerate(answers):
        assert [row["id"] for row in content["result"][0]] == [
            f"q{number}/{k}" for k in range(1 + number % 2)
        ]
    assert {topk for _, topk in retriever.calls} == {1, 2}


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), max_size=12),
    batch=st.integers(1, 8),
    given_up=st.sets(st.integers(0, 11)),
)
def test_every_request_gets_its_own_answers(sizes, batch, given_up):
    retriever = Echo()

    async def run():
        batcher = Batcher(retriever.search, batch, 10_000)
        batcher.start()
        tasks = [
            asyncio.create_task(batcher.ask([f"{i}-{j}" for j in range(size)], topk))
            for i, (size, topk) in enumerate(sizes)
        ]
        await asyncio.sleep(0)
        for number in given_up & set(range(len(tasks))):
            tasks[number].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        await batcher.stop()
        assert batcher.pending == 0
        return answers

    for number, (answer, (size, topk)) in enumerate(zip(asyncio.run(run()), sizes, strict=True)):
        if number not in given_up:
            assert [[p.id for p in found] for found in answer] == [
                [f"{number}-{j}/{k}" for k in range(topk)] for j in range(size)
            ]
    assert all(len(queries) <= max(batch, 1) for queries, _ in retriever.calls)


def test_a_batcher_that_is_stopped_cancels_what_waits():
    gate = threading.Event()

    async def run():
        batcher = Batcher(lambda queries, topk: [[] for _ in queries if gate.wait(5)], 1, 10)
        batcher.start()
        tasks = [asyncio.create_task(batcher.ask(["a"], 1)) for _ in range(3)]
        await asyncio.sleep(0.05)
        await batcher.stop()
        gate.set()
        return await asyncio.wait(tasks[1:], timeout=5)

    done, waiting = asyncio.run(run())
    assert len(done) == 2
    assert not waiting


def test_one_request_alone_is_taken_however_long():
    async def run():
        batcher = Batcher(Echo(0.05).search, 4, 5)
        batcher.start()
        long = asyncio.create_task(batcher.ask(["a"] * 20, 1))
        await asyncio.sleep(0.01)
        with pytest.raises(Busy):
            await batcher.ask(["b"], 1)
        assert len(await long) == 20
        await batcher.stop()

    asyncio.run(run())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
BODIES = st.binary(max_size=60) | st.fixed_dictionaries(
    {},
    optional={
        "queries": JSON | st.lists(st.text(max_size=4), max_size=4),
        "topk": JSON,
        "return_scores": JSON,
    },
).map(lambda content: json.dumps(content).encode())


@settings(max_examples=300, deadline=None)
@given(BODIES)
def test_any_body_is_understood_or_refused_with_a_sentence(body):
    limits = ServerSettings("x", max_queries=3, max_query=3)
    try:
        asked = parse(body, limits)
    except Refused as refusal:
        status, sentence = refusal.status, refusal.sentence
    else:
        assert all(isinstance(query, str) and len(query) <= 3 for query in asked.queries)
        assert len(asked.queries) <= 3
        assert 1 <= asked.topk <= limits.max_topk
        status, sentence = 400, "x."
    assert 400 <= status < 500
    assert sentence.endswith(".")
    assert "\n" not in sentence


@pytest.mark.parametrize(
    "values",
    [
        {"workers": 0},
        {"port": 70_000},
        {"topk": 5, "max_topk": 4},
        {"token": ""},
        {"token": "ü"},
        {"seconds": 0},
        {"batch": -1},
    ],
)
def test_settings_that_make_no_sense(values):
    with pytest.raises(LLDSError):
        ServerSettings("x", **values)


def test_settings_survive_the_way_to_a_worker():
    before = ServerSettings("x", token="t", workers=3, seconds=1.5)
    assert ServerSettings.from_json(before.to_json()) == before
