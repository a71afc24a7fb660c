"""Write the measured tables of docs/diagnosis.md, and its schema file.

Run it as ``PYTHONPATH=src python docs/make_diagnosis.py``. It needs nothing but llds and takes some minutes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from llds.diagnosis.findings import CLASSES
from llds.diagnosis.reading import read_logs
from llds.diagnosis.schema import JSON_SCHEMA
from llds.diagnosis.synthetic import HEALTHY, SICK, Made
from llds.diagnosis.verdict import diagnose
from llds.diagnosis.watch import lead_of
from llds.files import atomic_write_text

DOCS = Path(__file__).parent
PAGE = DOCS / "diagnosis.md"
LOGS = DOCS.parent / "tests" / "fixtures" / "logs"
#: The thresholds were chosen on seeds from 1000 on.
SEEDS = range(100)
TRUTH = {
    "verl_collapse_tools.log": "tool abandonment, then collapse; gradient surges from 36",
    "verl_collapse_fast.log.gz": "collapse within 12 steps, dead after",
    "verl_entropy_hump.log": "healthy: entropy .25, .63, .32, length grows",
    "verl_old_nine_steps.log": "nine steps: too short",
    "trainer_state.json": "healthy: noisy tiny batch",
}


def main() -> None:
    """Write everything."""
    page = PAGE.read_text("utf-8")
    page = replaced(
        page, "classes", table(("verdict", "meaning"), [(f"`{k}`", v) for k, v in CLASSES.items()])
    )
    page = replaced(page, "real", real_table())
    page = replaced(page, "synthetic", synthetic_table())
    atomic_write_text(PAGE, page)
    atomic_write_text(DOCS / "diagnosis.schema.json", json.dumps(JSON_SCHEMA, indent=2) + "\n")


def replaced(page: str, mark: str, content: str) -> str:
    """Return ``page`` with ``content`` between the comments that are named by ``mark``."""
    start, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
    return page.split(start)[0] + start + content + end + page.split(end)[1]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def real_table() -> str:
    """Return what is said of the real logs, and how early ``llds watch`` would have been."""
    rows = []
    for name, truth in TRUTH.items():
        log = read_logs([LOGS / name])
        diagnosis, lead = diagnose(log), lead_of(log)
        onset = "" if diagnosis.onset_step is None else str(diagnosis.onset_step)
        numbers = (lead.alarm_step, lead.visible_step, lead.steps)
        told = ["" if number is None else str(number) for number in numbers]
        rows.append((name, truth, f"`{diagnosis.verdict}`, {diagnosis.severity}", onset, *told))
    head = ("log", "truth", "verdict", "onset", "first alarm", "visible", "lead")
    return table(head, rows)


def synthetic_table() -> str:
    """Return how often made-up logs are named, and how near their onset is."""
    rows = [healthy_row(name, make) for name, make in HEALTHY.items()]
    rows += [sick_row(name, make) for name, make in SICK.items()]
    head = ("logs", "named right", "otherwise", "critical though healthy", "onset within 5 rows")
    return table(head, rows)


def healthy_row(name: str, make: Callable[[int], Made]) -> tuple[str, ...]:
    """Return the row of a healthy kind."""
    found = [diagnose(make(seed).table) for seed in SEEDS]
    others = Counter(f"{one.verdict} ({one.severity})" for one in found if one.verdict != "healthy")
    critical = sum(one.severity == "critical" for one in found)
    right = sum(one.verdict == "healthy" for one in found)
    return f"healthy: {name}", f"{right} of {len(found)}", _said(others), f"{critical} of {len(found)}", ""


def sick_row(name: str, make: Callable[[int], Made]) -> tuple[str, ...]:
    """Return the row of a class."""
    others: Counter[str] = Counter()
    right = near = 0
    for seed in SEEDS:
        made = make(seed)
        diagnosis = diagnose(made.table)
        if diagnosis.verdict != name:
            others[f"{diagnosis.verdict} ({diagnosis.severity})"] += 1
            continue
        right += 1
        assert diagnosis.onset_step is not None
        assert made.onset is not None
        near += abs(diagnosis.onset_step - made.onset) <= 5 * int(made.table.steps[0])
    return name, f"{right} of {len(SEEDS)}", _said(others), "", f"{near} of {right}"


def _said(others: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in others.most_common())


if __name__ == "__main__":
    main()
