"""A retrieval server of Search-R1's protocol that is out of order now and then."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ToolServer:
    """``answers(count)``: whether request number ``count`` (from 0) is answered. ``refused``: how many were not."""

    def __init__(self, answers):
        self.answers = answers
        self.count = self.refused = 0
        self.lock = threading.Lock()
        self.url = ""

    def take(self):
        with self.lock:
            count, self.count = self.count, self.count + 1
            answered = self.answers(count)
            self.refused += not answered
            return answered


@contextmanager
def tool_server(answers):
    tool = ToolServer(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            passage = {"document": {"id": "1", "contents": '"Aruba"\nThe florin.'}, "score": 1.0}
            body = json.dumps({"result": [[passage] for _ in asked["queries"]]}).encode()
            self.send_response(200 if tool.take() else 503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    tool.url = f"http://127.0.0.1:{server.server_port}/retrieve"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield tool
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
