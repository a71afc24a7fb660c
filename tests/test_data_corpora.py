"""Corpora in the shapes that people have, packed or not, and files that are broken."""

import gzip
import json

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llds.data.corpus import iter_corpus, iter_located
from llds.data.jsonl import count_lines
from llds.errors import LLDSError

WANTED = {"id": "7", "contents": '"Emma"\nA novel.'}
SHAPES = {
    "wiki-18": {"id": "7", "contents": '"Emma"\nA novel.'},
    "number as id": {"id": 7, "contents": '"Emma"\nA novel.'},
    "BEIR": {"_id": "7", "title": "Emma", "text": "A novel.", "metadata": {"url": "x"}},
    "title of two lines": {"_id": "7", "title": " Emma\n", "text": " A novel."},
    "FlashRAG with both": {"id": "7", "title": "Emma", "text": "A novel.", "contents": '"Emma"\nA novel.'},
}


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_the_same_document(tmp_path, shape):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(lines(SHAPES[shape]))
    assert list(iter_corpus(path)) == [WANTED]


def test_passages_of_beir_may_lack_title_or_text(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(lines({"_id": "a", "title": "", "text": "x"}, {"_id": "b", "title": "T", "text": ""}))
    assert [row["contents"] for row in iter_corpus(path)] == ['""\nx', '"T"\n']


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz", "corpus.jsonl.zst"])
def test_a_folder_of_beir(tmp_path, name):
    raw = lines(SHAPES["BEIR"])
    packed = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress}.get(name[13:], bytes)(raw)
    (tmp_path / name).write_bytes(packed)
    assert list(iter_located(tmp_path)) == [(f"{tmp_path / name}:1", WANTED)]
    assert count_lines(tmp_path / name) == 1


def test_zstd_of_several_frames_and_a_large_window(tmp_path):
    rows = [{"id": str(i), "contents": f'"T"\n{"word " * (i % 50)}x'} for i in range(3000)]
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    path = tmp_path / "corpus"
    path.write_bytes(compressor.compress(lines(*rows[:1000])) + compressor.compress(lines(*rows[1000:])))
    assert [row["id"] for row in iter_corpus(path)] == [row["id"] for row in rows]


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_a_packed_file_that_breaks_off_is_noticed_wherever_it_does(tmp_path, pack):
    rows = [{"id": str(i), "contents": f'"T{i * 7919}"\ntext {i * 104729}'} for i in range(300)]
    whole = pack(lines(*rows))
    path = tmp_path / "corpus"
    for size in [*range(5, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(LLDSError, match="breaks off or is damaged after line"):
            list(iter_corpus(path))
        with pytest.raises(LLDSError, match="breaks off or is damaged"):
            count_lines(path)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"contents": '"T"\nx'}, 'has no "id"'),
        ({"_id": 3.5, "text": "x"}, '"id" must be a string'),
        ({"id": "1", "title": "T"}, 'has no "contents"'),
        ({"id": "1", "title": "T", "text": None}, '"text" must be a string, not null'),
        ({"id": "1", "title": 4, "text": "x"}, '"title" must be a string, not a number'),
        ({"id": "1", "title": "", "text": " "}, '"text" is empty'),
        ({"id": "1", "contents": "no title"}, '"contents" must be a title in quotes'),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, told):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(lines(SHAPES["BEIR"], row))
    with pytest.raises(LLDSError) as error:
        list(iter_corpus(path))
    assert told in str(error.value)
    assert f"{path}:2" in str(error.value)


def test_a_line_without_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("llds.data.jsonl._LONGEST_LINE", 1000)
    path = tmp_path / "corpus.gz"
    path.write_bytes(gzip.compress(lines(WANTED) + b"x" * 100_000))
    with pytest.raises(LLDSError, match=r"corpus.gz:2: the line is longer than"):
        list(iter_corpus(path))


def test_a_folder_without_a_corpus(tmp_path):
    with pytest.raises(LLDSError, match=r"holds no corpus.jsonl"):
        list(iter_corpus(tmp_path))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prefix=st.sampled_from([b"", b"\x1f\x8b\x08\x00", b"\x28\xb5\x2f\xfd", lines(WANTED), b"\xef\xbb\xbf"]),
    rest=st.binary(max_size=200),
    place=st.integers(0, 10_000),
    pack=st.sampled_from([bytes, gzip.compress, zstandard.ZstdCompressor(write_checksum=True).compress]),
)
def test_garbage_gives_documents_or_a_sentence(tmp_path, prefix, rest, place, pack):
    content = bytearray(pack(prefix + rest))
    if content:
        content[place % len(content)] ^= 0x55
    path = tmp_path / "corpus"
    path.write_bytes(bytes(content))
    told = ""
    try:
        assert all(set(document) == {"id", "contents"} for document in iter_corpus(path))
    except LLDSError as error:
        told = str(error)
    assert not told or str(path) in told
    assert "\n" not in told
