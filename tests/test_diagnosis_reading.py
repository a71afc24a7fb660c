"""Readers of logs: every shape gives the same table, whatever a terminal, a crash or a copy did to it."""

import gzip
import io
import math
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import log_shapes
from llds.diagnosis.building import TableBuilder
from llds.diagnosis.formats.console import ConsoleReader, read_dict
from llds.diagnosis.formats.events import masked_crc
from llds.diagnosis.formats.rows import Row, decimals_of, read_number
from llds.diagnosis.reading import FORMATS, LogFollower, detect, read_logs, table_csv, write_table
from llds.diagnosis.vocabulary import SERIES, canonical_names
from llds.errors import LLDSError
from log_shapes import LOGS, SHAPES


def read(data, name="log", **options):
    stream = io.BytesIO(data)
    stream.name = name
    return read_logs([stream], **options)


def same(one, other):
    assert one.steps.tolist() == other.steps.tolist()
    for name in SERIES:
        a, b = one.values(name), other.values(name)
        assert (a is None) == (b is None), name
        if a is not None:
            np.testing.assert_allclose(a, b, rtol=1e-6)


# --- shapes


@pytest.mark.parametrize("shape", ["ray", "jsonl", "csv", "wandb csv", "gzip"])
def test_a_run_reads_the_same_from_every_shape(shape):
    same(read(SHAPES["console"]), read(SHAPES[shape]))


def test_trl_reads_the_same_from_console_state_swift_and_tensorboard():
    state = read(SHAPES["trainer state"])
    assert state.engine == "trl"
    assert (state.format, len(state)) == ("trainer-state", 30)
    for shape in ("ms-swift", "tensorboard"):
        same(state, read(SHAPES[shape]))
    console = read(SHAPES["trl console"])
    same(state, console)
    assert "does not number its steps" in " ".join(console.notes)
    assert read(SHAPES["ms-swift"]).engine == "ms-swift"


def test_the_checksum_is_that_of_the_standard():
    # The check value of CRC-32C, and TFRecord's mask over it.
    crc = 0xE3069283
    assert masked_crc(b"123456789") == (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@pytest.mark.parametrize(
    ("file", "rows", "last", "engine"),
    [
        ("verl_collapse_tools.log", 59, 59, "verl"),
        ("verl_collapse_fast.log.gz", 261, 261, "verl"),
        ("verl_entropy_hump.log", 238, 238, "verl"),
        ("verl_old_nine_steps.log", 9, 9, "verl"),
        ("trainer_state.json", 250, 250, "trl"),
    ],
)
def test_real_logs(file, rows, last, engine):
    table = read_logs([LOGS / file])
    assert (len(table), int(table.steps[-1]), table.engine) == (rows, last, engine)
    assert table.damaged_count == 0
    assert {"reward", "response_tokens", "grad_norm"} <= set(table.columns)


def test_three_decimals_are_noticed_and_full_precision_is_not():
    old = read_logs([LOGS / "verl_old_nine_steps.log"])
    assert old.columns["kl_old"].decimals == 3
    new = read_logs([LOGS / "verl_collapse_tools.log"])
    assert all(new.columns[name].decimals is None for name in ("reward", "kl_old", "truncated"))


def test_kl_to_old_and_to_reference_are_two_series():
    found = canonical_names(["actor/ppo_kl", "actor/kl_loss", "kl"])
    assert (found["kl_old"], found["kl_ref"]) == (["actor/ppo_kl"], ["actor/kl_loss"])
    table = read_logs([LOGS / "verl_collapse_tools.log"])
    assert table.columns["kl_old"].key == "actor/ppo_kl"
    assert "mean over micro-batches" in table.columns["entropy"].masked_mean


def test_our_own_runs_are_read_with_what_is_not_finite(tmp_path):
    lines = [
        '{"step": 1, "rollout": 1, "reward": 0.5, "grad_norm": 1.0, "llds/gate_rate": 0.1, "llds/coef": 0.2}'
    ]
    lines.append('{"step": 2, "rollout": 1, "grad_norm": "nan", "llds/gate_rate": 0.2, "llds/coef": 0.2}')
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    (tmp_path / "events.jsonl").write_text("{}\n")
    table = read_logs([tmp_path])
    assert table.engine == "llds"
    assert table.columns["gate_rate"].key == "llds/gate_rate"
    assert table.columns["grad_norm"].unreadable.tolist() == [False, True]
    assert table.columns["reward"].unreadable.tolist() == [False, False]
    assert math.isnan(table.columns["reward"].values[1])


def test_text_of_another_shape_by_a_pattern():
    text = b"it 5 | R=0.25 | gn 1e-2\nnoise\nit 6 | R=nan | gn 2e-2\n"
    table = read(text, pattern=r"it (?P<step>\d+) \| R=(?P<reward>\S+) \| gn (?P<grad_norm>\S+)")
    assert table.steps.tolist() == [5, 6]
    assert table.values("grad_norm").tolist() == [0.01, 0.02]
    assert table.columns["reward"].unreadable.tolist() == [False, True]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(", "no regular expression"),
        ("step", "needs named groups"),
        (r"(?P<step>\d+)", "needs named groups"),
    ],
)
def test_a_wrong_pattern_is_one_sentence(pattern, words):
    with pytest.raises(LLDSError, match=words):
        read(b"step 1\n", pattern=pattern)


