"""Process groups of workers, and their stores; on a single machine they listen only on the loopback interface."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rl_core.interfaces.worker_context import WorkerContext
from rl_core.rendezvous.interfaces import interface_variables, is_loopback


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


def join_process_group(context: WorkerContext, backend: str, *, timeout: timedelta) -> None:
    """Create the default process group of this worker and its peers; returns once all have joined.

    `backend` is as in `torch.distributed`, such as `cpu:gloo,cuda:nccl`; `timeout` is that of a collective, and of joining.
    """
    for variable, value in interface_variables(context.master_address).items():
        os.environ.setdefault(variable, value)
    store = open_store(context.master_address, context.master_port, is_master=context.rank == 0, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=context.rank, world_size=context.world_size, timeout=timeout)
