"""Recipes: reading, overriding, printing, and one clear sentence for every mistake."""

import pytest

from llds.errors import LLDSError
from llds.training.recipe import Recipe, load_recipe, read_recipe_file, recipe_names
from llds.training.settings import build, flat_values, read_yaml, settings_table, to_yaml


def one_sentence(error: pytest.ExceptionInfo[LLDSError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_every_packaged_recipe_loads_and_survives_printing():
    assert {"tiny", "smollm2"} <= set(recipe_names())
    for name in recipe_names():
        recipe = load_recipe(name)
        assert build(Recipe, read_yaml(Recipe, to_yaml(recipe), "printed")) == recipe
        assert recipe.run.name == f"{name}-seed0"


def test_tiny_is_the_default_and_has_the_promised_shape():
    recipe = load_recipe()
    assert recipe == load_recipe("tiny")
    assert (recipe.grpo.questions, recipe.grpo.responses, recipe.grpo.steps_per_rollout) == (16, 8, 4)
    assert (recipe.llds.coef, recipe.llds.gate, recipe.grpo.beta, recipe.sampling.temperature) == (
        0.2,
        "action",
        0,
        1,
    )


def test_overrides_beat_the_file_and_are_typed():
    recipe = load_recipe(
        "tiny",
        [
            "grpo.learning_rate=3e-4",
            "run.report_to=wandb, tensorboard",
            "run.name=007",
            "retrieval.url=http://localhost:8000/retrieve",
            "grpo.clip_high=0.28",
            "model.gradient_checkpointing=true",
        ],
    )
    assert recipe.grpo.learning_rate == 3e-4
    assert recipe.run.report_to == ("wandb", "tensorboard")
    assert recipe.run.name == "007"
    assert recipe.retrieval.url == "http://localhost:8000/retrieve"
    assert recipe.grpo.clip_high == 0.28
    assert recipe.model.gradient_checkpointing is True
    assert load_recipe("tiny", ["grpo.clip_high=null"]).grpo.clip_high is None


def test_an_override_may_hold_an_equals_sign():
    assert load_recipe("tiny", ["retrieval.url=http://h/r?a=b"]).retrieval.url == "http://h/r?a=b"


def test_a_recipe_file_names_the_run(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("grpo:\n  learning_rate: 1e-5\nrun:\n  seed: 3\n")
    recipe = load_recipe(str(path))
    assert recipe.grpo.learning_rate == 1e-5
    assert recipe.run.name == "mine-seed3"


def test_a_printed_recipe_reads_back_as_a_file(tmp_path):
    recipe = load_recipe("tiny", ["data.train=a: b # c.jsonl", "run.report_to=wandb"])
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(recipe))
    assert read_recipe_file(path) == recipe


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("grpo.lerning_rate=1", "did you mean 'grpo.learning_rate'?"),
        ("learning_rate=1", "did you mean 'grpo.learning_rate'?"),
        ("grop.questions=4", "did you mean 'grpo.questions'?"),
        ("qqqqqq=1", "`llds train --help`"),
        ("grpo.loss=gpro", "one of grpo, dapo"),
        ("grpo.questions=1.5", "must be a whole number, not '1.5'"),
        ("grpo.questions=true", "must be a whole number, not true"),
        ("grpo.learning_rate=fast", "must be a number, not 'fast'"),
        ("grpo.learning_rate=nan", "must be a number"),
        ("model.gradient_checkpointing=1", "must be true or false, not '1'"),
        ("sampling.top_p=2", "must be at least 1e-06 and at most 1, not 2"),
        ("llds.coef=-0.1", "must be at least 0"),
        ("run.report_to={a: b}", "must be a list of names"),
        ("grpo.questions", "write key=value"),
        ("grpo.steps_per_rollout=3", "choose a divisor of 128"),
        ("episode.max_observation=100000", "leaves no room"),
    ],
)
def test_a_wrong_override_is_one_sentence(override, expected):
    with pytest.raises(LLDSError) as error:
        load_recipe("tiny", [override])
    text = one_sentence(error)
    assert expected in text
    assert override.partition("=")[0].partition(".")[0] in text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("grpo:\n  lerning_rate: 1\n", "did you mean 'grpo.learning_rate'?"),
        ("gpro:\n  questions: 1\n", "Unknown setting 'gpro'"),
        ("grpo: 5\n", "is a section"),
        ("- a\n- b\n", "must hold sections"),
        (
            "grpo:\n  questions: 4\n  questions: 8\n",
            "line 3 is not valid YAML: the key 'questions' is given twice",
        ),
        ("grpo: [\n", "is not valid YAML"),
        ("[" * 100_000, "is nested too deeply"),
        ("grpo:\n  questions: [1]\n", "must be a whole number, not a list"),
        ("grpo:\n  questions:\n", "must be a whole number, not empty"),
    ],
)
def test_a_wrong_file_is_one_sentence_that_names_it(tmp_path, content, expected):
    path = tmp_path / "wrong.yaml"
    path.write_text(content)
    with pytest.raises(LLDSError) as error:
        load_recipe(str(path))
    text = one_sentence(error)
    assert expected in text
    assert "wrong.yaml" in text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tny", "did you mean 'tiny'?"),
        ("zzz", "the recipes are"),
        ("missing.yaml", "no recipe file missing.yaml"),
    ],
)
def test_an_unknown_recipe_is_one_sentence(name, expected):
    with pytest.raises(LLDSError) as error:
        load_recipe(name)
    assert expected in one_sentence(error)


def test_an_empty_file_is_the_defaults(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    assert load_recipe(str(path)).grpo == Recipe().grpo


def test_every_setting_has_a_help_text_and_its_default_passes_its_own_check():
    for key, item in settings_table(Recipe).items():
        assert item.help, key
        assert item.help[0].islower() or item.help.startswith(("LLDS", "TRL", "CPU", "GPU", "AdamW")), key
    assert build(Recipe, read_yaml(Recipe, to_yaml(Recipe()), "defaults")) == Recipe()
    assert flat_values(Recipe()).keys() == settings_table(Recipe).keys()
