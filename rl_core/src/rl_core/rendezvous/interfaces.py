"""The network interface that a run's processes use, and environment variables that keep libraries on it."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

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