def test_a_pattern_that_never_ends_is_stopped():
    with pytest.raises(LLDSError, match=r"took more than 0\.5 s on line 1"):
        read(b"a" * 60 + b"!\n", pattern=r"(?P<reward>(?:a|aa)+)$")


# --- what happens to lines


def console(data):
    reader = ConsoleReader()
    return [row for _, row in [*reader.feed(data), *reader.close()]], reader


def test_lines_broken_by_a_terminal_are_joined():
    line = log_shapes.verl_line(3, log_shapes.rows(1)[0])
    whole, _ = console(line.encode() + b"\n")
    following = log_shapes.verl_line(4, log_shapes.rows(1)[0])
    for width in range(40, len(line) - 1):
        broken = "\n".join([line[:width], line[width:], "Answer: no", following]) + "\n"
        rows, _ = console(broken.encode())
        assert rows[0].step == 3
        # A break right behind a value may look like its end; then what follows is lost, and nothing is made up.
        for key, value in rows[0].values.items():
            if not line[:width].endswith(f"{key}:{value!r}"[:3]):
                assert key in whole[0].values
        assert rows[-1].step == 4
        if line[width - 1] not in "0123456789." and line[width] not in "0123456789.":
            assert rows[0].values == whole[0].values, (width, line[width - 5 : width + 5])


def test_a_dangling_dash_goes_on_in_the_next_line():
    rows, _ = console(b"step:7 - actor/lr:0.5 -\nactor/entropy:0.25 - critic/score/mean:1.0\nother\n")
    assert rows == [
        Row(7, {"actor/lr": 0.5, "actor/entropy": 0.25, "critic/score/mean": 1.0}, rows[0].decimals)
    ]
    rows, _ = console(b"step:7 - actor/lr:0.5 -\nnothing of the kind\n")
    assert rows[0].values == {"actor/lr": 0.5}


def test_a_line_cut_in_the_middle_keeps_what_is_whole():
    rows, _ = console(b"step:10 - actor/lr:0.5 - val-aux/x/mean@30:np.float64(0.2) - val-aux/x/maj:np.flo\n")
    assert rows[0].values == {"actor/lr": 0.5, "val-aux/x/mean@30": 0.2}


def test_line_numbers_of_damage():
    table = read(b"x\nstep:1 - actor/lr:0.5\nstep:2 - what\nstep:3 - actor/lr:0.5\n", format="console")
    assert [(one.line, table.damaged_count) for one in table.damaged] == [(3, 1)]
    table = read(b'{"step": 1, "reward": 1}\nbroken\n{"step": 2, "reward": 2}\n[1]\n')
    assert [one.line for one in table.damaged] == [2, 4]


