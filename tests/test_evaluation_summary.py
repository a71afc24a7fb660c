"""Scores by set, averages as the paper's, paired comparison, and the table."""

import dataclasses
import json
import re

import pytest

from llds.data.benchmarks import BENCHMARKS
from llds.data.questions import Question
from llds.errors import LLDSError
from llds.evaluation.outcome import Outcome
from llds.evaluation.paired import compare_rows
from llds.evaluation.paper import PAPER_ROWS, departures, paper_rows
from llds.evaluation.rows import AnswerRow
from llds.evaluation.summary import MACROS, per_question, summarize
from llds.evaluation.table import format_table, paper_table_row, rows_of, table_to_json
from llds.evaluation.tasks import QuestionSet, make_tasks

NAMES = list(BENCHMARKS)


def row(benchmark="nq", id="0", match=1.0, sample=0, failed=False, **other):
    settings = {
        "id": id,
        "question": f"{benchmark} {id}?",
        "golden_answers": ("Paris",),
        "hops": 0,
        "answer": None if failed else "x",
        "exact_match": match,
        "f1": match,
        "searches": 2,
        "valid_searches": 1,
        "valid_format": 1.0,
        "stop": "tool_failed" if failed else "answer",
        "tool_failed": failed,
        "response": "<answer> x </answer>",
        "benchmark": benchmark,
        "sample": sample,
        "substring_match": match,
        "tokens": 10,
        "response_tokens": 30,
    }
    return AnswerRow(**settings | other)


def rows_by(matches):
    """One row per number: from ``{"nq": [1, 0]}``."""
    return [
        row(name, str(place), float(match))
        for name, scores in matches.items()
        for place, match in enumerate(scores)
    ]


def sets_for(names, published=None):
    question = Question("0", "?", ("Paris",))
    return [QuestionSet(name, (question,), 1, published) for name in names]


def test_macros_are_means_of_benchmarks():
    # Gen = mean of 1, 0, .5; MH = mean of 0, 0, 0, .25; Avg = mean of all seven.
    matches = {
        "nq": [1],
        "triviaqa": [0, 0],
        "popqa": [1, 0],
        "hotpotqa": [0],
        "2wikimultihopqa": [0],
        "musique": [0] * 5,
        "bamboogle": [1, 0, 0, 0],
    }
    summary = summarize(rows_by(matches), sets_for(NAMES))
    assert {name: one.exact_match.value for name, one in summary.macros.items()} == pytest.approx(
        {"Gen": 1.5 / 3, "MH": 0.25 / 4, "Avg": 1.75 / 7}
    )
    assert summary.macros["Avg"].exact_match.count == 16
    assert list(summary.sets) == NAMES
    part = summarize(rows_by({name: matches[name] for name in ("nq", "triviaqa", "popqa")}), sets_for(NAMES))
    assert list(part.macros) == ["Gen"]


def test_the_papers_averages_are_these_means():
    off = []
    for one in PAPER_ROWS:
        for name, members in MACROS.items():
            mean = sum(one.exact_match[member] for member in members) / len(members)
            if abs(mean - one.exact_match[name]) > 0.00051:
                off.append((one.model, one.run, name))
    assert off == [("Qwen2.5-3B-Instruct", "GSPO + LLDS", "Avg")]
    assert len(PAPER_ROWS) == 14
    assert len(paper_rows("qwen2.5-3b")) == 7
    assert paper_rows("gpt") == []


def test_how_answers_came_about():
    rows = [
        row(id="0", searches=3, valid_searches=2, tokens=20, truncated=True),
        row(id="1", match=0.0, answer=None, valid_format=0.0, searches=1, valid_searches=1, tokens=10),
        row(id="2", failed=True, match=0.0),
    ]
    scores = summarize(rows, sets_for(["nq"])).sets["nq"]
    assert (scores.answers, scores.left_out) == (2, 1)
    assert (scores.searches, scores.valid_searches, scores.tokens) == (2.0, 1.5, 15.0)
    assert (scores.valid_format, scores.answered, scores.truncated) == (0.5, 0.5, 0.5)
    assert scores.score.exact_match.value == 0.5
    assert scores.score.pass_at == {}
    assert summarize([row(failed=True)], sets_for(["nq"])).sets == {}


