"""A cross-encoder: reads query and passage together. Slow and exact, so it sees only the best few."""

from __future__ import annotations

from collections.abc import Sequence

from llds.errors import LLDSError


class CrossEncoderScorer:
    """A cross-encoder of sentence-transformers, by name or folder."""

    def __init__(self, name: str) -> None:
        try:
            from sentence_transformers import CrossEncoder
        except ImportError as error:
            raise LLDSError(
                f'Reranking by {name!r} needs sentence-transformers: run pip install "llds[dense]".'
            ) from error
        try:
            self._model = CrossEncoder(name, model_kwargs={"use_safetensors": True})
        except (OSError, ValueError, KeyError) as error:
            told = str(error).strip().splitlines()
            raise LLDSError(
                f"The reranker {name!r} can't be loaded ({told[0] if told else type(error).__name__}): "
                "name a cross-encoder with safetensors weights, or its folder."
            ) from error

    def scores(self, pairs: Sequence[tuple[str, str]]) -> Sequence[float]:
        """Return one number per pair of query and text; more is better."""
        found = self._model.predict([list(pair) for pair in pairs], show_progress_bar=False)
        if getattr(found, "ndim", 1) != 1:
            raise LLDSError(
                "The reranker gives several numbers per pair: use a cross-encoder with one label."
            )
        return [float(score) for score in found]
