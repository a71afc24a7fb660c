"""The search agent loop against the episode runner of ``llds train``, and what it does when things fail."""

import asyncio
import threading
from types import SimpleNamespace

import hydra
import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, _agent_loop_registry
from verl.workers.rollout.replica import TokenOutput

from llds.data.embedded import load_questions
from llds.engines.verl import agent
from llds.engines.verl.searching import NAME, SearchOptions, shared_tool
from llds.engines.verl.siblings import Siblings
from llds.errors import LLDSError
from llds.search.episode import EpisodeRunner
from llds.search.retrieval import NoRetriever, RetrieverUnavailable
from llds.search.sampling import GREEDY
from llds.training.tiny import tiny_folder

TINY = {"prompt": "short", "max_action": 48, "max_observation": 96, "passage_words": 20, "topk": 2}
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant]\n"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny_folder())


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(tiny_folder(), dtype=torch.float32).eval()


class Engine:
    """An inference engine that writes greedily. ``stops``: whether it heeds the stop strings."""

    def __init__(self, model, tokenizer, stops=True, logprobs=True):
        self.model, self.tokenizer, self.stops, self.logprobs = model, tokenizer, stops, logprobs
        self.asked = []

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        self.asked.append((request_id, sampling_params))
        await asyncio.sleep(0)
        with torch.no_grad():
            written, logprobs = self._write(list(prompt_ids), sampling_params)
        steps = {"global_steps": 3, "min_global_steps": 3, "max_global_steps": 3 + len(self.asked)}
        return TokenOutput(
            token_ids=written,
            log_probs=logprobs if self.logprobs else None,
            stop_reason="completed",
            num_preempted=0,
            extra_fields=steps,
        )

    def _write(self, read, sampling_params):
        written, logprobs, cache = [], [], None
        while len(written) < sampling_params["max_tokens"]:
            output = self.model(torch.tensor([read]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            distribution = output.logits[0, -1].log_softmax(-1)
            token = int(distribution.argmax())
            written.append(token)
            logprobs.append(float(distribution[token]))
            read = [token]
            text = self.tokenizer.decode(written)
            stopped = any(one in text for one in sampling_params["stop"])
            if token == self.tokenizer.eos_token_id or (self.stops and stopped):
                break
        return written, logprobs


class Script:
    """An engine that gives what is on its list, one entry an action."""

    def __init__(self, *answers):
        self.answers = list(answers)

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        ids = self.answers.pop(0)
        reason = "completed"
        if isinstance(ids, str):
            ids, reason = [], ids
        return TokenOutput(token_ids=ids, log_probs=[-1.0] * len(ids), stop_reason=reason)


def make_loop(engine, tokenizer, in_config=None, response=256, template=None, **settings):
    """Make a loop as verl does."""
    rollout = {"name": "vllm", "prompt_length": 96, "response_length": response}
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": rollout, "model": {"path": str(tiny_folder())}},
            "data": {"apply_chat_template_kwargs": template or {}},
        }
    )
    if in_config is not None:
        config[NAME] = in_config
    entry = {"name": NAME, **_agent_loop_registry[NAME], **settings}
    return hydra.utils.instantiate(
        config=OmegaConf.create(entry),
        trainer_config=DictConfigWrap(config),
        server_manager=engine,
        tokenizer=tokenizer,
        processor=None,
        hf_model_type="qwen2",
        dataset_cls=object,
        data_config=DictConfigWrap(config.data),
        tools=None,
    )


def user(text):
    return [{"role": "user", "content": text}]


def run(*loops_and_rows):
    """Run episodes side by side in one event loop; exceptions are returned."""

    async def all_of_them():
        sampling = {"temperature": 0, "logprobs": True}
        runs = [loop.run(dict(sampling), **row) for loop, row in loops_and_rows]
        return await asyncio.gather(*runs, return_exceptions=True)

    return asyncio.run(all_of_them())


def run_one(loop, **row):
    (result,) = run((loop, row))
    if isinstance(result, BaseException):
        raise result
    return result


# --- the same episodes as in llds train


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("response", [256, 120])
def test_token_for_token_the_episodes_of_the_runner(model, tokenizer, stops, response):
    options = SearchOptions(**TINY)
    questions = [one.question for one in load_questions("validation")[:8]]
    protocol, limits = options.protocol(), options.limits(96, response)
    runner = EpisodeRunner(model, tokenizer, shared_tool(options), protocol, limits, GREEDY)
    wanted = runner.run(questions)
    assert {one.stop for one in wanted} >= ({"answer"} if response == 256 else {"answer", "length"})
    assert max(one.searches for one in wanted) >= 1

    engine = Engine(model, tokenizer, stops)
    loops = [
        (make_loop(engine, tokenizer, response=response, **TINY), {"raw_prompt": user(protocol.prompt(one))})
        for one in questions
    ]
    results = run(*loops)
    assert any(0 in one.response_mask for one in results)
    for found, episode in zip(results, wanted, strict=True):
        assert found.prompt_ids == episode.prompt_ids
        assert found.response_ids == episode.response_ids
        assert found.response_mask == episode.response_mask
        assert found.response_logprobs == pytest.approx(episode.logprobs, abs=1e-4)
        assert found.extra_fields["llds_answer"] == episode.answer
        span = found.extra_fields["llds_answer_span"]
        assert (span and tuple(span)) == episode.answer_span
        assert found.extra_fields["llds_searches"] == episode.searches
        assert found.extra_fields["llds_valid_searches"] == episode.valid_searches


