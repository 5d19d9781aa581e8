"""The suite itself: an undisturbed run passes, and the checks detect violations."""

import pytest

from tests.faults.trial import Outcome, belongings, kielo, refused, went_well


def test_an_undisturbed_run_goes_well_twice(finished):
    """All stages are there, and a second run changes no file of theirs."""
    before = belongings(finished / "run" / "train")
    went_well(kielo(finished, "run", "tiny.toml", timeout=300))
    assert belongings(finished / "run" / "train") == before


def test_the_checks_bite():
    """A traceback, another exit code, and a message without the culprit or with another reason each fail a
    case; a name alone is no reason.
    """
    gone = Outcome(1, "", "kielo: text.txt: no such file\n")
    with pytest.raises(AssertionError):
        went_well(Outcome(0, "", "Traceback (most recent call last)\n"))
    for outcome, reason, named in (
        (Outcome(0, "", "kielo: text.txt: no such file\n"), "no such file", "text.txt"),
        (Outcome(1, "", "kielo: no such file\n"), "no such file", "text.txt"),
        (gone, "is a folder", "text.txt"),
        (gone, "text.txt", "text.txt"),
    ):
        with pytest.raises(AssertionError):
            refused(outcome, reason, named)
    assert "text.txt" in refused(gone, "no such file", "text.txt")
