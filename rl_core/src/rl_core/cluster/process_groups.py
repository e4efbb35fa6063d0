"""Joins the process group of a worker group; on a single machine it listens only on the loopback interface."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from rl_core.interfaces.worker_context import WorkerContext
from rl_core.rendezvous.interfaces import interface_variables
from rl_core.rendezvous.stores import open_store


def join_process_group(context: WorkerContext, backend: str, *, timeout: timedelta) -> None:
    """Create the default process group of this worker and its peers; returns once all have joined.

    `backend` is as in `torch.distributed`, such as `cpu:gloo,cuda:nccl`; `timeout` is that of a collective, and of joining.
    """
    for variable, value in interface_variables(context.master_address).items():
        os.environ.setdefault(variable, value)
    store = open_store(context.master_address, context.master_port, is_master=context.rank == 0, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=context.rank, world_size=context.world_size, timeout=timeout)