def test_several_answers_per_question():
    # 1 of 4 right, 4 of 4, 0 of 4.
    matches = [[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    rows = [
        row(id=str(q), match=float(m), sample=k) for q, ms in enumerate(matches) for k, m in enumerate(ms)
    ]
    score = summarize(rows, sets_for(["nq"])).sets["nq"].score
    assert score.exact_match.value == pytest.approx((0.25 + 1 + 0) / 3)
    assert score.exact_match.count == 3
    assert {k: one.value for k, one in score.pass_at.items()} == pytest.approx(
        {1: (0.25 + 1) / 3, 2: (0.5 + 1) / 3, 4: 2 / 3}
    )
    # An answer whose tool failed is none: three are left, so pass@4 knows two questions.
    rows[1] = dataclasses.replace(rows[1], tool_failed=True)
    score = summarize(rows, sets_for(["nq"])).sets["nq"].score
    assert score.pass_at[1].value == pytest.approx((1 / 3 + 1) / 3)
    assert (score.pass_at[4].value, score.pass_at[4].count) == (0.5, 2)
    assert per_question(rows, lambda one: one.exact_match)["0"] == pytest.approx(1 / 3)


def test_comparison_by_set_and_average():
    before = {name: [0] * 20 for name in NAMES}
    after = {name: [1] * 8 + [0] * 12 for name in NAMES} | {"nq": [0] * 20}
    comparison = compare_rows(rows_by(before), rows_by(after))
    assert comparison.sets["nq"].exact_match.value == 0.0
    assert (comparison.sets["popqa"].gains, comparison.sets["popqa"].losses) == (8, 0)
    assert comparison.sets["popqa"].p_value == pytest.approx(2 / 2**8)
    assert comparison.sets["popqa"].p_adjusted == pytest.approx(7 * 2 / 2**8)
    assert comparison.macros["Avg"].exact_match.value == pytest.approx(0.4 * 6 / 7)
    assert comparison.macros["Avg"].p_value == comparison.macros["Avg"].p_adjusted < 0.001
    assert comparison.macros["Gen"].exact_match.low > 0
    json.dumps(comparison.to_json())


def test_only_the_same_questions_compare():
    before, after = rows_by({"nq": [0, 1, 1]}), rows_by({"nq": [1, 1]})
    with pytest.raises(LLDSError, match="1 are only in the first and 0 only in the second"):
        compare_rows(before, after)
    other = [dataclasses.replace(before[0], question="Another?"), *before[1:]]
    with pytest.raises(LLDSError, match="only on the same questions"):
        compare_rows(before, other)
    failed = [dataclasses.replace(before[0], tool_failed=True), *before[1:]]
    comparison = compare_rows(before, failed)
    assert (comparison.left_out, comparison.sets["nq"].exact_match.count) == (1, 2)
    with pytest.raises(LLDSError, match="nothing to compare"):
        compare_rows([row(failed=True)], [row()])


SETTINGS = {
    "model": {"engine": "transformers"},
    "retriever": {
        "kind": "index",
        "where": "index",
        "passages": 21_015_324,
        "mode": "dense",
        "encoder": "e5-base",
    },
    "protocol": {"style": "search-r1", "topk": 3, "snippet_words": None, "correct_eos": True},
    "limits": {
        "max_turns": 4,
        "max_action_tokens": 500,
        "max_observation_tokens": 500,
        "max_response_tokens": 4096,
        "max_prompt_tokens": 2048,
    },
    "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0},
    "samples": 1,
    "seed": None,
}


def summary_of(matches, label="mine", published=None, **changes):
    sets = [
        QuestionSet(
            name,
            tuple(Question(str(place), f"{name} {place}?", ("Paris",)) for place in range(len(scores))),
            len(scores),
            len(scores) if published is None else published,
        )
        for name, scores in matches.items()
    ]
    settings = {**SETTINGS, "sets": {one.name: one.about() for one in sets}, **changes}
    outcome = Outcome(label, settings, sets, {"agent": rows_by(matches), "one-shot": rows_by(matches)})
    return json.loads(json.dumps(outcome.to_json()))


def test_a_whole_evaluation_in_the_papers_setup_compares():
    summary = summary_of({name: [1, 0] for name in NAMES})
    assert departures(summary["settings"]) == []
    text = format_table([*rows_of(summary), paper_table_row(PAPER_ROWS[0])])
    mine, baseline, theirs = text.splitlines()[2:5]
    assert re.match(r"mine +\| +\.500 +\.500 +\.500 +\| +\.500 .*\| +\.500 +\.500 +\.500 +\.\d+–\.\d+$", mine)
    assert baseline.startswith("mine, one-shot ")
    assert re.match(r"Qwen2.5-3B, GRPO \(paper\) +\| +\.421 .* \.191 +\.312$", theirs)
    assert "Not comparable" not in text
    assert "not the published" not in text
    assert "not measured here" in text


def test_what_does_not_compare_is_marked():
    summary = summary_of(
        {"nq": [1, 0], "hotpotqa": [1, 1]},
        published=7405,
        retriever={"kind": "embedded", "where": "the embedded corpus", "passages": 48428, "name": None},
        sampling={"temperature": 0.7, "top_p": 1.0, "top_k": 0},
        samples=4,
    )
    table = rows_of(summary)
    text = format_table(table)
    assert ".500*" in text.splitlines()[2]
    assert "1.000*" in text.splitlines()[2]
    assert "—" in text.splitlines()[2]
    for sentence in (
        "Not comparable with the paper's figures: mine; mine, one-shot.",
        "another corpus: the embedded corpus of 48,428 passages",
        "search by BM25, in the paper by vectors of E5",
        "temperature 0.7",
        "NQ 2 of 7,405, HotpotQA 2 of 7,405",
    ):
        assert sentence in text
    (first, _) = table_to_json(table)
    assert first["exact_match"]["hotpotqa"]["part"]
    assert "Avg" not in first["exact_match"]
    assert len(first["departures"]) == 4


def test_corpora_that_cannot_be_seen():
    def about(**retriever):
        return departures({**SETTINGS, "retriever": retriever, "sets": {}})

    (unknown,) = about(kind="server", where="http://h/retrieve", passages=None, name=None)
    assert "is not known (say --corpus-name wiki-18 if it is that)" in unknown
    assert about(kind="server", where="http://h/retrieve", passages=None, name="wiki-18") == []
    assert about(kind="none") == ["the search tool is off"]
    other, search = about(kind="file", where="mine.jsonl", passages=None, name=None)
    assert "another corpus: mine.jsonl" in other
    assert "BM25" in search
    lsa = about(kind="index", where="i", passages=21_015_324, mode="auto", encoder="lsa", name=None)
    assert lsa == ["search by vectors of lsa, in the paper by vectors of E5"]


def test_markdown_has_the_same_cells():
    summary = summary_of({name: [1, 0] for name in NAMES}, label="a|b", published=9)
    lines = format_table(rows_of(summary), markdown=True).splitlines()
    cells = [line.split(" | ") for line in lines[:3]]
    assert len(cells[0]) == len(cells[1]) == len(cells[2]) == 12
    assert lines[2].startswith("| a\\|b | .500\\* |")
    assert any(line.startswith("- Not comparable") for line in lines)


def test_the_table_wants_benchmarks_and_a_whole_summary():
    with pytest.raises(LLDSError, match="none of the seven benchmarks"):
        rows_of(summary_of({"mine": [1, 0]}, published=None))
    with pytest.raises(LLDSError, match="lacks 'settings'"):
        rows_of({"label": "x"})


def test_text_for_people_names_everything():
    summary = summarize(rows_by({"nq": [1]}), sets_for(["nq"]))
    assert summary.sets["nq"].score.exact_match.value == 1.0
    matches = {name: [1, 0] for name in NAMES}
    sets = sets_for(NAMES)
    settings = {**SETTINGS, "sets": {}}
    flat = {name: [0, 0] for name in NAMES}
    text = Outcome("mine", settings, sets, {"agent": rows_by(matches), "no-search": rows_by(flat)}).to_text()
    for part in (
        "mine: 7 questions, each answered once, greedily",
        "Bamboogle (2)",
        "Gen",
        "MH",
        "Avg",
        "p, adjusted",
    ):
        assert part in text
    assert "agent against no-search" in text
    assert "+50.0" in text
    failed = [row(), row(id="1", failed=True)]
    assert "failed in 1 answers" in Outcome("mine", settings, sets_for(["nq"]), {"agent": failed}).to_text()


def test_tasks_have_seeds_of_their_own():
    questions = tuple(Question(str(place), "?", ("x",)) for place in range(3))
    sets = [QuestionSet(name, questions, 3) for name in ("nq", "popqa")]
    tasks = make_tasks(sets, 4)
    assert [task.key for task in tasks[:5]] == [("nq", "0", k) for k in range(4)] + [("nq", "1", 0)]
    seeds = {task.seed(0) for task in tasks}
    assert len(seeds) == 24
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert {task.seed(0) for task in make_tasks(sets, 5)} > seeds
    assert seeds.isdisjoint({task.seed(1) for task in tasks})
