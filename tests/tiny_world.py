"""A little world for tests: passages, one- and two-hop questions, a model that half knows the protocol."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from llds.data.questions import Question, read_questions
from llds.search.protocol import Protocol
from llds.search.retrieval import BM25Retriever
from llds.training.traces import Habits, TraceSource
from llds.training.warmstart import WarmStartPlan, warm_start

LANDS = ["Arven", "Belor", "Caldia", "Dorum", "Estia", "Folk", "Garon", "Hestia"]
TOWNS = ["Aroth", "Bimm", "Corr", "Delph", "Enna", "Fex", "Gull", "Hove"]
COINS = ["ducat", "florin", "guilder", "crown", "thaler", "mark", "penny", "real"]
TAGS = [f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/")]


def write_world(folder: Path) -> None:
    """Write ``corpus.jsonl``, ``train.jsonl`` and ``test.jsonl``."""
    passages, single, double = [], [], []
    for index, (land, town, coin) in enumerate(zip(LANDS, TOWNS, COINS, strict=True)):
        passages.append({"id": f"l{index}", "contents": f'"{land}"\n{land} currency: the {coin}.'})
        passages.append({"id": f"t{index}", "contents": f'"{town}"\n{town} is a town located in {land}.'})
        first, second = [town, "located in", land], [land, "currency", coin]
        single.append(_row(f"s{index}", f"What is the currency of {land}?", coin, [second]))
        double.append(
            _row(f"d{index}", f"What is the currency of the land of {town}?", coin, [first, second])
        )
    _write(folder / "corpus.jsonl", passages)
    _write(folder / "train.jsonl", [*single[:6], *double[:6]])
    _write(folder / "test.jsonl", [*single[4:], *double[4:]])


def write_model(folder: Path, world: Path, steps: int = 160) -> None:
    """Write a Qwen2 of some ten thousand parameters that was shown traces for ``steps`` optimizer steps."""
    questions = read_questions(world / "train.jsonl")
    rows = [json.loads(line) for line in (world / "corpus.jsonl").read_text().splitlines()]
    source = TraceSource(
        questions, BM25Retriever(rows), Protocol(style="short", topk=1), Habits(stop_early=0.5)
    )
    texts = [prompt + "".join(segment.text for segment in trace) for prompt, trace in map(source, range(200))]
    tokenizer = _tokenizer(texts)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    warm_start(model, tokenizer, source, WarmStartPlan(steps, 16, 3e-3, optimizer="muon"))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def small_settings(world: Path, model: Path, runs: Path) -> list[str]:
    """Return the settings of a training run of seconds in this world."""
    return [
        f"model.path={model}",
        f"data.train={world / 'train.jsonl'}",
        f"data.test={world / 'test.jsonl'}",
        f"retrieval.corpus={world / 'corpus.jsonl'}",
        "retrieval.topk=1",
        "episode.max_turns=3",
        "episode.max_action=32",
        "episode.max_observation=32",
        "episode.max_response=128",
        "episode.passage_words=0",
        "grpo.questions=4",
        "grpo.responses=4",
        "grpo.steps_per_rollout=2",
        "grpo.micro_batch=4",
        "grpo.learning_rate=1e-3",
        "run.rollouts=4",
        "run.save_every=1",
        "run.threads=1",
        "run.name=try",
        f"run.folder={runs}",
    ]


def load(world: Path, name: str) -> list[Question]:
    """Return the questions of a split."""
    return read_questions(world / f"{name}.jsonl")


def _row(id_: str, question: str, answer: str, chain: list[list[str]]) -> dict:
    metadata = {"kind": "land", "hops": len(chain), "chain": chain}
    return {"id": id_, "question": question, "golden_answers": [answer], "metadata": metadata}


def _write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|pad|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<|pad|>", eos_token="<|end|>")


@functools.cache
def built_world() -> Path:
    """Return a folder with the questions, the corpus and the folder ``model``; built once per test run."""
    folder = Path(tempfile.mkdtemp(prefix="llds-world-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_world(folder)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    write_model(folder / "model", folder)
    torch.set_num_threads(threads)
    return folder
