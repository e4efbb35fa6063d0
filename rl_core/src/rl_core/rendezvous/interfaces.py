"""The network interface that a run's processes use, environment variables that keep libraries on it, and free ports."""

from __future__ import annotations

import ipaddress
import os
import random
import socket
import sys

import psutil

from rl_core.errors import ResourceInsufficientError

LOOPBACK = "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address; False for a host name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def own_address(address: str) -> str:
    """This machine's address on the route to `address`; connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def interface_variables(address: str) -> dict[str, str]:
    """Environment variables that keep gloo on this machine's interface to `address`, where workers meet.

    Without them gloo listens on the address that the host name resolves to, often that of loopback, which other nodes cannot
    reach. NCCL selects an interface itself unless `address` is loopback. A variable set in this process keeps its value.
    """
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if is_loopback(address) else ("GLOO_SOCKET_IFNAME",)
    own = own_address(address)
    name = next((name for name, all_ in psutil.net_if_addrs().items() if any(one.address == own for one in all_)), None)
    return {} if name is None else {variable: os.environ.get(variable, name) for variable in variables}


# Below Linux's ephemeral range (32768 and up), from which any outgoing connection may take a port meanwhile, and above
# the range of `ray start`'s workers (10002 to 19999).
_LOW, _HIGH = 20_000, 32_000
_returned: dict[int, socket.socket | None] = {}


def _reservation(port: int) -> socket.socket | None:
    """An abstract socket that one process of this machine can hold, so that no other returns a port that waits to be used.

    None on systems without abstract sockets, where only ports of the same process differ.

    Raises:
        OSError: Another process holds it.
    """
    if sys.platform != "linux":
        return None
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(f"\0rl-core-port-{port}")
    except OSError:
        held.close()
        raise
    return held


def free_port(address: str = "") -> int:
    """A port of `address` (empty for every interface) that is free now and that no live process of this machine has returned.

    Raises:
        ResourceInsufficientError: 200 random ports were all taken.
    """
    generator = random.Random()  # seeded by the system, so that drivers of one machine differ
    for _ in range(200):
        port = generator.randrange(_LOW, _HIGH)
        if port in _returned:
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, port))
                _returned[port] = _reservation(port)
            except OSError:
                continue
        return port
    raise ResourceInsufficientError(
        f"no free port found between {_LOW} and {_HIGH} in 200 attempts; too many processes listen on this machine: "
        "list them with `ss -ltn` and stop those that are not needed"
    )
