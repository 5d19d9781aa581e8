"""`kielo train --profile`: how many steps reach the ranks, alone and through the launcher."""

from types import SimpleNamespace

import pytest

from kielo.artifact.attempt_files import Outcome
from kielo.cli import train
from kielo.cli.main import main

DONE = Outcome(outcome="finished", step=1, tokens=1, exit_code=0, message="")


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ([], 0),
        (["--profile"], 10),
        (["--profile", "3"], 3),
        (["--profile", "3", "--profile-ranks", "0"], 3),
        (["--profile", "3", "--profile-ranks", "1,4"], 0),
    ],
)
def test_the_number_of_steps_reaches_the_training(monkeypatch, words, steps):
    """Rank 0 of eight records them, unless other ranks are named."""
    variables = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "5"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    asked_for = []
    monkeypatch.setattr(
        train, "train_here", lambda recipe, profile_steps, _: asked_for.append(profile_steps) or DONE
    )
    assert main(["train", "demo_estonian", *words]) == 0 and asked_for == [steps]


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ([], []),
        (["--profile"], ["--profile", "10"]),
        (["--profile", "4", "--profile-ranks", "0"], ["--profile", "4", "--profile-ranks", "0"]),
    ],
)
def test_ranks_are_started_with_the_option(monkeypatch, tmp_path, words, given):
    """Each rank is started with the option and reads it as the parent did."""
    commands = []

    def started(arguments, *_):
        commands.append(list(arguments))
        return SimpleNamespace(
            start=lambda *_: None, wait=lambda *_: None, close=lambda: None, is_stopping=False
        )

    monkeypatch.setattr("kielo.train.start_ranks.Ranks", started)
    monkeypatch.setattr("kielo.train.start_ranks.resolve", lambda *_, **__: None)  # nothing is packed there
    monkeypatch.setattr("kielo.train.start_ranks.read_outcome", lambda *_: DONE)
    assert main(["train", "demo_estonian", "--ranks", "2", "--set", f"folder={tmp_path}", *words]) == 0
    child = commands[0][commands[0].index("kielo") + 1 :]
    assert child[:2] == ["train", "demo_estonian"] and child[4:] == given
    asked_for = []
    monkeypatch.setenv("RANK", "0")
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "5"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        train, "train_here", lambda recipe, profile_steps, _: asked_for.append(profile_steps) or DONE
    )
    assert main(child) == 0 and asked_for == [int(given[1]) if given else 0]


def test_no_steps_are_refused(capsys):
    assert main(["train", "demo_estonian", "--profile", "0"]) == 1
    assert "--profile 0: give 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--profile-ranks", "0"), ("--profile", "--profile-ranks", "0,x"),
                                   ("--profile", "--profile-ranks", "1")])  # fmt: skip
def test_ranks_that_cannot_be_profiled_are_refused(words, capsys):
    assert main(["train", "demo_estonian", *words]) == 1
    assert "give --profile, and ranks from 0 to 0" in capsys.readouterr().err
