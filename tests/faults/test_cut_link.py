"""A link that is cut between two nodes: both sides notice by their heartbeats and end, and nothing waits.

Two network namespaces with a host name each, joined by a pair of virtual cards, are the nodes; a rank runs in
each. No process ends and no connection is closed when a card is switched off, as where a switch or a cable
fails.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kielo.artifact.attempt_files import Outcome
from kielo.artifact.checkpoint_folder import step_folders
from kielo.artifact.manifest import MANIFEST_NAME
from kielo.artifact.stage_json import read_json

IP, UNSHARE = shutil.which("ip"), shutil.which("unshare")
NAMES = [f"kielo{os.getpid()}{side}" for side in "ab"]
LIMIT_SECONDS = 120.0


def ip(*words: str) -> bool:
    return subprocess.run([IP, *words], capture_output=True).returncode == 0


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """The names of two namespaces; each other's address is 10.77.0.1 and 10.77.0.2."""
    if not IP or not UNSHARE or os.getuid() or not ip("netns", "add", NAMES[0]):
        pytest.skip("needs root, ip and network namespaces")
    try:
        assert ip("netns", "add", NAMES[1])
        ends = [["netns", NAMES[0]], ["type", "veth", "peer", "kielo1", "netns", NAMES[1]]]
        assert ip("link", "add", "kielo0", *ends[0], *ends[1])
        for number, name in enumerate(NAMES):
            assert ip("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", f"kielo{number}")
            assert ip("-n", name, "link", "set", f"kielo{number}", "up")
            assert ip("-n", name, "link", "set", "lo", "up")
        yield NAMES
    finally:
        for name in NAMES:
            ip("netns", "delete", name)


def rank_in(node: str, rank: int, workplace: Path) -> subprocess.Popen:
    """Starts a rank of two, in a namespace of the network and with a host name of its own."""
    train = [sys.executable, "-m", "kielo", "train", "tiny.toml", "--set", "train.hang_seconds=4"]
    train += ["--set", "train.log_every_steps=1", "--set", "train.tokens=4_000_000"]
    shell = f'hostname {node}; exec "$@"'
    launcher = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
    return subprocess.Popen(
        [IP, "netns", "exec", node, UNSHARE, "--uts", "sh", "-c", shell, "sh", *train],
        cwd=workplace,
        env=os.environ
        | {name: str(value) for name, value in launcher.items()}
        | {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29507", "GLOO_SOCKET_IFNAME": f"kielo{rank}"}
        | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@contextmanager
def ranks_in(nodes: list[str], workplace: Path) -> Iterator[list[subprocess.Popen]]:
    ranks = [rank_in(node, number, workplace) for number, node in enumerate(nodes)]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def until_step(process: subprocess.Popen, step: int) -> str:
    """Returns what rank 0 says until the line of a step, or its end."""
    told = []
    for line in process.stdout:
        told.append(line)
        if line.startswith(f"step {step}/"):
            break
    return "".join(told)


def test_both_sides_of_a_cut_link_stop(nodes, packed, fault_times):
    """Exit code 76 on both, the other side's rank is named, and no checkpoint is saved after the cut.

    With the link back, the same command goes on from the newest checkpoint.
    """
    with ranks_in(nodes, packed) as ranks:
        told = until_step(ranks[0], 12)  # the save of step 10 has begun, so that of step 5 is whole
        fault_times.note("planted")
        assert ip("-n", nodes[1], "link", "set", "kielo1", "down"), told
        folder = packed / "run" / "train"
        whole = [path for path in step_folders(folder / "checkpoints") if (path / MANIFEST_NAME).exists()]
        rest = [process.communicate(timeout=LIMIT_SECONDS)[0] for process in ranks]
        fault_times.note("found")
    assert [process.returncode for process in ranks] == [76, 76], "".join([told, *rest])
    outcome = read_json(folder, Outcome)
    assert outcome.outcome == "hung"
    assert f"rank 1 on {nodes[1]}" in "".join(rest) and "without a heartbeat" in rest[0]
    after = [path for path in step_folders(folder / "checkpoints") if (path / MANIFEST_NAME).exists()]
    assert len(after) <= len(whole) + 1  # one may have been in progress
    newest = int(after[0].name.removeprefix("step_"))
    assert ip("-n", nodes[1], "link", "set", "kielo1", "up")
    with ranks_in(nodes, packed) as ranks:
        told = until_step(ranks[0], newest + 1)
        fault_times.note("next_step")
    assert f"resuming after step {newest} of" in told and f"step {newest + 1}/" in told, told
