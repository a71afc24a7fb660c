"""vLLM in this process. Written against its documented offline interface; it needs a GPU.

What is used of it: ``LLM(...)``, ``LLM.generate`` with prompts as token ids, ``SamplingParams``, and of each
result ``outputs[0].token_ids``, which hold the end-of-sequence token and all of the token that completed a
stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llds.errors import LLDSError
from llds.inference.writing import Context
from llds.search.protocol import STOP_STRINGS
from llds.search.sampling import Sampling


class VLLMWriter:
    """Writes actions with vLLM. ``folder``: the model. ``length``: the longest context in tokens.

    ``dtype``: of weights and arithmetic. ``options``: further arguments of ``vllm.LLM``, such as
    ``tensor_parallel_size``. Raises :class:`LLDSError` when vLLM is not installed or can't load the model.
    """

    def __init__(self, folder: str, length: int, dtype: str = "auto", **options: Any) -> None:
        try:
            import vllm
        except ImportError as error:
            raise LLDSError(
                f"vLLM can't be imported ({error}): install it where there is a GPU (pip install vllm), or "
                "take --engine transformers, or --engine openai with a server."
            ) from error
        self._params = vllm.SamplingParams
        settings: dict[str, Any] = {
            "max_model_len": length,
            "dtype": dtype,
            "enable_prefix_caching": True,  # every turn begins with the whole episode so far
            "generation_config": "vllm",  # nothing is sampled otherwise than we say
        }
        try:
            self._llm = vllm.LLM(model=folder, **{**settings, **options})
        except (ValueError, RuntimeError, OSError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise LLDSError(f"vLLM can't load {folder}: {reason[0].rstrip('.')}.") from error

    def write(self, contexts: Sequence[Context], sampling: Sampling) -> list[list[int]]:
        """See :class:`~llds.inference.writing.Writer`."""
        results = self._llm.generate(
            [{"prompt_token_ids": context.ids} for context in contexts],
            sampling_params=[self._sampling(context, sampling) for context in contexts],
            use_tqdm=False,
        )
        return [list(result.outputs[0].token_ids) for result in results]

    def _sampling(self, context: Context, sampling: Sampling) -> Any:
        return self._params(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            seed=None if sampling.greedy else context.seed,
            max_tokens=context.max_tokens,
            stop=list(STOP_STRINGS),
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
        )
