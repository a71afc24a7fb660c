"""A plain AutoTokenizer reads saved folders as they were trained, whatever the model type."""

import json

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from llds.training.checkpoints import save_model_folder
from llds.training.environment import prepare_environment
from llds.training.policy import load_policy
from llds.training.recipe import ModelSettings
from llds.training.tiny import tiny_folder
from llds.training.tokenizers import save_tokenizer

prepare_environment()

TEXT = "Who in 1990 (or 25 B.C.) ruled .ke?\n\n<search> It's Kenya 12,5 </search>"


@pytest.fixture(scope="module")
def exact():
    """The ids by tokenizer.json alone."""
    return PreTrainedTokenizerFast.from_pretrained(tiny_folder())(TEXT).input_ids


def test_the_shipped_model_and_what_is_saved_from_it_read_alike(exact, tmp_path):
    policy = load_policy(ModelSettings())
    assert policy.tokenizer(TEXT).input_ids == exact
    save_model_folder(policy.model, policy.tokenizer, tmp_path / "checkpoint")
    for folder in (tiny_folder(), tmp_path / "checkpoint"):
        for options in ({}, {"trust_remote_code": False}):
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
            assert tokenizer(TEXT).input_ids == exact
            assert len(tokenizer) == policy.model.config.vocab_size
    # Saved once more, by someone who knows nothing of it.
    AutoTokenizer.from_pretrained(tmp_path / "checkpoint").save_pretrained(tmp_path / "again")
    policy.model.save_pretrained(tmp_path / "again")
    assert AutoTokenizer.from_pretrained(tmp_path / "again")(TEXT).input_ids == exact


def test_without_the_mark_it_would_be_misread(exact, tmp_path):
    # So the test above can fail.
    for path in tiny_folder().iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["auto_map"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert AutoTokenizer.from_pretrained(tmp_path)(TEXT).input_ids != exact
    # Such a folder, written by an earlier version, gets the mark when its model is saved again.
    policy = load_policy(ModelSettings(path=str(tmp_path)))
    save_model_folder(policy.model, policy.tokenizer, tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")(TEXT).input_ids == exact


def test_running_code_of_the_folder_is_refused_in_words(tmp_path):
    with pytest.raises(OSError, match="load_without_trust_remote_code"):
        AutoTokenizer.from_pretrained(tiny_folder(), trust_remote_code=True)


def test_a_tokenizer_of_the_model_type_gets_no_mark(tmp_path):
    policy = load_policy(ModelSettings())
    policy.model.save_pretrained(tmp_path)
    save_tokenizer(Qwen2Tokenizer(vocab={"a": 0, "b": 1}, merges=[]), tmp_path)
    assert "auto_map" not in json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert type(AutoTokenizer.from_pretrained(tmp_path)) is Qwen2Tokenizer
