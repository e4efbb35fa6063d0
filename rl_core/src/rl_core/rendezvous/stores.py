"""Stores of process groups; on a single machine they listen only on the loopback interface."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rl_core.rendezvous.interfaces import is_loopback


def open_store(ip: str, port: int, *, is_master: bool, timeout: timedelta) -> TCPStore:
    """A store at `ip:port`; the master serves it. `timeout` is the maximum wait for the master, and for a key.

    A store server listens on every interface, whatever its address. If `ip` is loopback, the master therefore passes it a
    socket bound to that address.

    Raises:
        RuntimeError: The port is taken, or the master does not answer in time.
    """
    if not (is_master and is_loopback(ip)):
        return TCPStore(ip, port, is_master=is_master, timeout=timeout, wait_for_workers=False)
    try:
        listener = socket.create_server((ip, port), family=socket.AF_INET6 if ":" in ip else socket.AF_INET)
    except OSError as error:
        raise RuntimeError(f"cannot listen on {ip}:{port}: {error}") from error
    # The store closes the socket; detach it so that Python does not close it a second time.
    return TCPStore(
        ip,
        listener.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
