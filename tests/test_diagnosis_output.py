"""What people and programs see of a diagnosis: page, JSON, HTML, comparison, watching, and the commands."""

import html.parser
import io
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from llds.cli.app import app
from llds.diagnosis import synthetic
from llds.diagnosis.compare import compare
from llds.diagnosis.findings import CLASSES, SEVERITIES, Diagnosis, Finding, Missing, Ruled, Signal
from llds.diagnosis.page import html_page
from llds.diagnosis.reading import read_logs
from llds.diagnosis.schema import JSON_SCHEMA, to_json
from llds.diagnosis.table import Column, Table
from llds.diagnosis.terminal import show
from llds.diagnosis.verdict import diagnose
from llds.diagnosis.watch import change_text, follow
from llds.errors import LLDSError
from llds.plots import Mark, line_chart, short_number, sparkline, ticks
from log_shapes import LOGS, SHAPES

COLLAPSE = LOGS / "verl_collapse_tools.log"
runner = CliRunner()


@pytest.fixture(scope="module")
def collapse():
    table = read_logs([COLLAPSE])
    return diagnose(table), table


def shown(diagnosis, table, width=100, encoding="utf-8"):
    raw = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    show(diagnosis, table, Console(file=raw, width=width))
    raw.flush()
    return raw.buffer.getvalue().decode(encoding)


def check(value, schema, path="$"):
    """A small validator of the parts of JSON Schema that ours uses."""
    if "anyOf" in schema:
        errors = []
        for option in schema["anyOf"]:
            try:
                return check(value, option, path)
            except AssertionError as error:
                errors.append(error)
        raise AssertionError(f"{path}: {errors}")
    if "const" in schema:
        assert value == schema["const"], path
    if "enum" in schema:
        assert value in schema["enum"], path
    types = schema.get("type", [])
    names = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "null": type(None),
    }
    for kind in [types] if isinstance(types, str) else types:
        if isinstance(value, names[kind]) and not isinstance(value, bool):
            break
    else:
        assert not types, f"{path}: {value!r} is no {types}"
    if isinstance(value, dict):
        for key in schema.get("required", []):
            assert key in value, f"{path}.{key}"
        for key, inner in schema.get("properties", {}).items():
            if key in value:
                check(value[key], inner, f"{path}.{key}")
    if isinstance(value, list) and "items" in schema:
        for index, inner in enumerate(value):
            check(inner, schema["items"], f"{path}[{index}]")
    return None


# --- the page


