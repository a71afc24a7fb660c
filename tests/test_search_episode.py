"""The runner with a model that follows a script: what is fed, masked, counted, and why an episode ends."""

import pytest
import torch

from llds.errors import LLDSError
from llds.search.episode import EpisodeRunner, Event, Limits
from llds.search.protocol import CORRECTION, Answer, Malformed, Protocol, Search
from llds.search.retrieval import NoRetriever, Passage, RetrieverUnavailable
from llds.search.sampling import Sampling
from llds.search.tokens import TokenText, eos_ids
from search_models import ScriptedLM, make_tokenizer

PASSAGE = Passage("1", "Paris", "Paris is the capital of France.")
OBSERVATION = '\n\n<information>Doc 1(Title: "Paris") Paris is the capital of France.</information>\n\n'
SEARCH = "<think> hm </think> <search> capital of France </search>"
ANSWER = "<answer> Paris </answer>"


class Library:
    """Finds one passage for everything, and remembers what it was asked, call by call."""

    def __init__(self, broken_calls=()):
        self.calls = []
        self._broken = broken_calls

    def search(self, queries, topk):
        self.calls.append((list(queries), topk))
        if len(self.calls) in self._broken:
            raise RetrieverUnavailable("The library is closed.")
        return [[PASSAGE] if query else [] for query in queries]


class Play:
    """Scripts by question. A script is a list of actions; an action is text, or tokens by name."""

    def __init__(self, scripts, tags="single", extra=(), retriever=None, protocol=None, **limits):
        self.tokenizer = make_tokenizer(tags, extra)
        self.protocol = protocol or Protocol("short")
        self.library = retriever or Library()
        self.questions = list(scripts)
        self.scripts = {}
        self.written = {}
        for question, actions in scripts.items():
            self.written[question] = [self._ids(action) for action in actions]
            prompt = tuple(self.protocol.prompt_ids(self.tokenizer, question))
            self.scripts[prompt] = [token for action in self.written[question] for token in action]
        self.model = ScriptedLM(self.tokenizer, self.scripts)
        settings = {"max_prompt_tokens": 100, "max_response_tokens": 900, **limits}
        self.runner = EpisodeRunner(
            self.model, self.tokenizer, self.library, self.protocol, Limits(**settings), Sampling(0.0)
        )

    def _ids(self, action):
        if isinstance(action, str):
            return self.tokenizer(action, add_special_tokens=False)["input_ids"]
        return [self.tokenizer.convert_tokens_to_ids(token) for token in action]

    def run(self, **options):
        return self.runner.run(self.questions, **options)

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def check(self, episodes):
        """Whatever happened: the policy's tokens are those of the script, and only they are masked in."""
        for question, episode in zip(self.questions, episodes, strict=True):
            assert len(episode.response_ids) == len(episode.response_mask) == len(episode.logprobs)
            script = [token for action in self.written[question] for token in action]
            own = [t for t, mask in zip(episode.response_ids, episode.response_mask, strict=True) if mask]
            assert own == script[: len(own)]
            spans = [list(range(turn.start, turn.end)) for turn in episode.turns]
            flags = [int(any(i in span for span in spans)) for i in range(len(episode.response_ids))]
            assert flags == episode.response_mask
            for turn, action in zip(episode.turns, self.written[question], strict=False):
                assert episode.response_ids[turn.start : turn.end] == action[: turn.end - turn.start]
            for mask, logprob in zip(episode.response_mask, episode.logprobs, strict=True):
                assert logprob == pytest.approx(0.0, abs=1e-6) if mask else logprob == 0.0
            assert self.decode(episode.response_ids).replace("<eos>", "") == episode.response


