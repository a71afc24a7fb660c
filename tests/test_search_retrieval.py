import json
import logging
import os
import random

import numpy as np
import pytest

from llds.errors import LLDSError
from llds.search.retrieval import BM25Retriever, NoRetriever, Passage, search_checked

CORPUS = [
    {"id": "fr", "contents": '"France"\nThe capital of France is Paris.'},
    {"id": "it", "contents": '"Italy"\nThe capital of Italy is Rome.'},
    {"id": "de", "contents": '"Germany"\nThe capital of Germany is Berlin.'},
    {"id": "ch", "contents": '"Cheese"\nFrance, Italy and Germany have cheeses.'},
]


def ids(results):
    return [[passage.id for passage in result] for result in results]


@pytest.fixture(scope="module")
def retriever():
    return BM25Retriever(CORPUS)


def test_search_finds_best_first(retriever):
    found = retriever.search(["What is the capital of Italy?", "a cheese"], 2)
    assert ids(found) == [["it", "ch"], ["ch"]]
    assert found[0][0].score > found[0][1].score > 0
    assert found[0][0].title == "Italy"
    assert found[0][0].contents == CORPUS[1]["contents"]


def test_words_are_stemmed_in_any_case(retriever):
    assert ids(retriever.search(["CHEESE", "capitals"], 1)) == [["ch"], ["fr"]]


@pytest.mark.parametrize("query", ["", "   ", "the of is", "zebra", "?!", "x"])
def test_nothing_is_found_for_nothing(retriever, query):
    assert retriever.search([query, "Rome"], 3) == [[], retriever.search(["Rome"], 3)[0]]


def test_more_than_there_is_and_no_queries(retriever):
    assert len(retriever.search(["capital"], 100)[0]) == 3
    assert retriever.search(["capital"], 0) == [[]]
    assert retriever.search([], 3) == []


def test_ties_go_by_order_of_the_corpus():
    twins = BM25Retriever([Passage(str(i), "T", "same words here") for i in range(50)])
    assert ids(twins.search(["words"], 4)) == [["0", "1", "2", "3"]]


@pytest.mark.parametrize("rare", [0, 10**9])
def test_scores_and_order_are_those_of_bm25s(monkeypatch, rare):
    import bm25s
    from Stemmer import Stemmer

    monkeypatch.setattr("llds.search.postings._RARE", rare)
    draw = random.Random(0)
    words = [f"word{i:02d}" for i in range(40)]
    texts = [" ".join(draw.choices(words, k=draw.randint(3, 30))) for _ in range(300)]
    queries = [" ".join(draw.choices(words, k=4)) for _ in range(20)]
    ours = BM25Retriever([Passage(str(i), "", text) for i, text in enumerate(texts)]).search(queries, 10)

    def tokens(batch):
        return bm25s.tokenize(batch, stopwords="en", stemmer=Stemmer("english"), show_progress=False)

    index = bm25s.BM25(k1=0.9, b=0.4)
    index.index(tokens([f'""\n{text}' for text in texts]), show_progress=False)
    documents, scores = index.retrieve(tokens(queries), k=10, show_progress=False)
    for row, found in enumerate(ours):
        np.testing.assert_allclose([passage.score for passage in found], scores[row], rtol=1e-5)
        for passage, document, score in zip(found, documents[row], scores[row], strict=True):
            assert passage.id == str(document) or np.isclose(score, passage.score)


@pytest.mark.parametrize("mmap", [True, False])
def test_saved_index_finds_the_same(retriever, tmp_path, mmap):
    retriever.save(tmp_path / "deep" / "index")
    loaded = BM25Retriever.load(tmp_path / "deep" / "index", mmap=mmap)
    queries = ["capital of Germany", "", "cheese Rome"]
    assert len(loaded) == 4
    assert loaded.search(queries, 3) == retriever.search(queries, 3)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["index"]


def test_saving_replaces_an_index_and_nothing_else(retriever, tmp_path):
    target = tmp_path / "index"
    BM25Retriever(CORPUS[:1]).save(target)
    retriever.save(target)
    assert len(BM25Retriever.load(target)) == 4
    other = tmp_path / "mine"
    other.mkdir()
    with pytest.raises(LLDSError, match="is not a search index"):
        retriever.save(other)


def test_an_index_that_appears_meanwhile_steps_aside(retriever, tmp_path, monkeypatch):
    target = tmp_path / "index"
    replace, calls = os.replace, []

    def busy(source, destination):
        calls.append(destination)
        if len(calls) == 2:
            monkeypatch.undo()
            BM25Retriever(CORPUS[:1]).save(target)
        return replace(source, destination)

    monkeypatch.setattr(os, "replace", busy)
    retriever.save(target)
    assert len(calls) == 2
    assert len(BM25Retriever.load(target)) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_unusable_indices(retriever, tmp_path):
    with pytest.raises(LLDSError, match="holds no search index"):
        BM25Retriever.load(tmp_path / "none")
    target = tmp_path / "index"
    retriever.save(target)
    about = target / "llds-index.json"
    passages = (target / "passages.jsonl").read_bytes()
    (target / "passages.jsonl").write_bytes(passages[:-5])
    with pytest.raises(LLDSError, match="is damaged"):
        BM25Retriever.load(target)
    (target / "passages.jsonl").write_bytes(passages)
    (target / "indptr.csc.index.npy").unlink()
    with pytest.raises(LLDSError, match="is damaged"):
        BM25Retriever.load(target)
    about.write_text(json.dumps({"format": 99}))
    with pytest.raises(LLDSError, match="format 99"):
        BM25Retriever.load(target)
    about.write_text("{")
    with pytest.raises(LLDSError, match="is damaged"):
        BM25Retriever.load(target)


@pytest.mark.parametrize(
    ("corpus", "settings", "message"),
    [
        ([], {}, "corpus is empty"),
        ([{"id": "1", "contents": "the of"}], {}, "no words to search for"),
        ([{"id": "1", "text": "x"}], {}, 'row 1 has no text under "contents"'),
        (CORPUS, {"k1": -1}, "k1=-1"),
        (CORPUS, {"b": 2}, "b=2"),
    ],
)
def test_unusable_corpora(corpus, settings, message):
    with pytest.raises(LLDSError, match=message):
        BM25Retriever(corpus, **settings)


def test_bm25s_is_quiet(capfd, caplog):
    with caplog.at_level(logging.NOTSET):
        BM25Retriever(CORPUS).search(["", "Rome"], 3)
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_no_retriever():
    assert NoRetriever().search(["a", "b"], 3) == [[], []]


def test_every_query_must_be_answered():
    class Forgetful:
        def search(self, queries, topk):
            return [[]]

    assert search_checked(Forgetful(), [], 3) == []
    with pytest.raises(LLDSError, match="Forgetful answered 1 of 2 queries"):
        search_checked(Forgetful(), ["a", "b"], 3)