def test_page_says_what_when_first_and_what_to_change(collapse):
    text = " ".join(shown(*collapse).split())
    for words in (
        "CRITICAL: tool abandonment, from step",
        "The first signal was turns at step",
        "steps before the reward fell or the gradient surged",
        "turns fell from",
        "What to change",
        "What it was not",
        "What this log cannot tell",
        "no log-probs of correct responses",
        "^ step",
    ):
        assert words in text, words
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [20, 60, 80, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_page_fits_any_terminal(collapse, width, encoding):
    lines = shown(*collapse, width=width, encoding=encoding).splitlines()
    assert max(map(len, lines)) <= max(width, 60)
    if encoding != "utf-8":
        assert all(ord(letter) < 256 for line in lines for letter in line)


def test_page_without_any_row():
    empty = Table(np.array([], dtype=np.int64), {}, "jsonl", "unknown", ("x",))
    assert "not enough data" in shown(diagnose(empty), empty)


# --- JSON


def test_json_has_the_promised_keys(collapse):
    content = to_json(*collapse)
    check(content, JSON_SCHEMA)
    assert content["verdict"] == "tool-abandonment"
    assert content["severity"] == "critical"
    assert content["first_signal"]["series"] == "turns"
    assert {"series", "step"} <= content["first_signal"].keys()
    assert content["steps"] == 59
    assert content["schema"] == 1
    assert json.loads(json.dumps(content, allow_nan=False)) == content


@pytest.mark.parametrize("kind", synthetic.SICK)
def test_json_of_every_class_follows_the_schema(kind):
    table = synthetic.SICK[kind](1).table
    check(to_json(diagnose(table), table), JSON_SCHEMA)


def test_the_schema_file_in_the_docs_is_the_schema():
    path = Path(__file__).parents[1] / "docs" / "diagnosis.schema.json"
    assert json.loads(path.read_text()) == JSON_SCHEMA


# --- HTML


class Links(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.outside = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in {"meta", "br", "path", "rect"}:
            self.open.append(tag)
        self.outside += [value for name, value in attrs if name in {"src", "href", "xlink:href", "action"}]

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()


def test_html_is_one_page_that_needs_nothing_else(collapse):
    page = html_page(*collapse)
    assert len(page) < 1_000_000
    parser = Links()
    parser.feed(page)
    assert parser.open == []
    assert parser.outside == []
    assert "url(" not in page
    assert "@import" not in page
    pictures = re.findall(r"<svg.*?</svg>", page, flags=re.S)
    assert len(pictures) > 10
    for picture in pictures:
        ElementTree.fromstring(picture)
    assert 'class="mark"' in pictures[0]
    data = json.loads(re.search(r'id="diagnosis">(.*?)</script>', page, flags=re.S).group(1))
    assert data == to_json(*collapse)


def test_html_escapes_what_a_log_says():
    evil = '</script><script>alert("x")</script>&"\'<img src=x>'
    values = np.linspace(0, 1, 30)
    columns = {
        evil: Column(evil, evil, values, np.zeros(30, dtype=bool)),
        "grad_norm": Column("grad_norm", evil, np.full(30, np.nan), np.ones(30, dtype=bool)),
    }
    table = Table(np.arange(1, 31), columns, "jsonl", "unknown", (evil,), notes=(evil,))
    page = html_page(diagnose(table), table)
    assert "<script>alert" not in page
    assert "<img" not in page
    parser = Links()
    parser.feed(page)
    assert parser.outside == []


TEXT = st.text(max_size=40)
NUMBER = st.floats(allow_nan=True, allow_infinity=True)
SIGNALS = st.builds(
    Signal,
    series=TEXT,
    family=st.sampled_from(["reward", "length"]),
    step=st.integers(0, 10**9),
    direction=st.sampled_from(["up", "down", "stuck", "nan"]),
    baseline=NUMBER,
    value=NUMBER,
    evidence=TEXT,
)
FINDINGS = st.builds(
    Finding,
    kind=st.sampled_from(list(CLASSES)),
    severity=st.sampled_from(SEVERITIES),
    title=TEXT,
    onset_step=st.none() | st.integers(0, 100),
    onset_interval=st.none() | st.tuples(st.integers(0, 100), st.integers(0, 100)),
    signals=st.lists(SIGNALS, max_size=3).map(tuple),
    lead_steps=st.none() | st.integers(0, 100),
    confidence=st.floats(0, 1),
    explanation=TEXT,
    advice=st.lists(TEXT, max_size=3).map(tuple),
)
DIAGNOSES = st.builds(
    Diagnosis,
    verdict=st.sampled_from(list(CLASSES)),
    severity=st.sampled_from(SEVERITIES),
    onset_step=st.none(),
    first_signal=st.none() | SIGNALS,
    steps=st.integers(0, 100),
    first_step=st.none() | st.integers(0, 100),
    last_step=st.none() | st.integers(0, 100),
    findings=st.lists(FINDINGS, max_size=3).map(tuple),
    ruled_out=st.lists(st.builds(Ruled, kind=TEXT, why=TEXT), max_size=2).map(tuple),
    missing=st.lists(st.builds(Missing, kind=TEXT, series=st.just(("a",)), sentence=TEXT), max_size=2).map(
        tuple
    ),
    notes=st.lists(TEXT, max_size=2).map(tuple),
)


@given(diagnosis=DIAGNOSES)
@settings(max_examples=60, deadline=None)
def test_any_diagnosis_can_be_shown(diagnosis):
    values = np.array([1.0, np.nan, 3.0])
    columns = {"reward": Column("reward", "r", values, np.zeros(3, dtype=bool))}
    table = Table(np.array([1, 2, 3]), columns, "jsonl", "verl", ("f",))
    check(to_json(diagnosis, table), JSON_SCHEMA)
    assert shown(diagnosis, table, encoding="ascii")
    parser = Links()
    parser.feed(html_page(diagnosis, table))
    assert parser.outside == []


# --- charts


def test_charts_keep_extremes_when_they_thin():
    values = [0.0] * 10_000
    values[5000] = 99.0
    picture = line_chart("t", "u", list(range(10_000)), [("a", values)], points=200)
    assert len(picture) < 12_000
    assert "0.0,30" in picture or re.search(r",(?:2[6-9]|3[0-3])\.\d", picture)


def test_charts_of_odd_data():
    assert line_chart("t", "", [], []) == ""
    assert line_chart("t", "", [1.0], [("a", [math.nan])]) == ""
    ElementTree.fromstring(
        line_chart("<&>", "", [1.0], [("a", [5.0])], marks=[Mark(-5, 900, "<x>"), Mark(3)])
    )
    ElementTree.fromstring(line_chart("t", "", [1, 2], [("a", [1e300, -1e300])]))


def test_ticks_are_round_and_sparklines_have_their_width():
    assert ticks(0, 1, 4) == [0.0, 0.5, 1.0]
    assert ticks(3, 3, 4) == [3]
    assert [short_number(x) for x in (0.0, 12345.0, 1e7, 1e-5, 0.25)] == [
        "0",
        "12.3k",
        "1.0e+07",
        "1.0e-05",
        "0.25",
    ]
    assert sparkline([1, 2, 3, 4], 4) == "▁▃▆█"
    assert sparkline([1, math.nan, 3], 3, ascii_only=True) == "_ #"
    assert len(sparkline(list(range(7)), 30)) == 30
    assert sparkline([], 5) == "     "


# --- comparison


def test_two_runs_part_where_they_part(tmp_path):
    def write(name, change):
        rng = np.random.default_rng(0)
        lines = [
            {
                "step": s,
                "reward": 0.5 + 0.01 * rng.standard_normal() + (change if s > 30 else 0),
                "entropy": 0.3,
            }
            for s in range(1, 61)
        ]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return tmp_path / name

    one, other = write("a.jsonl", 0.0), write("b.jsonl", 0.4)
    partings = compare(read_logs([one]), read_logs([other]))
    assert [(p.series, p.step is None) for p in partings] == [("reward", False), ("entropy", True)]
    assert 30 <= partings[0].step <= 34
    told = runner.invoke(app, ["diagnose", "--compare", str(one), str(other)])
    assert told.exit_code == 0, told.output
    assert "part at step" in told.output
    content = json.loads(runner.invoke(app, ["diagnose", "--compare", str(one), str(other), "--json"]).stdout)
    assert content["partings"][0]["series"] == "reward"
    told = runner.invoke(app, ["diagnose", "--compare", str(one)])
    assert isinstance(told.exception, LLDSError)


# --- commands


def test_diagnose_tells_writes_and_exits(tmp_path):
    page, table = tmp_path / "page.html", tmp_path / "table.csv"
    args = ["diagnose", str(COLLAPSE), "--html", str(page), "--table", str(table), "--json"]
    told = runner.invoke(app, args)
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["verdict"] == "tool-abandonment"
    assert page.read_text().startswith("<!doctype html>")
    again = runner.invoke(app, ["diagnose", str(table), "--json"])
    assert json.loads(again.stdout)["verdict"] == "tool-abandonment"
    codes = [
        runner.invoke(app, ["diagnose", str(log), "--fail-on", level]).exit_code
        for log in (COLLAPSE, LOGS / "verl_entropy_hump.log")
        for level in ("never", "critical", "warning")
    ]
    assert codes == [0, 1, 1, 0, 0, 0]


def test_the_table_goes_to_standard_output():
    told = runner.invoke(app, ["diagnose", str(COLLAPSE), "--table", "-"])
    assert told.stdout.startswith("step,")
    assert len(told.stdout.splitlines()) == 60


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["diagnose", "nowhere.log"], "can't be read"),
        (["diagnose", str(COLLAPSE), "--format", "word"], "There is no format"),
        (["diagnose", str(COLLAPSE), "--table", "x.xlsx"], "as .csv or .parquet"),
        (["diagnose", str(COLLAPSE), "--html", str(LOGS)], "is a folder"),
        (["watch", str(LOGS)], "is a folder"),
    ],
)
def test_mistakes_are_one_sentence(args, words):
    told = runner.invoke(app, args)
    assert isinstance(told.exception, LLDSError)
    assert words in str(told.exception)


