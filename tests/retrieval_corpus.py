"""A corpus with known answers, small encoders, and a server process, for the tests of retrieval."""

import json
import os
import select
import signal
import subprocess
import sys
import time

NAMES = [
    f"{first}{last}" for first in ("Nor", "Sud", "Est", "Wes") for last in ("ville", "burg", "ton", "dorf")
]
PLANTS = ["oak", "elm", "ash", "fir", "yew", "fig"]


def make_rows(count):
    """Row ``i`` alone speaks of ``key<i>``."""
    return [
        {
            "id": f"doc{i}",
            "contents": f'"Place {i}"\n{NAMES[i % 16]} has key{i:05d}, where the {PLANTS[i % 6]} grows by water.',
        }
        for i in range(count)
    ]


def write_corpus(path, count=300):
    path.write_text("".join(json.dumps(row) + "\n" for row in make_rows(count)))
    return path


def key_of(number):
    return f"key{number:05d}"


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1", **more}


class ServerProcess:
    """A real ``llds serve``; ``url`` is the address that it printed."""

    def __init__(self, folder, *arguments, port=0, token=None):
        command = [sys.executable, "-m", "llds.cli", "serve", str(folder), "--port", str(port), *arguments]
        secret = {} if token is None else {"LLDS_RETRIEVAL_TOKEN": token}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**secret)
        )
        ready, _, _ = select.select([self.process.stdout], [], [], 60)
        self.url = self.process.stdout.readline().strip() if ready else ""
        if not self.url:
            self.process.kill()
            raise AssertionError(self.process.communicate()[1])
        self.base = self.url.removesuffix("/retrieve")
        self.port = int(self.base.rpartition(":")[2])

    def memory(self):
        """The resident bytes of the process."""
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def stop(self, number=signal.SIGTERM):
        """Return the exit code and what was said on stderr."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            _, err = self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, err

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.stop()


def wait_for(condition, seconds=30):
    """Wait until ``condition()`` is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)
