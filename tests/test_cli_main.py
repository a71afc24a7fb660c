"""The command line: help, exit codes, one sentence per mistake, and what it prints."""

import errno
import json
import os
import subprocess
import sys

import pytest
from safetensors import SafetensorError

from llds.cli import main, make_streams_safe
from llds.cli.mistakes import sentence_for
from llds.search.episode import Event
from llds.training.environment import prepare_environment
from llds.training.recipe import Recipe
from llds.training.settings import settings_table
from tiny_world import built_world, small_settings

prepare_environment()


@pytest.fixture(scope="module")
def world():
    return built_world()


@pytest.fixture
def llds(monkeypatch, capsys, tmp_path):
    """Run a command in this process; returns exit code, stdout, stderr."""
    monkeypatch.setenv("LLDS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")

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


def test_help_lists_the_commands(llds):
    code, out, _ = llds("--help")
    assert code == 0
    for command in ("train", "eval", "ask"):
        assert command in out
    assert llds("--version")[1].startswith("llds ")


def test_train_help_explains_every_setting(llds):
    code, out, _ = llds("train", "--help")
    assert code == 0
    for key, item in settings_table(Recipe).items():
        assert f"\n  {key}=" in out
        assert item.help in out
        if item.unit:
            assert item.unit in out


def test_print_config_is_a_recipe_that_reads_back(llds, tmp_path):
    code, out, _ = llds("train", "smollm2", "grpo.learning_rate=3e-6", "--print-config")
    assert code == 0
    path = tmp_path / "printed.yaml"
    path.write_text(out)
    code, again, _ = llds("train", path, "--print-config")
    assert (code, again) == (0, out)
    assert "learning_rate: 3.0e-06" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "grpo.lerning_rate=1"], "did you mean 'grpo.learning_rate'?"),
        (["train", "grpo=1"], "'grpo' in 'grpo=1' is a section: name one of its settings"),
        (["train", "run.folder=/dev/null", "run.name=x"], "/dev/null"),
        (["train", "tny"], "did you mean 'tiny'?"),
        (["train", "tiny", "smollm2"], "'smollm2' is not a setting: write key=value"),
        (["eval", "tiny", "--split", "tset"], 'there is no split "tset"'),
        (["eval", "tiny", "--split", "test", "--questions", "q.jsonl"], "give one of them"),
        (["eval", "nowhere"], "There is no model folder nowhere"),
        (["ask", "nowhere", "Q?"], "There is no model folder nowhere"),
        (["ask", "tiny", "Q?", "episode.promt=x"], "did you mean 'episode.prompt'?"),
    ],
)
def test_a_mistake_is_one_sentence_on_stderr_and_exit_code_2(llds, arguments, expected):
    code, out, err = llds(*arguments)
    assert code == 2
    assert out == ""
    assert expected in err
    assert err.startswith("llds: ")
    assert err.count("\n") == 1


def test_arguments_and_terminals_of_another_encoding(llds, world, monkeypatch):
    code, out, err = llds("ask", "tiny", "Z\udcfcrich?")
    assert (code, out) == (2, "")
    assert "Argument 3 isn't UTF-8 text" in err
    script = "import sys; from llds.cli import main; main()"
    command = [sys.executable, "-c", script, "train", "run.name=Zürich→", "--print-config"]
    done = subprocess.run(
        command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "latin-1"}, check=True
    )
    assert "name: Zürich\\u2192" in done.stdout.decode("latin-1")


def test_a_long_question_is_one_sentence_that_names_the_setting(llds):
    code, _, err = llds("ask", "tiny", "Who? " * 200, "--no-retriever")
    assert code == 2
    assert "more than episode.max_prompt = 96" in err


def test_closed_streams_and_no_columns_stop_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setenv("COLUMNS", "0")
    make_streams_safe()
    for stream in (sys.stdout, sys.stderr):
        stream.write("é")
        stream.close()
    assert "COLUMNS" not in os.environ