@pytest.mark.parametrize("tags", ["single", "special", "spelled"])
def test_an_episode_with_two_searches(tags):
    play = Play({"where is Paris": [SEARCH, "<search>x</search>", ANSWER]}, tags)
    (episode,) = play.run()
    play.check([episode])
    assert episode.response == SEARCH + OBSERVATION + "<search>x</search>" + OBSERVATION + ANSWER
    assert [turn.action for turn in episode.turns] == [
        Search("capital of France"),
        Search("x"),
        Answer("Paris"),
    ]
    assert [turn.passages for turn in episode.turns] == [(PASSAGE,), (PASSAGE,), None]
    assert (episode.stop, episode.answer, episode.question) == ("answer", "Paris", "where is Paris")
    assert (episode.searches, episode.valid_searches, episode.tool_failed) == (2, 2, False)
    assert episode.queries == ["capital of France", "x"]
    start, end = episode.answer_span
    assert play.decode(episode.response_ids[start:end]).strip() == ANSWER
    assert episode.answer_mask == [int(start <= i < end) for i in range(len(episode.response_ids))]


@pytest.mark.parametrize("tags", ["single", "spelled"])
def test_rows_of_every_kind_side_by_side(tags):
    scripts = {
        "a": [ANSWER],
        "a longer question with more words": [
            "<think> so many words before the search </think>" + SEARCH,
            ANSWER,
        ],
        "b": ["nonsense </search>", SEARCH, "<search></search>", ANSWER],
        "c": [SEARCH] * 5,
        "d": ["<answer></answer>"],
        "e": ["x" * 90, "y" * 90, ANSWER],
    }
    play = Play(scripts, tags, max_action_tokens=90)
    episodes = play.run()
    play.check(episodes)
    assert [episode.stop for episode in episodes] == [
        "answer",
        "answer",
        "answer",
        "turns",
        "answer",
        "answer",
    ]
    assert [episode.searches for episode in episodes] == [0, 1, 2, 5, 0, 0]
    assert [episode.valid_searches for episode in episodes] == [0, 1, 1, 4, 0, 0]
    assert [len(queries) for queries, _ in play.library.calls] == [2, 2, 2, 1]
    assert {topk for _, topk in play.library.calls} == {3}
    assert min(play.model.batch_sizes) == 1
    for question, episode in zip(scripts, episodes, strict=True):
        (alone,) = Play({question: scripts[question]}, tags, max_action_tokens=90).run()
        assert alone == episode


def test_batches_one_after_the_other_give_the_same():
    scripts = {f"q{i}": [SEARCH] * (i % 3) + [ANSWER] for i in range(7)}
    assert Play(scripts).run(batch_size=3) == Play(scripts).run()
    assert Play(scripts).run(batch_size=1) == Play(scripts).run()


def test_token_ids_as_prompts_and_no_prompts():
    play = Play({"q": [ANSWER]})
    ids = play.protocol.prompt_ids(play.tokenizer, "q")
    (episode,) = play.runner.run([ids])
    assert (episode.prompt_ids, episode.question, episode.stop) == (ids, None, "answer")
    assert play.runner.run([]) == []


def test_malformed_actions_are_corrected():
    play = Play({"q": ["no idea </answer>", ANSWER]})
    (episode,) = play.run()
    play.check([episode])
    assert episode.response == "no idea </answer>" + CORRECTION + ANSWER
    assert episode.turns[0].action == Malformed()
    assert episode.turns[0].observation == CORRECTION
    assert play.library.calls == []


def test_the_last_allowed_action_may_answer_but_not_search():
    play = Play(
        {"a": [SEARCH, SEARCH, ANSWER], "b": [SEARCH, SEARCH, SEARCH], "c": ["</search>"] * 3}, max_turns=2
    )
    episodes = play.run()
    play.check(episodes)
    assert [episode.stop for episode in episodes] == ["answer", "turns", "turns"]
    assert [len(episode.turns) for episode in episodes] == [3, 3, 3]
    assert episodes[1].turns[2].passages is None
    assert episodes[1].response.endswith(SEARCH)
    assert episodes[1].valid_searches == 2
    assert len(play.library.calls) == 2


def test_no_turn_means_no_search():
    play = Play({"a": [SEARCH], "b": [ANSWER]}, max_turns=0)
    assert [episode.stop for episode in play.run()] == ["turns", "answer"]
    assert play.library.calls == []


