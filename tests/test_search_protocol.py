import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llds.errors import LLDSError
from llds.search.passages import Passage, snippet
from llds.search.protocol import (
    CORRECTION,
    Answer,
    Malformed,
    Protocol,
    Search,
    answer_characters,
    complete_question,
    encode_prompt,
    parse_action,
)
from search_models import TAGS, make_tokenizer

PARIS = Passage("7", "Paris", "Paris is the capital\nof France. ")
BRIE = Passage("8", "Brie (cheese)", "A soft cheese.")


def test_the_room_imports_no_framework_by_itself():
    code = (
        "import sys, llds.search.episode, llds.search.rewards, llds.search.trl_rollout\n"
        "sys.exit(str({'transformers', 'trl', 'bm25s', 'requests'} & sys.modules.keys() or ''))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.strip() == ""


def test_base_prompt_is_that_of_search_r1():
    assert Protocol().prompt(" who wrote Emma ") == (
        "Answer the given question. You must conduct reasoning inside <think> and </think> first "
        "every time you get new information. After reasoning, if you find you lack some knowledge, "
        "you can call a search engine by <search> query </search> and it will return the top "
        "searched results between <information> and </information>. You can search as many times as "
        "your want. If you find no further external knowledge needed, you can directly provide the "
        "answer inside <answer> and </answer>, without detailed illustrations. For example, <answer> "
        "Beijing </answer>. Question: who wrote Emma?\n"
    )


def test_correction_is_that_of_search_r1():
    assert CORRECTION == (
        "\nMy previous action is invalid. If I want to search, I should put the query between "
        "<search> and </search>. If I want to give the final answer, I should put the answer between "
        "<answer> and </answer>. Let me try again.\n"
    )


def test_instruct_prompt_goes_through_the_chat_template():
    tokenizer = make_tokenizer()
    protocol = Protocol("search-r1-instruct")
    with pytest.raises(LLDSError, match="no chat template"):
        protocol.prompt_ids(tokenizer, "who?")
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    ids = protocol.prompt_ids(tokenizer, "who?")
    assert tokenizer.decode(ids) == f"[user]{Protocol().prompt('who?')}[assistant]"


def test_short_prompt_and_plain_encoding():
    tokenizer = make_tokenizer()
    assert Protocol("short").prompt("who?") == "Question: who?\n"
    assert encode_prompt(tokenizer, "Question: who?\n") == tokenizer("Question: who?\n")["input_ids"]


@pytest.mark.parametrize(
    ("question", "completed"), [("a", "a?"), (" a? ", "a?"), ("a.", "a.?"), ("a ?", "a ?")]
)
def test_question_mark_is_added_where_missing(question, completed):
    assert complete_question(question) == completed


@pytest.mark.parametrize("question", ["", " \n"])
def test_empty_question_is_refused(question):
    with pytest.raises(LLDSError, match="question is empty"):
        complete_question(question)


def test_observation_is_that_of_search_r1():
    assert Protocol().format_observation([PARIS, BRIE]) == (
        '\n\n<information>Doc 1(Title: "Paris") Paris is the capital\nof France. \n'
        'Doc 2(Title: "Brie (cheese)") A soft cheese.</information>\n\n'
    )
    assert Protocol().format_observation([PARIS]).endswith("of France.</information>\n\n")
    assert Protocol().format_observation([]) == "\n\n<information></information>\n\n"


def test_observation_cut_round_the_query():
    text = " ".join(f"w{i}" for i in range(50)) + " currency dinar " + " ".join(f"v{i}" for i in range(50))
    shown = Protocol(snippet_words=8).format_observation([Passage("1", "T", text)], "currencies of T")
    assert shown == '\n\n<information>Doc 1(Title: "T") w48 w49 currency dinar v0 v1 v2 v3</information>\n\n'


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"style": "chatty"}, "chatty"),
        ({"topk": 0}, "topk is 0"),
        ({"snippet_words": 0}, "snippet_words is 0"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(LLDSError, match=message):
        Protocol(**settings)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<think> hm </think> <search> a b </search>", Search("a b")),
        ("<search></search>", Search("")),
        ("<search>a\nb</search>\n", Search("a\nb")),
        ("<answer> 42 </answer>", Answer("42")),
        ("<answer></answer>", Answer("")),
        ("<search> a <search> b </search>", Search("a <search> b")),
        ("<search> a <answer> b </answer>", Answer("b")),
        ("<answer> a <search> b </search>", Search("b")),
        ("<answer> a </answer> <answer> b </answer>", Answer("a")),
        ("a </search>", Malformed()),
        ("<search> a", Malformed()),
        ("</search> a <search>", Malformed()),
        ("<Search> a </Search>", Malformed()),
        ("<answer> a </search>", Malformed()),
        ("", Malformed()),
    ],
)
def test_actions(text, action):
    assert parse_action(text) == action


PIECES = st.one_of(st.sampled_from([*TAGS, "<", ">", "</", " ", "\n"]), st.text(max_size=5))


@given(st.lists(PIECES, max_size=12).map("".join))
def test_any_text_is_some_action(text):
    action = parse_action(text)
    span = answer_characters(text)
    assert (span is not None) == isinstance(action, Answer)
    if isinstance(action, Malformed):
        assert not ("<search>" in text and "</search>" in text.split("<search>", 1)[1])
    if span:
        inner = text[span[0] : span[1]].removeprefix("<answer>").removesuffix("</answer>")
        assert inner.strip() == action.text


@given(st.text(max_size=20).filter(lambda text: "<" not in text))
def test_a_whole_action_is_read_back(text):
    assert parse_action(f"<think> x </think><search>{text}</search>") == Search(text.strip())
    assert parse_action(f"<answer>{text}</answer>") == Answer(text.strip())


def test_snippet_prefers_the_place_where_most_words_meet():
    text = "currency a b c d e f g h i j currency of Angola is kwanza k l m n"
    assert "Angola is kwanza" in snippet(text, "What is the currency of Angola?", 8)
    assert snippet(text, "zebra", 3) == "currency a b"
    assert snippet(text, "the of is", 3) == "currency a b"
    assert snippet("short  text", "x", 2) == "short  text"


@given(st.text(), st.text(), st.integers(1, 20))
def test_snippet_is_a_run_of_words(text, query, words):
    cut = snippet(text, query, words)
    assert cut == text or (len(cut.split()) == words and f" {cut} " in f" {' '.join(text.split())} ")


@pytest.mark.parametrize(
    ("contents", "title", "text"),
    [
        ('"Evita"\nA film.\nOf 1996.', "Evita", "A film.\nOf 1996."),
        ('"The "A" Team"\nx', 'The "A" Team', "x"),
        ("Evita\nx", "Evita", "x"),
        ('"', '"', ""),
        ("", "", ""),
    ],
)
def test_passage_contents(contents, title, text):
    passage = Passage.from_contents("1", contents, 2.0)
    assert (passage.title, passage.text, passage.score) == (title, text, 2.0)
    assert Passage.from_contents("1", passage.contents, 2.0) == passage
