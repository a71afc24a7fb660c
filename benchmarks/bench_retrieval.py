"""Building, opening and asking an index, beside bm25s as it comes, and the server under load.

Run it as ``python benchmarks/bench_retrieval.py [PASSAGES]``. Passages are synthetic: 60 words each, drawn by
Zipf's law. Every measurement has a process of its own, so that its memory is its own. Seconds are of the
processor where one process works, and of the clock where server and clients work together.
"""

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

WORDS, LENGTH, QUERY, TOPK, BATCH, ROUNDS = 200_000, 60, 5, 3, 32, 10
CLIENTS, SECONDS = 16, 3.0


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("passages", type=int, nargs="?", default=20_000)
    parser.add_argument("--encoder", default="lsa", help="also measure vectors of this encoder; none to skip")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        queries = write_corpus(folder / "corpus.jsonl", arguments.passages)
        (folder / "queries.json").write_text(json.dumps(queries))
        print(
            f"{arguments.passages} passages of {LENGTH} words; {BATCH} queries of {QUERY} words, top {TOPK}\n"
        )
        print(f"{'':22}{'build':>9}{'memory':>9}{'disk':>9}{'open':>9}{'memory':>9}{'queries':>11}")
        peers = ["bm25s numba"] if find_spec("numba") else []
        for name in ("llds", "bm25s numpy", *peers):
            show(name, apart(build, name, folder), apart(ask, name, folder))
        if arguments.encoder != "none":
            for mode in ("dense", "hybrid"):
                built = apart(build, f"llds {arguments.encoder}", folder) if mode == "dense" else None
                show(f"llds {mode}", built, apart(ask, f"llds {mode}", folder))
            print("\nEmbedded corpus, one-hop training questions with an answer in the top 3")
            for mode, share in apart(recall, arguments.encoder, folder).items():
                print(f"  {mode:8}{share:7.1%}")
        print(f"\nServer, {CLIENTS} clients, {SECONDS:g} s each: queries per second of the clock")
        for workers in (1, 2):
            for size in (1, BATCH):
                rate, slow = serve(folder, workers, size, queries)
                print(
                    f"  {workers} workers, {size:2} queries per request: {rate:7.0f}, slowest 1 % {slow:6.0f} ms"
                )


def show(name: str, built: dict[str, float] | None, asked: dict[str, float]) -> None:
    """Print a row."""
    left = f"{built['seconds']:7.1f} s{built['memory']:6.0f} MB{built['disk']:6.0f} MB" if built else " " * 27
    right = f"{asked['open']:7.3f} s{asked['memory']:6.0f} MB{asked['batch']:8.1f} ms"
    print(f"{name:22}{left}{right}", flush=True)


def write_corpus(path: Path, count: int) -> list[str]:
    """Write passages; return queries, each of words of one passage."""
    draw = np.random.default_rng(0)
    names = np.array([f"w{number:x}x" for number in range(WORDS)])
    bounds = np.cumsum(1 / np.arange(1, WORDS + 1))
    queries: list[str] = []
    with path.open("w") as file:
        for first in range(0, count, 10_000):
            size = min(10_000, count - first)
            places = np.searchsorted(bounds, draw.random((size, LENGTH)) * bounds[-1])
            for number, words in enumerate(names[places], start=first):
                file.write(
                    json.dumps({"id": str(number), "contents": f'"{words[0]}"\n{" ".join(words)}'}) + "\n"
                )
            if len(queries) < BATCH * ROUNDS:
                queries += [" ".join(draw.choice(row, QUERY, replace=False)) for row in names[places[:200]]]
    return queries


def apart(work: Any, *arguments: Any) -> dict[str, float]:
    """Run ``work`` in a process of its own and return what it returns."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found: dict[str, float] = pool.apply(work, arguments)
        pool.close()
        pool.join()
    return found


def build(name: str, folder: Path) -> dict[str, float]:
    """Build one index; return processor seconds, megabytes of memory beyond the start's, and of disk."""
    target = folder / name.split()[0]
    if name.startswith("llds"):
        from llds.retrieval.build import IndexOptions, build_index

        encoder = name.split()[1] if " " in name else None
        before, start = peak_memory(), time.process_time()
        build_index(folder / "corpus.jsonl", target, IndexOptions(encoder=encoder))
    else:
        import bm25s
        from Stemmer import Stemmer

        before, start = peak_memory(), time.process_time()
        with (folder / "corpus.jsonl").open() as file:
            rows = [json.loads(line) for line in file]
        texts = [row["contents"] for row in rows]
        tokens = bm25s.tokenize(texts, stopwords="en", stemmer=Stemmer("english"), show_progress=False)
        index = bm25s.BM25(k1=0.9, b=0.4, backend=name.split()[1])
        index.index(tokens, show_progress=False)
        index.save(target, corpus=rows, show_progress=False)
    return {
        "seconds": time.process_time() - start,
        "memory": peak_memory() - before,
        "disk": sum(path.stat().st_size for path in target.rglob("*") if path.is_file()) / 1e6,
    }


