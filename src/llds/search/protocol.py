"""What a search agent and its tool say to each other: tags, prompts, observations, and what an action means.

The prompt, the correction and the shape of an observation are those of Search-R1 (arXiv 2503.09516), word for
word, so that checkpoints trained there and here can stand in for each other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from llds.errors import LLDSError
from llds.search.passages import Passage, snippet

PromptStyle = Literal["search-r1", "search-r1-instruct", "short"]
Prompt: TypeAlias = str | list[dict[str, Any]]

STOP_STRINGS = ("</search>", "</answer>")
ANSWER_OPEN = "<answer>"
OBSERVATION_OPEN = "\n\n<information>"
OBSERVATION_CLOSE = "</information>\n\n"
CORRECTION = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and "
    "</search>. If I want to give the final answer, I should put the answer between <answer> and "
    "</answer>. Let me try again.\n"
)
INSTRUCTION = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every "
    "time you get new information. After reasoning, if you find you lack some knowledge, you can call "
    "a search engine by <search> query </search> and it will return the top searched results between "
    "<information> and </information>. You can search as many times as your want. If you find no "
    "further external knowledge needed, you can directly provide the answer inside <answer> and "
    "</answer>, without detailed illustrations. For example, <answer> Beijing </answer>. "
)

_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True)
class Search:
    """The policy asks the search tool for ``query`` (stripped; may be empty)."""

    query: str


@dataclass(frozen=True)
class Answer:
    """The policy gives its final answer ``text`` (stripped; may be empty)."""

    text: str


@dataclass(frozen=True)
class Malformed:
    """The action holds neither a whole ``<search>…</search>`` nor a whole ``<answer>…</answer>``."""


Action: TypeAlias = Search | Answer | Malformed


def parse_action(text: str) -> Action:
    """Read one action, the text that the policy wrote between two observations. Never raises.

    As in Search-R1 the first whole pair of tags counts, whatever stands round it or inside it: the content of
    ``<search> a <search> b </search>`` is ``a <search> b``.
    """
    match = _ACTION.search(text)
    if match is None:
        return Malformed()
    content = match.group(2).strip()
    return Search(content) if match.group(1) == "search" else Answer(content)


def answer_characters(text: str) -> tuple[int, int] | None:
    """Return where the answer of one action lies: start and end of ``<answer>…</answer>``, tags included.

    ``None`` when the action is not an answer.
    """
    match = _ACTION.search(text)
    return match.span() if match and match.group(1) == "answer" else None


def complete_question(question: str) -> str:
    """Strip ``question`` and end it with a question mark, as Search-R1's data sets do.

    Raises :class:`LLDSError` when nothing is left.
    """
    question = question.strip()
    if not question:
        raise LLDSError("A question is empty: give every row of the question file some text.")
    return question if question.endswith("?") else question + "?"


@dataclass(frozen=True)
class Protocol:
    """The wording of an episode.

    ``style``: the prompt.

    - ``"search-r1"``: Search-R1's instruction and the question as plain text, for base models.
    - ``"search-r1-instruct"``: the same text as one user message through the tokenizer's chat template.
      Search-R1 itself uses the template wherever the tokenizer has one, for Qwen2.5 base models too: take
      this style to continue one of its checkpoints.
    - ``"short"``: ``Question: …`` and a line break, for tiny models that have learnt the protocol.

    ``topk``: passages per search. ``snippet_words``: show about this many words of each passage, cut round
    the words of the query; ``None`` shows all of it. ``correct_eos``: an action that ends in the
    end-of-sequence token without a search or an answer is malformed like any other and gets the correction,
    as in Search-R1; ``False`` takes it as the end of the episode.
    """

    style: PromptStyle = "search-r1"
    topk: int = 3
    snippet_words: int | None = None
    correct_eos: bool = True

    def __post_init__(self) -> None:
        if self.style not in get_args(PromptStyle):
            known = ", ".join(get_args(PromptStyle))
            raise LLDSError(f"Prompt style {self.style!r} is unknown: choose one of {known}.")
        if self.topk < 1:
            raise LLDSError(f"topk is {self.topk}: ask for at least 1 passage per search.")
        if self.snippet_words is not None and self.snippet_words < 1:
            raise LLDSError(
                f"snippet_words is {self.snippet_words}: give 1 or more, or None for whole passages."
            )

    def prompt(self, question: str) -> Prompt:
        """Return the prompt for ``question``: text, or chat messages for the instruct style."""
        question = complete_question(question)
        if self.style == "short":
            return f"Question: {question}\n"
        text = f"{INSTRUCTION}Question: {question}\n"
        return [{"role": "user", "content": text}] if self.style == "search-r1-instruct" else text

    def prompt_ids(self, tokenizer: Any, question: str) -> list[int]:
        """Return the token ids of :meth:`prompt`; see :func:`encode_prompt`."""
        return encode_prompt(tokenizer, self.prompt(question))

    def format_observation(self, passages: Sequence[Passage], query: str = "") -> str:
        """Return what the model is shown for ``passages``, in the order given.

        ``query``: where to cut the passages when ``snippet_words`` is set.
        """
        lines = [
            f'Doc {number}(Title: "{passage.title}") {self._shown(passage.text, query)}'
            for number, passage in enumerate(passages, start=1)
        ]
        return OBSERVATION_OPEN + "\n".join(lines).strip() + OBSERVATION_CLOSE

    def _shown(self, text: str, query: str) -> str:
        return text if self.snippet_words is None else snippet(text, query, self.snippet_words)


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Return the token ids of a prompt: text with the tokenizer's own start token, messages by its template.

    Raises :class:`LLDSError` for messages when the tokenizer has no chat template.
    """
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise LLDSError('The tokenizer has no chat template: use prompt style "search-r1" or "short".')
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