def test_end_of_sequence_is_corrected_like_search_r1_or_ends_the_episode():
    script = {"q": [["Ġ", "<eos>"], SEARCH, ["<eos>"]]}
    play = Play(script, max_turns=2)
    (episode,) = play.run()
    play.check([episode])
    assert episode.response == " " + CORRECTION + SEARCH + OBSERVATION
    assert episode.response_ids[1] == play.tokenizer.eos_token_id
    assert episode.response_mask[:3] == [1, 1, 0]
    assert episode.stop == "eos"
    play = Play(script, protocol=Protocol("short", correct_eos=False))
    (episode,) = play.run()
    assert (episode.stop, episode.response, len(episode.response_ids)) == ("eos", " ", 2)


def test_every_end_of_sequence_token_of_the_model_counts():
    play = Play({"q": [["Ġ", "a"]]}, protocol=Protocol("short", correct_eos=False))
    play.model.generation_config = type("Settings", (), {"eos_token_id": [play.tokenizer.vocab["a"], 5]})()
    assert eos_ids(play.model, play.tokenizer) == {play.tokenizer.vocab["a"], 5, play.tokenizer.eos_token_id}
    assert play.run()[0].stop == "eos"


def test_an_answer_before_end_of_sequence_needs_no_end():
    play = Play({"q": [ANSWER + "<eos>"]})
    (episode,) = play.run()
    assert episode.response == ANSWER
    assert episode.response_ids[-1] != play.tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("action", "text", "answer"),
    [
        (["<", "answer", ">", "P", "</", "answer", ">\n"], "<answer>P</answer>\n", "P"),
        (["<", "answer", ">P</answer>"], "<answer>P</answer>", "P"),
        (["x<answer>", "P", "</answer>."], "x<answer>P</answer>.", "P"),
        (["</answer", "<", "answer", ">", "P", "</", "answer", ">"], "</answer<answer>P</answer>", "P"),
    ],
)
def test_tags_that_share_tokens_stay_as_they_were_written(action, text, answer):
    play = Play(
        {"q": [action]},
        "spelled",
        ("answer", "</", ">\n", ">P</answer>", "x<answer>", "</answer>.", "</answer"),
    )
    (episode,) = play.run()
    play.check([episode])
    assert (episode.response, episode.answer) == (text, answer)
    assert len(episode.response_ids) == len(action)
    start, end = episode.answer_span
    covered = play.decode(episode.response_ids[start:end])
    assert "<answer>P</answer>" in covered
    assert "<answer>P</answer>" not in play.decode(episode.response_ids[start + 1 : end])
    assert "<answer>P</answer>" not in play.decode(episode.response_ids[start : end - 1])


def test_byte_tokens_complete_tags_too():
    class Bytes:
        def decode(self, ids, **options):
            return bytes(ids).decode(errors="replace")

        def convert_ids_to_tokens(self, token):
            return f"<0x{token:02X}>"

    text = TokenText(Bytes())
    written = list("é</search>".encode())
    assert [text.completes_tag(written[:n]) for n in range(1, len(written) + 1)] == [False] * 10 + [True]
    assert text.answer_tokens(list("é <answer>ü</answer>.".encode()), "é <answer>ü</answer>.") == (3, 22)
    assert text.answer_tokens([65], "A") is None


def test_action_limit():
    play = Play({"q": ["aaaaa", ANSWER]}, max_action_tokens=5)
    (episode,) = play.run()
    play.check([episode])
    assert episode.response == "aaaaa" + CORRECTION + ANSWER


def test_response_limit_on_an_action():
    length = len(Play({"q": [ANSWER]}).written["q"][0])
    assert Play({"q": [ANSWER]}, max_response_tokens=length).run()[0].stop == "answer"
    (episode,) = Play({"q": [ANSWER]}, max_response_tokens=length - 1).run()
    assert (episode.stop, episode.answer, len(episode.response_ids)) == ("length", None, length - 1)


def test_feedback_that_leaves_no_room_is_not_given():
    play = Play({"q": [SEARCH, ANSWER]})
    needed = play.run()[0].turns[1].start
    for room, fits in ((needed + 1, True), (needed, False)):
        play = Play({"q": [SEARCH, ANSWER]}, max_response_tokens=room)
        (episode,) = play.run()
        play.check([episode])
        assert episode.stop == "length"
        assert (len(episode.turns) == 2) == fits
        assert bool(episode.turns[0].observation) == fits
        assert episode.turns[0].passages == (PASSAGE,)


