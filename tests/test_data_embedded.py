"""The shipped corpus and questions: intact, split without leaks, answerable by searching, not by guessing."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter

import pytest

from llds.data.embedded import SPLITS, asset_path, load_corpus, load_manifest, load_questions
from llds.data.questions import gold_queries
from llds.errors import LLDSError
from llds.search.retrieval import BM25Retriever
from llds.search.rewards import exact_match, normalize_answer


@pytest.fixture(scope="module")
def retriever():
    return BM25Retriever(load_corpus())


def test_files_are_those_of_the_manifest():
    for name, entry in load_manifest()["files"].items():
        data = asset_path(name).read_bytes()
        assert len(data) == entry["bytes"]
        assert hashlib.sha256(data).hexdigest() == entry["sha256"]


def test_counts_are_those_of_the_manifest_and_the_data_is_small():
    manifest = load_manifest()
    assert (
        len(load_corpus())
        == manifest["files"]["corpus.jsonl.gz"]["rows"]
        == sum(manifest["passages"].values())
    )
    for split in SPLITS:
        assert len(load_questions(split)) == manifest["files"][f"questions_{split}.jsonl.gz"]["rows"]
    assert sum(entry["bytes"] for entry in manifest["files"].values()) < 12_000_000


def test_passages_have_a_title_and_a_text():
    for row in load_corpus():
        title, _, text = row["contents"].partition("\n")
        assert title.startswith('"')
        assert title.endswith('"')
        assert text.strip()


def test_no_question_and_no_country_of_a_chain_is_in_two_splits():
    questions, hidden = {}, {}
    for split in SPLITS:
        rows = load_questions(split)
        questions[split] = {row.question for row in rows}
        # What the last search is about: the country (or element) whose fact is asked for.
        hidden[split] = {row.metadata["chain"][-1][0] for row in rows}
    for one in SPLITS:
        for other in SPLITS:
            if one < other:
                assert not questions[one] & questions[other]
                assert not hidden[one] & hidden[other]


def test_chains_fit_their_questions():
    for split in SPLITS:
        for row in load_questions(split):
            chain = row.metadata["chain"]
            assert row.metadata["hops"] == len(chain)
            assert exact_match(chain[-1][2], row.golden_answers) == 1
            assert all(first[2] == second[0] for first, second in itertools.pairwise(chain))


@pytest.mark.parametrize("split", SPLITS)
def test_gold_searches_find_what_they_are_after(retriever, split):
    hops = [
        (query, hop[2])
        for row in load_questions(split)
        for query, hop in zip(gold_queries(row), row.metadata["chain"], strict=True)
    ]
    found = retriever.search([query for query, _ in hops], 3)
    hits = [
        any(normalize_answer(goal) in normalize_answer(passage.contents) for passage in passages)
        for (_, goal), passages in zip(hops, found, strict=True)
    ]
    assert sum(hits) / len(hits) > 0.99


def test_two_hop_questions_are_not_answered_by_one_search(retriever):
    rows = load_questions("test")
    found = retriever.search([row.question for row in rows], 3)
    hits = {1: [], 2: []}
    for row, passages in zip(rows, found, strict=True):
        shown = normalize_answer(" ".join(passage.contents for passage in passages))
        hits[row.metadata["hops"]].append(
            any(normalize_answer(answer) in shown for answer in row.golden_answers)
        )
    assert sum(hits[1]) / len(hits[1]) > 0.8
    assert sum(hits[2]) / len(hits[2]) < 0.15


def test_no_constant_guess_scores():
    for split in SPLITS:
        rows = load_questions(split)
        votes = Counter(
            answer for row in rows for answer in {normalize_answer(a) for a in row.golden_answers}
        )
        assert votes.most_common(1)[0][1] / len(rows) < 0.03


def test_an_unknown_split_is_named():
    with pytest.raises(LLDSError, match='no split "dev"'):
        load_questions("dev")
