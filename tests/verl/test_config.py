"""The settings in verl's configuration: composed by hydra, built by verl, checked before anything runs."""

from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from batches import actor_config, make_batch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass, validate_config

import llds.engines.verl as room
from llds.engines.verl.config import LLDSPolicyLossConfig
from llds.engines.verl.options import LLDSOptions, RunFacts
from llds.engines.verl.preflight import verdict
from llds.errors import LLDSError
from llds.preflight.verl import NAMES

LOSS = "actor_rollout_ref.actor.policy_loss"
NEEDED = [
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.n=5",
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=512",
]


def composed(*words):
    with initialize_config_module("verl.trainer.config", version_base=None):
        overrides = ["hydra.searchpath=[pkg://llds.engines.verl.conf]", *NEEDED, *words]
        return compose("ppo_trainer", overrides=overrides)


def policy_loss(*words):
    return omega_conf_to_dataclass(composed(*words).actor_rollout_ref.actor).policy_loss


def mistake(*words):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - hydra wraps what a target raises
        policy_loss(*words)
    return str(caught.value)


def test_two_words_are_the_papers_settings_and_verl_validates_them(capsys):
    config = composed("+llds@_global_=default")
    validate_config(config, use_reference_policy=False, use_critic=False)
    assert "All configuration checks passed" in capsys.readouterr().out
    built = omega_conf_to_dataclass(config.actor_rollout_ref.actor).policy_loss
    assert isinstance(built, LLDSPolicyLossConfig)
    assert built.loss_mode == "llds"
    assert built.llds_options() == LLDSOptions()
    assert RunFacts.of(built.llds_run) == RunFacts(
        train_batch_size=512, mini_batch_size=256, epochs=1, bypass=False
    )


def test_the_yaml_group_has_every_setting_with_its_default():
    file = Path(room.__file__).parent / "conf" / "llds" / "_options.yaml"
    shipped = yaml.safe_load(file.read_text())["actor_rollout_ref"]["actor"]["policy_loss"]
    assert shipped.pop("_target_") == "llds.engines.verl.config.LLDSPolicyLossConfig"
    assert set(shipped.pop("llds_run")) == {item.name for item in fields(RunFacts)}
    defaults = LLDSOptions()
    expected = {f"llds_{item.name}": getattr(defaults, item.name) for item in fields(LLDSOptions)}
    assert shipped == expected
    ours = {item.name: item.default for item in fields(LLDSPolicyLossConfig) if item.name.startswith("llds_")}
    ours.pop("llds_run")
    assert ours == expected


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["+llds@_global_=gspo"], {"base": "gspo"}),
        (["+llds@_global_=ma"], {"answer_weight": "auto"}),
        (["+llds@_global_=inplace"], {"wrap_registry": True}),
        (
            ["+llds@_global_=default", f"{LOSS}.llds_coef=1e-2", f"{LOSS}.llds_gate=response"],
            {"coef": 0.01, "gate": "response"},
        ),
        (["+llds@_global_=default", f"{LOSS}.llds_normalizer=authors"], {"normalizer": "authors"}),
        (["+llds@_global_=default", f"{LOSS}.llds_answer_weight=0.5"], {"answer_weight": 0.5}),
    ],
)
def test_variants_and_overrides(words, options, restored_registry):
    assert policy_loss(*words).llds_options() == LLDSOptions(**options)


