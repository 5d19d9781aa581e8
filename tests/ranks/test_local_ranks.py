"""Ranks of this machine are started again from the same process, and none outlives what started it."""

import os
import random
import signal
import socket
import subprocess
import sys
import time

import pytest

from kielo.ranks import local_ranks
from kielo.ranks.local_ranks import Failure, Ranks, free_port

# Rank 1 ends as its attempt says; rank 0 would go on for ever.
SCRIPT = """
import os, signal, sys, time
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if os.environ["RANK"] == "1" and attempt == 0:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(0 if attempt else 1)
"""
LAUNCHER = r"""
from kielo.ranks.local_ranks import Ranks
ranks = Ranks(["-c", "import os, time; os.write(1, b'%d\\n' % os.getppid()); time.sleep(60)"], 2, 75)
ranks.start()
ranks.wait(1)
"""


def test_a_port_for_a_meeting_is_free_and_none_that_the_kernel_gives_away(monkeypatch):
    """Another program that asks for any port cannot get it in the seconds until the ranks meet."""
    mine, spare, *others = {free_port() for _ in range(20)}
    assert len(others) > 10 and 20_000 <= min(mine, spare, *others) <= max(mine, spare, *others) < 32_768
    drawn, asked = iter([mine, spare]), []
    monkeypatch.setattr(random.SystemRandom, "choice", lambda self, ports: asked.append(ports) or next(drawn))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", mine))
        listener.listen()
        assert free_port() == spare and asked == 2 * [range(20_000, 32_768)]
        drawn = iter(20 * [mine])
        assert free_port() not in (0, mine) and len(asked) == 22  # then one of the kernel's


def test_ranks_that_failed_are_started_again():
    """The rank that was killed is the cause, whatever code the other one ends with at the same moment."""
    ranks = Ranks(["-c", SCRIPT], 2, 75)
    ranks.start()
    assert ranks.wait(1) == Failure(1, -signal.SIGKILL)
    ranks.start()
    assert ranks.wait(1) is None
    ranks.close()


@pytest.mark.parametrize("killed", ["the launcher", "the process that forks"])
def test_no_rank_is_left_behind(killed, fault_times):
    """The pipe of the ranks' output ends when the last of them has."""
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True)
    template, again = (int(launcher.stdout.readline()) for _ in range(2))
    assert template == again
    fault_times.note("planted")
    os.kill(launcher.pid if killed == "the launcher" else template, signal.SIGKILL)
    out, _ = launcher.communicate(timeout=60)
    fault_times.note("found")
    assert out == ""


def test_a_frozen_process_that_forks_is_ended(monkeypatch, capsys):
    """Nobody else would notice: its ranks train on, and their ends reach no one."""
    monkeypatch.setattr(local_ranks, "MOST_SILENT_SECONDS", 2)
    ranks = Ranks(["-c", "import time; time.sleep(60)"], 1, 75)
    others = set(children(os.getpid()))
    ranks.start()
    (template,) = set(children(os.getpid())) - others
    deadline = time.monotonic() + 30
    while not children(template) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.5)  # it has beaten
    os.kill(template, signal.SIGSTOP)
    begun = time.monotonic()
    assert ranks.wait(1) == Failure(0, -signal.SIGKILL)
    assert time.monotonic() - begun < 20
    ranks.close()
    said = f"process {template}, from which the ranks were forked, has not answered for 2 s"
    assert said in capsys.readouterr().err


def children(process: int) -> list[int]:
    with open(f"/proc/{process}/task/{process}/children", encoding="utf-8") as file:
        return [int(number) for number in file.read().split()]
