"""What a preflight reads from configurations: recipes, TRL arguments, verl's, and the command."""

import json

import pytest
from typer.testing import CliRunner

from llds.cli.app import app
from llds.errors import LLDSError
from llds.preflight import FAULTS, Finding, Report, Setup, check_setup, merge
from llds.preflight.verl import is_verl, setup_of_verl, with_overrides
from llds.training.environment import prepare_environment
from llds.training.preflight import check_recipe
from llds.training.recipe import load_recipe, recipe_names
from llds.training.verl_command import check_verl_recipe

prepare_environment()
runner = CliRunner()


def faults(report, worst=("certain", "likely")):
    return {one.fault for one in report.findings if one.severity in worst}


# --- recipes


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_are_clean(name):
    recipe = load_recipe(name)
    report = (check_verl_recipe if recipe.run.engine == "verl" else check_recipe)(recipe)
    assert report.findings == ()


@pytest.mark.parametrize(
    ("overrides", "fault", "setting"),
    [
        (["grpo.steps_per_rollout=1"], "L1", "grpo.steps_per_rollout"),
        (["llds.normalizer=preserved"], "L7", "llds.coef, llds.normalizer"),
        (["llds.coef=50"], "L7", "llds.coef"),
        (["llds.baseline=reference", "grpo.beta=0.1"], "L12", "llds.baseline, grpo.beta"),
        (["grpo.responses=2"], "L13", "grpo.responses"),
    ],
)
def test_faults_of_a_recipe(overrides, fault, setting):
    report = check_recipe(load_recipe("tiny", overrides))
    assert faults(report) == {fault}
    assert setting in report.findings[0].setting


@pytest.mark.parametrize(
    "overrides",
    [
        ["grpo.steps_per_rollout=1", "llds.coef=0"],
        ["grpo.steps_per_rollout=1", "grpo.passes=2"],
        ["grpo.steps_per_rollout=1", "llds.baseline=anchor"],
        ["llds.normalizer=preserved", "llds.coef=0.08"],
        ["llds.baseline=reference", "grpo.beta=0.001"],
        ["llds.gate=response"],
        ["llds.preserve=positive"],
        ["llds.mask_answer=true"],
    ],
)
def test_what_may_be_meant_is_no_fault_of_a_recipe(overrides):
    assert faults(check_recipe(load_recipe("tiny", overrides))) == set()


# --- verl


def verl(*words):
    base = {
        "data": {"train_batch_size": 512},
        "actor_rollout_ref": {
            "actor": {
                "ppo_mini_batch_size": 256,
                "ppo_epochs": 1,
                "use_kl_loss": True,
                "kl_loss_coef": 0.001,
                "policy_loss": {"loss_mode": "llds", "llds_coef": 0.2},
            },
            "rollout": {"n": 5, "multi_turn": {"enable": True}},
        },
        "algorithm": {"use_kl_in_reward": False},
    }
    return check_setup(setup_of_verl(with_overrides(base, words)))


A = "actor_rollout_ref.actor"


def test_the_papers_verl_settings_are_clean():
    assert verl().findings == ()


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ([f"{A}.ppo_mini_batch_size=512"], "L1"),
        (["data.train_batch_size=256"], "L1"),
        (["+algorithm.rollout_correction.bypass_mode=True"], "L3"),
        (["+do_search=true", f"+{A}.state_masking=false"], "L4"),
        ([f"+{A}.policy_loss.llds_normalizer=preserved"], "L7"),
        ([f"{A}.policy_loss.loss_mode=vanilla"], "L9"),
        (["algorithm.use_kl_in_reward=True"], "L12"),
        (["actor_rollout_ref.rollout.n=2"], "L13"),
        (["actor_rollout_ref.rollout.n=1"], "L13"),
        (["algorithm.adv_estimator=gae"], "L5"),
        ([f"{A}.policy_loss.llds_advantage_tol=5e-1"], "L5"),
        ([f"{A}.ppo_mini_batch_size=512", f"{A}.policy_loss.llds_coef=1e-1"], "L1"),
    ],
)
def test_faults_of_a_verl_configuration(words, fault):
    report = verl(*words)
    assert faults(report) == {fault}
    assert "." in report.findings[0].setting


