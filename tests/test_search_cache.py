"""Real models: one cache with gaps, rows that wait and leave, must give what each row alone would give."""

import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model

from llds.errors import LLDSError
from llds.search import episode as episodes_module
from llds.search.decoding import Decoder
from llds.search.episode import EpisodeRunner, Limits
from llds.search.protocol import Protocol
from llds.search.retrieval import BM25Retriever
from llds.search.sampling import Sampling
from search_models import favour, make_llama, make_qwen, make_tokenizer

CORPUS = [
    {"id": str(i), "contents": f'"Town {i}"\nTown {i} ' + "is a quiet place. " * (i % 5)} for i in range(20)
]
QUESTIONS = [
    "where is Paris",
    "a",
    "what is the capital of France and of all the other lands that there are",
    "Town 3 or Town 4",
    "is it",
    "where is the town in which the capital is",
]
LIMITS = Limits(
    max_turns=3,
    max_action_tokens=24,
    max_observation_tokens=60,
    max_response_tokens=400,
    max_prompt_tokens=100,
)


def make_runner(make_model, sampling=None, seed=0):
    """A random model that favours the tags, so that its episodes search, stumble, answer and run out."""
    tokenizer = make_tokenizer()
    token = tokenizer.convert_tokens_to_ids
    model = make_model(tokenizer, seed=seed)
    favour(
        model,
        {
            token("<search>"): 6,
            token("</search>"): 6,
            token("<answer>"): 4,
            token("</answer>"): 4,
            token("<eos>"): 3,
        },
    )
    return EpisodeRunner(
        model, tokenizer, BM25Retriever(CORPUS), Protocol("short", topk=2), LIMITS, sampling or Sampling()
    )


def reference_logprobs(runner, episode):
    """One plain forward over prompt and response, nothing cached, nothing padded."""
    ids = torch.tensor([episode.prompt_ids + episode.response_ids])
    with torch.no_grad():
        logits = runner.model(input_ids=ids, use_cache=False).logits[0, len(episode.prompt_ids) - 1 : -1]
    logprobs = (logits / (runner.sampling.temperature or 1)).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(episode.response_ids)[:, None])[:, 0]


