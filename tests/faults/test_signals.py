"""Signals: a run saves and stops, or ends at once, or continues, as the sender means; no rank is left."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kielo.cli.main import main
from kielo.ranks.local_ranks import Ranks
from tests.faults.test_terminal import same, weights
from tests.faults.trial import Outcome, rest_marked_full, start, went_well

WORK = ["--set", "checkpoint.every_steps=100000"]  # a save is then one that was asked for
LONG = ["--set", "train.tokens=12800", *WORK]  # 100 steps


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, _packed) -> dict[str, torch.Tensor]:
    """Weights of 100 steps without a stop."""
    workplace = Path(shutil.copytree(_packed, tmp_path_factory.mktemp("undisturbed") / "workplace"))
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(workplace)
        assert main(["train", "tiny.toml", *LONG]) == 0
    return weights(workplace / "run", "step_00000100")


def until_trained(process: subprocess.Popen) -> None:
    """Wait for the first step's line."""
    for line in iter(process.stdout.readline, ""):
        if line.startswith("step 1/"):
            return
    raise AssertionError(process.stderr.read())


def children(process: int) -> list[int]:
    """The processes that a process has started, the oldest first."""
    text = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(number) for number in text.split()]


def ended(process: subprocess.Popen) -> Outcome:
    out, err = process.communicate(timeout=120)
    return Outcome(process.returncode, out, err)


@pytest.mark.parametrize("name", rest_marked_full(["SIGINT", "SIGHUP", "SIGTERM"], ["SIGINT"]))
def test_a_signal_saves_and_says_how_to_go_on(name, packed, undisturbed, here):
    """Exit code 75; the same command ends with bitwise the weights of a run that was never stopped."""
    process = start(packed, "train", "tiny.toml", *LONG)
    until_trained(process)
    process.send_signal(signal.Signals[name])
    outcome = went_well(ended(process), code=75)
    assert f"{name}: finishing the step and saving" in outcome.err
    assert ("Ctrl-C again" in outcome.err) == (name == "SIGINT")
    step = json.loads((packed / "run" / "train" / "outcome.json").read_text(encoding="utf-8"))["step"]
    assert f"stopped after step {step:,} of 100" in outcome.out and f"step_{step:08d}" in outcome.out
    assert "he same command" in outcome.out
    went_well(here(packed, "train", "tiny.toml", *LONG))
    assert same(weights(packed / "run", "step_00000100"), undisturbed)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("SIGINT", True),
        pytest.param("SIGINT", False, marks=pytest.mark.full),
        pytest.param("SIGHUP", False, marks=pytest.mark.full),
    ],
)
def test_two_ranks_save_as_one(name, group, packed):
    """Both save once, also where the terminal signals all processes; no traceback, and one message."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kielo", "train", "tiny.toml", "--ranks", "2", *LONG],
        cwd=packed, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    until_trained(process)
    (os.killpg if group else os.kill)(process.pid, signal.Signals[name])
    outcome = went_well(ended(process), code=75)
    assert outcome.out.count("stopped after step") == 1 and "he same command" in outcome.out
    assert len(outcome.err.splitlines()) < 12, outcome.err


def test_a_run_of_all_stages_stops_in_its_training(packed):
    """`kielo run`, Ctrl-C: 75, what was saved, and the later stages wait."""
    process = start(packed, "run", "tiny.toml", *LONG)
    until_trained(process)
    process.send_signal(signal.SIGINT)
    outcome = went_well(ended(process), code=75)
    assert "stopped after step" in outcome.out and not (packed / "run" / "verify").exists()


@pytest.mark.parametrize("ranks", rest_marked_full(["1", "2"], ["1"]))
def test_nohup_keeps_its_promise(ranks, packed):
    """SIGHUP that is ignored by whoever started the run stays so."""
    process = subprocess.Popen(
        ["sh", "-c", f'trap "" HUP; exec "{sys.executable}" -m kielo train tiny.toml --ranks {ranks}'
         " --set train.log_every_steps=1"],
        cwd=packed, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    until_trained(process)
    process.send_signal(signal.SIGHUP)
    went_well(ended(process))
    assert weights(packed / "run")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_ranks_that_have_not_begun_are_stopped_too(name, packed):
    """A signal while they import: 75 or, before ours is the handler, the usual end; nothing is made and
    nobody is left.
    """
    process = start(packed, "train", "tiny.toml", "--ranks", "2", *LONG)
    process.send_signal(signal.Signals[name])
    outcome = ended(process)
    assert "Traceback" not in outcome.told or outcome.code < 0
    assert outcome.code in (75, 130, -signal.Signals[name])
    assert not (packed / "run" / "train" / "checkpoints").exists()


# A line is one write, so that those of two ranks do not mix (where PYTHONUNBUFFERED is set, print writes the
# end of the line by itself); a process that a failed test leaves behind ends by itself.
DEAF = """
import os, signal, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda *_: None)
os.write(1, b"ready\\n")
for _ in range(1200):
    time.sleep(0.05)