@pytest.mark.parametrize("tags", ["single", "spelled"])
def test_long_observations_keep_their_closing_tag(tags):
    play = Play({"q": [SEARCH, ANSWER]}, tags, max_observation_tokens=30)
    (episode,) = play.run()
    fed = episode.turns[1].start - episode.turns[0].end
    assert fed == 30
    assert episode.turns[0].observation.startswith(OBSERVATION[:20])
    assert episode.turns[0].observation.endswith("</information>\n\n")
    assert episode.turns[0].observation.count("information>") == 2


def test_without_retriever():
    play = Play({"q": [SEARCH, ANSWER]}, retriever=NoRetriever())
    (episode,) = play.run()
    assert episode.response == SEARCH + "\n\n<information></information>\n\n" + ANSWER
    assert episode.valid_searches == 1


def test_an_outage_ends_the_episodes_that_searched_and_no_others():
    scripts = {"a": [SEARCH, ANSWER], "b": ["</search>", SEARCH, ANSWER], "c": [ANSWER]}
    play = Play(scripts, retriever=Library(broken_calls=[1]))
    episodes = play.run()
    play.check(episodes)
    assert [episode.stop for episode in episodes] == ["tool_failed", "answer", "answer"]
    assert [episode.tool_failed for episode in episodes] == [True, False, False]
    assert (episodes[0].response, episodes[0].valid_searches, episodes[0].answer) == (SEARCH, 0, None)
    assert episodes[1].valid_searches == 1


def test_other_errors_of_a_retriever_are_not_hidden():
    class Buggy:
        def search(self, queries, topk):
            raise KeyError("bug")

    with pytest.raises(KeyError, match="bug"):
        Play({"q": [SEARCH]}, retriever=Buggy()).run()


def test_events_tell_the_episode():
    events = []
    play = Play({"é": ["<search>où</search>", "</answer>", ANSWER], "b": [ANSWER]}, "spelled")
    play.run(on_event=events.append)
    mine = [event for event in events if event.row == 0]
    told = [event for event in mine if event.kind != "token"]
    assert told == [
        Event("search", 0, "où"),
        Event("observation", 0, OBSERVATION, (PASSAGE,)),
        Event("correction", 0, CORRECTION),
        Event("answer", 0, "Paris"),
    ]
    written = [event.text for event in mine if event.kind == "token"]
    assert "".join(written) == "<search>où</search>" + "</answer>" + ANSWER
    assert all("\ufffd" not in text for text in written)
    assert len(written) > 20
    assert [event.kind for event in mine][-1] == "answer"


def test_what_was_not_fed_is_no_event():
    events = []
    play = Play({"q": ["</search>"], "s": ["<search></search>"]}, max_response_tokens=5)
    play.run(on_event=events.append)
    assert [(event.kind, event.row) for event in events if event.kind != "token"] == [("search", 1)]


def test_an_outage_is_an_event():
    events = []
    Play({"q": [SEARCH]}, retriever=Library(broken_calls=[1])).run(on_event=events.append)
    assert events[-1] == Event("tool_failed", 0, "The library is closed.")


def test_mode_and_gradients_are_put_back():
    play = Play({"q": [ANSWER]})
    play.model.train()
    play.run()
    assert play.model.training
    assert torch.is_grad_enabled()
    play.model.eval()
    play.run()
    assert not play.model.training


def test_prompts_out_of_range():
    play = Play({"q": [ANSWER]}, max_prompt_tokens=5)
    with pytest.raises(LLDSError, match=r"Prompt 1 has \d+ tokens, more than max_prompt_tokens=5"):
        play.runner.run([[1], "far too long"])
    with pytest.raises(LLDSError, match="Prompt 0 has no tokens"):
        play.runner.run([[]])
    with pytest.raises(LLDSError, match="exceed the model's 1024 positions"):
        Play({"q": [ANSWER]}, max_response_tokens=1024).run()


@pytest.mark.parametrize(
    "limits",
    [{"max_turns": -1}, {"max_action_tokens": 0}, {"max_response_tokens": 0}, {"max_observation_tokens": 2}],
)
def test_limits_out_of_range(limits):
    with pytest.raises(LLDSError, match=next(iter(limits))):
        Play({"q": [ANSWER]}, **limits)