def test_what_verl_is_told_beside_the_tokens(model, tokenizer):
    question = next(one.question for one in load_questions("validation"))
    engine = Engine(model, tokenizer)
    loop = make_loop(engine, tokenizer, **TINY)
    found = run_one(loop, raw_prompt=user(loop.options.protocol().prompt(question)), index=3, extra="x")
    actions = len(engine.asked)
    assert actions >= 2
    # The question, the actions, and what was fed back to all of them but the last.
    assert found.num_turns == 1 + actions + actions - 1
    # Weights may change in the middle of an episode: the span is that of all of its actions.
    assert found.extra_fields["min_global_steps"] == 3
    assert found.extra_fields["max_global_steps"] == 3 + actions
    assert found.metrics.generate_sequences > 0
    assert found.metrics.num_preempted == 0
    requests, parameters = zip(*engine.asked, strict=True)
    assert len(set(requests)) == 1
    assert all(one["max_tokens"] == 48 for one in parameters[:-1])
    assert all(one["include_stop_str_in_output"] for one in parameters)
    assert all(one["stop"] == ["</search>", "</answer>"] for one in parameters)
    assert found.as_dict()["rollout_log_probs"].shape == found.as_dict()["responses"].shape


def test_without_the_engines_logprobs_there_are_none(model, tokenizer):
    loop = make_loop(Engine(model, tokenizer, logprobs=False), tokenizer, **TINY)
    found = run_one(loop, raw_prompt=user("Question: What is the currency of Aruba?\n"))
    assert found.response_logprobs is None
    assert "rollout_log_probs" not in found.as_dict()


# --- settings and prompts


def test_settings_of_the_configuration_and_of_the_entry(model, tokenizer):
    loop = make_loop(None, tokenizer, in_config={**TINY, "topk": 1}, max_action=32)
    assert loop.options == SearchOptions(**{**TINY, "topk": 1, "max_action": 32})
    assert loop.limits.max_response_tokens == 256
    assert loop.limits.max_prompt_tokens == 96


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"top_k": 3}, "llds_search has no setting top_k: did you mean topk?"),
        ({"topk": 0}, "llds_search.topk must be at least 1, but is 0."),
        ({"topk": "3"}, "llds_search.topk must be a whole number, but is '3'."),
        ({"topk": True}, "llds_search.topk must be a whole number, but is True."),
        ({"prompt": "chat"}, "llds_search.prompt must be one of 'search-r1', "),
        ({"deadline": 0}, "llds_search.deadline must be above 0, but is 0."),
        ({"corpus": None}, "llds_search.corpus must be text, but is None."),
        ({"correct_eos": "yes"}, "llds_search.correct_eos must be true or false, but is 'yes'."),
    ],
)
def test_mistakes_are_one_sentence(tokenizer, settings, sentence):
    with pytest.raises(LLDSError) as error:
        SearchOptions.of(settings)
    assert str(error.value).startswith(sentence)
    with pytest.raises(Exception, match="llds_search"):  # as hydra wraps it
        make_loop(None, tokenizer, **settings)


def test_chat_prompts_go_through_the_template(tokenizer):
    chatty = AutoTokenizer.from_pretrained(tiny_folder())
    chatty.chat_template = TEMPLATE
    loop = make_loop(None, chatty)
    protocol = SearchOptions().protocol()
    messages = protocol.prompt("who wrote it")
    assert loop._prompt_ids(messages) == protocol.prompt_ids(chatty, "who wrote it")
    system = [{"role": "system", "content": "Be brief."}, *messages]
    assert chatty.decode(loop._prompt_ids(system)).startswith("[system] Be brief.")
    chatty.chat_template = "{{ greeting }}" + TEMPLATE
    greeted = make_loop(None, chatty, template={"greeting": "Hello"})._prompt_ids(messages)
    assert chatty.decode(greeted).startswith("Hello[user] Answer the given question.")


def test_plain_prompts_are_the_text_as_it_stands(tokenizer):
    loop = make_loop(None, tokenizer, prompt="search-r1")
    assert loop._prompt_ids(user("Question: a?\n")) == tokenizer("Question: a?\n")["input_ids"]
    with pytest.raises(LLDSError, match="takes one message as the prompt, but the row has 2"):
        loop._prompt_ids([*user("a"), *user("b")])


def test_prompts_that_can_not_be_used(model, tokenizer):
    with pytest.raises(LLDSError, match="no chat template: set llds_search"):
        run_one(make_loop(None, tokenizer), raw_prompt=user("a"))
    with pytest.raises(LLDSError, match="The row of a question has no raw_prompt"):
        run_one(make_loop(None, tokenizer, **TINY))
    with pytest.raises(LLDSError, match="more than max_prompt_tokens=96"):
        run_one(make_loop(None, tokenizer, **TINY), raw_prompt=user("word " * 100))


