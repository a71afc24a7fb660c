"""Atomic folders and locks: several writers at once, what a killed one leaves, permissions."""

import os
import subprocess
import sys
import threading
import time

import pytest

from llds.errors import LLDSError
from llds.files import atomic_folder, atomic_write_text, held, remove_unfinished


def test_writers_of_one_folder_do_not_disturb_each_other(tmp_path):
    target = tmp_path / "model"
    with atomic_folder(target) as first, atomic_folder(target) as second:
        for draft in (first, second):
            (draft / "weights").write_text(draft.name)
    # The inner block ended first, so the outer one replaced it.
    assert (target / "weights").read_text() == first.name
    assert list(tmp_path.iterdir()) == [target]


def test_many_writers_leave_one_whole_folder(tmp_path):
    target, faults = tmp_path / "model", []

    def write(number):
        try:
            for _ in range(10):
                with atomic_folder(target) as draft:
                    for name in ("config", "weights"):
                        (draft / name).write_text(str(number))
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert (target / "config").read_text() == (target / "weights").read_text()
    assert list(tmp_path.iterdir()) == [target]


def test_drafts_of_killed_writers_go_away_after_a_day(tmp_path):
    old, new = tmp_path / ".model.aaa.tmp", tmp_path / ".model.bbb.tmp"
    for draft in (old, new):
        draft.mkdir()
        (draft / "weights").write_text("half")
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    with atomic_folder(tmp_path / "model"):
        assert not old.exists()
    assert new.exists()


def test_drafts_are_removed_wherever_they_lie(tmp_path):
    for folder in ("checkpoints/.step-000004.abc.tmp", ".model.abc.tmp"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / ".config.json.x.tmp").write_text("half")
    (tmp_path / ".metrics.jsonl.abc.tmp").write_text("half")
    (tmp_path / "checkpoints" / "kept.tmp").write_text("mine")
    remove_unfinished(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoints", "kept.tmp"]


def test_a_killed_write_leaves_a_draft_that_is_known_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *names: os._exit(1))
    child = os.fork()
    if child == 0:
        atomic_write_text(tmp_path / "result.json", "{}")
        os._exit(0)
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 1
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_others_may_read_the_folder(tmp_path):
    before = os.umask(0o022)
    try:
        with atomic_folder(tmp_path / "model"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o755


def test_a_lock_is_held_by_one_process_alone(tmp_path):
    script = (
        "import sys; from pathlib import Path; from llds.files import held\n"
        "with held(Path(sys.argv[1]), 'busy'): print('mine', flush=True); sys.stdin.read()"
    )
    lock = tmp_path / ".lock"
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "mine\n"
    with pytest.raises(LLDSError, match=r"^busy$"), held(lock, "busy"):
        pass
    other.kill()
    other.wait()
    with held(lock, "busy"):
        assert lock.exists()
