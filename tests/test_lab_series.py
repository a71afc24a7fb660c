"""What is stored comes back, with what made it; other files are refused."""

import json
from dataclasses import replace

import numpy as np
import pytest

from llds.errors import LLDSError
from llds.lab.arms import ARMS
from llds.lab.regimes import REGIMES
from llds.lab.series import Store, settings_of

SETTINGS = settings_of(REGIMES["far"], ARMS["llds"])


def rows(seed, count=7):
    draw = np.random.default_rng(seed)
    return [
        {"rollout": float(i), "reward": draw.random(), "kl": None if i == 3 else draw.random() * 1e-4}
        for i in range(count)
    ]


def test_a_run_comes_back(tmp_path):
    store = Store(tmp_path)
    assert store.read("far", "llds") == []
    for seed in (3, 1):
        store.add("far", "llds", SETTINGS, seed, rows(seed), 12.345)
    assert store.names() == [("far", "llds")]
    assert store.seeds("far", "llds", SETTINGS) == {1, 3}
    first, second = store.read("far", "llds", SETTINGS)
    assert (first.seed, second.seed, first.updates, first.cpu_seconds) == (1, 3, 10, 12.35)
    for run in (first, second):
        for name in ("reward", "kl"):
            wanted = [np.nan if row[name] is None else row[name] for row in rows(run.seed)]
            np.testing.assert_allclose(run[name], wanted, rtol=2e-4)
    assert np.isnan(first["not measured"]).all()


def test_files_are_small(tmp_path):
    """Ten runs of a hundred rollouts with as many series as there are: under a hundred kilobytes."""
    store = Store(tmp_path)
    draw = np.random.default_rng(0)
    for seed in range(10):
        many = [{f"series{i}": draw.normal() for i in range(38)} for _ in range(100)]
        store.add("far", "llds", SETTINGS, seed, many, 1.0)
    assert store.path("far", "llds").stat().st_size < 110_000


def test_a_seed_is_replaced_and_new_columns_may_come(tmp_path):
    store = Store(tmp_path)
    store.add("far", "llds", SETTINGS, 0, rows(0), 1.0)
    store.add("far", "llds", SETTINGS, 0, [{**row, "new": 1.0} for row in rows(5)], 2.0)
    (run,) = store.read("far", "llds")
    assert run.cpu_seconds == 2.0
    assert run["new"].tolist() == [1.0] * 7
    np.testing.assert_allclose(run["reward"], [row["reward"] for row in rows(5)], rtol=2e-4)


def test_other_settings_are_refused(tmp_path):
    store = Store(tmp_path)
    store.add("far", "llds", SETTINGS, 0, rows(0), 1.0)
    other = settings_of(replace(REGIMES["far"], lr=1e-5), ARMS["llds"])
    for use in (store.seeds, store.read):
        with pytest.raises(
            LLDSError, match=r"llds\.parquet was made with another regime\.lr than is set now"
        ):
            use("far", "llds", other)
    with pytest.raises(LLDSError, match=r"regime\.lr"):
        store.add("far", "llds", other, 1, rows(1), 1.0)
    assert store.seeds("far", "llds") == {0}


def test_a_broken_file_is_named(tmp_path):
    store = Store(tmp_path)
    (tmp_path / "far").mkdir()
    for content in (b"", b"PAR1 nonsense"):
        store.path("far", "llds").write_bytes(content)
        with pytest.raises(LLDSError, match=r"llds\.parquet is not a file of the laboratory"):
            store.read("far", "llds")


def test_settings_hold_all_that_matters():
    settings = json.loads(json.dumps(SETTINGS))
    assert settings["regime"]["task"]["noise"] == 0.4
    assert settings["arm"] == {"coef": 0.2}
    assert "about" not in settings["regime"]
