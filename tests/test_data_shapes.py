"""Questions in every shape that people have, and every way in which such a file can be wrong."""

import gzip
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llds.data.convert import write_questions
from llds.data.embedded import load_questions
from llds.data.questions import Question, question_row, read_questions
from llds.data.tables import shape_of
from llds.errors import LLDSError

ROWS = [
    {
        "id": "test_0",
        "question": "who got the first nobel prize in physics",
        "golden_answers": ["Wilhelm Conrad Röntgen"],
    },
    {
        "id": "test_1",
        "question": "when is the next deadpool movie being released",
        "golden_answers": ["May 18 , 2018", "2018"],
    },
]


def search_r1(**changes):
    """Return rows as in PeterJinGo/nq_hotpotqa_train."""
    rows = []
    for index, row in enumerate(ROWS):
        rows.append(
            {
                **row,
                "data_source": "nq",
                "prompt": [
                    {"role": "user", "content": f"Answer the given question. Question: {row['question']}?\n"}
                ],
                "ability": "fact-reasoning",
                "reward_model": {"style": "rule", "ground_truth": {"target": row["golden_answers"]}},
                "extra_info": {"index": index, "split": "train"},
                "metadata": None,
                **changes,
            }
        )
    return rows


def parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(path):
    return [(one.id, one.question, list(one.golden_answers)) for one in read_questions(path)]


WANTED = [(row["id"], row["question"], row["golden_answers"]) for row in ROWS]


def test_flashrag(tmp_path):
    metadata = {"type": "bridge", "level": "hard", "supporting_facts": {"title": ["a"]}}
    rows = [{**row, "metadata": metadata} for row in ROWS]
    path = lines(tmp_path / "test.jsonl", rows)
    assert asked(path) == WANTED
    assert read_questions(path)[0].metadata["supporting_facts"] == {"title": ["a"]}
    for name, packed in (("a.json", json.dumps(rows)), ("b.json", "\ufeff  " + json.dumps(rows, indent=1))):
        (tmp_path / name).write_text(packed, "utf-8")
        assert asked(tmp_path / name) == WANTED
    (tmp_path / "c").write_bytes(gzip.compress(json.dumps(rows).encode()))
    assert asked(tmp_path / "c") == WANTED


def test_search_r1(tmp_path):
    path = parquet(tmp_path / "train.parquet", search_r1())
    assert shape_of(path) == "parquet"
    assert asked(path) == WANTED
    assert read_questions(path)[1].metadata == {"data_source": "nq"}


@pytest.mark.parametrize("target", ["one answer", ["one answer"]])
def test_a_target_may_be_a_text_or_a_list(tmp_path, target):
    rows = search_r1(reward_model={"style": "rule", "ground_truth": {"target": target}})
    assert asked(parquet(tmp_path / "a", rows))[0][2] == ["one answer"]
    bare = search_r1(reward_model={"style": "rule", "ground_truth": target})
    assert asked(parquet(tmp_path / "b", bare))[0][2] == ["one answer"]


