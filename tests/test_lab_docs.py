"""The page of the laboratory says what the stored series say, and nothing else."""

import re
import shutil
from pathlib import Path

import pytest

from llds.lab.arms import arm_named
from llds.lab.regimes import regime_named
from llds.lab.report import write_report
from llds.lab.series import Store, settings_of

ROOT = Path(__file__).parents[1]
STORE = Store(ROOT / "lab" / "series")


def test_the_page_and_its_pictures_are_those_of_the_series(tmp_path):
    page = tmp_path / "lab.md"
    shutil.copy(ROOT / "docs" / "lab.md", page)
    written = write_report(STORE, page)
    assert page.read_text() == (ROOT / "docs" / "lab.md").read_text()
    for path in written[:-1]:
        assert path.read_text() == (ROOT / "docs" / "figures" / path.name).read_text(), path.name


def test_the_page_shows_only_pictures_that_are_there():
    page = (ROOT / "docs" / "lab.md").read_text()
    shown = re.findall(r"\]\((figures/[^)]+)\)", page)
    assert shown
    assert all((ROOT / "docs" / name).exists() for name in shown)
    assert page.count("<!-- end of ") == len(re.findall(r"<!-- (?!end)", page))


@pytest.mark.parametrize(("regime", "arm"), STORE.names())
def test_the_series_were_made_with_the_settings_of_today(regime, arm):
    settings = settings_of(regime_named(regime), arm_named(arm))
    runs = STORE.read(regime, arm, settings)
    assert runs
    for run in runs:
        assert len(run["reward"]) == regime_named(regime).rollouts
