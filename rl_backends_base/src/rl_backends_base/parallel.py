"""The ranks that train one model: process group, sums of gradients, gradient norm.

The gradient of a global batch is the *sum* over ranks, because each loss is already divided by the global count. Reductions are
float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from rl_backends_base.shards import local
from rl_core.backend import WorkerContext
from rl_core.rendezvous.stores import join_process_group

BUCKET_BYTES = 32 * 2**20
"""Gradients are reduced in flat buckets of this size."""


def join_ranks(context: WorkerContext, *, timeout_s: float = 1800.0) -> None:
    """Join the default process group: gloo on CPUs, and gloo and NCCL on GPUs. A single rank needs none.

    `timeout_s` is the time limit of a collective in seconds.
    """
    if context.device == "cuda":
        torch.cuda.set_device(0)
        if not context.run_in_process:  # otherwise, it is a setting of the user's process
            torch.set_float32_matmul_precision("highest")  # no TF32
    if context.world_size > 1:
        backend = "cpu:gloo,cuda:nccl" if context.device == "cuda" else "gloo"
        join_process_group(context, backend, timeout=timedelta(seconds=timeout_s))


class Parallel:
    """The ranks that train one model; each holds the full model. A subclass shards it.

    Attributes:
        rank: of this process.
        world_size: number of ranks.
        device: device of this rank.
        shards: whether each rank holds only a shard of each weight.
        num_shards: number of ranks that share one copy of the model.
    """

    shards: bool = False

    def __init__(self, context: WorkerContext) -> None:
        self.rank = context.rank
        self.world_size = context.world_size
        self.num_shards = 1
        self.device = torch.device("cuda:0" if context.device == "cuda" else "cpu")

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum each gradient over ranks in float32; collective."""
        fill_missing_gradients(parameters)
        if self.world_size == 1:
            return
        for bucket in _buckets([p.grad for p in parameters.values() if p.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat)
            for gradient, total in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(total.view_as(gradient))

    def gradient_norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Scalar float32, the 2-norm of the full gradient; the same on every rank; collective."""
        return norm_of(gradients, self.device)

    def after_forward(self, model: nn.Module) -> None:
        """Free gathered weights after a pass without a backward pass."""
        return None

    def any(self, flag: torch.Tensor) -> torch.Tensor:
        """Scalar float32, 1 if `flag` (a scalar bool) is true on any rank; collective."""
        flag = flag.float()
        if self.world_size > 1:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return flag


def fill_missing_gradients(parameters: Mapping[str, nn.Parameter]) -> None:
    """Give weights that received no tokens (an expert, for example) a zero gradient.

    All ranks then participate in its reduction, and the step does not depend on the number of ranks.
    """
    for parameter in parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def clip_(gradients: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their norm is at most `max_norm`; does not synchronize with the device."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local(gradient).mul_(scale.to(gradient.device))


def norm_of(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Scalar float32 on `device`, the 2-norm of all tensors together."""
    if not tensors:
        return torch.zeros((), device=device)
    norms = [torch.linalg.vector_norm(tensor.float()).to(device) for tensor in tensors]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _buckets(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    buckets: list[list[torch.Tensor]] = []
    free_bytes = -math.inf
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size > free_bytes:
            buckets.append([])
            free_bytes = BUCKET_BYTES
        buckets[-1].append(tensor)
        free_bytes -= size
    return buckets
