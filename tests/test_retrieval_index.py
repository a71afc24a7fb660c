"""Index folders: what they find, how they are built and resumed, and what damage does."""

import dataclasses
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llds.data.embedded import corpus_path, load_questions
from llds.errors import LLDSError
from llds.retrieval import build as build_module
from llds.retrieval.build import IndexOptions, build_index
from llds.retrieval.encoders import load_encoder, make_encoder
from llds.retrieval.lsa import train_table
from llds.retrieval.opening import open_index, read_info
from llds.retrieval.rankers import HybridRanker, IndexRetriever
from llds.search.bm25 import BM25Retriever
from llds.search.passages import Passage
from retrieval_corpus import NAMES, PLANTS, environment, key_of, make_rows, wait_for, write_corpus

COUNT = 300
DIMENSION = 128  # room for a random direction of each of the keys


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", COUNT)


@pytest.fixture(scope="module")
def index(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("index") / "index"
    assert build_index(corpus, folder, IndexOptions(encoder="lsa", dimension=DIMENSION)) == COUNT
    return folder


def found_ids(retriever, queries, topk):
    return [[passage.id for passage in found] for found in retriever.search(queries, topk)]


def test_recall_on_the_embedded_corpus_is_that_of_bm25s(tmp_path):
    import bm25s
    from Stemmer import Stemmer

    build_index(corpus_path(), tmp_path / "index")
    retriever = open_index(tmp_path / "index")
    theirs = bm25s.BM25.load(tmp_path / "index", mmap=True)
    queries = [question.question for question in load_questions("test")[:300]]
    tokens = bm25s.tokenize(
        queries, stopwords="en", stemmer=Stemmer("english"), return_ids=False, show_progress=False
    )
    documents, scores = theirs.retrieve(tokens, k=10, show_progress=False)
    for row, found in enumerate(retriever.search(queries, 10)):
        assert [passage.score for passage in found] == pytest.approx(scores[row].tolist(), rel=1e-5)
        firm = [n for n, s in zip(documents[row], scores[row], strict=True) if s > scores[row][-1] * 1.00001]
        passages = {retriever._passages[int(n)].id for n in firm}
        assert passages <= {passage.id for passage in found}


def test_a_built_index_is_the_saved_one(corpus, tmp_path):
    build_index(corpus, tmp_path / "built")
    BM25Retriever(make_rows(COUNT)).save(tmp_path / "saved")
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "built").iterdir())
    for name in names:
        assert (tmp_path / "built" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes(), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["built", "saved"]


@pytest.mark.parametrize("mode", ["auto", "bm25", "dense", "hybrid"])
def test_every_mode_finds_the_one_passage(index, mode):
    retriever = open_index(index, mode)
    assert len(retriever) == COUNT
    numbers = random.Random(0).sample(range(COUNT), 40)
    found = found_ids(retriever, [f"{key_of(n)} {NAMES[n % 16]}" for n in numbers], 3)
    assert [ids[0] for ids in found] == [f"doc{n}" for n in numbers]
    assert found_ids(retriever, ["", "?!", "unheardof"], 3) == [[], [], []]
    assert retriever.search([], 3) == []


@pytest.mark.parametrize("mode", ["bm25", "dense", "hybrid"])
def test_asking_for_less_gives_the_beginning(index, mode):
    retriever = open_index(index, mode)
    queries = [f"{name} {plant}" for name in NAMES[:5] for plant in PLANTS]
    long = found_ids(retriever, queries, 50)
    assert found_ids(retriever, queries, 7) == [ids[:7] for ids in long]
    assert all(len(ids) == 50 for ids in long)


@pytest.mark.parametrize("vectors", ["ivf", "hnsw"])
def test_approximate_vectors_find_most_of_what_exact_ones_do(index, corpus, tmp_path, vectors):
    build_index(corpus, tmp_path / "index", IndexOptions(encoder="lsa", dimension=DIMENSION, vectors=vectors))
    assert read_info(tmp_path / "index").vectors == vectors
    assert not (tmp_path / "index" / "dense" / "vectors.npy").exists()
    queries = [f"{NAMES[n % 16]} {PLANTS[n % len(PLANTS)]}" for n in range(0, COUNT, 5)]
    exact = found_ids(open_index(index, "dense"), queries, 1)
    near = found_ids(open_index(tmp_path / "index", "dense"), queries, 1)
    assert np.mean([a == b for a, b in zip(exact, near, strict=True)]) >= (0.9 if vectors == "hnsw" else 0.7)


def test_word_vectors_bring_words_of_the_same_passages_together(tmp_path):
    rows = [
        {"id": f"{kind}{i}", "contents": f'"x"\n{a} {b} filler{i}'}
        for kind, pair in {"sea": ("ship", "sailor"), "air": ("plane", "pilot")}.items()
        for i, (a, b) in enumerate([pair] * 20)
    ]
    rows.append({"id": "only", "contents": '"x"\nsailor alone'})
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_index(path, tmp_path / "index", IndexOptions(encoder="lsa", dimension=16))
    assert "only" not in found_ids(open_index(tmp_path / "index", "bm25"), ["ship"], 21)[0]
    assert "only" in found_ids(open_index(tmp_path / "index", "dense"), ["ship"], 21)[0]


def test_word_vectors_do_not_depend_on_the_order_of_passages():
    """The words of this corpus have equal singular values and null directions, which rounding would turn."""
    postings = BM25Retriever(make_rows(COUNT)).postings
    places = np.random.default_rng(0).permutation(COUNT)
    indices, data = postings.indices.copy(), postings.data.copy()
    for start, stop in itertools.pairwise(postings.indptr):
        moved = places[postings.indices[start:stop]]
        indices[start:stop] = np.sort(moved)
        data[start:stop] = postings.data[start:stop][np.argsort(moved)]
    table = train_table(postings, 16)
    again = train_table(dataclasses.replace(postings, indices=indices, data=data), 16)
    assert again == pytest.approx(table, abs=1e-3 * float(np.abs(table).max()))


def test_building_is_deterministic(index, corpus, tmp_path):
    build_index(corpus, tmp_path / "again", IndexOptions(encoder="lsa", dimension=DIMENSION))
    for path in (path for path in index.rglob("*") if path.is_file()):
        again = tmp_path / "again" / path.relative_to(index)
        assert path.read_bytes() == again.read_bytes(), path.name


def test_rank_fusion_adds_up_reciprocal_ranks():
    class Fixed:
        def __init__(self, *numbers):
            self.numbers = numbers

        def rank(self, queries, topk):
            return [(np.asarray(self.numbers[:topk]), np.ones(len(self.numbers[:topk])))] * len(queries)

    ranker = HybridRanker([Fixed(4, 2, 9), Fixed(2, 7)], constant=60)
    ((numbers, scores),) = ranker.rank(["q"], 10)
    assert numbers.tolist() == [2, 4, 7, 9]
    assert scores.tolist() == pytest.approx([1 / 62 + 1 / 61, 1 / 61, 1 / 62, 1 / 63])
    ((numbers, _),) = HybridRanker([Fixed(), Fixed()]).rank(["q"], 3)
    assert len(numbers) == 0


def test_a_reranker_orders_the_best_anew():
    class ByLength:
        def scores(self, pairs):
            assert all(query == "q" for query, _ in pairs)
            return [len(text) for _, text in pairs]

    class All:
        def rank(self, queries, topk):
            return [(np.arange(5)[:topk], np.arange(5, 0, -1.0)[:topk])] * len(queries)

    passages = [Passage(str(i), "t", "x" * i) for i in range(5)]
    retriever = IndexRetriever(passages, All(), ByLength(), depth=3)
    assert found_ids(retriever, ["q", "q"], 2) == [["2", "1"]] * 2
    assert found_ids(retriever, ["q"], 9) == [["2", "1", "0"]]


# Encoders


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A tiny BERT with random weights, as sentence-transformers and as a cross-encoder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "query", "passage", *PLANTS, *map(str.lower, NAMES)]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=1,
    )
    root = tmp_path_factory.mktemp("models")
    for name, kind in (("tiny-e5", BertModel), ("cross", BertForSequenceClassification)):
        kind(config).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