def test_help_is_quick_because_it_imports_no_framework():
    script = (
        "import sys\nfrom llds.cli import main\nsys.argv = ['llds', 'train', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'transformers', 'trl', 'datasets', 'accelerate', 'bm25s'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("missing", ["typer", "transformers", "bm25s"])
def test_a_missing_extra_is_one_sentence(llds, monkeypatch, missing):
    monkeypatch.setattr("llds.cli.find_spec", lambda name: None if name == missing else name)
    code, out, err = llds("train")
    assert (code, out) == (2, "")
    assert err == f"llds: {missing} is not installed; run: pip install 'llds[train]'\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ImportError('needs TRL, which is not installed: pip install "llds[trl]"'),
            'pip install "llds[trl]".',
        ),
        (ModuleNotFoundError("No module named 'gguf'", name="gguf"), "pip install 'llds[train]'"),
        (ImportError("cannot import name 'x'"), None),
    ],
)
def test_what_is_imported_late_may_be_missing_too(error, said):
    sentence = sentence_for(error)
    assert sentence is None if said is None else sentence is not None and sentence.endswith(said)


def test_train_eval_ask_work_together(llds, world, tmp_path):
    settings = small_settings(world, world / "model", tmp_path / "runs")
    code, out, err = llds("train", *settings, "run.rollouts=1", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["finished"]
    assert {"before", "after"} <= result["evaluations"].keys()
    assert "step 2/2" in err

    folder = result["folder"]
    # What the run held out is asked again, unless something else is said.
    code, out, err = llds("eval", folder, "--json", "--rows", tmp_path / "rows.jsonl")
    assert code == 0, err
    again = json.loads(out)
    assert again["groups"] == result["evaluations"]["after"]["groups"]
    assert f"Answering 8 questions of {world / 'test.jsonl'}." in err
    _, _, err = llds("eval", folder, "--questions", world / "train.jsonl", "--no-retriever")
    assert f"Answering 12 questions of {world / 'train.jsonl'}." in err
    _, _, err = llds("eval", folder, "--split", "validation", "evaluation.questions=2", "--no-retriever")
    assert "Answering 2 questions of the embedded validation split." in err
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 8
    code, out, _ = llds("eval", folder, "--questions", world / "test.jsonl", "--no-retriever")
    assert code == 0
    assert "one-hop" in out

    question = "What is the currency of Estia?"
    code, out, _ = llds("ask", folder, question)
    assert code == 0
    assert "<search> Estia currency </search>" in out
    assert "<information>" in out
    code, asked, _ = llds("ask", folder, question, "--json")
    assert json.loads(asked)["response"].strip() == out.strip()


def test_a_model_folder_without_a_recipe_gets_the_default_one(llds, world):
    code, out, err = llds(
        "ask",
        world / "model",
        "What is the currency of Estia?",
        f"retrieval.corpus={world / 'corpus.jsonl'}",
        "episode.max_response=256",
        "--no-retriever",
    )
    assert code == 0, err
    assert "<information></information>" in out


class OutOfMemoryError(RuntimeError):
    """As torch's, which is recognised by its name."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/x"),
            "runs/x: No space left on device; make room",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "runs"),
            "runs: Permission denied; check its perm",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; make room"),
        (OutOfMemoryError("Tried to allocate\nmuch"), "memory is full; lower grpo.micro_batch"),
        (
            SafetensorError("Error while serializing: I/O error: x (os error 28)"),
            "No space left on device; make room",
        ),
        (SafetensorError("invalid header"), "can't be read or written: invalid header."),
        (OSError("made by hand"), None),
        (ValueError("a fault of the program"), None),
    ],
)
def test_faults_of_the_machine_are_told_apart_from_those_of_the_program(error, expected):
    said = sentence_for(error)
    if expected is None:
        assert said is None
    else:
        assert expected in said
        assert "\n" not in said


def test_what_a_tool_found_cannot_steer_the_terminal(capsys):
    from llds.cli.asking import _Screen

    screen = _Screen()
    screen(Event("observation", 0, "a\x1b]0;title\x07\x9b2Jbc\n"))
    screen.finish("answer")
    assert capsys.readouterr().out == "a\ufffd]0;title\ufffd\ufffd2Jbc\n\n"
