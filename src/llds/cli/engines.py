"""From the command line to the engine that runs the model, and what tells one model from another."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from llds.cli.orders import Order
from llds.inference.engine import Engine
from llds.training.policy import load_policy, load_reader
from llds.training.progress import Display
from llds.training.recipe import Recipe
from llds.training.scoring import arithmetic


def make_engine(order: Order, recipe: Recipe, display: Display) -> tuple[Engine, dict[str, Any]]:
    """Return the engine and what tells its model from another."""
    about: dict[str, Any] = {"engine": order.engine}
    if order.engine == "transformers":
        from llds.inference.local import TransformersEngine

        policy = load_policy(recipe.model)
        for note in policy.notes:
            display.note(note)
        about |= {"dtype": recipe.model.dtype, "device": policy.model.device.type}
        engine = TransformersEngine(
            policy.model,
            policy.tokenizer,
            recipe.evaluation.batch,
            lambda: arithmetic(policy.model, recipe.model),
        )
        return engine, about | {"batch": engine.batch, **_about_files(recipe.model.path)}
    reader = load_reader(recipe.model.path)
    for note in reader.notes:
        display.note(note)
    if order.engine == "openai":
        from llds.inference.server import CompletionServer, read_key
        from llds.inference.writing import ConcurrentEngine

        server = CompletionServer(order.url or "", order.served_model, reader.tokenizer, key=read_key())
        if not server.exact:
            display.note(
                f"The server at {server.url} returns text alone, which is tokenised again: its model may see "
                "other tokens than it wrote."
            )
        positions = server.positions or reader.positions
        about |= {"served": server.model, "token_ids": server.exact}
        return (
            ConcurrentEngine(server, reader.tokenizer, reader.eos, positions, order.concurrency),
            about | _about_files(recipe.model.path, weights=False),
        )
    from llds.inference.vllm import VLLMWriter
    from llds.inference.writing import BatchedEngine

    episode = recipe.episode
    length = episode.max_prompt + max(episode.max_response, episode.max_observation + episode.max_action)
    length = min(length, reader.positions or length)
    writer = VLLMWriter(recipe.model.path, length, recipe.model.dtype)
    batch = recipe.evaluation.batch
    about |= {"dtype": recipe.model.dtype, "batch": batch, **_about_files(recipe.model.path)}
    return BatchedEngine(writer, reader.tokenizer, reader.eos, length, batch), about


_PROBED = 64  # places at which a file of weights is looked at
_PIECE = 64 << 10  # bytes


def _about_files(path: str, weights: bool = True) -> dict[str, Any]:
    """Return a digest of a model folder: of its small files whole, of its weights at many places."""
    folder = Path(path)
    if not folder.is_dir():
        return {"name": path}
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    for file in sorted(folder.glob("*.safetensors")) if weights else ():
        size = file.stat().st_size
        digest.update(f"{file.name}/{size}".encode())
        with file.open("rb") as stream:
            for place in range(_PROBED):
                stream.seek(place * max(0, size - _PIECE) // (_PROBED - 1))
                digest.update(stream.read(_PIECE))
    return {"digest": digest.hexdigest()[:16]}
