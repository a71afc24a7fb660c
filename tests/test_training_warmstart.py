"""The warm start: what carries the loss, that it learns, that it repeats, and the tiny model it made."""

from __future__ import annotations

import math
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from llds.data.embedded import load_questions
from llds.training import tiny
from llds.training.recipe import load_recipe
from llds.training.traces import Segment
from llds.training.warmstart import IGNORED, WarmStartPlan, collate, encode, imitation_loss, warm_start

TRACE = (
    Segment("<think> a </think>\n<search> b </search>", written=True),
    Segment("\n\n<information>c</information>\n\n", written=False),
    Segment("<answer> c </answer>", written=True),
)


@pytest.fixture(scope="module")
def tokenizer():
    return PreTrainedTokenizerFast.from_pretrained(tiny.tiny_folder())


@pytest.fixture
def model(tokenizer):
    return tiny.build_model(tokenizer)


def test_only_what_the_demonstrator_wrote_is_labelled(tokenizer):
    ids, labels = encode(tokenizer, "Question: x?\n", TRACE)
    assert len(ids) == len(labels)
    labelled = tokenizer.decode([token for token in labels if token != IGNORED])
    assert labelled == TRACE[0].text + TRACE[2].text
    assert tokenizer.decode(ids) == "Question: x?\n" + "".join(segment.text for segment in TRACE)


def test_the_loss_is_transformers_own_and_ignores_padding(tokenizer, model):
    short = encode(tokenizer, "Question: x?\n", TRACE)
    long = encode(tokenizer, "Question: what is it, and why?\n", TRACE * 2)
    ids, mask, labels = collate([short, long], tokenizer.pad_token_id)
    ours = imitation_loss(model, ids, mask, labels)
    theirs = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    alone = imitation_loss(model, *collate([short], tokenizer.pad_token_id))
    padded = imitation_loss(model, ids[:1], mask[:1], labels[:1])
    torch.testing.assert_close(alone, padded, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_it_learns_and_repeats_itself(tokenizer, optimizer):
    def draw(number: int):
        answer = random.Random(number).choice("pqrs")
        return f"Question: {answer}?\n", (Segment(f"<answer> {answer} </answer>", written=True),)

    plan = WarmStartPlan(steps=20, batch=4, learning_rate=3e-3, optimizer=optimizer)
    losses: list[list[float]] = []
    for _ in range(2):
        seen: list[float] = []
        warm_start(
            tiny.build_model(tokenizer),
            tokenizer,
            draw,
            plan,
            on_step=lambda step, loss, seen=seen: seen.append(loss),
        )
        losses.append(seen)
    assert losses[0] == losses[1]
    assert losses[0][0] == pytest.approx(math.log(tiny.VOCABULARY), rel=0.1)
    assert losses[0][-1] < 0.5 * losses[0][0]


def test_the_shipped_model_is_small_and_speaks_the_protocol(tokenizer):
    folder = tiny.tiny_folder()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 3_000_000
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen2"
    assert sum(weight.numel() for weight in model.parameters()) < 1_500_000
    assert len(tokenizer) == tiny.VOCABULARY == model.config.vocab_size
    for tag in tiny.TAGS:
        assert len(tokenizer(tag, add_special_tokens=False).input_ids) == 1
    assert tokenizer.pad_token_id is not None
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_the_default_recipe_shows_the_model_what_it_was_trained_on():
    recipe = load_recipe("tiny")
    protocol = tiny.PROTOCOL
    assert (recipe.episode.prompt, recipe.retrieval.topk) == (protocol.style, protocol.topk)
    assert recipe.episode.passage_words == protocol.snippet_words


def test_the_default_limits_hold_every_embedded_prompt(tokenizer):
    recipe = load_recipe("tiny")
    questions = [*load_questions("train"), *load_questions("test")]
    longest = max(len(tiny.PROTOCOL.prompt_ids(tokenizer, question.question)) for question in questions)
    assert longest <= recipe.episode.max_prompt


def test_the_tokenizer_is_the_same_whenever_it_is_built():
    texts = [question.question for question in load_questions("validation")]
    built = [tiny.build_tokenizer(texts).backend_tokenizer.to_str() for _ in range(2)]
    assert built[0] == built[1]
