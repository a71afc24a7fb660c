"""The lines of docs/evaluation.md, run as they stand."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from llds.cli import main
from llds.evaluation.statistics import wilson

PAGE = (Path(__file__).parent.parent / "docs" / "evaluation.md").read_text("utf-8")


def test_ten_lines_from_file_to_score(tmp_path, monkeypatch, capsys):
    block = next(block for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) if "<<'END'" in block)
    assert len(block.splitlines()) == 10
    monkeypatch.chdir(tmp_path)
    commands = [line for line in block.splitlines() if line.startswith("llds ")]
    files = "\n".join(line for line in block.splitlines() if not line.startswith("llds "))
    subprocess.run(["sh", "-euc", files], check=True)
    for command in commands:
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        with pytest.raises(SystemExit) as ending:
            main()
        assert not ending.value.code
    out = capsys.readouterr().out
    assert "passages.jsonl: 2 rows, passages" in out
    assert "agent against one-shot" in out
    (row,) = [json.loads(line) for line in Path("scores/agent.jsonl").read_text().splitlines()]
    assert row["answer"] == "Estia"
    assert re.search(r'stops after one search, with\s+"Estia"', PAGE)


def test_the_interval_that_is_named():
    assert "0 of 125: [0, 3.0 %]" in PAGE
    assert f"{100 * wilson(0, 125).high:.1f}" == "3.0"
