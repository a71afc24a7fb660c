"""Real server processes: right answers under load and through restarts, and what they refuse."""

import json
import os
import random
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from llds.retrieval.build import IndexOptions, build_index
from llds.retrieval.opening import open_index
from llds.search.remote import HTTPRetriever, RetrieverUnavailable
from retrieval_corpus import ServerProcess, key_of, make_rows, wait_for, write_corpus

COUNT = 2000
CLIENTS = 64


@pytest.fixture(scope="module", autouse=True)
def no_proxy():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.delenv("LLDS_RETRIEVAL_TOKEN", raising=False)
        yield


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    build_index(
        write_corpus(root / "c.jsonl", COUNT), root / "index", IndexOptions(encoder="lsa", dimension=32)
    )
    return root / "index"


@pytest.fixture(scope="module")
def server(index):
    limits = ["--max-body", "200000", "--max-queries", "50", "--max-query", "1000", "--max-topk", "20"]
    with ServerProcess(index, *limits) as running:
        yield running


def post(url, **body):
    return requests.post(url, json=body, timeout=30)


def metric(server, name):
    lines = requests.get(f"{server.base}/metrics", timeout=30).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


# The protocol


def test_the_client_of_search_r1_is_answered_as_by_its_own_server(server):
    # What search_r1/llm_agent/generation.py sends, and how it reads the answer.
    payload = {"queries": ["key00007 water", "key00011"], "topk": 3, "return_scores": True}
    results = requests.post(server.url, json=payload).json()["result"]
    reference = ""
    for idx, doc_item in enumerate(results[0]):
        content = doc_item["document"]["contents"]
        title = content.split("\n")[0]
        text = "\n".join(content.split("\n")[1:])
        reference += f"Doc {idx + 1}(Title: {title}) {text}\n"
    assert reference.startswith('Doc 1(Title: "Place 7") ')
    assert len(results) == 2
    assert len(results[0]) == 3
    assert set(results[0][0]) == {"document", "score"}
    assert results[0][0]["document"] == make_rows(8)[7]
    assert [type(item["score"]) for item in results[0]] == [float] * 3


def test_without_scores_the_documents_are_bare(server):
    answer = post(server.url, queries=["key00007"], topk=1, return_scores=False).json()
    assert answer == {"result": [[make_rows(8)[7]]]}
    answer = post(server.url, queries=["key00007", "", "of the"]).json()["result"]
    assert len(answer[0]) == 3
    assert answer[1:] == [[], []]
    assert post(server.url, queries=[]).json() == {"result": []}


@pytest.mark.parametrize("mode", ["bm25", "dense"])
def test_scores_are_those_of_the_index(index, mode):
    queries = [f"{key_of(n)} water" for n in range(0, COUNT, 100)]
    with ServerProcess(index, "--mode", mode) as running:
        served = HTTPRetriever(running.url).search(queries, 5)
    assert served == open_index(index, mode).search(queries, 5)


def test_health_says_what_is_served(server):
    answer = requests.get(f"{server.base}/health", timeout=30).json()
    assert answer["status"] == "ok"
    assert answer["passages"] == COUNT
    assert answer["encoder"] == "lsa"


# Load


def ask_much(url, seed, rounds, wrong, lost, enough=None, **settings):
    """Ask in batches of several sizes and topk; keep what came back for another query, or not at all."""
    draw = random.Random(seed)
    client = HTTPRetriever(url, **settings)
    for done in range(rounds):
        if enough is not None and enough.is_set():
            return done
        numbers = [draw.randrange(COUNT) for _ in range(draw.randint(1, 12))]
        topk = draw.choice([1, 2, 3])
        try:
            found = client.search([f"{key_of(number)} water" for number in numbers], topk)
        except RetrieverUnavailable as error:
            lost.append(str(error))
            continue
        for number, passages in zip(numbers, found, strict=True):
            if not passages or passages[0].id != f"doc{number}" or len(passages) != topk:
                wrong.append((number, passages))
    return rounds