BYPASS = "algorithm.rollout_correction.bypass_mode=True"


def test_in_bypass_mode_one_step_is_no_structural_zero():
    """Old log-probs are those of the inference engine, which differ from the trainer's at once."""
    assert faults(verl(BYPASS, f"{A}.ppo_mini_batch_size=512")) == {"L3"}


def test_log_probs_of_an_engine_that_returns_none():
    words = [BYPASS, "actor_rollout_ref.rollout.calculate_log_probs=False"]
    assert faults(verl(*words)) == {"L3", "L11"}
    assert faults(verl(words[0], "actor_rollout_ref.rollout.calculate_log_probs=True")) == {"L3"}


def test_the_older_trainer_drops_the_loss_in_bypass_mode():
    report = verl(BYPASS, "trainer.use_v1=False")
    assert faults(report) == {"L3", "L9"}
    assert "replaces whatever is set" in report.text
    assert faults(verl(BYPASS, "trainer.use_v1=True")) == {"L3"}


def test_search_r1_counts_its_mini_batches_in_responses():
    """The paper's run: 512 questions of 5 responses feed ten steps of 256."""
    words = ["actor_rollout_ref.rollout.n=1", "actor_rollout_ref.rollout.n_agent=5", "do_search=true"]
    words += [f"{A}.state_masking=true"]
    assert faults(verl(*words)) == set()
    assert faults(verl(*words, f"{A}.ppo_mini_batch_size=2560")) == {"L1"}


@pytest.mark.parametrize(
    "words",
    [
        [f"{A}.ppo_mini_batch_size=512", f"{A}.ppo_epochs=2"],
        ["+do_search=true", f"+{A}.state_masking=true"],
        [f"{A}.policy_loss.loss_mode=llds_gspo"],
        [f"{A}.use_kl_loss=False", "algorithm.use_kl_in_reward=True"],
        ["actor_rollout_ref.rollout.n=8"],
        [f"{A}.ppo_mini_batch_size=512", f"{A}.policy_loss.llds_coef=0"],
        [f"{A}.ppo_mini_batch_size=512", f"{A}.policy_loss.llds_baseline=reference"],
        [f"{A}.policy_loss.llds_normalizer=authors"],
    ],
)
def test_clean_verl_configurations(words):
    assert faults(verl(*words)) == set()


def test_plain_verl_without_llds_says_what_it_could_not_look_for():
    report = check_setup(
        setup_of_verl({"actor_rollout_ref": {"actor": {"ppo_mini_batch_size": "${data.x}"}}})
    )
    assert report.findings == ()
    assert {"L1", "L5", "L6", "L9", "L13"} <= dict(report.unchecked).keys()


def test_overrides_need_an_equals_sign():
    assert is_verl({"actor_rollout_ref": {}})
    assert with_overrides({"a": {"b": 1}}, ["a.b=2", "+a.c.d=[1]"]) == {"a": {"b": 2, "c": {"d": [1]}}}
    assert with_overrides({}, ["+llds@_global_=default"]) == {"llds": "default"}
    with pytest.raises(LLDSError, match="'wrong' is no setting"):
        with_overrides({}, ["wrong"])
    with pytest.raises(LLDSError, match=r"The value in 'a=\['"):
        with_overrides({}, ["a=["])


# --- reports


def test_reports_are_merged_worst_first_and_without_repeats():
    def finding(fault, severity):
        return Finding(fault, severity, "e", "s", "c")

    again = finding("L5", "info")
    one = Report((finding("L13", "likely"), again), ("L13",), (("L2", "w"),))
    two = Report((finding("L9", "certain"), again), ("L2",), (("L3", "w"),))
    both = merge([one, two])
    assert [each.fault for each in both.findings] == ["L9", "L13", "L5"]
    assert both.checked == ("L2", "L13")
    assert both.unchecked == (("L3", "w"),)
    assert not both.is_clean
    assert json.loads(json.dumps(both.to_json()))["findings"][0]["meaning"] == FAULTS["L9"]


