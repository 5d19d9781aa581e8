"""Find the meeting place of the ranks from the launcher's variables, and the network interface that leads
there.

torchrun, which may run inside a Slurm step, wins over Slurm's srun. No launcher is a world of one rank.
"""

import fcntl
import ipaddress
import os
import re
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kielo.recipe.errors import KieloError

# Below 32768, where Linux starts to hand out ports to clients by itself, and above the registered services.
_FIRST_PORT, _NUM_PORTS = 12_000, 20_000
_LAST_PORT = 65_535
_MOST_HOSTS = 100_000  # in one list: more than any cluster has
_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # linux/sockios.h: an interface's IPv4 address


@dataclass(frozen=True)
class Rendezvous:
    """The meeting place of the ranks of one attempt. `host` is empty for a world of one rank.

    A launcher's store `store_is_running` (torchrun's). `attempt` separates the keys of a restarted job.
    """

    rank: int
    size: int
    local_rank: int
    host: str = ""
    port: int = 0
    store_is_running: bool = False
    attempt: str = "0"


def find_rendezvous(environment: Mapping[str, str] = os.environ) -> Rendezvous:
    """Read the launcher's variables. Raises KieloError naming a variable that is missing or not a number."""
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _from_torchrun(environment)
    # A batch script outside srun has SLURM_PROCID=0 and SLURM_NTASKS too, but only a step has its node list.
    if "SLURM_PROCID" in environment and "SLURM_STEP_NODELIST" in environment:
        return _from_slurm(environment)
    return Rendezvous(rank=0, size=1, local_rank=0)


def _from_torchrun(environment: Mapping[str, str]) -> Rendezvous:
    (rank, size), port = _place(environment, "RANK", "WORLD_SIZE"), _number(environment, "MASTER_PORT")
    if not 1 <= port <= _LAST_PORT:
        raise KieloError(f"environment variable MASTER_PORT={port} is no port. Fix: 1 to {_LAST_PORT}")
    return Rendezvous(
        rank=rank,
        size=size,
        local_rank=_number(environment, "LOCAL_RANK"),
        host=_text(environment, "MASTER_ADDR"),
        port=port,
        store_is_running=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _from_slurm(environment: Mapping[str, str]) -> Rendezvous:
    size_key = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    job = _number(environment, "SLURM_JOB_ID")
    step = _number(environment, "SLURM_STEP_ID") if "SLURM_STEP_ID" in environment else 0
    # Each job and step has its own port, so that two jobs on a node do not meet each other's ranks.
    port = _FIRST_PORT + (job + 101 * step) % _NUM_PORTS
    rank, size = _place(environment, "SLURM_PROCID", size_key)
    nodelist = environment["SLURM_STEP_NODELIST"]
    found = hosts(nodelist)
    if not found or not found[0]:
        raise KieloError(f"environment variable SLURM_STEP_NODELIST={nodelist!r} names no host. Fix: srun")
    return Rendezvous(
        rank=rank,
        size=size,
        local_rank=_number(environment, "SLURM_LOCALID"),
        host=found[0],
        port=port,
        attempt=f"{job}.{step}",
    )


def hosts(nodelist: str) -> list[str]:
    """Return the hosts of a Slurm node list: `nid[08-10,12],gpu7` → nid08, nid09, nid10, nid12, gpu7."""
    if nodelist.count("[") != nodelist.count("]"):
        raise _no_list(nodelist)
    parts = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)  # a comma in brackets divides numbers
    return [host for part in parts for host in _expanded(part.strip())]


