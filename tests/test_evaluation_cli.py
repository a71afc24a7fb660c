"""``llds eval``: from questions to kept answers, comparisons and the table; stops, kills and mistakes."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from completion_server import CompletionTestServer
from llds.cli import main
from llds.training.environment import prepare_environment
from llds.training.policy import load_policy
from llds.training.recipe import ModelSettings
from tiny_world import built_world

prepare_environment()
BENCHMARKS = Path(__file__).parent / "fixtures" / "benchmarks"


@pytest.fixture(scope="module")
def world():
    return built_world()


@pytest.fixture
def llds(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

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


def asked(world, *more):
    """A small evaluation of the world's model."""
    settings = [
        f"retrieval.corpus={world / 'corpus.jsonl'}",
        "episode.max_action=32",
        "episode.max_response=160",
        "evaluation.batch=2",
        "run.threads=1",
    ]
    return ["eval", world / "model", *settings, "--questions", world / "test.jsonl", *more]


def test_the_seven_benchmarks_from_folder_to_table(llds, tmp_path):
    out = tmp_path / "out"
    command = ["eval", "tiny", "--benchmarks", BENCHMARKS, "--baseline", "one-shot", "--out", out]
    code, text, err = llds(*command, "--label", "shipped", "run.threads=1")
    assert code == 0, err
    assert "shipped: 35 questions" in text
    assert "agent against one-shot" in text
    rows = [json.loads(line) for line in (out / "agent.jsonl").read_text().splitlines()]
    assert [row["benchmark"] for row in rows[::5]] == [
        "nq",
        "triviaqa",
        "popqa",
        "hotpotqa",
        "2wikimultihopqa",
        "musique",
        "bamboogle",
    ]
    summary = json.loads((out / "summary.json").read_text())
    agent = summary["contestants"]["agent"]
    means = [
        sum(row["exact_match"] for row in rows if row["benchmark"] == name) / 5
        for name in dict.fromkeys(row["benchmark"] for row in rows)
    ]
    assert agent["macros"]["Avg"]["exact_match"]["value"] == pytest.approx(sum(means) / 7)
    assert agent["macros"]["Gen"]["exact_match"]["value"] == pytest.approx(sum(means[:3]) / 3)
    assert sum(means[:3]) > 0

    # Done is done: the model is not asked again, and nothing changes.
    kept = {path.name: path.read_bytes() for path in out.iterdir()}
    code, again, _ = llds(*command, "--label", "shipped", "run.threads=1")
    assert (code, again) == (0, text)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == kept
    # A baseline that is there stays a part of it.
    assert "agent against one-shot" in llds(*command[:4], "--out", out, "run.threads=1")[1]

    code, table, _ = llds("eval", "--table", out, "--paper", "llama")
    assert code == 0
    assert table.count("(paper)") == 4
    assert "Not comparable with the paper's figures: tiny; tiny, one-shot." in table
    assert "NQ 5 of 3,610" in table
    code, markdown, _ = llds("eval", "--table", out, "--paper", "none", "--markdown")
    assert markdown.startswith("| exact match | NQ |")
    code, content, _ = llds("eval", "--table", out, "--json", "--paper", "7b")
    assert [row["source"] for row in json.loads(content)] == ["measured"] * 2 + ["paper"] * 4

    part = ["eval", "tiny", "--benchmarks", BENCHMARKS, "--only", "bamboogle,NQ", "--questions", "2"]
    code, content, err = llds(*part, "--json", "run.threads=1")
    assert code == 0, err
    assert {name: one["questions"] for name, one in json.loads(content)["settings"]["sets"].items()} == {
        "nq": 2,
        "bamboogle": 2,
    }


