"""Loopback addresses, and environment variables that keep libraries on the loopback interface."""

from __future__ import annotations

import ipaddress
import os

import psutil

ADDRESS = "127.0.0.1"
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address; False for a host name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def interface_variables(address: str) -> dict[str, str]:
    """Environment variables that keep gloo and NCCL on the loopback interface, for workers that meet at `address`.

    Without them gloo listens on the address that the host name resolves to. Empty if `address` is not loopback. A variable
    that is set in this process keeps its value.
    """
    if not is_loopback(address):
        return {}
    name = next((name for name, own in psutil.net_if_addrs().items() if any(one.address == ADDRESS for one in own)), None)
    return {} if name is None else {variable: os.environ.get(variable, name) for variable in _INTERFACE_VARIABLES}