def test_feeding_in_pieces_changes_nothing():
    data = SHAPES["console"] + SHAPES["ray"]
    whole, _ = console(data)
    for size in (1, 7, 100, 4096):
        reader = ConsoleReader()
        rows = [
            row for start in range(0, len(data), size) for _, row in reader.feed(data[start : start + size])
        ]
        rows += [row for _, row in reader.close()]
        assert rows == whole
        assert reader.lines == data.count(b"\n")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1.0),
        ("-0.5e-3", -5e-4),
        ("np.float64(0.25)", 0.25),
        ("np.int32(2)", 2.0),
        ("'0.5'", 0.5),
        (".5", 0.5),
        ("torch.tensor(1.5)", 1.5),
        ("True", 1.0),
    ],
)
def test_numbers_as_python_prints_them(text, number):
    assert read_number(text) == number


def test_numbers_that_are_none_or_not_finite():
    assert math.isnan(read_number("nan"))
    assert read_number("-inf") == -math.inf
    assert [read_number(text) for text in ("", "x", "1.2.3", "0x10", "1_000", "--1")] == [None] * 6
    assert [decimals_of(text) for text in ("0.000", "1", "1e-5", "np.float64(0.1)")] == [3, 0, None, None]
    assert read_dict("{'loss': nan, 'x': -inf, 'ok': True}") == {"loss": "nan", "x": "-inf", "ok": True}
    assert read_dict("{'a': __import__('os')}") is None


# --- resumes