class Child:
    """A command in a process of its own, forked from this one, which has imported everything already."""

    def __init__(self, arguments, told):
        self._told = told
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                with told.open("w") as file:
                    os.dup2(file.fileno(), 1)
                    os.dup2(file.fileno(), 2)
                    sys.stdout = sys.stderr = file
                    sys.argv = ["llds", *map(str, arguments)]
                    main()
                    code = 0
            except SystemExit as ending:
                code = ending.code or 0
            finally:
                os._exit(code)

    def stop(self, number, path, after):
        """Send a signal once ``path`` has ``after`` lines."""
        deadline = time.monotonic() + 60
        while lines(path) < after and time.monotonic() < deadline:
            time.sleep(0.002)
        os.kill(self.pid, number)
        return self

    def wait(self):
        """Return exit code and what was printed."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), self._told.read_text()


def lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_kill_and_a_stop_change_nothing(world, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    torch.set_num_threads(1)  # a process with one thread can be forked
    sampled = ["--samples", "6", "--temperature", "1.0", "--baseline", "no-search"]

    def start(name):
        return Child(asked(world, *sampled, "--out", tmp_path / name), tmp_path / f"{name}.txt")

    code, told = start("whole").wait()
    assert code == 0, told
    total = lines(tmp_path / "whole" / "agent.jsonl")
    assert total == 8 * 6

    killed = tmp_path / "killed" / "agent.jsonl"
    assert start("killed").stop(signal.SIGKILL, killed, after=6).wait()[0] == -signal.SIGKILL
    assert 6 <= lines(killed) < total

    stopped = tmp_path / "stopped" / "agent.jsonl"
    code, told = start("stopped").stop(signal.SIGINT, stopped, after=4).wait()
    assert code == 130, told
    assert "and the same command goes on." in told
    assert "Traceback" not in told
    assert 4 <= lines(stopped) < total
    assert not (tmp_path / "stopped" / "summary.json").exists()

    for name in ("killed", "stopped"):
        assert start(name).wait()[0] == 0
        for file in ("agent.jsonl", "no-search.jsonl", "summary.json"):
            assert (tmp_path / name / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_compare_and_refuse(llds, world, tmp_path):
    first, second, other = tmp_path / "first", tmp_path / "second", tmp_path / "other"
    assert llds(*asked(world, "--no-retriever", "--out", first))[0] == 0
    assert llds(*asked(world, "--out", second))[0] == 0
    code, text, _ = llds("eval", "--compare", first, second)
    assert code == 0
    assert "test (8)" in text
    assert "More than the model differs: retriever.kind" in text
    code, content, _ = llds("eval", "--compare", first / "agent.jsonl", second, "--json")
    assert json.loads(content)["sets"]["test"]["exact_match"]["value"] > 0

    code, _, err = llds(*asked(world, "--out", second, "--temperature", "0.5"))
    assert code == 2
    assert "other settings (sampling.temperature is 0.0 there and 0.5 here): give another --out" in err
    code, _, err = llds(*asked(world, "episode.max_turns=1", "--out", second))
    assert "limits.max_turns is 3 there and 1 here" in err or "limits.max_turns" in err

    assert llds(*asked(world, "evaluation.questions=3", "--out", other))[0] == 0
    code, _, err = llds("eval", "--compare", second, other)
    assert code == 2
    assert "only on the same questions" in err
    code, _, err = llds("eval", "--table", second)
    assert code == 2
    assert "asked none of the seven benchmarks" in err


def test_a_server_through_the_command(llds, world, tmp_path, monkeypatch):
    policy = load_policy(ModelSettings(path=str(world / "model")))
    server = CompletionTestServer(policy.model, policy.tokenizer, key="secret")
    monkeypatch.setenv("LLDS_API_KEY", "secret")
    try:
        served = ["--engine", "openai", "--url", server.url, "--concurrency", "3"]
        code, text, err = llds(*asked(world, *served, "--json", "--out", tmp_path / "served"))
        assert code == 0, err
        local = llds(*asked(world, "--json"))[1]
        assert json.loads(text)["groups"] == json.loads(local)["groups"]
        assert "secret" not in "".join(path.read_text() for path in (tmp_path / "served").iterdir())
        server.moves = [500] * 3
        code, text, err = llds(*asked(world, *served, "--served-model", "qwen"))
        assert code == 2
        assert "has no model 'qwen', but tiny" in err
    finally:
        server.close()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "llds eval needs a MODEL first"),
        (["run.threads=1"], "llds eval needs a MODEL first"),
        (["tiny", "--samples", "4"], "give --samples a --temperature too"),
        (["tiny", "--samples", "0"], "--samples is 0: give at least 1."),
        (["tiny", "--engine", "openai"], "needs the server's address: --url"),
        (["tiny", "--url", "http://h/v1"], "add --engine openai"),
        (
            ["tiny", "--engine", "sglang"],
            "--engine sglang is unknown: choose transformers or openai or vllm.",
        ),
        (["tiny", "--engine", "openai", "--url", "h:1"], "Server address 'h:1' is not a URL"),
        (["tiny", "--baseline", "rag"], "--baseline rag is unknown: choose no-search or one-shot."),
        (["tiny", "--no-retriever", "--baseline", "one-shot"], "take --no-retriever away"),
        (["tiny", "--no-retriever", "--retriever", "x"], "exclude each other"),
        (["tiny", "--only", "nq"], "give their folder with --benchmarks"),
        (
            ["tiny", "--benchmarks", str(BENCHMARKS), "--split", "test"],
            "--split and --benchmarks name different",
        ),
        (["tiny", "--benchmarks", str(BENCHMARKS), "--only", "squad"], "no benchmark 'squad'"),
        (["tiny", "--benchmarks", "nowhere"], "nowhere"),
        (["tiny", "--retriever", "nowhere.jsonl"], "There is no corpus file nowhere.jsonl"),
        (["tiny", "--temperature", "-1"], "temperature is -1.0"),
        (["--table"], "--table needs at least one folder"),
        (["--table", "nowhere"], "nowhere is no evaluation"),
        (["--compare", "nowhere"], "takes two evaluations"),
        (["--compare", "nowhere", "there"], "nowhere can't be read"),
        (["--table", "--compare"], "give one of them"),
    ],
)
def test_mistakes_are_one_sentence(llds, arguments, expected):
    code, out, err = llds("eval", *arguments)
    assert code == 2
    assert out == ""
    assert expected in err
    assert "Traceback" not in err
    assert [line for line in err.splitlines() if line.startswith("llds: ")] == err.splitlines()[-1:]
