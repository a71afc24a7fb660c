"""The search episode as an agent loop of verl: the same protocol, rules and tool as in ``llds train``.

Registered as ``llds_search``. Its settings (:class:`~llds.engines.verl.searching.SearchOptions`) stand under
``llds_search`` in verl's configuration, where the group ``llds_search`` puts them, or in the entry of a file of
agent loops (``agent_loop_config_path``), which comes first.

Tokens go to the inference engine and come from it; nothing that the policy wrote is tokenised again. The engine is
asked to stop at a closing tag. Where it writes on, the response is cut behind the token that completes the tag.

**When the search tool fails.** After the client's tries, the episode is left out: it does not reach verl at all. verl
computes the advantages of a question from the episodes that are there, fills the batch up with empty rows that
count in no loss, and goes on. When fewer than two episodes of a question came through, none is handed on, since a
lone reward would have no baseline; then one of them raises, by which verl counts the question as failed (and takes
another one for it, where ``trainer.v1.sampler.sync_refill_failed_groups`` or an asynchronous trainer does so).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.fs import copy_to_local
from verl.utils.model import get_generation_config
from verl.utils.rollout_trace import rollout_trace_op

from llds.engines.verl.batch import ANSWER_SPAN, VALID_SEARCHES
from llds.engines.verl.reward import ANSWER, SEARCHES, VALID_FORMAT
from llds.engines.verl.searching import NAME, SearchOptions, search_threads, shared_tool
from llds.engines.verl.siblings import Membership, Siblings
from llds.errors import LLDSError
from llds.search.protocol import STOP_STRINGS, encode_prompt
from llds.search.retrieval import RetrieverUnavailable
from llds.search.rewards import valid_format
from llds.search.rules import Row, Rules, check_prompt
from llds.search.tokens import TokenText
from llds.search.trajectory import Episode, Event

logger = logging.getLogger("llds.engines.verl")

_siblings = Siblings()
#: What verl or hydra hands to every agent loop besides the settings.
_NOT_OURS = frozenset({"name", "tools", "processor", "dataset_cls", "hf_model_type"})


@register(NAME)
class SearchAgentLoop(AgentLoopBase):
    """One search episode; verl makes an object for each."""

    def __init__(
        self, trainer_config: Any, server_manager: Any, tokenizer: Any, data_config: Any, **settings: Any
    ) -> None:
        # verl's own __init__ builds what puts tool messages through chat templates, which is not needed here and
        # fails for tokenizers without one.
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.apply_chat_template_kwargs = dict(data_config.config.get("apply_chat_template_kwargs") or {})
        own = {name: value for name, value in settings.items() if name not in _NOT_OURS}
        self.options = SearchOptions.of({**(self.config.get(NAME) or {}), **own})
        self.limits = self.options.limits(
            self.rollout_config.prompt_length, self.rollout_config.response_length
        )

    @rollout_trace_op  # type: ignore[untyped-decorator]
    async def run(
        self, sampling_params: dict[str, Any], **row: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Run one episode. ``row``: the fields of the question, of which ``raw_prompt`` is the prompt.

        Returns an empty list for an episode that is left out.

        Raises :class:`RetrieverUnavailable` in one episode of a question that is left out as a whole, and
        :class:`LLDSError` for a prompt that can't be used or an engine that writes nothing.
        """
        group = row.get("uid") if "session_id" in row else None
        async with _siblings.join(str(group or uuid4().hex)) as member:
            episode, made = await self._episode(sampling_params, _messages(row))
            if group is None:
                if episode.tool_failed:
                    raise RetrieverUnavailable(
                        f"{made.failure} verl's older trainer can't leave an episode out, so it stops here; "
                        "set trainer.use_v1=True."
                    )
                return self._output(episode, made)
            return await self._among_siblings(member, episode, made)

    async def _among_siblings(
        self, member: Membership, episode: Episode, made: _Made
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        outcome = await member.settle(not episode.tool_failed)
        if episode.tool_failed and member.is_first_failure():
            left_out = outcome.members - (outcome.through if outcome.comparable else 0)
            _siblings.left_out += left_out
            told = (
                f"{left_out} of {outcome.members} episodes of a question are left out "
                f"({_siblings.left_out} so far in this process). {made.failure}"
            )
            logger.warning("LLDS: %s", told)
            if not outcome.comparable:
                raise RetrieverUnavailable(told)
        if episode.tool_failed or not outcome.comparable:
            return []
        return self._output(episode, made)

    async def _episode(
        self, sampling_params: Mapping[str, Any], messages: list[dict[str, Any]]
    ) -> tuple[Episode, _Made]:
        loop, threads = asyncio.get_running_loop(), search_threads()
        tool = await loop.run_in_executor(threads, shared_tool, self.options)
        made = _Made()
        text = TokenText(self.tokenizer)
        eos = _eos_ids(self.config.actor_rollout_ref.model.path, self.tokenizer.eos_token_id)
        rules = Rules(text, eos, tool, self.options.protocol(), self.limits, made.watch)
        row = Row(0, self._prompt_ids(messages), None)
        check_prompt(0, row.prompt_ids, self.limits, None)
        request = uuid4().hex
        while row.stop is None:
            began = perf_counter()
            rules.begin(row)
            await self._act(rules, row, request, sampling_params, made)
            made.generating += perf_counter() - began
            began = perf_counter()
            await loop.run_in_executor(threads, rules.respond, [row])
            made.searching += perf_counter() - began
        return row.episode(), made

    async def _act(
        self, rules: Rules, row: Row, request: str, sampling_params: Mapping[str, Any], made: _Made
    ) -> None:
        """Let the engine write one action."""
        written = await self.server_manager.generate(
            request_id=request,
            prompt_ids=row.prompt_ids + row.response_ids,
            sampling_params={
                **sampling_params,
                "max_tokens": row.limit - row.begin,
                "stop": list(STOP_STRINGS),
                **_KEEP_STOP.get(str(self.rollout_config.name), {}),
            },
        )
        made.add(written)
        if not written.token_ids:
            if not row.response_ids or written.stop_reason in ("abort", "aborted"):
                raise LLDSError(
                    f"The inference engine wrote nothing after {len(row.prompt_ids + row.response_ids)} tokens "
                    f"(it stopped for {written.stop_reason!r}): check rollout.max_model_len and its log."
                )
            row.stop = "length"
            return
        logprobs = written.log_probs or [0.0] * len(written.token_ids)
        for token, logprob in zip(written.token_ids, logprobs, strict=True):
            if rules.take(row, int(token), float(logprob)):
                return
        rules.finish_action(row)

    def _prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        if self.options.prompt != "search-r1-instruct":
            if len(messages) != 1:
                raise LLDSError(
                    f"{NAME}.prompt={self.options.prompt} takes one message as the prompt, but the row has "
                    f"{len(messages)}: take {NAME}.prompt=search-r1-instruct."
                )
            return encode_prompt(self.tokenizer, str(messages[0]["content"]))
        if not getattr(self.tokenizer, "chat_template", None):
            raise LLDSError(
                f"The tokenizer has no chat template: set {NAME}.prompt=search-r1, which takes the text of the "
                "row's message as the prompt."
            )
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self.apply_chat_template_kwargs
        )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _output(self, episode: Episode, made: _Made) -> AgentLoopOutput:
        observed = sum(bool(turn.observation) for turn in episode.turns)
        return AgentLoopOutput(
            prompt_ids=episode.prompt_ids,
            response_ids=episode.response_ids,
            response_mask=episode.response_mask,
            response_logprobs=episode.logprobs if made.has_logprobs else None,
            num_turns=1 + len(episode.turns) + observed,
            metrics={
                "generate_sequences": made.generating,
                "tool_calls": made.searching,
                "num_preempted": made.preempted,
            },
            extra_fields={
                **made.extra_fields,
                "turn_scores": [],
                "tool_rewards": [],
                ANSWER: episode.answer,
                ANSWER_SPAN: None if episode.answer_span is None else list(episode.answer_span),
                SEARCHES: episode.searches,
                VALID_SEARCHES: episode.valid_searches,
                VALID_FORMAT: valid_format(episode.response),
            },
        )


