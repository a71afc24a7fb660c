"""The organism, its cache, its sampling, and how it acts."""

import numpy as np
import pytest
import torch

from llds.errors import LLDSError
from llds.lab import rollouts
from llds.lab.organism import Body, Cache, Organism, score, score_by_length
from llds.lab.rollouts import Limits, roll_out
from llds.lab.warm import demonstrations
from llds.lab.world import (
    ANSWER,
    ANSWER_END,
    INFO,
    INFO_END,
    NOTHING,
    PAD,
    SEARCH,
    SEARCH_END,
    THINK,
    Questions,
    Task,
    World,
)

WORLD = World(Task(entities=6, relations=2, noise=0.0))
BODY = Body(layers=2, width=16, heads=2, positions=24)
R, E = WORLD.first_relation, WORLD.first_entity


def organism(seed=0):
    torch.manual_seed(seed)
    model = Organism(WORLD.vocabulary_size, BODY)
    for p in model.parameters():
        torch.nn.init.normal_(p, 0, 0.4)
    return model


def test_reading_into_the_cache_equals_reading_at_once():
    model, ids = organism(), torch.randint(0, WORLD.vocabulary_size, (5, 20))
    with torch.no_grad():
        whole = model(ids)
        cache = Cache(BODY, 5)
        logits = [model.read(ids[:, :7], cache)]
        logits += [model.read(ids[:, i : i + 1], cache) for i in range(7, 12)]
        cache.keep(torch.tensor([1, 4]))
        late = [model.read(ids[[1, 4], i : i + 1], cache) for i in range(12, 20)]
    torch.testing.assert_close(torch.stack(logits, 1), whole[:, 6:12], rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.stack(late, 1), whole[[1, 4], 12:], rtol=0, atol=1e-4)


def test_scores_are_those_of_the_softmax():
    model, ids = organism(), torch.randint(0, WORLD.vocabulary_size, (3, 12))
    scores = score(model, ids, 5)
    every = model(ids).softmax(-1)
    for row in range(3):
        for place in range(7):
            distribution = every[row, place + 4].double()
            assert scores.logprobs[row, place].item() == pytest.approx(
                distribution[ids[row, place + 5]].log().item(), abs=1e-4
            )
            entropy = -(distribution * distribution.log()).sum().item()
            assert scores.entropies[row, place].item() == pytest.approx(entropy, abs=1e-4)
    assert scores.logprobs.requires_grad
    assert not scores.entropies.requires_grad
    assert score(model, ids, 5, entropy_gradient=True).entropies.requires_grad


def test_scoring_by_length_changes_nothing():
    model, ids = organism(), torch.randint(0, WORLD.vocabulary_size, (9, 17))
    lengths = torch.tensor([3, 12, 7, 1, 12, 5, 9, 2, 11])
    whole, parts = score(model, ids, 5), score_by_length(model, ids, lengths, 5)
    for row, length in enumerate(lengths.tolist()):
        for name in ("logprobs", "entropies", "hidden"):
            wanted, got = getattr(whole, name)[row, :length], getattr(parts, name)[row, :length]
            torch.testing.assert_close(got, wanted.detach(), rtol=0, atol=1e-4)


def test_tokens_are_drawn_by_their_probabilities():
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0]]).repeat(40000, 1)
    drawn = rollouts._sample(logits, torch.Generator().manual_seed(0))
    shares = np.bincount(drawn, minlength=4) / len(drawn)
    np.testing.assert_allclose(shares, logits[0].softmax(-1).numpy(), atol=0.01)


def test_heads_divide_the_width():
    with pytest.raises(LLDSError, match="multiple of heads"):
        Body(width=10, heads=4)


class Script:
    """Stands in for an organism: row i writes the tokens of its script, whatever it reads."""

    body = BODY

    def __init__(self, *scripts):
        self.scripts = scripts
        self.live = list(range(len(scripts)))
        self.written = [0] * len(scripts)
        self.fed = [[] for _ in scripts]

    def read(self, ids, cache):
        if ids.shape[1] > 1:
            self.cache = cache
            keep = cache.keep
            cache.keep = lambda rows: (keep(rows), self._narrow(rows))
        else:
            for row, token in zip(self.live, ids[:, 0].tolist(), strict=True):
                self.fed[row].append(token)
                script = self.scripts[row]
                if self.written[row] < len(script) and script[self.written[row]] == token:
                    self.written[row] += 1
        logits = torch.full((len(self.live), WORLD.vocabulary_size), -1e9)
        for place, row in enumerate(self.live):
            script = self.scripts[row]
            logits[place, script[self.written[row]] if self.written[row] < len(script) else THINK] = 0
        return logits

    def _narrow(self, rows):
        self.live = [self.live[row] for row in rows.tolist()]


