"""BM25's arrays are those of bm25s, however they were built, and looking at less finds the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llds.errors import LLDSError
from llds.search import postings as postings_module
from llds.search.indexfiles import WordFile, write_words
from llds.search.postings import Postings, PostingsBuilder
from llds.search.words import stems_of


def texts_of(seed, count, words=60):
    draw = np.random.default_rng(seed)
    names = [f"word{chr(97 + i % 26)}{i}" for i in range(words)]
    weights = 1 / np.arange(1, words + 1)
    return [
        " ".join(draw.choice(names, draw.integers(0, 30), p=weights / weights.sum())) for _ in range(count)
    ]


def theirs(texts):
    import bm25s
    from Stemmer import Stemmer

    index = bm25s.BM25(k1=0.9, b=0.4)
    tokens = bm25s.tokenize(texts, stopwords="en", stemmer=Stemmer("english"), show_progress=False)
    index.index(tokens, show_progress=False)
    return index


@pytest.mark.parametrize("chunk", [1, 100, 10**6])
@pytest.mark.parametrize("spilled", [True, False])
def test_arrays_are_those_of_bm25s_bit_for_bit(tmp_path, chunk, spilled):
    texts = [*texts_of(0, 200), "The running runners ran; THE races, 1900s, naïve café"]
    builder = PostingsBuilder(0.9, 0.4, tmp_path / "spill" if spilled else None, chunk)
    for text in texts:
        builder.add(text)
    words, found = builder.finish()
    index = theirs(texts)
    assert set(words) == {word for word in index.vocab_dict if word}
    for number, word in enumerate(words):
        ours = slice(found.indptr[number], found.indptr[number + 1])
        column = index.vocab_dict[word]
        span = slice(index.scores["indptr"][column], index.scores["indptr"][column + 1])
        assert np.array_equal(found.indices[ours], index.scores["indices"][span])
        assert np.array_equal(found.data[ours], index.scores["data"][span])
        assert found.peaks[number] == found.data[ours].max()


def everything_added_up(postings, words, topk):
    sums = np.zeros(postings.count)
    for word in words:
        span = slice(postings.indptr[word], postings.indptr[word + 1])
        sums[postings.indices[span]] += postings.data[span]
    best = np.lexsort((np.arange(postings.count), -sums))[:topk]
    best = best[sums[best] > 0]
    return best, sums[best]


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(), seed=st.integers(0, 1000), topk=st.integers(1, 12), rare=st.sampled_from([0, 16, 10**9])
)
def test_stopping_early_finds_the_same(data, seed, topk, rare):
    builder = PostingsBuilder(0.9, 0.4)
    for text in texts_of(seed, 120):
        builder.add(text)
    words, postings = builder.finish()
    query = data.draw(st.lists(st.integers(0, len(words) - 1), max_size=8))
    before, postings_module._RARE = postings_module._RARE, rare
    try:
        found = postings.best(query, topk)
    finally:
        postings_module._RARE = before
    expected = everything_added_up(postings, query, topk)
    assert found[0].tolist() == expected[0].tolist()
    assert found[1].tolist() == pytest.approx(expected[1].tolist(), rel=1e-12)


def test_common_words_are_left_unread_where_they_cannot_matter(monkeypatch):
    builder = PostingsBuilder(0.9, 0.4)
    for number in range(2000):
        builder.add("common " + ("rareone rareone raretwo" if number < 5 else f"other{number}"))
    words, postings = builder.finish()
    read = []
    add_up = Postings._add_up
    monkeypatch.setattr(Postings, "_add_up", lambda self, spans: read.append(spans) or add_up(self, spans))
    found = postings.best([words.index(word) for word in ("common", "rareon", "raretwo")], 3)
    assert found[0].tolist() == [0, 1, 2]
    assert max(span.stop - span.start for spans in read for span in spans) == 5


@pytest.mark.parametrize("what", ["far", "negative", "nan"])
def test_arrays_that_make_no_sense(what):
    builder = PostingsBuilder(0.9, 0.4)
    builder.add("alpha beta")
    _, postings = builder.finish()
    postings.indices[0] = {"far": 2**31 - 1, "negative": -5, "nan": 0}[what]
    if what == "nan":
        postings.data[0] = np.nan
    with pytest.raises(LLDSError, match="search index is damaged"):
        postings.best([0], 1)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200))
def test_words_are_those_of_bm25s(text):
    import bm25s
    from Stemmer import Stemmer

    (expected,) = bm25s.tokenize(
        [text], stopwords="en", stemmer=Stemmer("english"), return_ids=False, show_progress=False
    )
    assert stems_of(text) == expected
    builder = PostingsBuilder(0.9, 0.4)
    builder.add(text)
    assert builder._words.tolist() == [list(dict.fromkeys(expected)).index(word) for word in expected]


@settings(max_examples=50, deadline=None)
@given(words=st.sets(st.text(min_size=1, max_size=8), min_size=1, max_size=60), other=st.text(max_size=8))
def test_mapped_words(tmp_path_factory, words, other):
    folder = tmp_path_factory.mktemp("words")
    listed = sorted(words)
    write_words(folder, listed)
    mapped = WordFile(folder)
    assert [mapped.get(word) for word in listed] == list(range(len(listed)))
    assert mapped.get(other) == (listed.index(other) if other in words else None)
    assert list(mapped) == listed
