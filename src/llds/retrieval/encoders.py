"""Encoders turn texts into vectors of length 1, so that the inner product says how near two texts are.

A static encoder adds up one vector per word or token: it needs no GPU and no network. Any model of
sentence-transformers is the other kind, E5 among them.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llds.errors import LLDSError
from llds.search.indexfiles import WordFile, map_array
from llds.search.words import stems_of

Vectors: TypeAlias = NDArray[np.float32]

LSA = "lsa"
WORDLLAMA = "wordllama"
_STATIC = "static:"
_ABOUT = "encoder.json"
_TABLE = "table.npy"
_TOKENIZER = "tokenizer.json"


class Encoder(Protocol):
    """Turns texts into vectors ``[texts, dimension]``, float32, of length 1, or 0 for texts without content."""

    @property
    def dimension(self) -> int:
        """The length of a vector."""
        ...

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of questions."""
        ...

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of passages."""
        ...

    def save(self, folder: Path) -> None:
        """Write to ``folder`` what :func:`load_encoder` needs."""
        ...


class StaticEncoder:
    """The mean of one vector per token. ``table``: ``[tokens, dimension]``; ``rows``: text → rows of it."""

    def __init__(
        self, table: NDArray[Any], rows: Callable[[str], Sequence[int]], save: Callable[[Path], None]
    ) -> None:
        self._table = table
        self._rows = rows
        self._save = save

    @property
    def dimension(self) -> int:
        """The length of a vector."""
        return int(self._table.shape[1])

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of ``texts``."""
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        for place, text in enumerate(texts):
            if rows := self._rows(text):
                vectors[place] = self._table[rows].mean(axis=0, dtype=np.float32)
        return normalised(vectors)

    encode_passages = encode_queries

    def save(self, folder: Path) -> None:
        """Write the table and the tokenizer to ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / _TABLE, self._table)
        self._save(folder)


class SentenceEncoder:
    """A model of sentence-transformers by name or folder, with what E5 wants before queries and passages."""

    def __init__(self, name: str, query_prefix: str | None = None, passage_prefix: str | None = None) -> None:
        is_e5 = "e5" in Path(name).name.lower().replace("-", " ").replace("_", " ").split()
        self.name = name
        self.query_prefix = ("query: " if is_e5 else "") if query_prefix is None else query_prefix
        self.passage_prefix = ("passage: " if is_e5 else "") if passage_prefix is None else passage_prefix
        self._model = _sentence_transformer(name)

    @property
    def dimension(self) -> int:
        """The length of a vector."""
        return len(self.encode_queries(["length"])[0])

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of questions."""
        return self._encode(self._model.encode_query, self.query_prefix, texts)

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of passages."""
        return self._encode(self._model.encode_document, self.passage_prefix, texts)

    def _encode(self, encode: Callable[..., Any], prefix: str, texts: Sequence[str]) -> Vectors:
        if not texts:
            return np.empty((0, self.dimension), np.float32)
        prefixed = [prefix + text for text in texts]
        vectors = encode(prefixed, convert_to_numpy=True, show_progress_bar=False)
        return normalised(np.asarray(vectors, np.float32))

    def save(self, folder: Path) -> None:
        """Write the model's name and prefixes; the model itself stays where it is."""
        about = {
            "kind": "sentence-transformers",
            "name": self.name,
            "query_prefix": self.query_prefix,
            "passage_prefix": self.passage_prefix,
        }
        _write_about(folder, about)


def make_encoder(spec: str, query_prefix: str | None = None, passage_prefix: str | None = None) -> Encoder:
    """Return the encoder that ``spec`` names.

    ``wordllama``: the vectors in that package. ``static:FOLDER``: those of a model2vec folder. Anything else
    is a model of sentence-transformers. (``lsa`` is trained on the corpus: see :mod:`llds.retrieval.lsa`.)
    Raises :class:`LLDSError` when the package, folder or model is missing or unfit.
    """
    if spec == WORDLLAMA:
        return _token_encoder(*_wordllama_files())
    if spec.startswith(_STATIC):
        folder = Path(spec.removeprefix(_STATIC))
        return _token_encoder(folder / "model.safetensors", folder / _TOKENIZER)
    return SentenceEncoder(spec, query_prefix, passage_prefix)


def load_encoder(folder: Path) -> Encoder:
    """Return the encoder that :meth:`Encoder.save` wrote; raises :class:`LLDSError` when it is damaged."""
    try:
        about = json.loads((folder / _ABOUT).read_text("utf-8"))
        if about["kind"] == "sentence-transformers":
            return SentenceEncoder(about["name"], about["query_prefix"], about["passage_prefix"])
        table = map_array(folder / _TABLE)
        if table.ndim != 2 or table.dtype.kind != "f":
            raise ValueError(f"{_TABLE} holds {table.dtype} {table.shape}")
        if about["kind"] == "words":
            return word_encoder(table, WordFile(folder))
        return _checked_token_encoder(table, folder / _TOKENIZER)
    except LLDSError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise LLDSError(f"The encoder in {folder} is damaged ({error}): build the index again.") from error


