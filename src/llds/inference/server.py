"""A server that speaks OpenAI's completions API: vLLM's, SGLang's, llama.cpp's, or another.

Prompts are sent as token ids, so the model reads what transformers would give it. A server that returns token
ids (vLLM from 0.10.2) gives exactly what the model wrote. The text of others is tokenised again, which
may give other tokens for the same text.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from llds.errors import LLDSError
from llds.inference.writing import Context
from llds.search.protocol import STOP_STRINGS
from llds.search.resilience import Backoff
from llds.search.sampling import GREEDY, Sampling
from llds.search.tokens import TokenText
from llds.search.transport import GivenUp, Patience, TooLong, Transient, Transport, told_by

Result = TypeVar("Result")

KEY_VARIABLE = "LLDS_API_KEY"
_LONGEST_ANSWER = 64 << 20  # bytes
_OPENING = re.compile(r"<(/?)(search|answer)>")
# What servers call the reason of a stop beyond "stop": a stop string, or a token, or null for the end of text.
_REASONS = ("stop_reason", "matched_stop")


class CompletionServer:
    """Writes actions through ``POST url/completions``. Threads may share one.

    ``url``: with its path, e.g. ``http://127.0.0.1:8000/v1``. ``model``: the name it is served by; None takes
    the only one there is. ``tokenizer``: that of the model. ``key``: shown as a bearer token. ``timeout``:
    seconds to wait for one answer, ``tries`` and ``deadline``: how often and how long one action is tried; refused
    and broken connections, timeouts, unreadable answers, and the statuses 429 and 5xx are tried again.

    Making one asks the server for its models and for one token. Raises :class:`LLDSError` when it does
    not answer, has no such model, wants another key, or takes no token ids.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        tokenizer: Any,
        *,
        key: str | None = None,
        timeout: float = 600.0,
        tries: int = 8,
        deadline: float = 1800.0,
        backoff: float = 0.5,
        longest_pause: float = 30.0,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = _base(url)
        self._text = TokenText(tokenizer)
        self._end = tokenizer.eos_token_id
        self._timeout = timeout
        self._transport = Transport(_checked(key), _LONGEST_ANSWER, clock)
        self._patience = Patience(tries, Backoff(backoff, longest_pause), deadline, sleep, clock)
        models = self._models()
        self.model = self._pick(models, model)
        self.positions = models.get(self.model)
        self._extras = True
        self.exact = self._probe()

    def write(self, contexts: Sequence[Context], sampling: Sampling) -> list[list[int]]:
        """See :class:`~llds.inference.writing.Writer`."""
        return [self._written(self._complete(self._request(context, sampling))) for context in contexts]

    def _models(self) -> dict[str, int | None]:
        """Return the names of the models that are served, each with its longest context; empty if unknown."""
        status, content = self._insist("/models", None)
        if status in (401, 403):
            raise LLDSError(self._refused(status, content))
        try:
            listed = json.loads(content)["data"] if status == 200 else []
            return {str(one["id"]): _length(one.get("max_model_len")) for one in listed}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}

    def _pick(self, models: dict[str, int | None], name: str | None) -> str:
        told = ", ".join(models) or "none that it tells of"
        if name is None and len(models) == 1:
            return next(iter(models))
        if name is None:
            raise LLDSError(
                f"The server at {self.url} has these models: {told}; name one with --served-model."
            )
        if models and name not in models:
            raise LLDSError(
                f"The server at {self.url} has no model {name!r}, but {told}; name it with --served-model."
            )
        return name

    def _probe(self) -> bool:
        """Ask for one token, first with the options of vLLM and SGLang. Returns whether token ids come back."""
        context = Context(self._text.encode("Hello"), 1, 0)
        status, content = self._insist("/completions", self._request(context, GREEDY))
        if status in (400, 422):
            self._extras = False
            status, content = self._insist("/completions", self._request(context, GREEDY))
        if status != 200:
            raise LLDSError(self._refused(status, content))
        return self._choice(content).get("token_ids") is not None

    def _request(self, context: Context, sampling: Sampling) -> dict[str, Any]:
        request = {
            "model": self.model,
            "prompt": context.ids,
            "max_tokens": context.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop": list(STOP_STRINGS),
        }
        if not sampling.greedy:
            request["seed"] = context.seed
        if self._extras:
            request |= {
                "return_token_ids": True,  # vLLM
                "include_stop_str_in_output": True,  # vLLM
                "no_stop_trim": True,  # SGLang
                "skip_special_tokens": False,  # both: tags may be special tokens
                "spaces_between_special_tokens": False,  # both
                # Servers take these from the model's generation_config.json when they are not told.
                "top_k": sampling.top_k or -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
            }
        return request

    def _complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the server's choice; an answer that can't be read is asked for again."""

        def attempt() -> dict[str, Any]:
            status, content = self._send("/completions", request, end)
            if status != 200:
                raise LLDSError(self._refused(status, content))
            choice = self._choice(content)
            if choice.get("finish_reason") in ("abort", "error"):
                raise Transient("broke off writing")
            return choice

        end = self._patience.end()
        return self._told(lambda: self._patience.insist(attempt, end))

    def _written(self, choice: dict[str, Any]) -> list[int]:
        """Return the tokens of an action."""
        ids = choice.get("token_ids")
        if ids is not None:
            return list(ids)
        text, ended = whole_text(choice)
        return self._text.encode(text) + ([self._end] if ended and self._end is not None else [])

    def _choice(self, content: bytes) -> dict[str, Any]:
        try:
            choice = json.loads(content)["choices"][0]
            ids = choice.get("token_ids")
            whole = ids is None or all(isinstance(token, int) and token >= 0 for token in ids)
            if not isinstance(choice["text"], str) or not whole:
                raise TypeError
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            raise Transient("answered in another form than OpenAI's completions API") from None
        return choice  # type: ignore[no-any-return]

    def _insist(self, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        end = self._patience.end()

        def attempt() -> tuple[int, bytes]:
            status, content = self._send(path, body, end)
            if body is not None and status == 200:
                self._choice(content)
            return status, content

        return self._told(lambda: self._patience.insist(attempt, end))

    def _send(self, path: str, body: dict[str, Any] | None, end: float | None) -> tuple[int, bytes]:
        return self._transport.send(self.url + path, body, timeout=self._timeout, end=end)

    def _told(self, request: Callable[[], Result]) -> Result:
        """Turn what a request may come to into sentences."""
        try:
            return request()
        except GivenUp as error:
            raise LLDSError(
                f"The server at {self.url} {error}: check that it runs and is reachable, then run the same "
                "command again."
            ) from error
        except TooLong:
            raise LLDSError(
                f"The server at {self.url} answered with more than {_LONGEST_ANSWER >> 20} MiB: check that the "
                "address is right."
            ) from None

    def _refused(self, status: int, content: bytes) -> str:
        detail = told_by(content)
        told = f' ("{detail}")' if detail else ""
        remedy = "check the address, which ends in /v1 for most servers, and that it has /completions"
        if status in (401, 403):
            remedy = f"it wants another key; set {KEY_VARIABLE}"
        elif status in (400, 413, 422):
            remedy = "it must take prompts as token ids, and as many tokens as the episode's limits allow"
        return f"The server at {self.url} refused the request with status {status}{told}: {remedy}."


def whole_text(choice: dict[str, Any]) -> tuple[str, bool]:
    """Return the text of an action with the tag that stopped it, and whether the end of text did.

    Servers leave the stop string out of the text unless they are told otherwise, and only some say which one it
    was. Where nothing says so, a tag that is open was closed, and without one the text had ended.
    """
    text: str = choice["text"]
    if choice.get("finish_reason") == "length" or any(tag in text for tag in STOP_STRINGS):
        return text, False
    known = [choice[name] for name in _REASONS if name in choice]
    tag = next((reason for reason in known if reason in STOP_STRINGS), None)
    if tag is None and not known:
        tag = _left_open(text)
    return (text + tag, False) if tag else (text, True)


def _left_open(text: str) -> str | None:
    """Return the closing tag of the last search or answer that was opened and not closed."""
    tags = _OPENING.findall(text)
    return f"</{tags[-1][1]}>" if tags and not tags[-1][0] else None


def read_key() -> str | None:
    """Return the key for the server from the environment, or None."""
    return os.environ.get(KEY_VARIABLE) or None


def _length(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _base(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise LLDSError(f"Server address {url!r} is not a URL: write e.g. http://127.0.0.1:8000/v1.")
    return url.rstrip("/").removesuffix("/completions")


def _checked(key: str | None) -> str | None:
    if key is not None and (not key.strip() or not key.isascii() or not key.isprintable()):
        raise LLDSError(f"The key in {KEY_VARIABLE} must be visible ASCII characters on one line.")
    return key