def _expanded(part: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, after = rest.partition("]")
    numbers: list[str] = []
    for one in inside.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", one)
        if found is None:
            raise _no_list(part)
        first, last = int(found[1]), int(found[2] or found[1])
        if not 0 <= last - first < _MOST_HOSTS or len(numbers) >= _MOST_HOSTS:
            raise _no_list(part)
        numbers += [f"{number:0{len(found[1])}}" for number in range(first, last + 1)]
    ends = _expanded(after)
    if len(numbers) * len(ends) > _MOST_HOSTS:
        raise _no_list(part)
    return [before + number + end for number in numbers for end in ends]


def _no_list(text: str) -> KieloError:
    return KieloError(f"{text[:60]!r} is no list of hosts in Slurm's form, such as nid[001-016,020]")


def nodes_of_ranks(ranks: Sequence[int], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the nodes of these ranks by the launcher's list, or nothing. torchrun only numbers its nodes."""
    if "LOCAL_WORLD_SIZE" not in environment:
        return hosts_of_ranks(ranks, environment)
    per_node, nodes = (environment.get(key, "") for key in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
    if not per_node.isdigit() or nodes in ("", "1"):
        return []
    return list(dict.fromkeys(f"node {rank // int(per_node)} of torchrun" for rank in ranks))


def hosts_of_ranks(ranks: Sequence[int], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the hosts of these ranks, each once, by Slurm's list of the step and its tasks on each host.

    Empty outside a step of one task a rank, and for a step whose tasks are not placed node by node.
    """
    if "LOCAL_WORLD_SIZE" in environment:  # by torchrun: a task is a node then
        return []
    tasks, nodelist = (environment.get(f"SLURM_STEP_{key}", "") for key in ("TASKS_PER_NODE", "NODELIST"))
    if not tasks or not nodelist or not environment.get("SLURM_DISTRIBUTION", "block").startswith("block"):
        return []
    by_rank: list[str] = []
    for host, number in zip(hosts(nodelist), _tasks_of_nodes(tasks), strict=False):
        by_rank += [host] * number
    return list(dict.fromkeys(by_rank[rank] for rank in ranks if rank < len(by_rank)))


def _tasks_of_nodes(text: str) -> list[int]:
    """Return Slurm's tasks of each node: `8(x3),2` → 8, 8, 8, 2."""
    found = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        found += [int(number)] * min(int(times or 1), _MOST_HOSTS)
    return found


def _place(environment: Mapping[str, str], rank_key: str, size_key: str) -> tuple[int, int]:
    """Read rank and size. An unexpected rank is refused, because all ranks would wait for ever."""
    rank, size = _number(environment, rank_key), _number(environment, size_key)
    if rank >= size:
        raise KieloError(
            f"environment variables {rank_key}={rank} and {size_key}={size}: the rank must be less"
        )
    return rank, size


def _text(environment: Mapping[str, str], key: str) -> str:
    if not environment.get(key):
        raise KieloError(
            f"environment variable {key} is not set, although others of its launcher are. Fix: start every "
            "rank with `torchrun ... --no-python kielo train RECIPE` or `srun kielo train RECIPE`, or unset "
            "RANK and WORLD_SIZE"
        )
    return environment[key]


def _number(environment: Mapping[str, str], key: str) -> int:
    text = _text(environment, key)
    if not re.fullmatch(r"[0-9]{1,10}", text.strip()):
        raise KieloError(f"environment variable {key} must be a whole number, not {text[:60]!r}")
    return int(text)


def choose_gloo_interface(place: Rendezvous) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that leads to rank 0, if torch would take the loopback.

    torch binds gloo to the address of the node's own name. If that is the loopback, ranks of several nodes
    hang. Nothing changes for one rank, a variable that is set, and ranks that meet on the loopback.
    """
    if place.size == 1 or os.environ.get(_VARIABLE):
        return
    own = _own_address_towards(place.host, place.port)
    if own is None or (interface := _interface_of(own)) is None:
        return
    is_here = ipaddress.ip_address(own).is_loopback
    if not is_here and _is_reachable(socket.gethostname()):
        return
    os.environ[_VARIABLE] = interface
    if place.local_rank == 0 and not is_here:
        print(
            f"kielo: this node's own name, {socket.gethostname()}, leads to no address that other nodes "
            f"reach. The ranks meet by {_VARIABLE}={interface}, which leads to {place.host}",
            file=sys.stderr,
            flush=True,
        )


def gloo_interface() -> str:
    """Return the interface that gloo takes: the variable's, else the interface of the node's own name.

    "" if the name has no address here.
    """
    if chosen := os.environ.get(_VARIABLE):
        return chosen
    try:
        return _interface_of(socket.gethostbyname(socket.gethostname())) or ""
    except OSError:
        return ""


def _is_reachable(name: str) -> bool:
    try:
        found = {str(address[0]) for *_, address in socket.getaddrinfo(name, None)}
    except OSError:
        return False
    return not any(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in found)


def _own_address_towards(host: str, port: int) -> str | None:
    """Return the IPv4 address of this node on the way to `host`, or None without a way. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError:
            return None
        return probe.getsockname()[0]


def _interface_of(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
