"""The suite itself: an undisturbed run passes, and the checks detect violations."""

import pytest

from tests.faults.trial import Outcome, belongings, kielo, refused, went_well


def test_an_undisturbed_run_goes_well_twice(finished):
    """All stages are there, and a second run changes no file of theirs."""
    before = belongings(finished / "run" / "train")
    went_well(kielo(finished, "run", "tiny.toml", timeout=300))
    assert belongings(finished / "run" / "train") == before


def test_the_checks_bite():
    """A traceback, another exit code and a message without the culprit each fail a case."""
    with pytest.raises(AssertionError):
        went_well(Outcome(0, "", "Traceback (most recent call last)\n"))
    with pytest.raises(AssertionError):
        refused(Outcome(0, "", "kielo: no\n"))
    with pytest.raises(AssertionError):
        refused(Outcome(1, "", "kielo: no such file\n"), "text.txt")
    assert "text.txt" in refused(Outcome(1, "", "kielo: text.txt: no such file\n"), "text.txt")