def test_a_model_of_sentence_transformers_with_the_prefixes_of_e5(bert, corpus, tmp_path):
    from sentence_transformers import SentenceTransformer

    name = str(bert / "tiny-e5")
    build_index(corpus, tmp_path / "index", IndexOptions(encoder=name, batch=64))
    retriever = open_index(tmp_path / "index", "dense")
    model = SentenceTransformer(name)
    texts = [
        "passage: " + Passage.from_contents(row["id"], row["contents"]).contents for row in make_rows(COUNT)
    ]
    vectors = model.encode(texts, normalize_embeddings=True, show_progress_bar=False)
    query = model.encode(["query: norville oak"], normalize_embeddings=True, show_progress_bar=False)[0]
    best = vectors @ query
    found = retriever.search(["norville oak"], 5)[0]
    assert [p.score for p in found] == pytest.approx(sorted(best, reverse=True)[:5], abs=1e-5)
    assert best[int(found[0].id.removeprefix("doc"))] == pytest.approx(best.max(), abs=1e-5)


def test_a_cross_encoder_reranks(bert, index):
    from llds.retrieval.rerank import CrossEncoderScorer

    scorer = CrossEncoderScorer(str(bert / "cross"))
    found = open_index(index, "bm25", scorer).search(["norville oak"], 20)[0]
    assert len(found) == 20
    scores = scorer.scores([("norville oak", passage.contents) for passage in found])
    assert [passage.score for passage in found] == pytest.approx(scores, abs=1e-5)
    assert scores == sorted(scores, reverse=True)


