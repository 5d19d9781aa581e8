"""The network interface of gloo, where torch would take the loopback, which leads to no other node.

torch binds gloo to the address of the node's own name. Where that does not resolve, or as 127.0.1.1, it is
the loopback: ranks of one node meet, and those of several hang.
"""

import fcntl
import ipaddress
import os
import socket
import struct
import sys

from kielo.parallel.rendezvous import Rendezvous

_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # linux/sockios.h: an interface's IPv4 address


def choose_gloo_interface(place: Rendezvous) -> None:
    """Sets GLOO_SOCKET_IFNAME to the interface that leads to rank 0, and says so, where it is needed.

    Ranks that meet on the loopback are of one machine, and listen nowhere else. Left alone: one rank, a
    variable that is set, and a name that others can reach.
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
            f"reach; the ranks meet by {_VARIABLE}={interface}, which leads to {place.host}",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def _is_reachable(name: str) -> bool:
    """Returns True for a name of which each address is no loopback."""
    try:
        found = {address[0] for *_, address in socket.getaddrinfo(name, None)}
    except OSError:
        return False
    return not any(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in found)


def _own_address_towards(host: str, port: int) -> str | None:
    """Returns the IPv4 address of this node on the way to `host`; None: there is no way. Nothing is sent."""
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
