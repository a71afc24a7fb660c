"""Question files and corpora: good rows are read, bad ones are named by file and line."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llds.data.corpus import join_contents, read_corpus, split_contents
from llds.data.questions import Question, gold_queries, question_row, read_questions
from llds.errors import LLDSError

GOOD = {"id": "1", "question": "Who?", "golden_answers": ["Ada"]}


def write(path, *lines):
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n", "utf-8"
    )
    return path


def test_flashrag_rows_are_read_plain_and_gzipped(tmp_path):
    rows = [GOOD, {**GOOD, "id": 2, "metadata": {"hops": 1}}]
    plain = write(tmp_path / "q.jsonl", *rows)
    zipped = tmp_path / "q.gz"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_questions(plain) == read_questions(zipped)
    assert [question.id for question in read_questions(plain)] == ["1", "2"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "isn't valid JSON"),
        ("[1]", "is a list, not a JSON object"),
        ({"id": "2", "golden_answers": ["x"]}, 'has no "question"'),
        ({**GOOD, "id": "2", "question": " "}, '"question" is empty'),
        ({**GOOD, "id": "2", "question": 3}, '"question" must be a string, not a number'),
        ({**GOOD, "id": "2", "golden_answers": []}, "at least one string"),
        ({**GOOD, "id": "2", "golden_answers": "Ada"}, "at least one string"),
        ({**GOOD, "id": "2", "golden_answers": [None]}, "must be a string, not null"),
        ({**GOOD, "id": "2", "metadata": []}, None),
        ({**GOOD, "id": "2", "metadata": [1]}, '"metadata" must be an object'),
        ({**GOOD, "id": "2", "metadata": {"chain": [["a", "b"]]}}, "[subject, relation, object]"),
        *[
            ({**GOOD, "id": "2", "metadata": {"hops": hops}}, '"hops" must be a whole number from 1 on')
            for hops in ("two", 0, -1, 1.5, [2], True, float("inf"))
        ],
        (GOOD, 'the id "1" occurs twice'),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, line, told):
    path = write(tmp_path / "q.jsonl", GOOD, line)
    if told is None:
        assert len(read_questions(path)) == 2
        return
    with pytest.raises(LLDSError) as error:
        read_questions(path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "holds no rows"),
        (b"\n \n", "holds no rows"),
        (b'{"id": "\xff"}\n', "isn't UTF-8"),
        (gzip.compress(b'{"id": "1", "question": "Q?", "golden_answers": ["a"]}\n' * 99)[:60], "breaks off"),
        (b"\x1f\x8bnot gzip", "damaged"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path, content, told):
    path = tmp_path / "q.jsonl"
    path.write_bytes(content)
    with pytest.raises(LLDSError, match=told):
        read_questions(path)


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(LLDSError, match=r"q\.jsonl can't be read \(No such file"):
        read_questions(tmp_path / "q.jsonl")


def test_a_corpus_needs_title_and_text_and_ids_of_their_own(tmp_path):
    good = {"id": "1", "contents": '"Title"\ntext'}
    assert read_corpus(write(tmp_path / "c.jsonl", good)) == [good]
    for bad, told in [
        ({"id": "2", "contents": "no text"}, ":2: .*title in quotes"),
        ({"id": "2"}, ':2: .*no "contents"'),
        (good, 'the id "1" occurs twice'),
    ]:
        with pytest.raises(LLDSError, match=told):
            read_corpus(write(tmp_path / "c.jsonl", good, bad))


@given(st.binary(max_size=200))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_hostile_bytes_are_a_sentence_or_questions(tmp_path, data):
    path = tmp_path / "hostile"
    path.write_bytes(data)
    try:
        questions = read_questions(path)
    except LLDSError as error:
        told = str(error)
        questions = None
    assert questions or told.count("\n") == 0


@given(st.text(min_size=1).filter(str.strip), st.lists(st.text(min_size=1).filter(str.strip), min_size=1))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_rows_read_back_as_written(tmp_path, text, answers):
    question = Question("7", text, tuple(answers), {"chain": [["a", "b of", "c"]]})
    path = write(tmp_path / "q.jsonl", question_row(question))
    assert read_questions(path) == [question]


def test_gold_queries_follow_the_chain():
    chain = [["Tokyo", "capital of", "Japan"], ["Japan", "currency", "yen"]]
    assert gold_queries(Question("1", "Q?", ("yen",), {"chain": chain})) == [
        "Tokyo capital",
        "Japan currency",
    ]
    with pytest.raises(LLDSError, match='no "chain"'):
        gold_queries(Question("1", "Q?", ("yen",)))


def test_contents_split_and_join():
    assert split_contents(join_contents('A "quoted" title', "text\nmore")) == (
        'A "quoted" title',
        "text\nmore",
    )