def ask(name: str, folder: Path) -> dict[str, float]:
    """Open an index and ask it; return seconds to open, memory, and the median milliseconds of a batch."""
    queries = json.loads((folder / "queries.json").read_text())
    if name.startswith("llds"):
        from llds.retrieval.opening import open_index

        mode: Any = name.split()[1] if " " in name else "bm25"
        before, start = memory(), time.process_time()
        retriever = open_index(folder / "llds", mode)
        opened = time.process_time() - start

        def search(batch: list[str]) -> None:
            retriever.search(batch, TOPK)
    else:
        import bm25s
        from Stemmer import Stemmer

        before, start = memory(), time.process_time()
        index = bm25s.BM25.load(folder / "bm25s", mmap=True, load_corpus=True, show_progress=False)
        opened = time.process_time() - start
        index.backend = name.split()[1]
        if index.backend == "numba":
            index.activate_numba_scorer()
        stemmer = Stemmer("english")

        def search(batch: list[str]) -> None:
            tokens = bm25s.tokenize(batch, stopwords="en", stemmer=stemmer, show_progress=False)
            index.retrieve(tokens, k=TOPK, show_progress=False)

    times = []
    for first in range(0, min(BATCH * ROUNDS, len(queries)), BATCH):
        start = time.process_time()
        search(queries[first : first + BATCH])
        times.append(1e3 * (time.process_time() - start))
    return {"open": opened, "memory": memory() - before, "batch": statistics.median(times)}


def recall(encoder: str, folder: Path) -> dict[str, float]:
    """Return for every mode the share of questions with an answer in the passages found first."""
    from llds.data.embedded import corpus_path, load_questions
    from llds.retrieval.build import IndexOptions, build_index
    from llds.retrieval.opening import open_index

    build_index(corpus_path(), folder / "embedded", IndexOptions(encoder=encoder))
    questions = [one for one in load_questions("train") if len(one.metadata["chain"]) == 1]
    modes: tuple[Any, ...] = ("bm25", "dense", "hybrid")
    found = {}
    for mode in modes:
        texts = open_index(folder / "embedded", mode).search([one.question for one in questions], TOPK)
        hits = [
            any(
                answer.lower() in passage.contents.lower() for answer in one.golden_answers for passage in row
            )
            for one, row in zip(questions, texts, strict=True)
        ]
        found[mode] = sum(hits) / len(hits)
    return found


def serve(folder: Path, workers: int, size: int, queries: list[str]) -> tuple[float, float]:
    """Return the queries per second that the server answers, and the 99th percentile of a request in ms."""
    import requests

    command = [
        sys.executable,
        "-m",
        "llds.cli",
        "serve",
        str(folder / "llds"),
        "--mode",
        "bm25",
        "--port",
        "0",
    ]
    server = subprocess.Popen([*command, "--workers", str(workers)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    times: list[float] = []

    def client(seed: int) -> None:
        session = requests.Session()
        draw = np.random.default_rng(seed)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            batch = [queries[n] for n in draw.integers(len(queries), size=size)]
            start = time.monotonic()
            session.post(url, json={"queries": batch, "topk": TOPK, "return_scores": True}).raise_for_status()
            times.append(time.monotonic() - start)

    try:
        requests.post(url, json={"queries": queries[:1], "topk": 1}, timeout=60).raise_for_status()
        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        server.terminate()
        server.wait()
    return len(times) * size / SECONDS, 1e3 * float(np.percentile(times, 99))


def memory() -> float:
    """Return the memory of this process in megabytes that is not mapped from files."""
    with open("/proc/self/status") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1e3


def peak_memory() -> float:
    """Return the most memory that this process had, in megabytes, mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == "__main__":
    os.environ.setdefault("NO_PROXY", "127.0.0.1")
    main()
