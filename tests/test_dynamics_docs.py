"""What docs/dynamics.md says about series and thresholds is what the code does."""

import importlib.util
from dataclasses import asdict
from pathlib import Path

from llds.dynamics import PhaseSettings
from llds.dynamics.detectors import Drift, Persistence
from llds.dynamics.phases import SIGNALS

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "dynamics.md").read_text("utf-8")


def maker():
    spec = importlib.util.spec_from_file_location("make_dynamics", DOCS / "make_dynamics.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_series_is_up_to_date():
    make = maker()
    assert make.replaced(PAGE, "series", make.series_table()) == PAGE, "run python docs/make_dynamics.py"


def test_the_figures_are_up_to_date():
    make = maker()
    for name, run in make.FIGURES.items():
        path = DOCS / "figures" / f"dynamics_{name}.svg"
        assert f"figures/{path.name}" in PAGE
        assert path.read_text("utf-8") == make.figure(run), "run python docs/make_dynamics.py"


def test_the_measured_table_is_whole():
    make = maker()
    start, end = PAGE.index("<!-- measured -->"), PAGE.index("<!-- end of measured -->")
    rows = PAGE[start:end].strip().split("\n")[3:]
    assert len(rows) == 2 * (2 + len(make.HEALTHY) + len(make.HARD))


def test_the_thresholds_in_the_text_are_those_in_the_code():
    rule = asdict(PhaseSettings())
    assert (rule["displacement_on"], rule["displacement_off"], rule["epsilon"]) == (9, 2, 1e-4)
    assert (rule["drift_on"], rule["drift_off"], rule["level_alone"]) == (3.5, 1.5, 5)
    cells = [line for line in PAGE.split("\n") if line.startswith("| ") and " | likelihood | " in line]
    assert "between 0 and 16; ε = 1e-4" in cells[0]
    assert cells[0].endswith("| 9 | below 2, five values in a row |")
    assert cells[1].endswith("| 3.5 | below 1.5, five in a row |")
    assert Persistence(above=0).cap == 16
    drift = Drift(bad=1, least=0)
    assert (drift.short, drift.long, drift.warmup) == (7, 15, 20)
    assert "median of the last 7 values against the best median of 15" in PAGE
    assert all(name in PAGE for signal in SIGNALS.values() for name in signal.series)
