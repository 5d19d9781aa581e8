"""The run that `synthetic_run` writes, with its report; tests that change it copy it."""

from pathlib import Path

import pytest

from kielo.report.write import write_report
from tests.report import synthetic_run
from tests.report.synthetic_run import RECIPE, STAGES


@pytest.fixture(scope="package")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run with space")
    synthetic_run.write_run(folder)
    assert write_report(folder, RECIPE, STAGES) == folder / "report.html"
    return folder