def test_by_target_alone_as_in_older_versions():
    target = f"{LOSS}._target_=llds.engines.verl.config.LLDSPolicyLossConfig"
    built = policy_loss(
        target, f"{LOSS}.loss_mode=llds", f"+{LOSS}.llds_base=cispo", f"+{LOSS}.llds_coef=0.1"
    )
    assert built.llds_options() == LLDSOptions(base="cispo", coef=0.1)
    assert RunFacts.of(built.llds_run).updates_per_rollout is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["llds_coef=-0.1"], "llds_coef must be at least 0, but is -0.1."),
        (["llds_coef=a lot"], "llds_coef must be a finite number, but is 'a lot'."),
        (["llds_coef=.inf"], "llds_coef must be a finite number"),
        (["llds_base=gsop"], "llds_base must be one of verl's policy losses, bypass_mode, cispo,"),
        (["llds_base=llds"], "llds_base must name the loss that LLDS is added to"),
        (["llds_gate=acton"], "llds_gate must be one of 'action', 'response', 'token', but is 'acton'."),
        (["llds_normalizer=tokens"], "llds_normalizer must be one of 'all', 'response', 'authors'"),
        (["llds_normalizer=preserved"], "convert λ: multiply it by"),
        (["llds_baseline=anchor"], "llds_baseline must be one of 'old', 'reference'"),
        (["llds_preserve=all"], "llds_preserve must be one of"),
        (["llds_penalty=square"], "llds_penalty must be one of 'relu', 'huber'"),
        (["llds_huber_width=0"], "llds_huber_width must be above 0, but is 0.0."),
        (["llds_dead_zone=-1"], "llds_dead_zone must be at least 0"),
        (["llds_answer_weight=often"], 'llds_answer_weight must be a number, "auto" or null, but is'),
        (["llds_answer_searches=0"], "llds_answer_searches must be above 0"),
        (["llds_compat=authors", "llds_preserve=positive"], 'llds_compat="authors" goes with preserve='),
        (["llds_preflight=never"], "llds_preflight must be one of 'warn', 'stop'"),
        (["llds_wrap_registry=perhaps"], "llds_wrap_registry must be true or false"),
        (["loss_mode=vanilla"], "Nothing would call LLDS: loss_mode is 'vanilla'."),
        (["loss_mode=llds_gspo", "llds_base=cispo"], "adds LLDS to 'gspo', but llds_base says 'cispo'"),
        (["loss_mode=cispo", "llds_base=gspo", "llds_wrap_registry=true"], "goes with loss_mode=llds"),
    ],
)
def test_one_clear_sentence_per_mistake(words, told, restored_registry):
    assert told in mistake("+llds@_global_=default", *(f"{LOSS}.{word}" for word in words))


def test_a_setting_that_does_not_exist():
    assert "llds_coeff" in mistake("+llds@_global_=default", f"+{LOSS}.llds_coeff=0.1")
    with pytest.raises(LLDSError, match="LLDS has no setting llds_coeff; it has llds_coef, llds_base,"):
        LLDSOptions.of({"llds_coeff": 0.1})
    with pytest.raises(LLDSError, match="llds_run has no entry 'batch'"):
        RunFacts.of({"batch": 4})


@pytest.mark.parametrize(
    ("facts", "steps"),
    [
        ((512, 256, 1), 2),
        ((512, 512, 2), 2),
        ((512, 512, None), 1),
        ((512, 300, 1), None),
        ((None, 2, 1), None),
    ],
)
def test_updates_per_rollout(facts, steps):
    names = ("train_batch_size", "mini_batch_size", "epochs")
    assert RunFacts.of(dict(zip(names, facts, strict=True))).updates_per_rollout == steps


def test_answers_need_an_agent_loop_that_tells_of_them():
    config = actor_config(answer_weight="auto")
    with pytest.raises(LLDSError, match="calls the policy loss by another way"):
        get_policy_loss_fn("llds")(**make_batch(), config=config)


# --- the verdict


def told(*words):
    return verdict(OmegaConf.to_container(composed(*words), resolve=True))


def test_the_verdict_of_a_clean_run():
    text, report = told("+llds@_global_=default")
    assert report.findings == ()
    assert text.startswith("LLDS: live in 1 of 2 optimizer steps of each rollout;")
    assert "No fault found; looked for L1," in text


@pytest.mark.parametrize(
    ("words", "said", "fault"),
    [
        (
            ["actor_rollout_ref.actor.ppo_mini_batch_size=512"],
            "STRUCTURAL ZERO. The penalty cannot act",
            "L1",
        ),
        ([f"{LOSS}.llds_coef=0"], "off (llds_coef=0)", None),
        ([f"{LOSS}.loss_mode=vanilla"], "nothing calls the penalty", "L9"),
        (
            [
                "algorithm.rollout_correction.bypass_mode=true",
                "actor_rollout_ref.rollout.calculate_log_probs=true",
            ],
            "live in every step, on drift and",
            "L3",
        ),
        ([f"{LOSS}.llds_baseline=reference"], "live once the policy has left the reference", None),
        (["data.train_batch_size=500"], "how many optimizer steps a rollout gets can't be told", None),
        ([f"{LOSS}.llds_normalizer=authors"], "live in 1 of 2", None),
        ([f"{LOSS}.llds_normalizer=response"], "live in 1 of 2", "L7"),
        (["algorithm.adv_estimator=gae"], "live in 1 of 2", "L5"),
    ],
)
def test_the_verdict_in_words(words, said, fault):
    text, report = told("+llds@_global_=default", *words)
    assert said in text
    assert [one.fault for one in report.findings] == ([fault] if fault else [])


def test_the_translator_names_settings_that_exist():
    named = {name.rpartition(".llds_")[2] for name in NAMES.values() if ".policy_loss.llds_" in name}
    assert named <= {item.name for item in fields(LLDSOptions)}
    assert {"coef", "gate", "normalizer", "baseline", "preserve", "advantage_tol", "answer_weight"} == named
