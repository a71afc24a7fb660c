"""The few calls of vLLM that are made, over transformers: the same names, keywords and results, and no others.

As in vLLM (0.6 to 0.11): ``LLM.generate`` takes prompts as ``{"prompt_token_ids": [...]}`` and one ``SamplingParams``
each, answers in their order, and ``token_ids`` hold the end-of-sequence token, and the whole token that completed
a stop string. ``surplus``: tokens written behind it, as an engine does that checks for stop strings late.
"""

from __future__ import annotations

import types
from dataclasses import dataclass

import torch


@dataclass(kw_only=True)
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: list[str] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self):
        assert self.top_k >= -1
        assert self.max_tokens is None or self.max_tokens >= 1


def make(model, tokenizer, surplus=0):
    """Return a module that stands for ``vllm``, and the list of the engines made with it."""
    made = []

    class LLM:
        def __init__(
            self, *, model, max_model_len, dtype, enable_prefix_caching, generation_config, **options
        ):
            if dtype == "float8":
                raise ValueError("Unknown dtype: float8.\nMore lines.")
            assert generation_config == "vllm"
            self.length, self.options, self.calls = max_model_len, options, []
            made.append(self)

        def generate(self, prompts, sampling_params, *, use_tqdm=True):
            assert len(prompts) == len(sampling_params)
            self.calls.append(sampling_params)
            return [self._one(*pair) for pair in zip(prompts, sampling_params, strict=True)]

        def _one(self, prompt, params):
            assert prompt.keys() == {"prompt_token_ids"}
            ids = prompt["prompt_token_ids"]
            assert len(ids) + params.max_tokens <= self.length
            assert params.temperature == 0 or params.seed is not None
            with torch.no_grad():
                output = model.generate(
                    torch.tensor([ids]),
                    attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                    max_new_tokens=params.max_tokens,
                    do_sample=False,
                    stop_strings=params.stop,
                    tokenizer=tokenizer,
                )[0, len(ids) :].tolist()
            stopped = any(tag in tokenizer.decode(output) for tag in params.stop)
            text = tokenizer.decode(output, skip_special_tokens=params.skip_special_tokens)
            found = types.SimpleNamespace(
                token_ids=tuple(output + ([ids[0]] * surplus if stopped else [])),
                text=text,
                finish_reason="stop" if stopped or output[-1] == tokenizer.eos_token_id else "length",
                stop_reason=None,
            )
            return types.SimpleNamespace(prompt_token_ids=ids, outputs=[found], finished=True)

    module = types.ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SamplingParams
    return module, made
