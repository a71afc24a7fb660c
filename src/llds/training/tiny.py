"""The tiny model that the default recipe starts from, and how it is built.

``python -m llds.training.tiny --out DIR`` trains a byte-level BPE tokenizer on the embedded corpus, then a
small Qwen2 from random weights on disguised traces of a flawed demonstrator (:mod:`llds.training.traces`).
The result is shipped with the package. The shipped weights were made before passages were cut and ties broken
as now, so a new build gives a model of the same kind, not the same bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from llds.data.embedded import load_corpus, load_questions
from llds.search.passages import Passage
from llds.search.protocol import Protocol
from llds.search.retrieval import BM25Retriever
from llds.training.tokenizers import save_tokenizer
from llds.training.traces import Habits, TraceSource
from llds.training.warmstart import WarmStartPlan, warm_start

PAD, END = "<|pad|>", "<|end|>"
VOCABULARY = 2048
DISGUISED = 0.85
HABITS = Habits(stop_early=0.7, verbatim=0.2, guess=0.1)
PLAN = WarmStartPlan(steps=700, batch=48, learning_rate=3e-3, optimizer="muon")
PROTOCOL = Protocol(style="short", topk=1, snippet_words=40)
TAGS = [f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/")]


def tiny_folder() -> Path:
    """Return the folder of the shipped tiny model."""
    return Path(str(resources.files("llds.training") / "assets" / "tiny"))


def build_tokenizer(texts: Iterable[str]) -> Any:
    """Train the byte-level BPE tokenizer; the tags of the protocol are one token each."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )


def build_model(tokenizer: Any, seed: int = 0) -> Any:
    """Return a Qwen2 of about a million parameters with random weights (float32)."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def build(out: Path, plan: WarmStartPlan = PLAN) -> None:
    """Build tokenizer and model from the embedded data and save them in ``out`` (bfloat16 safetensors)."""
    import torch

    corpus = [Passage.from_contents(row["id"], row["contents"]) for row in load_corpus()]
    retriever = BM25Retriever(corpus)
    names = sorted({passage.title for passage in corpus if ":" not in passage.title})
    source = TraceSource(
        load_questions("train"), retriever, PROTOCOL, HABITS, names=names, disguised=DISGUISED
    )
    sample = [
        prompt + "".join(segment.text for segment in trace) for prompt, trace in map(source, range(3000))
    ]
    tokenizer = build_tokenizer([*(f" {passage.title}\n {passage.text}" for passage in corpus), *sample])
    model = build_model(tokenizer)
    warm_start(model, tokenizer, source, plan, on_step=_report)
    model.to(torch.bfloat16).save_pretrained(out)
    save_tokenizer(tokenizer, out)


def _report(step: int, loss: float) -> None:
    if step % 50 == 0:
        print(f"step {step}: {loss:.3f} nats per token", flush=True)  # noqa: T201 - a builder's own progress


def main() -> None:
    """Build the model into the folder given by ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    build(parser.parse_args().out)


if __name__ == "__main__":
    main()
