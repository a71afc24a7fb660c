"""Tokenizers and language models for the tests of the search room: random, and following a script."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_outputs import CausalLMOutput

TAGS = [f"<{slash}{tag}>" for tag in ("think", "search", "information", "answer") for slash in ("", "/")]
TEXT = [
    "Question: what is the capital of France?\n",
    "<think> I need to search </think> <search> capital of France </search>",
    '\n\n<information>Doc 1(Title: "Paris") Paris is the capital of France.</information>\n\n',
    "<answer> Paris </answer>",
]


def make_tokenizer(tags: str = "single", extra: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Byte-level BPE. ``tags``: "single" tokens, "special" ones (often dropped by decode), or "spelled"."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<eos>", "<pad>"], show_progress=False
    )
    tokenizer.train_from_iterator([text.replace("<", "< ").replace(">", " >") for text in TEXT], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    if tags != "spelled":
        fast.add_tokens(TAGS, special_tokens=tags == "special")
    fast.add_tokens(list(extra))
    return fast


def make_qwen(tokenizer, seed: int = 0, **settings) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**_sizes(tokenizer), **settings)).eval()


def make_llama(tokenizer, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**_sizes(tokenizer))).eval()


def _sizes(tokenizer):
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,  # far from uniform, so wrong positions or masks show in the log-probs
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }


def favour(model, tokens: dict[int, float]):
    """Raise the logits of some ``tokens``, so that a random model acts: searches, answers, ends."""
    bias = torch.zeros(model.config.vocab_size)
    for token, by in tokens.items():
        bias[token] = by
    head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size)
    head.weight, head.bias = model.lm_head.weight, torch.nn.Parameter(bias)
    model.lm_head = head
    return model


class ScriptedLM(torch.nn.Module):
    """Writes for each prompt a given list of tokens, whatever batch it finds itself in.

    It keeps the token ids themselves in the cache, as keys, and so sees of each row exactly what the cache
    and the attention mask let it see. A context that was seen before gets the same token again; a new one
    the next token of its prompt's script. The positions must count what is seen.
    """

    def __init__(self, tokenizer, scripts: dict[tuple[int, ...], list[int]]) -> None:
        super().__init__()
        self.config = Qwen2Config(**{**_sizes(tokenizer), "num_hidden_layers": 1})
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self._scripts = {prompt: iter(script) for prompt, script in scripts.items()}
        self._memory: dict[tuple[int, ...], int] = {}
        self.batch_sizes: list[int] = []

    def forward(self, input_ids, attention_mask, position_ids, cache, use_cache=True, logits_to_keep=0):
        self.batch_sizes.append(len(input_ids))
        states = input_ids[:, None, :, None].double()
        seen = cache.update(states, states, 0)[0][:, 0, :, 0].long()
        assert seen.shape == attention_mask.shape
        logits = torch.full((len(seen), 1, self.config.vocab_size), -50.0)
        for row, (ids, mask) in enumerate(zip(seen, attention_mask.bool(), strict=True)):
            context = tuple(ids[mask].tolist())
            if mask[-1]:
                assert position_ids[row, -1] == len(context) - 1
                logits[row, 0, self._next(context)] = 50.0
        return CausalLMOutput(logits=logits)

    def _next(self, context: tuple[int, ...]) -> int:
        if context not in self._memory:
            prompt = max((p for p in self._scripts if context[: len(p)] == p), key=len)
            self._memory[context] = next(self._scripts[prompt])
        return self._memory[context]
