"""What a run shows, on a terminal and in a pipe; and stopping it by signals."""

import io
import os
import signal

import pytest
from rich.console import Console

from llds.training.interrupt import stop_on_signal
from llds.training.progress import LiveDisplay, PlainDisplay, make_display

ROW = {
    "step": 3,
    "reward": 0.25,
    "searches": 1.5,
    "llds/gate_rate": 0.125,
    "llds/displacement_correct": -0.0123,
    "llds/logprob_correct": "nan",
}


def run_through(display):
    with display:
        with display.phase("evaluating", 10) as count:
            count(5)
        with display.training(2, 8):
            display.step(ROW)
            with display.phase("evaluating", 4) as count:
                count(4)
        display.note("Saved in runs/x [not markup].")


def test_a_pipe_gets_one_plain_line_per_step():
    stream = io.StringIO()
    display = make_display(stream)
    assert isinstance(display, PlainDisplay)
    run_through(display)
    text = stream.getvalue()
    assert "\x1b" not in text
    step = next(line for line in text.splitlines() if line.startswith("step 3/8"))
    for part in (
        "reward 0.250",
        "searches 1.50",
        "gates open 12%",
        "displacement -1.23e-02",
        "of correct nan",
    ):
        assert part in step
    assert "left 0:00:0" in step
    assert "Saved in runs/x [not markup]." in text


def test_in_a_narrow_terminal_labels_are_cut_and_numbers_are_not():
    stream = io.StringIO()
    run_through(LiveDisplay(Console(file=stream, force_terminal=True, width=20, no_color=True)))
    for part in ("0.250", "1.50", "12%", "-1.23e-02"):
        assert part in stream.getvalue()


def test_a_terminal_gets_the_table_and_the_bar():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    run_through(LiveDisplay(console))
    text = stream.getvalue()
    for part in ("reward", "0.250", "gates open", "12%", "training", "evaluating", "[not markup]"):
        assert part in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_the_second_stops(number):
    told = []
    before = signal.getsignal(number)
    with stop_on_signal(lambda: told.append(True)) as request:
        assert not request.requested
        os.kill(os.getpid(), number)
        assert request.requested
        assert told == [True]
        assert request.exit_code == 128 + number
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before