def test_verl_has_no_id_and_no_question(tmp_path):
    rows = search_r1(data_source="searchR1_nq")
    for row in rows:
        del row["id"], row["question"], row["golden_answers"]
    assert asked(parquet(tmp_path / "a", rows)) == [
        (f"train_{index}", row["question"] + "?", row["golden_answers"]) for index, row in enumerate(ROWS)
    ]
    for index, row in enumerate(rows):
        row["extra_info"] = {"index": index, "split": "test", "question": f"own {index}"}
    assert [one[:2] for one in asked(parquet(tmp_path / "b", rows))] == [
        ("test_0", "own 0"),
        ("test_1", "own 1"),
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reward_model": {"style": "rule", "ground_truth": {"target": []}}}, "ground_truth.target"),
        (
            {"reward_model": {"style": "rule", "ground_truth": {"target": [1992]}}},
            "must be a string, not a number",
        ),
        (
            {"reward_model": {"style": "rule", "ground_truth": {"target": [["a"]]}}},
            "must be a string, not a list",
        ),
        ({"reward_model": {"style": "rule", "ground_truth": {"target": ["  "]}}}, "is empty"),
        ({"question": "\n"}, '"question" is empty'),
        ({"question": None, "prompt": [{"role": "user", "content": "hello"}]}, 'add a column "question"'),
        ({"question": None, "prompt": []}, 'add a column "question"'),
        ({"data_source": 7}, '"data_source" must be a string'),
        ({"metadata": "[1"}, '"metadata" must be an object'),
    ],
)
def test_a_bad_row_is_named(tmp_path, changes, said):
    bad = parquet(tmp_path / "train.parquet", search_r1(**changes))
    with pytest.raises(LLDSError) as caught:
        read_questions(bad)
    assert str(caught.value).startswith(f"{bad}, row 1: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_repeated_id_is_named(tmp_path):
    rows = search_r1() + search_r1()
    with pytest.raises(LLDSError, match=r'row 3: the id "test_0" occurs twice'):
        read_questions(parquet(tmp_path / "a.parquet", rows))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no rows"),
        (b"[]", "holds no rows"),
        (b"[1]", "row 1: the row is not a JSON object"),
        (b'[{"id"', "isn't valid JSON"),
        (b"[" * 100_000, "isn't valid JSON"),
        (b'[{"id": "\xff"}]', "isn't UTF-8"),
        (b"PAR1", "can't be read as parquet"),
        (b"PAR1" + bytes(200) + b"PAR1", "can't be read as parquet"),
        (b"id,question\n1,a\n", "isn't valid JSON"),
        (gzip.compress(b"[{}]")[:-6], "breaks off"),
    ],
)
def test_a_file_that_is_none(tmp_path, content, said):
    path = tmp_path / "questions"
    path.write_bytes(content)
    with pytest.raises(LLDSError) as caught:
        read_questions(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damaged_parquet_is_one_sentence(tmp_path):
    """Bytes are changed or cut away at random places: a sentence, or the rows, never another exception."""
    rows = [{**search_r1()[0], "id": str(index)} for index in range(300)]
    good = parquet(tmp_path / "good.parquet", rows).read_bytes()
    draw = random.Random(0)
    told = []
    for _ in range(150):
        bad = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            bad[draw.randrange(len(bad))] = draw.randrange(256)
        if draw.random() < 0.3:
            del bad[draw.randrange(8, len(bad)) :]
        path = tmp_path / "bad.parquet"
        path.write_bytes(bad)
        try:
            read_questions(path)
        except LLDSError as error:
            told.append(str(error))
    assert len(told) > 20
    assert not any("\n" in sentence for sentence in told)


TEXT = st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda text: text.strip())


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(TEXT, st.lists(TEXT, min_size=1, max_size=3), st.dictionaries(TEXT, TEXT, max_size=2)),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([".jsonl", ".jsonl.gz", ".parquet"]),
)
def test_what_is_written_is_read_back(tmp_path_factory, rows, ending):
    questions = [
        Question(str(index), text, tuple(answers), {**extra, "data_source": "nq"})
        for index, (text, answers, extra) in enumerate(rows)
        if not {"hops", "chain", "data_source"} & extra.keys()
    ]
    if not questions:
        return
    path = tmp_path_factory.mktemp("round") / f"a{ending}"
    write_questions(path, questions, lambda text: text, "test")
    assert read_questions(path) == questions


def test_the_embedded_questions_survive_the_table(tmp_path):
    questions = load_questions("validation")
    write_questions(tmp_path / "a.parquet", questions, str.upper, "test")
    again = read_questions(tmp_path / "a.parquet")
    assert [(one.id, one.question, one.golden_answers) for one in again] == [
        (one.id, one.question, one.golden_answers) for one in questions
    ]
    assert [{**one.metadata, "data_source": ""} for one in again] == [
        {**one.metadata, "data_source": ""} for one in questions
    ]
    row = pq.read_table(tmp_path / "a.parquet").to_pylist()[3]
    assert row["prompt"] == [{"role": "user", "content": questions[3].question.upper()}]
    assert row["extra_info"]["split"] == "test"
    with pytest.raises(LLDSError, match="end it in"):
        write_questions(tmp_path / "a.csv", questions, str, "test")


def test_lines_are_as_they_were(tmp_path):
    questions = load_questions("validation")
    write_questions(tmp_path / "a.jsonl", questions, str, "test")
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == [
        question_row(one) for one in questions
    ]
    write_questions(tmp_path / "b.jsonl.gz", questions, str, "test")
    assert gzip.decompress((tmp_path / "b.jsonl.gz").read_bytes()) == (tmp_path / "a.jsonl").read_bytes()
