"""Tests go through the front door: no private name of Kielo is read, imported or patched."""

import pytest

from tests.house.checks import PACKAGE, ROOT, private_names_used


def test_no_test_touches_a_private_name():
    """A test that did would hold the inside as it is, and break with a change that nobody outside sees."""
    assert private_names_used(ROOT / "tests", PACKAGE) == []


@pytest.mark.parametrize(
    "planted",
    [
        "from kielo.room import _helper",
        "def test(run):\n    assert run._tensors",
        "def test(run):\n    run._tensors = {}",
        "def test(monkeypatch, run):\n    monkeypatch.setattr(run, '_tensors', {})",
        "def test(monkeypatch):\n    monkeypatch.setattr('kielo.room._LIMIT', 3)",
        "def test(run):\n    getattr(run, '_helper')()",
    ],
)
def test_a_planted_use_is_found(tmp_path, planted):
    """Each way to reach a private name is found; a test's own private names and other packages' are not."""
    package, tests = tmp_path / "kielo", tmp_path / "tests"
    package.mkdir()
    tests.mkdir()
    (package / "room.py").write_text(
        "_LIMIT = 2\n\n\ndef _helper():\n    pass\n\n\nclass Run:\n"
        "    def __init__(self):\n        self._tensors = {}\n"
    )
    sound = (
        "import os\n\n\nclass Own:\n    def end(self):\n"
        "        self._tensors = 1\n        os._exit(self._tensors)\n"
    )
    (tests / "test_room.py").write_text(sound)
    assert private_names_used(tests, package) == []
    (tests / "test_room.py").write_text(sound + planted)
    assert len(private_names_used(tests, package)) == 1
