import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from llds.errors import LLDSError
from llds.search.retrieval import HTTPRetriever, Passage, RetrieverUnavailable

DOCUMENT = {"id": "1", "contents": '"Evita"\nA film.\nOf 1996.'}
FOUND = Passage("1", "Evita", "A film.\nOf 1996.", 0.5)


def answer(queries):
    return {"result": [[{"document": DOCUMENT, "score": 0.5}] * 2 for _ in queries]}


class Server:
    """A real server that plays its ``moves`` in turn, the last one for ever, and keeps what it was sent."""

    def __init__(self):
        self.moves = [answer]
        self.requests = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append(body)
                move = server.moves.pop(0) if len(server.moves) > 1 else server.moves[0]
                status, text = move if isinstance(move, tuple) else (200, json.dumps(move(body["queries"])))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda request, address: (
            None
        )  # a client that hangs up is part of the play
        self.url = f"http://127.0.0.1:{self._server.server_port}/retrieve"
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    running = Server()
    yield running
    running.close()


def client(server, pauses=None, **settings):
    sleep = pauses.append if pauses is not None else lambda seconds: None
    return HTTPRetriever(server.url, **{"timeout": 5.0, "sleep": sleep, **settings})


def test_request_and_answer_are_those_of_search_r1(server):
    assert client(server).search(["a", "b"], 1) == [[FOUND], [FOUND]]
    assert server.requests == [{"queries": ["a", "b"], "topk": 1, "return_scores": True}]


def test_empty_queries_are_not_sent(server):
    retriever = client(server)
    assert retriever.search(["", "a", " "], 2) == [[], [FOUND, FOUND], []]
    assert retriever.search(["", " "], 2) == [[], []]
    assert retriever.search([], 2) == []
    assert [request["queries"] for request in server.requests] == [["a"]]


def test_a_failing_server_is_tried_again_after_growing_pauses(server):
    server.moves = [(500, "oops"), (429, "busy"), answer]
    pauses = []
    assert client(server, pauses, backoff=1.0).search(["a"], 1) == [[FOUND]]
    assert len(server.requests) == 3
    assert 0 <= pauses[0] <= 1
    assert 0 <= pauses[1] <= 2


def test_a_server_that_keeps_failing(server):
    server.moves = [(503, "")]
    with pytest.raises(RetrieverUnavailable, match=r"answered with status 503 \(tried 2 times\)"):
        client(server, tries=2).search(["a"], 1)
    assert len(server.requests) == 2


def test_a_refused_request_is_not_repeated(server):
    server.moves = [(404, "")]
    with pytest.raises(RetrieverUnavailable, match="refused the request with status 404"):
        client(server).search(["a"], 1)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "reply",
    [
        "<html>",
        "[]",
        "null",
        "{}",
        '{"result": 1}',
        '{"result": [[1]]}',
        '{"result": [1]}',
        '{"result": [[{"document": {"id": "1"}, "score": 1}]]}',
        '{"result": [[{"document": {"contents": 5}, "score": 1}]]}',
        '{"result": [[{"document": {"contents": "x"}, "score": "high"}]]}',
        '{"result": [[{"id": "1", "contents": "x"}]]}',
    ],
)
def test_another_form_of_answer(server, reply):
    server.moves = [(200, reply)]
    with pytest.raises(RetrieverUnavailable, match="in another form than Search-R1's"):
        client(server).search(["a"], 1)
    assert len(server.requests) == 1


def test_wrong_number_of_results(server):
    server.moves = [lambda queries: {"result": [[]]}]
    with pytest.raises(RetrieverUnavailable, match="1 results for 2 queries"):
        client(server).search(["a", "b"], 1)


def test_a_hanging_server_is_given_up(server):
    release = threading.Event()
    server.moves = [lambda queries: release.wait(5) and answer(queries)]
    began = time.monotonic()
    with pytest.raises(RetrieverUnavailable, match=r"did not answer within 0.1 s \(tried 2 times\)"):
        client(server, timeout=0.1, tries=2).search(["a"], 1)
    release.set()
    assert time.monotonic() - began < 3


def test_no_server(server):
    server.close()
    with pytest.raises(RetrieverUnavailable, match=r"could not be reached .* \(tried once\)"):
        client(server, tries=1).probe()


@pytest.mark.parametrize(
    ("url", "settings"),
    [
        ("localhost:8000", {}),
        ("http://x", {"timeout": 0}),
        ("http://x", {"tries": 0}),
        ("http://x", {"backoff": -1}),
    ],
)
def test_settings_out_of_range(url, settings):
    with pytest.raises(LLDSError):
        HTTPRetriever(url, **settings)
