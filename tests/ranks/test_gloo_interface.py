"""Nodes whose own names lead nowhere: the interface that leads to rank 0, and two nodes that meet by it."""

import ctypes
import os
import re
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from kielo.ranks import rendezvous
from kielo.ranks.rendezvous import Rendezvous, choose_gloo_interface, gloo_interface
from kielo.ranks.world import start_world
from tests.started_ranks import run_ranks

VARIABLE = "GLOO_SOCKET_IFNAME"
CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000  # of Linux
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


@pytest.mark.skipif(not interfaces(), reason="no interface with an address, or no program `ip`")
def test_the_interface_that_gloo_takes_is_known(names, monkeypatch) -> None:
    """The variable's, else the one of the address that the node's own name has."""
    address, interface = next(iter(interfaces().items()))
    monkeypatch.setattr(rendezvous.socket, "gethostbyname", {"node": address}.__getitem__)
    assert gloo_interface() == interface
    monkeypatch.setattr(rendezvous.socket, "gethostbyname", {"node": "10.255.0.1"}.__getitem__)
    assert gloo_interface() == ""  # no interface here has it
    monkeypatch.setenv(VARIABLE, "ib0")
    assert gloo_interface() == "ib0"


NODES = {"a": "10.9.0.1", "b": "10.9.0.2"}


def test_ranks_of_one_machine_listen_nowhere_else(names, capsys) -> None:
    """They meet on the loopback, whatever the machine is called."""
    names["node"] = ["10.1.1.2"]
    choose_gloo_interface(replace(OF_TWO, host="127.0.0.1"))
    assert os.environ[VARIABLE] == "lo" and capsys.readouterr().err == ""


def listening_on() -> set[str]:
    """Return the addresses, as the kernel's table writes them, on which this rank accepts connections."""
    os.environ.pop(VARIABLE, None)
    start_world(60, "cpu")
    files = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    own = {os.readlink(file) for file in files if os.path.lexists(file)}
    lines = [
        line for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()
    ]
    rows = [line.split() for line in lines if ":" in line.split()[0]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


def test_nothing_listens_on_other_interfaces() -> None:
    """Neither the store nor gloo, by the kernel's own table of sockets."""
    first, second = run_ranks(listening_on, 2)
    assert first == {"0100007F"} and second <= first


def meet_in_a_node() -> str | None:
    """Move this rank into the namespaces of its node, and return the interface by which it met the other."""
    node = sorted(NODES)[int(os.environ["RANK"])]
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/kielo_{node}") as network:
        assert libc.setns(network.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    assert libc.unshare(CLONE_NEWUTS) == 0, os.strerror(ctypes.get_errno())
    socket.sethostname(f"no-such-{node}")
    os.environ.pop(VARIABLE, None)
    os.environ |= {"LOCAL_RANK": "0", "MASTER_ADDR": NODES["a"]}
    start_world(60, "cpu")
    return os.environ.get(VARIABLE)


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
def test_two_nodes_without_names_meet() -> None:
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
        assert run_ranks(meet_in_a_node, 2) == ["kielo_va", "kielo_vb"]
    finally:
        for node in NODES:
            subprocess.run(["ip", "netns", "del", f"kielo_{node}"])
