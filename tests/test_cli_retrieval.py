"""``llds index``, ``search`` and ``serve``, and what training makes of index and server."""

import json
import sys

import pytest

from llds.cli import main
from llds.errors import LLDSError
from llds.search.passages import Passage
from llds.training.inputs import make_retriever
from llds.training.recipe import RetrievalSettings, load_recipe
from retrieval_corpus import ServerProcess, make_rows, write_corpus

FIRST = {"id": "doc3", "title": "Place 3"}


@pytest.fixture
def llds(monkeypatch, capsys):
    """Run a command in this process; returns exit code, stdout, stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["llds", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as ending:
            code = ending.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", 60)


def test_from_a_corpus_to_an_answer(llds, corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    index = tmp_path / "index"
    code, out, err = llds("index", corpus, index, "--encoder", "lsa", "--dimension", 16, "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["passages"] == 60
    assert told["bytes"] > 10_000
    code, out, _ = llds("search", index, "key00003", "--mode", "bm25", "--json")
    assert code == 0
    (found,) = json.loads(out)
    assert {key: found[key] for key in FIRST} == FIRST
    with ServerProcess(index, "--mode", "bm25", token="t0ken") as server:
        monkeypatch.setenv("LLDS_RETRIEVAL_TOKEN", "t0ken")
        code, out, _ = llds("search", server.url, "key00003")
        assert out.startswith("1. Place 3  [doc3, ")
        passages = make_retriever(RetrievalSettings(url=server.url)).search(["key00003"], 3)
        monkeypatch.setenv("LLDS_RETRIEVAL_TOKEN", "wrong")
        code, _, err = llds("search", server.url, "key00003")
        assert code == 2
        assert "wants another token" in err
    assert passages == make_retriever(RetrievalSettings(corpus=str(index), mode="bm25")).search(
        ["key00003"], 3
    )
    assert llds("search", index, "unheardof")[1] == "Nothing was found.\n"


def test_training_searches_corpus_file_and_index_alike(corpus, tmp_path, monkeypatch, llds):
    monkeypatch.setenv("LLDS_CACHE", str(tmp_path / "cache"))
    llds("index", corpus, tmp_path / "index")
    from_file = make_retriever(RetrievalSettings(corpus=str(corpus))).search(["key00003 water"], 3)
    from_index = make_retriever(RetrievalSettings(corpus=str(tmp_path / "index"))).search(
        ["key00003 water"], 3
    )
    assert from_file == from_index
    assert isinstance(from_file[0][0], Passage)
    assert from_file[0][0].contents == make_rows(4)[3]["contents"]
    with pytest.raises(LLDSError, match=r"retrieval\.mode=dense needs an index folder"):
        make_retriever(RetrievalSettings(corpus=str(corpus), mode="dense"))
    with pytest.raises(LLDSError, match="has no vectors"):
        make_retriever(RetrievalSettings(corpus=str(tmp_path / "index"), mode="dense"))
    with pytest.raises(LLDSError, match=r"bm25|hybrid"):
        load_recipe("tiny", ["retrieval.mode=fuzzy"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["index", "nowhere.jsonl", "index"], "nowhere.jsonl can't be read"),
        (["index", "CORPUS", "index", "--vectors", "tree"], "choose flat, ivf or hnsw"),
        (
            ["index", "CORPUS", "index", "--encoder", "static:nowhere"],
            "There is no nowhere/model.safetensors",
        ),
        (["serve", "nowhere"], "nowhere holds no search index"),
        (["serve", "nowhere", "--workers", "0"], "workers is 0"),
        (["serve", "nowhere", "--token-file", "none"], "The token file none can't be read"),
        (["search", "nowhere", "q"], "nowhere holds no search index"),
        (["search", "http://127.0.0.1:9/retrieve", "q"], "could not be reached"),
    ],
)
def test_a_mistake_is_one_sentence(llds, corpus, tmp_path, monkeypatch, arguments, told):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("llds.search.remote.Backoff.pause", lambda self, tries: 0.0)
    code, out, err = llds(*(corpus if word == "CORPUS" else word for word in arguments))
    assert (code, out) == (2, "")
    assert told in err
    assert err.startswith("llds: ")
    assert err.count("\n") == 1


def test_serving_needs_no_training_packages(llds, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("llds.cli.find_spec", lambda name: None if name in ("trl", "transformers") else name)
    assert llds("index", corpus, tmp_path / "index")[0] == 0
    monkeypatch.setattr("llds.cli.find_spec", lambda name: None if name == "bm25s" else name)
    code, _, err = llds("index", corpus, tmp_path / "index")
    assert (code, err) == (2, "llds: bm25s is not installed; run: pip install 'llds[serve]'\n")


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "prometheus_client"])
def test_a_missing_server_package_is_one_sentence(llds, corpus, tmp_path, monkeypatch, package):
    llds("index", corpus, tmp_path / "index")
    monkeypatch.setitem(sys.modules, package, None)
    code, _, err = llds("serve", tmp_path / "index")
    assert (code, err) == (2, f'llds: Serving needs {package}: run pip install "llds[serve]".\n')
