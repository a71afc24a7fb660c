"""``llds lab``: a sweep that can be stopped at any time, and the report of what it stored."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llds.cli.app import app
from llds.errors import LLDSError
from llds.lab.regimes import every_regime
from llds.lab.series import Store
from llds.lab.starts import load_start, start_path
from llds.lab.sweep import Cell, make_run, plan

SMOKE = every_regime()["smoke"]


def run(*words):
    return CliRunner().invoke(app, ["lab", *map(str, words)])


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("starts")
    load_start(folder, SMOKE)
    return folder


def sweep_words(folder, starts, arms="grpo,llds", seeds=2):
    return [
        *("sweep", "--regimes", "smoke", "--arms", arms, "--seeds", seeds, "--workers", 1),
        *("--series", folder, "--starts", starts),
    ]


def test_a_run_is_shown(starts):
    result = run("run", "--regime", "smoke", "--arm", "llds", "--starts", starts)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].split()[:2] == ["rollout", "reward"]
    assert [int(line.split()[0]) for line in lines[1 : 1 + SMOKE.rollouts]] == list(range(SMOKE.rollouts))


def fill(store, starts, arms, seeds, regime="smoke"):
    """Make runs in this process and store them under another regime's name, if one is given."""
    for arm in arms:
        for seed in seeds:
            store.add(regime, arm, **make_run(starts, Cell("smoke", arm, seed)))


def test_a_sweep_goes_on_where_it_stopped(tmp_path, starts):
    fill(Store(tmp_path / "a"), starts, ["grpo"], [1])
    more = run(*sweep_words(tmp_path / "a", starts))
    assert more.exit_code == 0
    assert more.stdout == f"3 runs made, 1 were stored already; series in {tmp_path / 'a'}.\n"
    assert "smoke, llds, seed 1: reward" in more.stderr
    assert run(*sweep_words(tmp_path / "a", starts)).stdout.startswith("0 runs made, 4 were")
    fill(Store(tmp_path / "b"), starts, ["grpo", "llds"], [0, 1])
    for arm in ("grpo", "llds"):
        one, other = (Store(tmp_path / name).read("smoke", arm) for name in "ab")
        assert [r.seed for r in one] == [r.seed for r in other] == [0, 1]
        for r, s in zip(one, other, strict=True):
            assert {n: v.tobytes() for n, v in r.columns.items()} == {
                n: v.tobytes() for n, v in s.columns.items()
            }


def test_killed_in_the_middle_it_loses_one_run_and_leaves_no_worker(tmp_path, starts):
    words = [str(word) for word in sweep_words(tmp_path, starts, arms="all", seeds=9)]
    process = subprocess.Popen([sys.executable, "-m", "llds.cli", "lab", *words], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not Store(tmp_path).names() and time.monotonic() < deadline:
        time.sleep(0.05)
    (worker,) = _children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = len(Store(tmp_path).seeds("smoke", "grpo"))
    assert kept >= 1
    while _is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_alive(worker)
    result = run(*sweep_words(tmp_path, starts, arms="grpo", seeds=kept + 1))
    assert result.stdout.startswith(f"1 runs made, {kept} were stored")


def _children(pid):
    """The processes started by ``pid`` that work; the helper that tracks shared resources is not one."""
    processes = [path for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [
        int(path.name)
        for path in processes
        if _stat(path.name)[1:2] == [str(pid)] and "resource_tracker" not in _read(path / "cmdline")
    ]


def _is_alive(pid):
    return _stat(pid)[:1] not in ([], ["Z"])


def _stat(pid):
    """State, parent and so on of a process; nothing if it is gone."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def _read(path):
    try:
        return path.read_text()
    except OSError:
        return ""


def test_interrupted_it_keeps_what_is_stored(tmp_path, starts):
    words = [str(word) for word in sweep_words(tmp_path, starts, arms="all", seeds=9)]
    process = subprocess.Popen(
        [sys.executable, "-m", "llds.cli", "lab", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not Store(tmp_path).names() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Stopping; stored runs are kept." in err
    assert "runs made, 0 were stored already" in out
    assert "Traceback" not in err
    assert Store(tmp_path).seeds("smoke", "grpo")


def test_the_report_needs_nothing_but_the_series(tmp_path, starts):
    # The smoke regime is in no table, so its series pass for those of the far one here.
    fill(Store(tmp_path / "series"), starts, ["grpo", "llds"], [0, 1], regime="far")
    page = tmp_path / "out" / "page.md"
    for _ in range(2):
        result = run("report", "--series", tmp_path / "series", "--page", page)
        assert result.exit_code == 0, result.output
        written = page.read_text()
    assert written.count("<!-- results far -->") == 1
    assert "| `grpo` | 2 |" in written
    assert "4 runs," in written
    pictures = sorted(path.name for path in (tmp_path / "out" / "figures").iterdir())
    assert pictures == ["lab_far.svg", "lab_far_arms.svg"]
    assert all((page.parent / "figures" / name).read_text().startswith("<svg") for name in pictures)
    page.write_text("kept\n<!-- arms -->\nold\n<!-- end of arms -->\nkept too\n")
    run("report", "--series", tmp_path / "series", "--page", page)
    assert page.read_text().startswith("kept\n<!-- arms -->\n| arm |")
    assert page.read_text().endswith("<!-- end of arms -->\nkept too\n")
    page.write_text("<!-- arms -->\n")
    broken = run("report", "--series", tmp_path / "series", "--page", page)
    assert isinstance(broken.exception, LLDSError)
    assert "no '<!-- end of arms -->' after it" in str(broken.exception)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("run", "--regime", "fra"), "There is no regime 'fra'; choose among far, near"),
        (("run", "--arm", "x"), "There is no arm 'x'; choose among grpo"),
        (("sweep", "--arms", "grpo,x"), "There is no arm 'x'"),
        (("report", "--series", "nowhere"), "nowhere holds no series; make some with `llds lab sweep`"),
    ],
)
def test_mistakes_are_told_in_a_sentence(words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*words)
    assert isinstance(result.exception, LLDSError)
    assert sentence in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_a_broken_start_is_named(tmp_path):
    path = start_path(tmp_path, SMOKE)
    path.write_bytes(b"nonsense")
    with pytest.raises(LLDSError, match="is broken; delete it"):
        load_start(tmp_path, SMOKE)


def test_the_plan_is_what_is_missing(tmp_path):
    cells = plan(Store(tmp_path), ["smoke"], ["grpo", "llds"], range(2))
    assert cells == [Cell("smoke", arm, seed) for arm in ("grpo", "llds") for seed in (0, 1)]


def test_everything_is_listed():
    out = run("list").output
    for word in ("far", "near", "no-noise", "grpo", "llds+kl100", "spare-prefix"):
        assert word in out
    assert json.dumps(out)