def test_without_lambda_a_setup_has_no_fault_of_the_penalty():
    silent = Setup("x", is_attached=False, coef=0.0, baseline="old", steps_per_rollout=1, normalizer="all")
    assert faults(check_setup(silent)) == set()


# --- the command


def test_command_on_trl_arguments(tmp_path):
    path = tmp_path / "args.yaml"
    path.write_text("num_generations: 8\nper_device_train_batch_size: 8\nllds_coef: 0.2\n")
    told = runner.invoke(app, ["preflight", str(path), "--json"])
    assert told.exit_code == 1, told.output
    findings = json.loads(told.stdout)["findings"]
    # TRL logs every tenth step unless told otherwise, which is worth a word.
    assert [(one["fault"], one["severity"]) for one in findings] == [("L1", "certain"), ("L10", "info")]
    told = runner.invoke(app, ["preflight", str(path), "num_iterations=2"])
    assert told.exit_code == 0, told.output
    assert "L1 (" not in told.output
    assert "Not looked for: L9" in told.output


def test_command_on_trl_arguments_for_a_trainer_that_llds_is_attached_to(tmp_path):
    path = tmp_path / "args.json"
    path.write_text(json.dumps({"num_generations": 8, "per_device_train_batch_size": 8}))
    told = runner.invoke(app, ["preflight", str(path)])
    assert told.exit_code == 1, told.output
    assert "L1 (certain)" in told.output
    assert "no setting llds_" in " ".join(told.output.split())
    assert runner.invoke(app, ["preflight", str(path), "llds_coef=0"]).exit_code == 0


def test_a_rollout_that_optimizer_steps_cut_is_not_used_up():
    """TRL's rule: with accumulation 3 and rollouts of 2 micro-batches steps find responses of an older policy."""
    from fractions import Fraction

    for accumulation in range(1, 7):
        for micro_batches in range(1, 9):
            setup = Setup(
                "trl", coef=0.2, baseline="old", steps_per_rollout=Fraction(micro_batches, accumulation)
            )
            found = "L1" in faults(check_setup(setup))
            assert found == (accumulation % micro_batches == 0)


def test_command_on_a_verl_command_line():
    words = ["actor_rollout_ref.actor.policy_loss.loss_mode=llds", "actor_rollout_ref.rollout.n=2"]
    words += ["data.train_batch_size=512", "actor_rollout_ref.actor.ppo_mini_batch_size=256"]
    assert runner.invoke(app, ["preflight", "-", *words]).exit_code == 0
    told = runner.invoke(app, ["preflight", "-", *words, "--fail-on", "likely"])
    assert told.exit_code == 1
    assert "L13 (likely)" in told.output


def test_command_on_a_recipe_without_a_rollout():
    told = runner.invoke(app, ["preflight", "--static", "grpo.steps_per_rollout=1"])
    assert told.exit_code == 1
    assert "STRUCTURAL ZERO" in told.output
    assert runner.invoke(app, ["preflight", "tiny", "--static"]).exit_code == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("num_generation: 8\n", "did you mean 'num_generations'"),
        ("- 1\n", "must hold settings by name, not list"),
        ("a: [\n", "is neither YAML nor JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("num_generations: 8\nper_device_train_batch_size: 3\n", "TRL does not take the arguments"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path, content, words):
    path = tmp_path / "args.yaml"
    path.write_text(content)
    told = runner.invoke(app, ["preflight", str(path)])
    assert isinstance(told.exception, LLDSError)
    assert words in str(told.exception)


def test_a_missing_file_is_one_sentence():
    told = runner.invoke(app, ["preflight", "nowhere.yaml"])
    assert isinstance(told.exception, LLDSError)
    assert "nowhere.yaml can't be read" in str(told.exception)
