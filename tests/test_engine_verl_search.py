"""What search episodes in verl are made of, as far as it needs no verl."""

import asyncio
import threading

import pytest

from llds.engines.verl import searching
from llds.engines.verl.searching import SearchOptions, search_threads, shared_tool
from llds.engines.verl.siblings import Siblings
from llds.errors import LLDSError
from llds.retrieval.tool import open_corpus
from llds.search.protocol import Protocol
from llds.search.trajectory import Limits
from llds.training.inputs import make_limits, make_protocol
from llds.training.recipe import load_recipe

CORPUS = '{"id": "1", "contents": "\\"Aruba\\"\\nThe currency is the florin."}\n'


def test_the_settings_are_those_of_search_r1_unless_said_otherwise():
    options = SearchOptions()
    assert options.protocol() == Protocol(style="search-r1-instruct")
    assert options.limits(2048, 4096) == Limits()


def test_the_settings_of_a_recipe_give_its_protocol_and_limits():
    recipe = load_recipe("tiny")
    episode, retrieval = recipe.episode, recipe.retrieval
    options = SearchOptions(
        prompt=episode.prompt,
        max_turns=episode.max_turns,
        max_action=episode.max_action,
        max_observation=episode.max_observation,
        passage_words=episode.passage_words,
        correct_eos=episode.correct_eos,
        topk=retrieval.topk,
    )
    assert options.protocol() == make_protocol(recipe)
    assert options.limits(episode.max_prompt, episode.max_response) == make_limits(recipe)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"top_k": 3}, "llds_search has no setting top_k: did you mean topk?"),
        ({"zzz": 3}, "llds_search has no setting zzz: there are prompt, max_turns,"),
        ({"topk": 0}, "llds_search.topk must be at least 1, but is 0."),
        ({"topk": "3"}, "llds_search.topk must be a whole number, but is '3'."),
        ({"tries": True}, "llds_search.tries must be a whole number, but is True."),
        ({"max_turns": -1}, "llds_search.max_turns must be at least 0, but is -1."),
        ({"prompt": "chat"}, "llds_search.prompt must be one of 'search-r1', "),
        ({"mode": "fast"}, "llds_search.mode must be one of 'auto', "),
        ({"timeout": "soon"}, "llds_search.timeout must be a number, but is 'soon'."),
        ({"deadline": 0}, "llds_search.deadline must be above 0, but is 0."),
        ({"corpus": None}, "llds_search.corpus must be text, but is None."),
        ({"url": 8000}, "llds_search.url must be text, but is 8000."),
        ({"correct_eos": "yes"}, "llds_search.correct_eos must be true or false, but is 'yes'."),
    ],
)
def test_mistakes_are_one_sentence(settings, sentence):
    with pytest.raises(LLDSError) as error:
        SearchOptions.of(settings)
    assert str(error.value).startswith(sentence)


# --- the tool


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("LLDS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "corpus.jsonl"
    path.write_text(CORPUS)
    return path


def test_a_corpus_is_opened_once_for_all_episodes(corpus, monkeypatch):
    opened = []

    def counted(name, *rest, **more):
        opened.append(name)
        return open_corpus(name, *rest, **more)

    monkeypatch.setattr(searching, "open_corpus", counted)
    options = SearchOptions(corpus=str(corpus))
    tools = list(search_threads().map(lambda _: shared_tool(options), range(8)))
    assert opened == [str(corpus)]
    assert len(set(map(id, tools))) == 1
    assert tools[0].search(["florin"], 3)[0][0].title == "Aruba"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"corpus": "nowhere.jsonl"}, "There is no corpus file nowhere.jsonl; check llds_search.corpus."),
        ({"mode": "dense"}, "llds_search.mode=dense needs an index folder, which embedded is not"),
        ({"url": "localhost"}, "Retriever address 'localhost' is not a URL"),
    ],
)
def test_a_tool_that_can_not_be_opened(settings, sentence):
    with pytest.raises(LLDSError) as error:
        shared_tool(SearchOptions(**settings))
    assert str(error.value).startswith(sentence)


def test_many_searches_wait_at_once():
    """As many as there are threads: each waits for the others."""
    threads = search_threads()
    barrier = threading.Barrier(32, timeout=30)
    assert len(list(threads.map(lambda _: barrier.wait(), range(32)))) == 32


# --- siblings


def gather(*episodes):
    async def together():
        return await asyncio.gather(*episodes, return_exceptions=True)

    return asyncio.run(together())


async def episode(siblings, key, pauses, came_through):
    async with siblings.join(key) as member:
        for _ in range(pauses):
            await asyncio.sleep(0)
        if came_through is None:
            raise RuntimeError("broken")
        outcome = await member.settle(came_through)
        first = not came_through and member.is_first_failure()
        return outcome.members, outcome.through, outcome.comparable, first


def test_each_learns_what_came_of_all():
    siblings = Siblings()
    results = gather(
        episode(siblings, "a", 3, True),
        episode(siblings, "a", 0, False),
        episode(siblings, "a", 1, True),
        episode(siblings, "b", 0, False),
        episode(siblings, "a", 2, False),
    )
    ofa = [*results[:3], results[4]]
    assert {one[:3] for one in ofa} == {(4, 2, True)}
    assert sum(one[3] for one in ofa) == 1
    assert results[3] == (1, 0, False, True)
    assert siblings._groups == {}


@pytest.mark.parametrize(
    ("through", "comparable"),
    [((True,), True), ((False,), False), ((True, False), False), ((True, True, False), True)],
)
def test_what_can_be_compared(through, comparable):
    siblings = Siblings()
    results = gather(*(episode(siblings, "a", place, one) for place, one in enumerate(through)))
    assert {one[2] for one in results} == {comparable}


def test_who_breaks_off_does_not_keep_the_others():
    siblings = Siblings()
    broken, first, second = gather(
        episode(siblings, "a", 5, None), episode(siblings, "a", 0, True), episode(siblings, "a", 1, True)
    )
    assert isinstance(broken, RuntimeError)
    assert first[:3] == second[:3] == (3, 2, True)
    assert siblings._groups == {}


def test_a_cancelled_episode_does_not_keep_the_others():
    siblings = Siblings()

    async def together():
        slow = asyncio.ensure_future(episode(siblings, "a", 10**9, True))
        quick = asyncio.ensure_future(episode(siblings, "a", 1, True))
        await asyncio.sleep(0.01)
        slow.cancel()
        return await quick

    assert asyncio.run(together())[:3] == (2, 1, False)
    assert siblings._groups == {}


def test_the_same_question_later_is_another_group():
    siblings = Siblings()
    for _ in range(2):
        assert gather(episode(siblings, "a", 0, True), episode(siblings, "a", 0, True))[0][0] == 2
