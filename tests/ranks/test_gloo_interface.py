"""Nodes whose own names lead nowhere: the interface that leads to rank 0, and two nodes that meet by it."""

import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kielo.ranks import rendezvous
from kielo.ranks.rendezvous import Rendezvous, choose_gloo_interface

VARIABLE = "GLOO_SOCKET_IFNAME"
OF_TWO = Rendezvous(rank=1, size=2, local_rank=0, host="10.1.1.1", port=12_345)


def interfaces() -> dict[str, str]:
    """Address → interface, as `ip` tells them, without the loopback."""
    if shutil.which("ip") is None:
        return {}
    told = subprocess.run(["ip", "-o", "-4", "addr"], capture_output=True, text=True).stdout
    found = re.findall(r"^\d+: (\S+) +inet ([\d.]+)", told, re.MULTILINE)
    return {address: name for name, address in found if name != "lo"}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Name → its addresses, of a machine named "node"; a name that is not here does not resolve."""
    known: dict[str, list[str]] = {}

    def getaddrinfo(name: str, port: None) -> list[tuple]:
        if name not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(2, 1, 6, "", (address, 0)) for address in known[name]]

    monkeypatch.setattr(rendezvous.socket, "gethostname", lambda: "node")
    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setenv(VARIABLE, "")
    return known


@pytest.mark.skipif(not interfaces(), reason="no interface with an address, or no program `ip`")
@pytest.mark.parametrize("own", [None, ["127.0.1.1"], ["::1", "127.0.0.1"]])
def test_it_is_the_interface_that_leads_to_rank_0(names, own, capsys) -> None:
    """Here rank 0 is on this node. One rank of a node tells."""
    if own:
        names["node"] = own
    address, interface = next(iter(interfaces().items()))
    for local_rank, told in (
        (1, ""),
        (0, f"The ranks meet by {VARIABLE}={interface}, which leads to {address}"),
    ):
        os.environ[VARIABLE] = ""
        choose_gloo_interface(replace(OF_TWO, host=address, local_rank=local_rank))
        said = capsys.readouterr().err
        assert os.environ[VARIABLE] == interface and told in said and bool(said) is bool(told)


def test_what_works_is_left_alone(names, monkeypatch, capsys) -> None:
    """A name that others reach, one rank, no way to rank 0, and a person's choice."""
    names["node"] = ["10.1.1.2"]
    choose_gloo_interface(OF_TWO)
    del names["node"]
    choose_gloo_interface(replace(OF_TWO, host="no such host"))
    choose_gloo_interface(Rendezvous(rank=0, size=1, local_rank=0))
    assert os.environ[VARIABLE] == ""
    monkeypatch.setenv(VARIABLE, "ib0")
    choose_gloo_interface(replace(OF_TWO, host=next(iter(interfaces()), "127.0.0.1")))
    assert os.environ[VARIABLE] == "ib0" and capsys.readouterr().err == ""


NODES = {"a": "10.9.0.1", "b": "10.9.0.2"}


def test_ranks_of_one_machine_listen_nowhere_else(names, capsys) -> None:
    """They meet on the loopback, whatever the machine is called."""
    names["node"] = ["10.1.1.2"]
    choose_gloo_interface(replace(OF_TWO, host="127.0.0.1"))
    assert os.environ[VARIABLE] == "lo" and capsys.readouterr().err == ""


LISTENING = """
import os, subprocess
from kielo.ranks.world import end_world, start_world
if os.fork() == 0:
    os.environ.update(RANK="1", LOCAL_RANK="1")
world = start_world(60, "cpu")
if world.rank == 0:
    files = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    own = {os.readlink(file) for file in files if os.path.lexists(file)}
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/net/{table}").read().splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and f"socket:[{cells[9]}]" in own:  # it listens
                print(cells[1], flush=True)
end_world()
"""


def test_nothing_listens_on_other_interfaces() -> None:
    """Neither the store nor gloo, by the kernel's own table of sockets."""
    environment = os.environ | {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29556",
    }  # fmt: skip
    environment.pop(VARIABLE, None)
    done = subprocess.run([sys.executable, "-c", LISTENING], env=environment, capture_output=True, text=True)
    addresses = {line.partition(":")[0] for line in done.stdout.split()}
    assert addresses == {"0100007F"}, done.stdout + done.stderr


MEET = """
import os
from kielo.ranks.world import end_world, start_world
world = start_world(60, "cpu")
print("met", os.environ.get("GLOO_SOCKET_IFNAME"), flush=True)
end_world()
"""


def can_make_nodes() -> bool:
    made = ["ip", "netns", "add", "kielo_probe"]
    if (
        os.geteuid() != 0
        or shutil.which("ip") is None
        or subprocess.run(made, capture_output=True).returncode
    ):
        return False
    return subprocess.run(["ip", "netns", "del", "kielo_probe"]).returncode == 0


@pytest.mark.skipif(not can_make_nodes(), reason="no namespaces of networks can be made here")
def test_two_nodes_without_names_meet(tmp_path: Path) -> None:
    """Each a namespace with a name that does not resolve and an end of a cable; before, they hung."""
    commands = [
        *(f"ip netns add kielo_{node}" for node in NODES),
        "ip link add kielo_va type veth peer name kielo_vb",
        *(f"ip link set kielo_v{node} netns kielo_{node}" for node in NODES),
        *(f"ip -n kielo_{node} addr add {NODES[node]}/24 dev kielo_v{node}" for node in NODES),
        *(f"ip -n kielo_{node} link set kielo_v{node} up" for node in NODES),
        *(f"ip -n kielo_{node} link set lo up" for node in NODES),
    ]  # fmt: skip
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        ranks = []
        for rank, node in enumerate(NODES):
            environment = os.environ | {
                "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": NODES["a"],
                "MASTER_PORT": "29555", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            environment.pop(VARIABLE, None)
            inside = f'hostname no-such-{node}; exec "$0" -c "$1"'
            words = ["ip", "netns", "exec", f"kielo_{node}", "unshare", "--uts", "bash", "-c", inside]
            ranks.append(
                subprocess.Popen(
                    [*words, sys.executable, MEET], env=environment, stdout=subprocess.PIPE, text=True
                )
            )
        told = [rank.communicate(timeout=120)[0].strip() for rank in ranks]
        assert told == ["met kielo_va", "met kielo_vb"]
    finally:
        for node in NODES:
            subprocess.run(["ip", "netns", "del", f"kielo_{node}"])
