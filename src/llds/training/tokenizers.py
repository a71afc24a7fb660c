"""Tokenizers in model folders: written so that transformers' AutoTokenizer reads them back as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llds.files import atomic_write_text

# Classes that take every rule from tokenizer.json.
GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast")
_CONFIG = "tokenizer_config.json"
# The name is what people read who ask AutoTokenizer to run code of the folder: there is none.
_CLASS = "load_without_trust_remote_code.Tokenizer"


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer into ``folder``, which holds the model already.

    For some model types, Qwen2 among them, AutoTokenizer puts the pre-tokenizer of the original model in place
    of the one in ``tokenizer.json``. It leaves a tokenizer alone that claims to have a class of its own, so a
    generic one that would be misread says that here.
    """
    tokenizer.save_pretrained(folder)
    if type(tokenizer).__name__ in GENERIC and _is_misread(tokenizer, folder):
        config = json.loads((folder / _CONFIG).read_text("utf-8"))
        config["auto_map"] = {"AutoTokenizer": [None, _CLASS]}
        atomic_write_text(folder / _CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def tokenizer_class(folder: str) -> str | None:
    """Return the class that a model folder's ``tokenizer_config.json`` names, if it does."""
    try:
        config = json.loads((Path(folder) / _CONFIG).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return config.get("tokenizer_class") if isinstance(config, dict) else None


def _is_misread(tokenizer: Any, folder: Path) -> bool:
    from transformers import AutoTokenizer

    return type(AutoTokenizer.from_pretrained(folder, local_files_only=True)) is not type(tokenizer)
