"""Loading the policy: any causal language model in safetensors, with its tokenizer and a pad token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llds.errors import LLDSError
from llds.training.environment import is_offline
from llds.training.recipe import RECIPE_FILE, ModelSettings, Recipe, load_recipe, recipe_names
from llds.training.tokenizers import GENERIC, tokenizer_class


@dataclass(frozen=True)
class Policy:
    """A model in evaluation mode on its device, its tokenizer, and what the user should know about them."""

    model: Any
    tokenizer: Any
    notes: tuple[str, ...] = ()

    @property
    def positions(self) -> int | None:
        """The longest context of the model in tokens; None when its config does not say."""
        return getattr(self.model.config, "max_position_embeddings", None)


@dataclass(frozen=True)
class Reader:
    """What is known of a model without its weights.

    ``eos``: the tokens that end a sequence. ``positions``: the longest context in tokens, None when the config
    does not say.
    """

    tokenizer: Any
    eos: frozenset[int]
    positions: int | None
    notes: tuple[str, ...] = ()


def load_reader(path: str) -> Reader:
    """Load the tokenizer of a model that is named as in a recipe, for a model whose weights are elsewhere.

    Raises :class:`LLDSError` when there is no such model, or its tokenizer is missing.
    """
    from transformers import AutoConfig, GenerationConfig

    source = model_source(path)
    tokenizer, notes = _load_tokenizer(source)
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=is_offline())
    except (OSError, ValueError, TypeError) as error:
        raise LLDSError(_why_not(source, error)) from None
    try:
        listed = GenerationConfig.from_pretrained(source, local_files_only=is_offline()).eos_token_id
    except (OSError, ValueError, TypeError):
        listed = config.eos_token_id  # not every model has a generation_config.json
    others = listed if isinstance(listed, list | tuple) else [listed]
    eos = frozenset(token for token in (tokenizer.eos_token_id, *others) if token is not None)
    return Reader(tokenizer, eos, getattr(config, "max_position_embeddings", None), notes)


def load_policy(settings: ModelSettings) -> Policy:
    """Load the model (float32) and the tokenizer that ``settings`` name.

    Weights are read from safetensors only. Raises :class:`LLDSError` when there is no such model, when its
    weights are no safetensors, not those that its config asks for, or not finite, and when the tokenizer is
    missing, has neither a pad nor an end-of-text token, or more tokens than there are embeddings.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    source = model_source(settings.path)
    tokenizer, notes = _load_tokenizer(source)
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=is_offline(),
            output_loading_info=True,
        )
    except (OSError, ValueError, TypeError, AttributeError, SafetensorError) as error:
        raise LLDSError(_why_not(source, error)) from None
    except RuntimeError as error:
        if type(error) is not RuntimeError:
            raise
        raise LLDSError(f"The weights in {source} have other shapes than its config.json says.") from None
    if loaded["missing_keys"]:
        # They would be random numbers.
        raise LLDSError(
            f"The weights in {source} are not those of its config.json: {sorted(loaded['missing_keys'])[0]} "
            "is missing."
        )
    if loaded["unexpected_keys"]:
        names = sorted(loaded["unexpected_keys"])
        notes += (f"{len(names)} tensors in {source} have no place in the model, such as {names[0]}.",)
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise LLDSError(
            f"The tokenizer of {source} has {len(tokenizer)} tokens but the model has embeddings for {rows}: "
            "they do not belong together."
        )
    if (name := first_not_finite(model)) is not None:
        raise LLDSError(
            f"The weights of {source} hold NaN or infinities (in {name}): that model is broken, take another."
        )
    return Policy(model.to(pick_device(settings.device)).eval(), tokenizer, notes)


def first_not_finite(model: Any) -> str | None:
    """Return the name of the first parameter that holds a NaN or an infinity; None when all is well."""
    return next((name for name, weight in model.named_parameters() if not weight.isfinite().all()), None)


def model_source(path: str) -> str:
    """Return the folder (or Hub name) of a model that is named as in a recipe.

    A run folder stands for its final model, or for its newest checkpoint while there is none. Raises
    :class:`LLDSError` when a folder is not a model folder or a path does not exist.
    """
    if path == "tiny":
        from llds.training.tiny import tiny_folder

        return str(tiny_folder())
    if path == "smollm2":
        from llds.training.smollm2 import smollm2_folder

        return str(smollm2_folder())
    folder = Path(path)
    if not folder.exists():
        if _looks_like_hub_name(path):
            return path
        raise LLDSError(f"There is no model folder {path}; check the path.")
    return str(_inside_run(folder))


def saved_recipe(path: str, overrides: Sequence[str]) -> Recipe:
    """Return the recipe that a model was trained by, with overrides, for using the model of that name.

    A model folder without a recipe in it gets that of its name, or the default one. Raises
    :class:`LLDSError` as :func:`model_source` and :func:`load_recipe`.
    """
    source = model_source(path)
    kept = Path(source) / RECIPE_FILE
    own = str(kept) if kept.is_file() else path if path in recipe_names() else None
    recipe = load_recipe(own, overrides)
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, path=source))


def pick_device(name: str) -> str:
    """Return the torch device for ``model.device``; raises :class:`LLDSError` for a GPU that is not there."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise LLDSError("model.device=cuda, but torch sees no GPU here; use model.device=cpu or auto.")
    return name


def _inside_run(folder: Path) -> Path:
    """Return the model folder that ``folder`` is or, as a run folder, holds."""
    from llds.training.checkpoints import list_checkpoints

    candidates = [folder, folder / "model", *reversed(list_checkpoints(folder / "checkpoints"))]
    for candidate in candidates:
        if (candidate / "config.json").is_file():
            return candidate
    raise LLDSError(f"{folder} is not a model folder: there is no config.json in it.")


def _looks_like_hub_name(path: str) -> bool:
    owner, slash, name = path.partition("/")
    return bool(owner and slash and name) and "/" not in name and not path.startswith((".", "~"))


def _load_tokenizer(source: str) -> tuple[Any, tuple[str, ...]]:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # For some model types AutoTokenizer puts its own rules in place of those in tokenizer.json, even when the
    # folder says that the file tells everything.
    loader = PreTrainedTokenizerFast if tokenizer_class(source) in GENERIC else AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(source, padding_side="left", local_files_only=is_offline())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LLDSError(_why_not(source, error, "tokenizer")) from None
    if tokenizer.pad_token_id is not None:
        return tokenizer, ()
    if tokenizer.eos_token_id is None:
        raise LLDSError(
            f"The tokenizer of {source} has neither a pad nor an end-of-text token; add one "
            "(tokenizer.add_special_tokens({'pad_token': '<pad>'})) and save it with the model."
        )
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, (
        f"The tokenizer of {source} has no pad token; {tokenizer.eos_token} pads in its place.",
    )


def _why_not(source: str, error: Exception, what: str = "model") -> str:
    folder = Path(source)
    if not folder.is_dir() and not is_offline():
        return (
            f"The {what} '{source}' is not on this machine and did not come from the Hub; check its name, the "
            "network and, for a model that is not public, your token."
        )
    if not folder.is_dir():
        return (
            f"The {what} '{source}' is not on this machine; set HF_HUB_OFFLINE=0 to download it "
            "from the Hub, or give the path of a model folder."
        )
    if what == "model" and not any(folder.glob("*.safetensors")):
        return f"{folder} holds no safetensors weights; save the model again with save_pretrained."
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"The {what} in {folder} can't be loaded: {reason.rstrip('.: ')}."