def test_an_engine_that_writes_nothing(tokenizer):
    search = tokenizer.encode("<search> Aruba </search>", add_special_tokens=False)
    with pytest.raises(LLDSError, match="wrote nothing after"):
        run_one(make_loop(Script("length"), tokenizer, **TINY), raw_prompt=user("a"))
    with pytest.raises(LLDSError, match="it stopped for 'aborted'"):
        run_one(make_loop(Script(search, "aborted"), tokenizer, **TINY), raw_prompt=user("a"))
    full = run_one(make_loop(Script(search, "length"), tokenizer, **TINY), raw_prompt=user("a"))
    assert full.extra_fields["llds_answer"] is None
    assert full.response_mask[-1] == 0


def test_an_action_that_ends_at_a_token_only_the_engine_knows(tokenizer):
    """Such as a stop token of its own: the action is over and gets its correction."""
    words = tokenizer.encode("I wonder", add_special_tokens=False)
    answer = tokenizer.encode("<answer> Aruba </answer>", add_special_tokens=False)
    found = run_one(make_loop(Script(words, answer), tokenizer, **TINY), raw_prompt=user("a"))
    assert "My previous action is invalid." in tokenizer.decode(found.response_ids)
    assert found.extra_fields["llds_answer"] == "Aruba"


# --- outages


class Down:
    """A search tool that is down for queries with the word "down"."""

    def search(self, queries, topk):
        if any("down" in query for query in queries):
            raise RetrieverUnavailable("The retriever is down.")
        return NoRetriever().search(queries, topk)


@pytest.fixture
def down(monkeypatch):
    monkeypatch.setattr(agent, "shared_tool", lambda options: Down())
    monkeypatch.setattr(agent, "_siblings", Siblings())


def group(tokenizer, failing, uid="q", members=4):
    """Run a question's episodes, of which the first ones meet an outage."""

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False)

    runs = []
    for member in range(members):
        query = "down" if member < failing else "up"
        engine = Script(ids(f"<search> {query} </search>"), ids("<answer> x </answer>"))
        row = {"raw_prompt": user("a"), "uid": uid, "session_id": member}
        runs.append((make_loop(engine, tokenizer, **TINY), row))
    return runs


def test_an_episode_whose_tool_failed_is_left_out(tokenizer, down, caplog):
    first, *others = run(*group(tokenizer, 1))
    assert first == []
    assert [one.extra_fields["llds_answer"] for one in others] == ["x"] * 3
    assert "1 of 4 episodes of a question are left out (1 so far in this process)." in caplog.text
    assert "The retriever is down." in caplog.text


@pytest.mark.parametrize("failing", [3, 4])
def test_a_lone_episode_is_left_out_too(tokenizer, down, caplog, failing):
    results = run(*group(tokenizer, failing))
    raised = [one for one in results if isinstance(one, RetrieverUnavailable)]
    assert len(raised) == 1
    assert "4 of 4 episodes of a question are left out (4 so far" in str(raised[0])
    assert [one for one in results if not isinstance(one, Exception)] == [[]] * 3
    assert len(caplog.records) == 1


def test_questions_do_not_wait_for_each_other(tokenizer, down):
    results = run(*group(tokenizer, 0, "a", 2), *group(tokenizer, 2, "b", 2), *group(tokenizer, 0, "c", 1))
    failed = results.pop(2), results.pop(2)
    assert sorted(isinstance(one, RetrieverUnavailable) for one in failed) == [False, True]
    assert [one.extra_fields["llds_answer"] for one in results] == ["x"] * 3
    assert agent._siblings._groups == {}


def test_another_fault_counts_as_a_failure_of_its_episode_alone(tokenizer, down):
    runs = group(tokenizer, 0)
    runs[1] = (make_loop(Script("length"), tokenizer, **TINY), runs[1][1])
    results = run(*runs)
    assert isinstance(results[1], LLDSError)
    assert all(results[place].extra_fields["llds_answer"] == "x" for place in (0, 2, 3))
    assert agent._siblings._groups == {}


def test_verls_older_trainer_is_told_why_it_stops(tokenizer, down):
    ((loop, row),) = group(tokenizer, 1, members=1)
    del row["session_id"]
    with pytest.raises(RetrieverUnavailable, match="older trainer can't leave an episode out"):
        run_one(loop, **row)


def test_searches_wait_side_by_side(tokenizer, monkeypatch):
    """Each search waits until four are under way: one that held the event loop would wait for ever."""
    together = threading.Barrier(4, timeout=30)

    def search(queries, topk):
        together.wait()
        return [[] for _ in queries]

    monkeypatch.setattr(agent, "shared_tool", lambda options: SimpleNamespace(search=search))
    results = run(*group(tokenizer, 0))
    assert [one.extra_fields["llds_answer"] for one in results] == ["x"] * 4