def test_a_resumed_run_overwrites_what_it_does_again(tmp_path):
    def lines(steps, value):
        return "".join(f'{{"step": {step}, "reward": {value}}}\n' for step in steps)

    (tmp_path / "a.jsonl").write_text(lines(range(1, 11), 1.0))
    (tmp_path / "b.jsonl").write_text(lines(range(8, 13), 2.0))
    table = read_logs([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert table.steps.tolist() == list(range(1, 13))
    assert table.values("reward").tolist() == [1.0] * 7 + [2.0] * 5
    assert [(one.from_step, one.to_step) for one in table.resumes] == [(10, 8)]
    assert table.rows_read == 15
    alone = read((lines(range(1, 11), 1.0) + lines(range(8, 13), 2.0)).encode())
    same(table, alone)


def test_rows_of_one_step_are_put_together():
    table = read(b'{"step": 1, "reward": 1}\n{"step": 1, "eval_reward": 3}\n{"step": 2, "reward": 2}\n')
    assert table.steps.tolist() == [1, 2]
    assert table.values("validation").tolist()[0] == 3
    assert table.resumes == ()


def test_rows_of_validation_alone_are_left_out_and_told():
    table = read(b'{"step": 0, "eval_reward": 3}\n{"step": 1, "reward": 1}\n')
    assert table.steps.tolist() == [1]
    assert "validation figures only" in table.notes[0]


# --- sources


def test_folders_and_what_is_in_them(tmp_path):
    run = tmp_path / "run"
    for name, count in (("checkpoint-9", 9), ("checkpoint-10", 10)):
        (run / name).mkdir(parents=True)
        (run / name / "trainer_state.json").write_bytes(log_shapes.trainer_state(count))
    assert len(read_logs([run])) == 10
    (tmp_path / "wandb" / "files").mkdir(parents=True)
    (tmp_path / "wandb" / "files" / "output.log").write_bytes(SHAPES["console"])
    assert read_logs([tmp_path / "wandb"]).files == (str(tmp_path / "wandb" / "files" / "output.log"),)
    (tmp_path / "empty").mkdir()
    with pytest.raises(LLDSError, match="holds no log that is known"):
        read_logs([tmp_path / "empty"])


def test_standard_input(monkeypatch):
    class Stdin:
        buffer = io.BufferedReader(io.BytesIO(SHAPES["gzip"]))

    monkeypatch.setattr(sys, "stdin", Stdin)
    assert len(read_logs(["-"])) == 30


def test_a_torn_archive_gives_what_could_be_unpacked():
    data = gzip.compress(b"".join(SHAPES["jsonl"] for _ in range(1)) * 1, compresslevel=0)
    table = read(data[: len(data) // 2])
    assert 5 < len(table) < 30
    assert any("can't be unpacked" in one.reason for one in table.damaged)


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (b"", {}, "No step was found"),
        (b"hello\nworld\n", {}, "No step was found in .*log, read as console"),
        (b"hello", {"format": "word"}, "There is no format 'word'"),
        (b"hello", {"format": "pattern"}, "belong together"),
        (b"\x28\xb5\x2f\xfd1234", {}, "packed by zstd"),
        (b'{"log_history": [', {}, "No step was found"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(data, options, words):
    with pytest.raises(LLDSError, match=words):
        read(data, **options)


def test_missing_files_and_none_at_all(tmp_path):
    with pytest.raises(LLDSError, match="can't be read: No such file"):
        read_logs([tmp_path / "nothing.log"])
    with pytest.raises(LLDSError, match="No log was given"):
        read_logs([])


def test_formats_are_told_from_their_first_bytes():
    expected = {
        "console": "console",
        "ray": "console",
        "jsonl": "jsonl",
        "csv": "csv",
        "wandb csv": "csv",
        "trl console": "console",
        "trainer state": "trainer-state",
        "ms-swift": "jsonl",
        "tensorboard": "tensorboard",
    }
    assert {shape: detect(SHAPES[shape]) for shape in expected} == expected
    assert set(expected.values()) | {"pattern"} == set(FORMATS)


# --- tables


def test_the_table_can_be_written_and_read_again(tmp_path):
    table = read(SHAPES["console"])
    write_table(table, tmp_path / "t.csv")
    again = read_logs([tmp_path / "t.csv"])
    assert again.steps.tolist() == table.steps.tolist()
    assert again.values("reward").tolist() == table.values("reward").tolist()
    write_table(table, tmp_path / "t.parquet")
    import pyarrow.parquet as pq

    assert pq.read_table(tmp_path / "t.parquet")["reward"].to_pylist() == table.values("reward").tolist()
    with pytest.raises(LLDSError, match=r"as \.csv or \.parquet"):
        write_table(table, tmp_path / "t.xlsx")
    assert table_csv(table).splitlines()[0].startswith("step,reward,")


def test_too_many_keys_are_left_out_and_told():
    builder = TableBuilder()
    builder.open("x")
    builder.add(Row(1, {f"key{i}": 1.0 for i in range(3100)}))
    assert "100 keys beyond" in builder.table("jsonl").notes[0]


# --- following


@pytest.mark.parametrize("shape", ["console", "ray", "jsonl", "trl console"])
def test_following_reads_what_reading_reads(shape):
    data = SHAPES[shape]
    log = LogFollower("log")
    for start in range(0, len(data), 113):
        log.feed(data[start : start + 113])
    log.close()
    same(log.table(), read(data))


def test_what_cannot_be_followed_is_one_sentence():
    with pytest.raises(LLDSError, match="can't be followed"):
        LogFollower("x").feed(SHAPES["trainer state"])


# --- damage: never a traceback, never a hang


@pytest.mark.parametrize("shape", SHAPES)
@given(data=st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_logs_are_read_or_refused(shape, data):
    content = bytearray(SHAPES[shape])
    for _ in range(data.draw(st.integers(0, 6))):
        place = data.draw(st.integers(0, max(0, len(content) - 1)))
        kind = data.draw(st.sampled_from(["cut", "flip", "drop", "insert", "repeat"]))
        if kind == "cut":
            del content[place:]
        elif kind == "flip" and content:
            content[place] = data.draw(st.integers(0, 255))
        elif kind == "drop":
            del content[place : place + data.draw(st.integers(1, 200))]
        elif kind == "insert":
            content[place:place] = data.draw(st.binary(max_size=30))
        else:
            content[place:place] = content[place : place + 300]
    try:
        table = read(bytes(content))
    except LLDSError:
        return
    assert len(table) >= 1
    assert (np.diff(table.steps) > 0).all()
    assert all(len(column.values) == len(table) for column in table.columns.values())