@pytest.mark.parametrize("workers", [1, 2])
def test_64_clients_get_each_its_own_answers(index, workers):
    wrong, lost = [], []
    with ServerProcess(index, "--mode", "bm25", "--workers", str(workers)) as running:
        with ThreadPoolExecutor(CLIENTS) as pool:
            for seed in range(CLIENTS):
                pool.submit(ask_much, running.url, seed, 6, wrong, lost)
        assert not wrong
        assert not lost
        assert metric(running, 'llds_requests_total{status="200"}') == CLIENTS * 6
        batches = metric(running, "llds_batch_queries_count")
        assert batches < CLIENTS * 6, "concurrent requests were never searched together"
        wait_for(lambda: metric(running, "llds_pending_queries") == 0)
        code, err = running.stop()
        assert (code, err) == (0, "")


def test_no_request_is_lost_through_restarts(index):
    wrong, lost = [], []
    running = ServerProcess(index, "--mode", "bm25")
    told = []
    settings = {
        "tries": 200,
        "backoff": 0.05,
        "longest_pause": 0.3,
        "deadline": 120.0,
        "on_event": lambda kind, details: told.append(kind),
    }
    with ThreadPoolExecutor(16) as pool:
        enough = threading.Event()
        asked = [
            pool.submit(ask_much, running.url, seed, 10**6, wrong, lost, enough, **settings)
            for seed in range(16)
        ]
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                time.sleep(0.3)
                running.stop(number)
                running = ServerProcess(index, "--mode", "bm25", port=running.port)
            wait_for(lambda: metric(running, "llds_queries_total") > 1000)
        finally:
            enough.set()
        assert min(future.result() for future in asked) > 0
    running.stop()
    assert not wrong
    assert not lost
    assert told.count("retriever_failing") == told.count("retriever_recovered") > 0
    assert "retriever_unavailable" not in told


def test_what_is_under_way_is_answered_before_the_server_stops(index):
    running = ServerProcess(index, "--mode", "bm25", "--batch", "1")
    queries = [f"{key_of(n)} water place" for n in range(COUNT)]
    answers = []
    thread = threading.Thread(target=lambda: answers.append(post(running.url, queries=queries, topk=1)))
    thread.start()
    wait_for(lambda: metric(running, "llds_pending_queries") > 0)
    code, _ = running.stop()
    thread.join()
    assert code == 0
    assert [found[0]["id"] for found in answers[0].json()["result"]] == [f"doc{n}" for n in range(COUNT)]


# Refusals


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b"1" * 10_000, 400, "not JSON"),
        (b"[]", 422, "not a JSON object"),
        (b"{}", 422, '"queries" is not a list'),
        (b'{"queries": "q"}', 422, '"queries" is not a list'),
        (b'{"queries": ["q", 1]}', 422, "Query 2 is not a text"),
        (b'{"queries": ["\\ud800"]}', 422, "Query 1 holds half of a surrogate pair"),
        (json.dumps({"queries": ["q" * 1001]}).encode(), 422, "Query 1 has 1001 characters"),
        (json.dumps({"queries": ["q"] * 51}).encode(), 422, "There are 51 queries, more than 50"),
        (b'{"queries": ["q"], "topk": -1}', 422, '"topk" is not a whole number from 1 to 20'),
        (b'{"queries": ["q"], "topk": 21}', 422, '"topk" is not'),
        (b'{"queries": ["q"], "topk": 1.5}', 422, '"topk" is not'),
        (b'{"queries": ["q"], "topk": true}', 422, '"topk" is not'),
        (b'{"queries": ["q"], "topk": 1e999}', 422, '"topk" is not'),
        (b'{"queries": ["q"], "return_scores": "yes"}', 422, '"return_scores" is neither'),
        (b" " * 200_001, 413, "longer than 200000 bytes"),
    ],
)
def test_malformed_requests_get_a_sentence(server, body, status, told):
    answer = requests.post(server.url, data=body, timeout=30)
    assert answer.status_code == status
    assert told in answer.json()["detail"]
    assert post(server.url, queries=["key00001"], topk=1).status_code == 200