def word_encoder(table: NDArray[Any], words: WordFile) -> StaticEncoder:
    """Return a static encoder over the stems of BM25; each distinct word of a text counts once."""
    if len(words) != len(table):
        raise ValueError(f"{len(words)} words and {len(table)} vectors")

    def rows(text: str) -> list[int]:
        found = (words.get(stem) for stem in dict.fromkeys(stems_of(text)))
        return [number for number in found if number is not None]

    return StaticEncoder(table, rows, lambda folder: _write_about(folder, {"kind": "words"}))


def normalised(vectors: Vectors) -> Vectors:
    """Return ``vectors`` with length 1 each; those of length 0 stay so."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32, copy=False)


def _token_encoder(weights: Path, tokenizer: Path) -> StaticEncoder:
    """Read vectors in the shape of model2vec: one tensor per token, maybe weights and a mapping to rows."""
    for path in (weights, tokenizer):
        if not path.is_file():
            raise LLDSError(
                f"There is no {path}: a static encoder is a folder with model.safetensors and {_TOKENIZER}."
            )
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file
    except ImportError as error:
        raise LLDSError('Static encoders need safetensors: run pip install "llds[dense]".') from error
    try:
        tensors: Mapping[str, NDArray[Any]] = load_file(weights)
    except (SafetensorError, OSError, ValueError) as error:
        raise LLDSError(f"{weights} can't be read ({error}): fetch it again.") from error
    return _checked_token_encoder(_table(tensors, weights), tokenizer)


def _table(tensors: Mapping[str, NDArray[Any]], source: Path) -> NDArray[np.float32]:
    matrices = [name for name, tensor in tensors.items() if tensor.ndim == 2]
    name = "embeddings" if "embeddings" in matrices else matrices[0] if len(matrices) == 1 else None
    if name is None:
        raise LLDSError(f'{source} has no tensor "embeddings" of two dimensions: give a static model.')
    table = tensors[name].astype(np.float32)
    if "mapping" in tensors:
        table = table[tensors["mapping"]]
    if "weights" in tensors:
        table = table * tensors["weights"].astype(np.float32)[:, None]
    return table


def _checked_token_encoder(table: NDArray[Any], tokenizer: Path) -> StaticEncoder:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise LLDSError('Static encoders need tokenizers: run pip install "llds[dense]".') from error
    try:
        reader = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # tokenizers raises plain Exception
        raise LLDSError(f"{tokenizer} is no tokenizer of the tokenizers package ({error}).") from error
    if reader.get_vocab_size() > len(table):
        raise LLDSError(
            f"{tokenizer} knows {reader.get_vocab_size()} tokens, but there are {len(table)} vectors: "
            "tokenizer and vectors must belong together."
        )
    reader.no_padding()
    reader.no_truncation()

    def rows(text: str) -> list[int]:
        return list(reader.encode(text, add_special_tokens=False).ids)

    def save(folder: Path) -> None:
        shutil.copyfile(tokenizer, folder / _TOKENIZER)
        _write_about(folder, {"kind": "tokens"})

    return StaticEncoder(table, rows, save)


def _wordllama_files() -> tuple[Path, Path]:
    # The package's own loader looks in another folder and then asks the network, so it is not used.
    spec = importlib.util.find_spec(WORDLLAMA)
    if spec is None or spec.origin is None:
        raise LLDSError("The encoder wordllama is not installed: run pip install wordllama.")
    root = Path(spec.origin).parent
    return (
        root / "weights" / "l2_supercat_256.safetensors",
        root / "tokenizers" / "l2_supercat_tokenizer_config.json",
    )


def _sentence_transformer(name: str) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise LLDSError(
            f"The encoder {name!r} needs sentence-transformers: run pip install "
            '"llds[dense]", or use the encoder lsa, which needs no model.'
        ) from error
    try:
        return SentenceTransformer(name, model_kwargs={"use_safetensors": True})
    except (OSError, ValueError, KeyError) as error:
        told = str(error).strip().splitlines()
        raise LLDSError(
            f"The encoder {name!r} can't be loaded ({told[0] if told else type(error).__name__}): "
            "name a model of sentence-transformers with safetensors weights, or its folder."
        ) from error


def _write_about(folder: Path, about: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _ABOUT).write_text(json.dumps(about) + "\n", encoding="utf-8")
