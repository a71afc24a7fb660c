"""The seven benchmarks in folders and tables, and ``llds data``."""

import json

import pytest
from typer.testing import CliRunner

from llds.cli.app import app
from llds.data.benchmarks import BENCHMARKS, benchmark_of, find_benchmarks, load_benchmarks
from llds.data.check import check_file, reduced
from llds.data.embedded import corpus_path, questions_path
from llds.errors import LLDSError
from test_data_shapes import ROWS, lines, parquet, search_r1

runner = CliRunner()


@pytest.fixture
def folder(tmp_path):
    """All seven, each laid out in another way."""
    names = ["nq/test.jsonl", "triviaqa_test.jsonl", "PopQA.jsonl", "HotpotQA/dev.json", "2wiki-dev.jsonl",
             "musique.parquet", "bamboogle/test.jsonl"]  # fmt: skip
    for number, name in enumerate(names):
        path = tmp_path / "sets" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{**row, "id": f"{number}_{index}"} for index, row in enumerate(ROWS)]
        if path.suffix == ".parquet":
            parquet(path, rows)
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows))
        else:
            lines(path, rows)
    (tmp_path / "sets" / "README.md").write_text("not a set")
    return tmp_path / "sets"


def test_the_paper_s_table_has_seven():
    assert [one.title for one in BENCHMARKS.values()] == [
        "NQ", "TriviaQA", "PopQA", "HotpotQA", "2Wiki", "MuSiQue", "Bamboogle"
    ]  # fmt: skip
    assert sum(one.published for one in BENCHMARKS.values()) == 51_713


def test_every_layout_is_found(folder):
    assert list(find_benchmarks(folder)) == list(BENCHMARKS)
    sets = load_benchmarks(folder)
    assert list(sets) == list(BENCHMARKS)
    assert [members[0].id for members in sets.values()] == [f"{number}_0" for number in range(7)]
    assert list(load_benchmarks(folder, ["hotpotqa", "nq"])) == ["nq", "hotpotqa"]


def test_one_table_for_all(tmp_path):
    rows = [
        {**search_r1()[0], "id": f"{name}{index}", "data_source": name}
        for name in ("searchR1_musique", "searchR1_nq", "2wikimultihopqa")
        for index in range(3)
    ]
    sets = load_benchmarks(parquet(tmp_path / "test.parquet", rows))
    assert {name: len(members) for name, members in sets.items()} == {
        "nq": 3,
        "2wikimultihopqa": 3,
        "musique": 3,
    }
    assert list(sets) == ["nq", "2wikimultihopqa", "musique"]
    with pytest.raises(LLDSError, match="holds no bamboogle; it holds"):
        load_benchmarks(tmp_path / "test.parquet", ["bamboogle"])
    rows[4]["data_source"] = "squad"
    with pytest.raises(LLDSError, match=r'row 5: the data_source "squad" is none of nq, '):
        load_benchmarks(parquet(tmp_path / "test.parquet", rows))
    with pytest.raises(LLDSError, match='has no "data_source"'):
        load_benchmarks(lines(tmp_path / "plain.jsonl", ROWS))


def test_names(folder):
    assert benchmark_of("searchR1_TriviaQA").name == "triviaqa"
    assert benchmark_of("squad") is None
    with pytest.raises(LLDSError, match="no benchmark 'squad'; choose among nq, "):
        load_benchmarks(folder, ["squad"])


def test_a_folder_that_is_none(folder, tmp_path):
    lines(folder / "nq_test.jsonl", ROWS)
    with pytest.raises(LLDSError, match="holds NQ twice"):
        find_benchmarks(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(LLDSError, match="none of the seven benchmarks"):
        find_benchmarks(tmp_path / "empty")
    with pytest.raises(LLDSError, match="no folder"):
        find_benchmarks(tmp_path / "absent")


def test_check_tells_every_mistake(tmp_path):
    rows = [dict(ROWS[0], id=str(index)) for index in range(30)]
    del rows[3]["golden_answers"]
    rows[7]["question"] = " "
    rows[9]["id"] = "8"
    path = lines(tmp_path / "nq_test.jsonl", rows)
    check = check_file(path)
    assert (check.rows, check.mistakes) == (30, 3)
    for error, line in zip(check.errors, (4, 8, 10), strict=True):
        assert error.startswith(f"{path}:{line}: ")
    assert any("27 questions are asked more than once" in one for one in check.warnings)
    assert any("NQ has 30 questions here and 3610 in the published test set" in one for one in check.warnings)


def test_check_tells_of_many_mistakes_in_short(tmp_path):
    path = lines(tmp_path / "a.jsonl", [{"id": str(index), "question": ""} for index in range(50)])
    result = runner.invoke(app, ["data", "check", str(path)])
    assert result.exit_code == 1
    assert result.stdout.count("error:") == 20
    assert "and 30 errors more" in result.stdout


def test_check_finds_training_questions(tmp_path, folder):
    train = lines(
        tmp_path / "train.jsonl",
        [dict(ROWS[0], id="t", question="WHO got the first Nobel prize in physics?!")],
    )
    result = runner.invoke(app, ["data", "check", str(folder), "--train", str(train), "--json"])
    assert result.exit_code == 0
    checks = json.loads(result.stdout)
    assert len(checks) == 7
    assert all("1 of 2 questions are in the training questions too." in one["warnings"] for one in checks)
    assert reduced("Who?  wrote 'Émile'") == "who wrote émile"


def test_check_of_a_corpus(tmp_path):
    result = runner.invoke(app, ["data", "check", str(corpus_path()), "--json"])
    (check,) = json.loads(result.stdout)
    assert (result.exit_code, check["rows"], check["kind"], check["mistakes"]) == (0, 48_428, "passages", 0)
    rows = [
        {"id": "1", "contents": '"A"\ntext'},
        {"id": "1", "contents": '"B"\ntext'},
        {"id": "2", "contents": 3},
    ]
    bad = check_file(lines(tmp_path / "corpus.jsonl", rows))
    assert bad.mistakes == 2
    assert "occurs twice" in bad.errors[0]


@pytest.mark.parametrize("content", [b"", b"\x00" * 40, b"PAR1", b"[{", b'{"id": 1}\n'])
def test_check_never_raises(tmp_path, content):
    path = tmp_path / "x"
    path.write_bytes(content)
    check = check_file(path)
    assert check.mistakes >= 1
    assert all("\n" not in error for error in check.errors)
    assert check_file(tmp_path / "absent").mistakes == 1


def test_check_of_a_file_that_breaks_off(tmp_path):
    path = tmp_path / "questions.jsonl.gz"
    path.write_bytes(questions_path("test").read_bytes()[:9000])
    check = check_file(path)
    assert check.rows > 50
    assert check.mistakes == 1
    assert check.errors[0].endswith("Nothing behind this place was checked.")


def test_convert(tmp_path, folder):
    table, back = tmp_path / "a.parquet", tmp_path / "b.jsonl"
    assert (
        runner.invoke(app, ["data", "convert", str(folder), str(table), "--only", "nq,popqa"]).exit_code == 0
    )
    result = runner.invoke(app, ["data", "convert", str(table), str(back)])
    assert result.stdout == f"Wrote 4 questions to {back}.\n"
    assert [json.loads(line)["id"] for line in back.read_text().splitlines()] == ["0_0", "0_1", "2_0", "2_1"]