@pytest.mark.parametrize(("method", "path", "status"), [("get", "/retrieve", 405), ("post", "/", 404)])
def test_other_places_get_a_sentence(server, method, path, status):
    answer = requests.request(method, server.base + path, timeout=30)
    assert answer.status_code == status
    assert "POST /retrieve, GET /health and GET /metrics" in answer.json()["detail"]


def test_a_packed_body_is_refused(server):
    answer = requests.post(server.url, data=b"x", headers={"Content-Encoding": "gzip"}, timeout=30)
    assert answer.status_code == 415


def send_much(server, head, block, blocks):
    """Send ``blocks`` blocks, or as many as the server takes; return how many that were."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(head)
        for number in range(blocks):
            try:
                connection.sendall(block)
            except OSError:
                return number
    return blocks


@pytest.mark.parametrize("how", ["announced", "chunked", "lied about"])
def test_a_body_of_two_gigabytes_does_not_take_the_server_down(server, how):
    size = 1 << 20
    header = {
        "announced": f"Content-Length: {2048 * size}",
        "chunked": "Transfer-Encoding: chunked",
        "lied about": "Content-Length: 10",
    }[how]
    head = f"POST /retrieve HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode()
    block = b"x" * size if how != "chunked" else f"{size:x}\r\n".encode() + b"x" * size + b"\r\n"
    before = server.memory()
    assert send_much(server, head, block, 2048) < 64, "the server went on taking it"
    assert server.memory() - before < 50 << 20
    assert post(server.url, queries=["key00001"], topk=1).json()["result"][0][0]["id"] == "doc1"


def test_connections_that_say_nothing_do_not_block_others(server):
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
    try:
        assert post(server.url, queries=["key00001"]).status_code == 200
    finally:
        for connection in silent:
            connection.close()


def test_a_token_is_asked_for(index):
    with ServerProcess(index, token="open sesame".replace(" ", "-")) as running:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "open-sesame"}):
            for answer in (
                requests.post(running.url, json={"queries": ["q"]}, headers=headers, timeout=30),
                requests.get(f"{running.base}/metrics", headers=headers, timeout=30),
            ):
                assert answer.status_code == 401
                assert "asks for a token" in answer.json()["detail"]
        assert requests.get(f"{running.base}/health", timeout=30).status_code == 200
        assert HTTPRetriever(running.url, token="open-sesame").search(["key00005"], 1)[0][0].id == "doc5"
        with pytest.raises(RetrieverUnavailable, match="wants another token"):
            HTTPRetriever(running.url, token="close-sesame").probe()


# Workers


def test_a_worker_that_dies_is_replaced_and_none_outlives_its_parent(index):
    running = ServerProcess(index, "--workers", "2")
    client = HTTPRetriever(running.url, tries=50, backoff=0.1, longest_pause=0.5)
    client.probe()

    def workers():
        with open(f"/proc/{running.process.pid}/task/{running.process.pid}/children") as file:
            children = [int(word) for word in file.read().split()]
        return [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]

    def alive(number):
        try:
            with open(f"/proc/{number}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] != "Z"
        except FileNotFoundError:
            return False

    first = workers()
    assert len(first) == 2
    os.kill(first[0], signal.SIGKILL)
    wait_for(lambda: len(workers()) == 2 and first[0] not in workers())
    assert client.search(["key00042"], 1)[0][0].id == "doc42"
    second = workers()
    running.stop(signal.SIGKILL)
    wait_for(lambda: not any(alive(number) for number in second))


def test_a_port_that_is_taken_and_an_index_that_is_none(server, index, tmp_path):
    with pytest.raises(AssertionError, match=r"llds: The server can't listen at 127.0.0.1 port"):
        ServerProcess(index, port=server.port)
    with pytest.raises(AssertionError, match=r"llds: .* holds no search index"):
        ServerProcess(tmp_path)
