"""How fast a large console log is read, and in how much memory, beside a loop over its lines.

Run it as ``python benchmarks/bench_diagnosis.py``, with ``--mb 1000`` for a log of 1 GB. The log is verl's, 2,000
rows of 150 keys between printed samples. Each reader runs in a process of its own, so that the peak of memory is its
own.
"""

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROWS, KEYS = 2000, 150


def write_log(path: Path, megabytes: int) -> None:
    """Write the log."""
    draw = random.Random(0)
    words = ["the", "answer", "<search>", "river", "{'a'", "1,234", "step", "so -", "that:", "\\frac{1}{2}"]
    sample = "\n".join(" ".join(draw.choices(words, k=14)) for _ in range(4000)) + "\n"
    keys = ["critic/score/mean", "response_length/mean", "num_turns/mean", "actor/entropy", "actor/grad_norm"]
    keys += [f"val-aux/set/score/best@{i}/mean" for i in range(KEYS - len(keys))]
    size = megabytes << 20
    between = max(0, size // ROWS - 60 * KEYS)
    with path.open("w", encoding="utf-8") as file:
        for step in range(1, ROWS + 1):
            file.write((sample * (between // len(sample) + 1))[:between] + "\n")
            pairs = (f"{key}:np.float64({draw.random()!r})" for key in keys)
            file.write(f"step:{step} - " + " - ".join(pairs) + "\n")


def read_ours(path: str) -> int:
    """Read the log; return the number of rows."""
    from llds.diagnosis.reading import read_logs

    return len(read_logs([path]))


def read_lines(path: str) -> int:
    """What a short script would do: go through the lines, and split those that begin with a step."""
    rows = 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("step:"):
                rows += 1
                dict(part.rsplit(":", 1) for part in line.strip().split(" - "))
    return rows


def measure(how: str, path: str) -> None:
    """Read the log in this process; print rows, processor seconds and the peak of memory in MB."""
    if how == "llds":
        import llds.diagnosis.reading  # noqa: F401
    start = time.process_time()
    rows = read_ours(path) if how == "llds" else read_lines(path)
    seconds = time.process_time() - start
    print(rows, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    """Write the log, read it in two ways, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=200, help="size of the log in megabytes")
    parser.add_argument("--measure", nargs=2, metavar=("HOW", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "output.log"
        write_log(path, options.mb)
        megabytes = path.stat().st_size / 1e6
        speeds = {}
        for how in ("llds", "lines"):
            command = [sys.executable, __file__, "--measure", how, str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows, seconds, memory = (float(word) for word in done.stdout.split()[-3:])
            speeds[how] = megabytes / seconds
            told = f"{how:<6} {rows:.0f} rows of {megabytes:.0f} MB: {speeds[how]:.0f} MB/s on one core"
            print(f"{told}, {memory:.0f} MB of memory")
        print(f"llds reads at {speeds['llds'] / speeds['lines']:.2f} times the speed of a loop over lines")


if __name__ == "__main__":
    main()
