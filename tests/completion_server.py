"""A small completions server over transformers, for tests: OpenAI's API, with the dialects of several servers.

It generates with ``transformers``' own ``generate`` and its stop strings, so that nothing of what is tested is used
to make what it is compared with.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

STANDARD = {"model", "prompt", "max_tokens", "temperature", "top_p", "stop", "seed", "n", "stream"}
NAME = "tiny"


class CompletionTestServer:
    """Serves one model. ``dialect``: "vllm" (returns token ids), "sglang" (says what stopped it), or "plain": an
    OpenAI server that knows no other option, leaves the stop string out, and does not say why it stopped.

    ``moves``: what to do with the next requests instead of answering; see :meth:`_misbehave`.
    """

    def __init__(self, model, tokenizer, dialect="vllm", key=None, memory=None):
        self.model, self.tokenizer, self.dialect, self.key = model, tokenizer, dialect, key
        self.moves = []
        self.requests = []
        self.busy = self.busiest = 0
        self.paths = Counter()
        self._memory = {} if memory is None else memory
        self._lock, self._writing = threading.Lock(), threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                outer.handle(self, None)

            def do_POST(self):
                length = int(self.headers["Content-Length"])
                outer.handle(self, json.loads(self.rfile.read(length)))

            def log_message(self, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def handle(self, handler, body):
        with self._lock:
            self.paths[handler.path] += 1
            self.busy += 1
            self.busiest = max(self.busiest, self.busy)
            move = self.moves.pop(0) if self.moves and body is not None else None
            if body is not None:
                self.requests.append(body)
        try:
            if self.key and handler.headers.get("Authorization") != f"Bearer {self.key}":
                self._send(handler, 401, {"error": {"message": "Incorrect API key provided"}})
            elif move is not None:
                self._misbehave(handler, move, body)
            elif handler.path == "/v1/models":
                self._send(handler, 200, {"object": "list", "data": [{"id": NAME, "max_model_len": 2048}]})
            elif handler.path == "/v1/completions":
                self._send(handler, *self._complete(body))
            else:
                self._send(handler, 404, {"detail": "Not Found"})
        finally:
            with self._lock:
                self.busy -= 1

    def _misbehave(self, handler, move, body):
        if isinstance(move, int):
            self._send(handler, move, {"error": {"message": f"status {move}"}})
        elif move == "slow":
            time.sleep(1.0)
            self._send(handler, *self._complete(body))
        elif move == "cut":
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            handler.wfile.write(b'{"choices": [')
            handler.wfile.flush()
            handler.close_connection = True
        elif move == "hang up":
            handler.close_connection = True
            handler.connection.close()
        else:
            content = move.encode()
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(content)))
            handler.end_headers()
            handler.wfile.write(content)

    def _send(self, handler, status, content):
        data = json.dumps(content).encode()
        with suppress(OSError):  # who waited too long has gone
            handler.send_response(status)
            handler.send_header("Content-Type", "application/json")
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data)

    def _complete(self, body):
        if body["model"] != NAME:
            message = f"The model `{body['model']}` does not exist."
            return 404, {"error": {"message": message, "type": "NotFoundError", "code": 404}}
        if self.dialect == "plain" and (unknown := body.keys() - STANDARD):
            return 400, {"error": {"message": f"Unrecognized request arguments: {sorted(unknown)}"}}
        ids = self._generate(tuple(body["prompt"]), body["max_tokens"], tuple(body["stop"]))
        return 200, {"object": "text_completion", "model": NAME, "choices": [self._choice(list(ids), body)]}

    def _generate(self, prompt, max_tokens, stop):
        key = (prompt, max_tokens, stop)
        with self._writing:
            if key not in self._memory:
                with torch.no_grad():
                    output = self.model.generate(
                        torch.tensor([prompt]),
                        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                        max_new_tokens=max_tokens,
                        do_sample=False,
                        stop_strings=list(stop),
                        tokenizer=self.tokenizer,
                    )
                self._memory[key] = output[0, len(prompt) :].tolist()
            return self._memory[key]

    def _choice(self, ids, body):
        end = ids[-1] == self.tokenizer.eos_token_id
        text = self.tokenizer.decode(ids[:-1] if end else ids, skip_special_tokens=False)
        tag = next((tag for tag in body["stop"] if tag in text), None)
        choice = {
            "index": 0,
            "text": text,
            "logprobs": None,
            "finish_reason": "stop" if end or tag else "length",
        }
        if self.dialect == "vllm":
            assert body["include_stop_str_in_output"]
            assert not body["skip_special_tokens"]
            choice["stop_reason"] = tag
            choice["token_ids"] = ids if body["return_token_ids"] else None
            choice["text"] = text if tag is None else text[: text.index(tag) + len(tag)]
        elif tag is not None:
            choice["text"] = text[: text.index(tag)]  # neither asks for the stop string to be kept
            if self.dialect == "sglang":
                choice["matched_stop"] = tag
        elif self.dialect == "sglang":
            choice["matched_stop"] = self.tokenizer.eos_token_id if end else None
        return choice
