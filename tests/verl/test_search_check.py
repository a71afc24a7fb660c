"""The group ``llds_search`` in verl's configuration, and what is said of it before Ray starts."""

import re

import pytest
from hydra import compose, initialize_config_module
from test_console import SEARCH, command
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config.rollout import AgentLoopConfig

from llds.engines.verl import search_check
from llds.engines.verl.search_check import check
from llds.engines.verl.searching import SearchOptions
from llds.errors import LLDSError

SMALL = ["llds_search.max_action=48", "data.max_response_length=320", "actor_rollout_ref.model.path=a-model"]


def composed(*words):
    with initialize_config_module("verl.trainer.config", version_base=None):
        needed = ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"]
        return compose("ppo_trainer", [SEARCH, "+llds_search@_global_=default", *SMALL, *needed, *words])


@pytest.fixture
def unopened(monkeypatch):
    monkeypatch.setattr(search_check, "open_tool", lambda options: None)


def test_the_group_holds_every_setting_with_its_default():
    config = composed("llds_search.max_action=500")
    assert dict(config.llds_search) == vars(SearchOptions())


def test_the_group_puts_loop_and_reward_where_verl_looks():
    config = composed()
    agent = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.agent, AgentLoopConfig)
    assert agent.default_agent_loop == "llds_search"
    assert config.reward.custom_reward_function.path == "pkg://llds.engines.verl.reward"
    assert config.actor_rollout_ref.model.external_lib == "llds.engines.verl.agent"
    assert config.actor_rollout_ref.rollout.skip_tokenizer_init is False


def test_what_is_told(unopened):
    assert check(composed("llds_search.url=http://127.0.0.1:1/retrieve")) == (
        "LLDS: search in http://127.0.0.1:1/retrieve, 3 passages a search; up to 4 searches, 48 tokens an action, "
        "500 a result, 320 altogether."
    )


def test_an_engine_that_can_not_stop_is_told(unopened):
    skip = "actor_rollout_ref.rollout.skip_tokenizer_init=True"
    assert "can't stop at a closing tag" in check(composed(skip, "actor_rollout_ref.rollout.name=sglang"))
    # verl's vLLM server has its tokenizer whatever is set.
    assert "can't stop" not in check(composed(skip, "actor_rollout_ref.rollout.name=vllm"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["llds_search.topk=0"], "llds_search.topk must be at least 1"),
        (["+llds_search.top_k=3"], "llds_search has no setting top_k: did you mean topk?"),
        (["data.max_response_length=48"], "has no room for more than one action"),
        (
            ["llds_search.corpus=nowhere.jsonl"],
            "There is no corpus file nowhere.jsonl; check llds_search.corpus.",
        ),
        (["llds_search.tries=1", "llds_search.url=http://127.0.0.1:9/"], "could not be reached"),
    ],
)
def test_mistakes(words, sentence):
    with pytest.raises(LLDSError, match=re.escape(sentence)):
        check(composed(*words))


def test_a_section_that_is_none():
    config = composed()
    config.llds_search = 3
    with pytest.raises(LLDSError, match=re.escape("llds_search must hold settings, but is 3.")):
        check(config)


def test_a_mistake_ends_the_command_before_ray(tmp_path):
    code, said = command(tmp_path, SEARCH, "+llds_search@_global_=default", "llds_search.topk=0")
    assert code == 1
    assert said.strip().splitlines()[-1] == "LLDS: llds_search.topk must be at least 1, but is 0."
    assert "RAY WOULD START" not in said