#: How an engine is told to leave the stop string's tokens in place.
_KEEP_STOP: Mapping[str, Mapping[str, Any]] = {
    "vllm": {"include_stop_str_in_output": True},
    "sglang": {"no_stop_trim": True},
    "trtllm": {"include_stop_str_in_output": True},
}


@dataclass
class _Made:
    """What is told of an episode besides its tokens. ``generating``, ``searching``: seconds."""

    generating: float = 0.0
    searching: float = 0.0
    preempted: int = -1
    has_logprobs: bool = True
    failure: str = ""
    extra_fields: dict[str, Any] = field(default_factory=dict)

    def add(self, written: Any) -> None:
        """Take note of one answer of the inference engine."""
        if written.token_ids and not written.log_probs:
            self.has_logprobs = False
        if written.num_preempted is not None:
            self.preempted = max(self.preempted, 0) + written.num_preempted
        first = self.extra_fields.get("min_global_steps")
        self.extra_fields |= written.extra_fields
        if first is not None:
            self.extra_fields["min_global_steps"] = first

    def watch(self, event: Event) -> None:
        """Remember why the tool failed."""
        if event.kind == "tool_failed":
            self.failure = event.text


def _messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = row.get("raw_prompt")
    if messages is None:
        raise LLDSError("The row of a question has no raw_prompt: set data.return_raw_chat=True.")
    return [dict(message) for message in messages]


@functools.cache
def _eos_ids(model_path: str, tokenizer_eos: int | None) -> frozenset[int]:
    """Return every token that ends a sequence, by the tokenizer or by the model's generation settings."""
    settings = get_generation_config(copy_to_local(model_path))
    listed = getattr(settings, "eos_token_id", None)
    listed = listed if isinstance(listed, (list, tuple)) else [listed]
    return frozenset(int(token) for token in [tokenizer_eos, *listed] if token is not None)