def test_a_log_from_standard_input_in_a_process_of_its_own():
    root = Path(__file__).parents[1] / "src"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "llds.cli", "diagnose", "-", "--json", "--fail-on", "critical"]
    done = subprocess.run(command, input=COLLAPSE.read_bytes(), env=env, capture_output=True, check=False)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["verdict"] == "tool-abandonment"
    command[4:] = ["nothing.log"]
    failed = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert failed.stderr.count("\n") == 1
    assert "Traceback" not in failed.stderr


# --- watching


def test_watch_follows_a_log_that_grows_in_pieces(tmp_path):
    path = tmp_path / "run.log"
    data = COLLAPSE.read_bytes()

    def write():
        time.sleep(0.05)
        with path.open("wb") as file:
            for start in range(0, len(data), 4001):
                file.write(data[start : start + 4001])
                file.flush()
                time.sleep(0.004)

    writer = threading.Thread(target=write)
    writer.start()
    changes = []
    last = follow(path, changes.append, until_idle=1.0, pause=0.01)
    writer.join()
    assert last.verdict == "tool-abandonment"
    assert [change.diagnosis.verdict for change in changes] == [
        "not-enough-data",
        "healthy",
        "tool-abandonment",
        "tool-abandonment",
    ]
    assert [change.step for change in changes] == [1, 20, 24, 38]
    assert "WARNING tool-abandonment" in change_text(changes[2])


def test_watch_reads_a_log_anew_when_it_is_replaced_or_cut(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(SHAPES["jsonl"])
    steps = iter([lambda: None, lambda: path.write_bytes(SHAPES["jsonl"][:2000]), lambda: None])
    clock = iter(range(100))

    def sleep(_):
        next(steps, lambda: None)()

    last = follow(
        path, lambda change: None, until_idle=6, pause=0, clock=lambda: float(next(clock)), sleep=sleep
    )
    assert last.steps < 30


def test_watch_replays_and_tells_the_lead():
    told = runner.invoke(app, ["watch", str(COLLAPSE), "--replay"])
    assert told.exit_code == 0, told.output
    assert "First alarm at step 24" in told.output
    lines = runner.invoke(app, ["watch", str(COLLAPSE), "--replay", "--json"]).stdout.splitlines()
    content = [json.loads(line) for line in lines]
    assert content[-1]["lead"] == content[-1]["visible_step"] - content[-1]["alarm_step"]
    code = runner.invoke(
        app, ["watch", str(COLLAPSE), "--until-idle", "0", "--fail-on", "critical"]
    ).exit_code
    assert code == 1