def sliding_qwen(tokenizer, seed=0):
    return make_qwen(tokenizer, seed, use_sliding_window=True, sliding_window=16, max_window_layers=1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("make_model", [make_qwen, make_llama, sliding_qwen])
@pytest.mark.filterwarnings("ignore:.*keeps no plain key-value cache")
def test_recorded_logprobs_are_those_of_a_fresh_forward(make_model, temperature):
    stops, turns = set(), []
    for seed in range(3):
        runner = make_runner(make_model, Sampling(temperature), seed)
        episodes = runner.run(QUESTIONS, generator=torch.Generator().manual_seed(seed))
        for episode in episodes:
            mask = torch.tensor(episode.response_mask, dtype=torch.bool)
            recorded = torch.tensor(episode.logprobs)
            torch.testing.assert_close(
                recorded[mask], reference_logprobs(runner, episode)[mask], atol=1e-4, rtol=0
            )
            assert not recorded[~mask].any()
            stops.add(episode.stop)
            turns.append(len(episode.turns))
    assert {"answer", "turns"} <= stops, "the episodes are too dull to prove anything"
    assert len(set(turns)) >= 2


@pytest.mark.parametrize("make_model", [make_qwen, make_llama])
def test_a_batch_is_as_good_as_each_alone(make_model):
    runner = make_runner(make_model, Sampling(0.0))
    together = runner.run(QUESTIONS)
    assert len({len(episode.response_ids) for episode in together}) > 1
    for question, episode in zip(QUESTIONS, together, strict=True):
        (alone,) = runner.run([question])
        assert alone.response_ids == episode.response_ids
        assert alone.response_mask == episode.response_mask
        assert alone.turns == episode.turns
        assert alone.logprobs == pytest.approx(episode.logprobs, abs=1e-4)


def test_same_generator_state_same_episodes():
    runner = make_runner(make_qwen)
    first, second, other = (
        runner.run(QUESTIONS, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5, 6)
    )
    assert first == second != other


def test_taking_rows_out_of_the_batch_changes_nothing(monkeypatch):
    narrowed = []
    narrow = Decoder.narrow
    monkeypatch.setattr(Decoder, "narrow", lambda *args: (narrowed.append(args), narrow(*args))[1])
    runner = make_runner(make_qwen)
    taken_out = runner.run(QUESTIONS * 3, generator=torch.Generator().manual_seed(2))
    assert sum(bool(aside) for _, _, aside in narrowed) >= 2
    monkeypatch.setattr(episodes_module, "_WORTH_NARROWING", 0.0)
    narrowed.clear()
    kept = runner.run(QUESTIONS * 3, generator=torch.Generator().manual_seed(2))
    assert not narrowed
    assert [e.response_ids for e in taken_out] == [e.response_ids for e in kept]
    assert [e.turns for e in taken_out] == [e.turns for e in kept]


def test_a_sliding_window_is_read_anew_and_said_so():
    runner = make_runner(sliding_qwen)
    with pytest.warns(UserWarning, match="keeps no plain key-value cache"):
        runner.run(QUESTIONS, generator=torch.Generator().manual_seed(0))


def test_a_model_inside_an_adapter():
    runner = make_runner(make_qwen)
    adapter = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.5)
    runner = runner.for_model(get_peft_model(runner.model, adapter))
    for episode in runner.run(QUESTIONS, generator=torch.Generator().manual_seed(0)):
        mask = torch.tensor(episode.response_mask, dtype=torch.bool)
        runner.model.eval()
        expected = reference_logprobs(runner, episode)[mask]
        torch.testing.assert_close(torch.tensor(episode.logprobs)[mask], expected, atol=1e-4, rtol=0)


def test_plain_caches_are_kept_silently():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_runner(make_qwen).run(QUESTIONS[:2], generator=torch.Generator().manual_seed(0))


def test_a_model_without_a_cache_is_refused():
    class Bare(torch.nn.Module):
        def forward(self, input_ids, attention_mask):
            raise NotImplementedError

    with pytest.raises(LLDSError, match="Bare takes no key-value cache"):
        Decoder(Bare(), 0)


def test_decoder_against_the_model_itself():
    """Start, steps with waiting rows, narrow, widen, extend: every logits row is that of the plain model."""
    tokenizer = make_tokenizer()
    model = make_qwen(tokenizer)
    draw = torch.Generator().manual_seed(0)

    def some(count):
        return torch.randint(0, len(tokenizer), (count,), generator=draw).tolist()

    def check(logits, rows, places=None):
        for place in range(len(rows)) if places is None else places:
            with torch.no_grad():
                expected = model(input_ids=torch.tensor([rows[place]])).logits[0, -1]
            torch.testing.assert_close(logits[place], expected, atol=1e-4, rtol=1e-4)

    def step(rows, live):
        tokens = torch.tensor(some(len(rows)))
        logits = decoder.step(tokens, live)
        for place in live:
            rows[place] = [*rows[place], int(tokens[place])]
        check(logits, rows, live)

    with torch.no_grad():
        decoder = Decoder(model, pad_id=3)
        rows = [some(n) for n in (5, 1, 9, 3)]
        check(decoder.start(rows), rows)
        step(rows, [0, 1, 2, 3])
        step(rows, [1, 3])
        decoder.narrow([3, 1], aside=[2])
        _, b, c, d = rows
        present = [d, b]
        step(present, [0, 1])
        step(present, [0])
        decoder.narrow([0], aside=[1])
        present, b = present[:1], present[1]
        step(present, [0])
        decoder.widen()
        rows = [c, b, present[0]]
        rows = [row + some(n) for row, n in zip(rows, (1, 7, 2), strict=True)]
        kept = [rows[0], rows[2]]
        check(decoder.extend([0, 2], kept), kept)
        step(kept, [0, 1])