@pytest.fixture(scope="module")
def static_model(tmp_path_factory):
    """A folder in the shape of model2vec, with a mapping and weights."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("static")
    words = ["[UNK]", *PLANTS, *NAMES]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.save(str(folder / "tokenizer.json"))
    vectors = np.random.default_rng(0).standard_normal((len(words), 24)).astype(np.float32)
    shuffled = np.random.default_rng(1).permutation(len(words))
    weights = np.ones(len(words))
    weights[0] = 0
    tensors = {"embeddings": vectors[np.argsort(shuffled)], "mapping": shuffled, "weights": weights}
    save_file(tensors, folder / "model.safetensors")
    return folder, vectors, words


def test_a_static_encoder_in_the_shape_of_model2vec(static_model, corpus, tmp_path):
    folder, vectors, words = static_model
    encoder = make_encoder(f"static:{folder}")
    mean = (vectors[words.index("oak")] + vectors[words.index("Norville")]) / 3
    assert encoder.encode_queries(["oak Norville unknown"])[0] == pytest.approx(
        mean / np.linalg.norm(mean), abs=1e-5
    )
    assert not encoder.encode_queries(["", "unknown"]).any()
    build_index(corpus, tmp_path / "index", IndexOptions(encoder=f"static:{folder}"))
    found = open_index(tmp_path / "index", "dense").search(["Norville oak"], 5)[0]
    assert all("Norville" in passage.text and "oak" in passage.text for passage in found)


def test_unfit_encoders(static_model, corpus, tmp_path, monkeypatch):
    folder, _, _ = static_model
    with pytest.raises(LLDSError, match=r"There is no .*model.safetensors"):
        make_encoder(f"static:{tmp_path}")
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "model.safetensors").write_bytes(b"\x10" * 100)
    with pytest.raises(LLDSError, match="can't be read"):
        make_encoder(f"static:{broken}")
    (broken / "tokenizer.json").write_text("{}")
    shutil.copy(folder / "model.safetensors", broken)
    with pytest.raises(LLDSError, match="no tokenizer"):
        make_encoder(f"static:{broken}")
    with pytest.raises(LLDSError, match="can't be loaded"):
        make_encoder(str(tmp_path / "nowhere"))
    monkeypatch.setattr("llds.retrieval.encoders.importlib.util.find_spec", lambda name: None)
    with pytest.raises(LLDSError, match="wordllama is not installed"):
        make_encoder("wordllama")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(LLDSError, match="needs sentence-transformers"):
        make_encoder("intfloat/e5-base-v2")
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(LLDSError, match="needs faiss"):
        build_index(corpus, tmp_path / "index", IndexOptions(encoder="lsa"))


# Building


def test_an_id_that_occurs_twice_is_named_with_both_places(tmp_path):
    rows = make_rows(50)
    rows[41]["id"] = rows[7]["id"]
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows[:20]) + "\n\n\n")
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows[20:])
    with pytest.raises(LLDSError) as error:
        build_index(path, tmp_path / "index")
    assert f'{path}:44: the id "doc7" occurred before, at {path}:8' in str(error.value)
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"k1": -1}, "k1=-1"),
        ({"vectors": "tree"}, "choose flat, ivf or hnsw"),
        ({"dimension": 0}, "at least 1"),
        ({"batch": 0}, "at least 1"),
    ],
)
def test_options_out_of_range(corpus, tmp_path, options, told):
    with pytest.raises(LLDSError, match=told):
        build_index(corpus, tmp_path / "index", IndexOptions(**options))


def test_nothing_else_is_replaced_and_two_builds_do_not_meet(corpus, tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(LLDSError, match="is not a search index"):
        build_index(corpus, tmp_path / "mine")
    with (
        build_module._draft(tmp_path / "index"),
        pytest.raises(LLDSError, match="Another process is building"),
    ):
        build_index(corpus, tmp_path / "index")
    assert build_index(corpus, tmp_path / "index") == COUNT
    assert build_index(corpus, tmp_path / "index") == COUNT
    with pytest.raises(LLDSError, match="can't be read"):
        build_index(tmp_path / "none.jsonl", tmp_path / "index")
    assert len(open_index(tmp_path / "index")) == COUNT


def test_a_build_killed_while_encoding_goes_on_and_gives_the_same(tmp_path):
    path = write_corpus(tmp_path / "c.jsonl", 20_000)

    def command(folder):
        arguments = ["--encoder", "lsa", "--dimension", "16", "--batch", "2"]
        return [sys.executable, "-m", "llds.cli", "index", str(path), str(tmp_path / folder), *arguments]

    # All three builds are processes alike: the number of threads decides the last bits of the table.
    quiet = {"env": environment(), "stderr": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    process = subprocess.Popen(command("index"), **quiet)
    state = tmp_path / ".index.building" / "build.json"

    def encoding():
        assert process.poll() is None, "it was too quick to be killed"
        return state.is_file() and json.loads(state.read_text())["done"].get("encoded", 0) > 0

    wait_for(encoding, 60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "index").exists()
    before = json.loads(state.read_text())["done"]
    assert 0 < before["encoded"] < 20_000
    texts = os.stat(tmp_path / ".index.building" / "passages.jsonl").st_mtime_ns
    subprocess.run(command("index"), check=True, **quiet)
    assert os.stat(tmp_path / "index" / "passages.jsonl").st_mtime_ns == texts
    subprocess.run(command("whole"), check=True, **quiet)
    for name in ("dense/vectors.npy", "dense/table.npy", "data.csc.index.npy"):
        assert (tmp_path / "index" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / ".index.building").exists()


def test_a_draft_of_other_options_is_not_taken_up(corpus, tmp_path, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build_module, "_encode", stop)
        with pytest.raises(KeyboardInterrupt):
            build_index(corpus, tmp_path / "index", IndexOptions(encoder="lsa", dimension=8))
    assert (tmp_path / ".index.building" / "dense").is_dir()
    build_index(corpus, tmp_path / "index", IndexOptions(k1=1.2))
    assert read_info(tmp_path / "index").encoder is None
    assert not (tmp_path / "index" / "dense").exists()


# Damage


def test_files_that_are_missing_or_cut(index, tmp_path):
    names = [path.relative_to(index) for path in sorted(index.rglob("*")) if path.is_file()]
    assert len(names) > 12
    for name in names:
        broken = tmp_path / "broken"
        shutil.copytree(index, broken)
        size = (broken / name).stat().st_size
        os.truncate(broken / name, size - 1 if name.name != "llds-index.json" else size // 2)
        with pytest.raises(LLDSError, match="damaged"):
            open_index(broken)
        (broken / name).unlink()
        with pytest.raises(LLDSError, match=r"damaged|holds no search index"):
            open_index(broken)
        shutil.rmtree(broken)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_bytes_changed_anywhere_give_passages_or_a_sentence(index, tmp_path, data):
    broken = tmp_path / "broken"
    shutil.rmtree(broken, ignore_errors=True)
    shutil.copytree(index, broken)
    names = sorted(path.relative_to(index).as_posix() for path in index.rglob("*") if path.is_file())
    path = broken / data.draw(st.sampled_from(names))
    content = bytearray(path.read_bytes())
    start = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):  # the beginning is where types and shapes are
        start %= 200
    new = data.draw(st.binary(min_size=1, max_size=16))
    content[start : start + len(new)] = new[: len(content) - start]
    path.write_bytes(bytes(content))
    try:
        found = open_index(broken, data.draw(st.sampled_from(["bm25", "hybrid"]))).search(
            ["Norville oak water", key_of(3), PLANTS[2]], 5
        )
    except LLDSError:
        return
    assert all(isinstance(passage, Passage) for passages in found for passage in passages)


def test_an_index_without_vectors_says_so(corpus, tmp_path):
    build_index(corpus, tmp_path / "index")
    for mode in ("dense", "hybrid"):
        with pytest.raises(LLDSError, match="has no vectors"):
            open_index(tmp_path / "index", mode)
    with pytest.raises(LLDSError, match="no search mode 'fuzzy'"):
        open_index(tmp_path / "index", "fuzzy")


def test_a_pickle_is_not_opened(index, tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "evil"),))

    broken = tmp_path / "broken"
    shutil.copytree(index, broken)
    for name in ("peaks.npy", "dense/vectors.npy", "dense/table.npy", "offsets.npy"):
        np.save(broken / name, np.array([Evil()], dtype=object), allow_pickle=True)
    about = json.loads((broken / "llds-index.json").read_text())
    about["files"] = {}
    (broken / "llds-index.json").write_text(json.dumps(about))
    with pytest.raises(LLDSError, match="damaged"):
        open_index(broken)
    with pytest.raises(LLDSError, match="damaged"):
        load_encoder(broken / "dense")
    assert not (tmp_path / "evil").exists()