"""
DEAF_RANKS = f"""
import sys
from kielo.cli.main import main
from kielo.ranks import local_ranks
class Deaf(local_ranks.Ranks):
    def __init__(self, arguments, *others):
        super().__init__(["-c", {DEAF!r}], *others)
local_ranks.Ranks = Deaf
sys.exit(main(["train", "tiny.toml", "--ranks", "2", *sys.argv[1:]]))
"""
DEAF_RANK = """
import os, time, torch
from kielo.train.stop import Stop
with Stop(is_telling=True) as stop:
    stop.use(torch.device("cpu"))  # the ranks have met
    os.write(1, b"ready\\n")
    until = time.monotonic() + 60
    while time.monotonic() < until:
        pass
"""


def deaf(script: str, workplace: Path, *arguments: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], cwd=workplace, env=os.environ | {"OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    for _ in range(script.count("main([") + 1):  # two ranks, or one
        line = process.stdout.readline()
        if line != "ready\n":
            process.kill()
            raise AssertionError(f"{line!r} in place of 'ready': {process.communicate(timeout=70)}")
    return process


@pytest.mark.parametrize("script", [DEAF_RANK, DEAF_RANKS], ids=["one rank", "two ranks"])
def test_a_second_interrupt_ends_at_once(script, packed):
    """Exit code 130, whatever the process is busy with; no rank is left behind, for their output ends."""
    process = deaf(script, packed)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):  # one within a second would be the same one, come twice
        process.wait(timeout=1.5)
    process.send_signal(signal.SIGINT)
    outcome = went_well(ended(process), code=130)
    assert "he same command" in outcome.err


def test_ranks_that_do_not_save_in_time_are_killed(packed, fault_times):
    """--shutdown-seconds after a signal; what was there before stays."""
    process = deaf(DEAF_RANKS, packed, "--shutdown-seconds", "0")
    fault_times.note("planted")
    process.send_signal(signal.SIGTERM)
    outcome = went_well(ended(process), code=75)
    fault_times.note("found")
    assert "stopped before training began" in outcome.out + outcome.err


def test_a_rank_that_is_killed_is_named(packed):
    """The message says which rank ended and how, as one out of memory does;
    the other, which waits for it, is ended.
    """
    endless = [*LONG, "--set", "train.tokens=2560000"]
    process = start(packed, "train", "tiny.toml", "--ranks", "2", "--restarts", "0", *endless)
    until_trained(process)
    (template,) = children(process.pid)
    ranks = children(template)
    os.kill(ranks[1], signal.SIGKILL)
    outcome = ended(process)
    assert outcome.code == 1 and "training failed" in outcome.err
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)


def test_ranks_that_fail_say_why(packed):
    """An error inside the ranks is exit code 1 and its message is the outcome's,
    not only in torchrun's log.
    """
    words = "train", "tiny.toml", "--ranks", "2", "--json", "--set", "train.learning_rate=1e30"
    outcome = ended(start(packed, *words))
    assert outcome.code == 1
    assert "not finite 3 steps in a row" in json.loads(outcome.out)["message"], outcome.err


def test_what_one_rank_fails_of_ends_all():
    """The failure names the rank and its exit code; one that stops on purpose is none."""
    failing = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(600)"
    for script, number, told in (
        (failing, 2, "rank 1 ended with exit code 3"),
        ("import sys; sys.exit(75)", 1, ""),
    ):
        ranks = Ranks(["-c", script], number, 75)
        ranks.start()
        assert str(ranks.wait(1) or "") == told
        ranks.close()
