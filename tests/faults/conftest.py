"""Workplaces for the fault suite: made once, and copied for each case.
Everything in this folder is marked `faults`.
"""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kielo.cli.main import main
from tests.faults.trial import Outcome, write_workplace


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.faults)


@pytest.fixture(autouse=True, scope="session")
def _signals_arrive() -> Iterator[None]:
    """Ctrl-C and SIGHUP reach the processes that the suite starts.

    In the background, and under nohup, they would inherit that these signals are ignored.
    """
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def here(monkeypatch, capfd):
    """here(workplace, *arguments): the verb in this process, in `workplace`: quick, and an exception that
    gets out of it fails the case. For verbs that start no workers and get no signals.
    """

    def call(workplace: Path, *arguments: str | Path) -> Outcome:
        monkeypatch.chdir(workplace)
        capfd.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit:  # argparse
            code = exit.code
        out, err = capfd.readouterr()
        return Outcome(code, out, err)

    return call


@pytest.fixture
def workplace(tmp_path) -> Path:
    """A recipe and its text; nothing has run."""
    return write_workplace(tmp_path / "workplace")


@pytest.fixture(scope="session")
def _packed(tmp_path_factory) -> Path:
    return _run_to("pack", write_workplace(tmp_path_factory.mktemp("packed") / "workplace"))


@pytest.fixture(scope="session")
def _trained(tmp_path_factory, _packed) -> Path:
    return _run_to("train", _copy(_packed, tmp_path_factory.mktemp("trained")))


@pytest.fixture(scope="session")
def _finished(tmp_path_factory, _trained) -> Path:
    return _run_to("report", _copy(_trained, tmp_path_factory.mktemp("finished")))


@pytest.fixture
def packed(tmp_path, _packed) -> Path:
    """A workplace whose run has corpus, tokenizer and tokens."""
    return _copy(_packed, tmp_path)


@pytest.fixture
def trained(tmp_path, _trained) -> Path:
    """A workplace whose run is trained: 20 steps, checkpoints 15 and 20."""
    return _copy(_trained, tmp_path)


@pytest.fixture
def finished(tmp_path, _finished) -> Path:
    """A workplace whose run went through all stages."""
    return _copy(_finished, tmp_path)


def _run_to(stage: str, workplace: Path) -> Path:
    """In this process, which has imported torch and transformers."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(workplace)
        assert main(["run", "tiny.toml", "--to", stage]) == 0
    return workplace


def _copy(workplace: Path, folder: Path) -> Path:
    """File times are kept: stages compare them."""
    return Path(shutil.copytree(workplace, folder / "workplace", symlinks=True))