def act(*scripts, limits=None, world=WORLD):
    count = len(scripts)
    questions = Questions(*(np.array(column) for column in ([0] * count, [-1] * count, [2] * count)), None)
    questions = Questions(questions.inner, questions.outer, questions.entity, world.facts[0, [2] * count])
    return roll_out(
        Script(*scripts),
        world,
        questions,
        1,
        limits or Limits(max_response=16, max_searches=2),
        torch.Generator().manual_seed(0),
        np.random.default_rng(0),
    )


GOLD = E + int(WORLD.facts[0, 2])
QUERY = [SEARCH, R, E + 2, SEARCH_END]


def test_feedback_is_put_in_and_is_not_the_policys():
    out = act([THINK, *QUERY, ANSWER, GOLD, ANSWER_END], [ANSWER, GOLD, ANSWER_END])
    assert out.ids[0, 5:].tolist() == [THINK, *QUERY, INFO, GOLD, INFO_END, ANSWER, GOLD, ANSWER_END]
    assert out.mask[0].tolist() == [1] * 5 + [0] * 3 + [1] * 3
    assert out.answer_mask[0].tolist() == [0] * 8 + [1] * 3
    assert out.ids[1, 5:].tolist() == [ANSWER, GOLD, ANSWER_END] + [PAD] * 8
    assert out.mask[1].tolist() == [1] * 3 + [0] * 8
    assert out.rewards.tolist() == [1.0, 1.0]
    assert out.searches.tolist() == [1, 0]
    assert out.first_query == [(R, E + 2), None]
    assert out.answered.tolist() == [True, True]


WRONG = E + (int(WORLD.facts[0, 2]) + 1) % 6


@pytest.mark.parametrize(
    ("script", "answered"),
    [
        ([ANSWER, WRONG, ANSWER_END], True),
        ([ANSWER, GOLD, GOLD, ANSWER_END], False),
        ([GOLD, ANSWER_END], False),
        ([ANSWER_END], False),
        ([ANSWER, GOLD], False),
        ([*QUERY, GOLD, ANSWER_END], False),
    ],
)
def test_only_the_right_answer_in_its_tags_is_rewarded(script, answered):
    out = act(script, limits=Limits(max_response=9, max_searches=2))
    assert out.rewards.tolist() == [0.0]
    assert out.answered.tolist() == [answered]


@pytest.mark.parametrize(
    "query",
    [
        [SEARCH, E + 2, R, SEARCH_END],
        [SEARCH, R, SEARCH_END],
        [SEARCH_END],
        [R, E + 2, SEARCH_END],
        [SEARCH, R, E + 2, E + 2, SEARCH_END],
    ],
)
def test_a_malformed_search_finds_nothing(query):
    out = act([*query, ANSWER, GOLD, ANSWER_END])
    place = 5 + len(query)
    assert out.ids[0, place : place + 3].tolist() == [INFO, NOTHING, INFO_END]
    assert (out.searches.tolist(), out.malformed.tolist()) == ([1], [1])


def test_one_search_too_many_ends_the_response():
    out = act([*QUERY, *QUERY, *QUERY, ANSWER, GOLD, ANSWER_END], limits=Limits(19, 2))
    assert out.searches.tolist() == [2]
    assert out.rewards.tolist() == [0.0]
    assert out.ids.shape[1] - 5 == 2 * 7 + 4
    assert out.mask[0, -4:].tolist() == [1, 1, 1, 1]


def test_the_length_limit_ends_a_response():
    out = act([THINK] * 40, limits=Limits(9, 2))
    assert out.mask.sum() == 9
    assert not out.answered.any()


def test_narrowing_the_batch_changes_nothing(monkeypatch):
    scripts = [[ANSWER, GOLD, ANSWER_END]] * 5 + [[THINK, *QUERY, *QUERY, ANSWER, GOLD, ANSWER_END]] * 2
    narrowed = act(*scripts, limits=Limits(19, 2))
    monkeypatch.setattr(rollouts, "_WORTH_NARROWING", 0.0)
    whole = act(*scripts, limits=Limits(19, 2))
    for name in ("ids", "mask", "rewards", "searches", "answer_mask"):
        assert torch.equal(getattr(narrowed, name), getattr(whole, name)), name
    assert narrowed.rewards.sum() == 7


def test_demonstrations_answer_right_unless_they_go_wrong():
    draw = np.random.default_rng(0)
    questions = WORLD.ask(64, draw)
    ids, mask = demonstrations(WORLD, questions, 0.0, draw)
    for row in range(64):
        written = [token for token in ids[row].tolist() if token != PAD]
        assert written[-3:] == [ANSWER, E + questions.gold[row], ANSWER_END]
        feedback = [i for i, token in enumerate(ids[row, 5:].tolist()) if token == INFO]
        assert len(feedback) == 1 + (questions.outer[row] >= 0)
        assert all(mask[row, i : i + 3].sum() == 0 for i in feedback)
    ids, _ = demonstrations(WORLD, questions, 1.0, draw)
    right = [[t for t in ids[row].tolist() if t != PAD][-2] == E + questions.gold[row] for row in range(64)]
    assert sum(right) < 40
