"""The ranks that train one model: process group, shards (FSDP2), sums of gradients, gradient norm.

The gradient of a global batch is the *sum* over ranks, because each loss is already divided by the global count. Reductions are
float32.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from rl_backends_base.shards import local, reshard
from rl_core.backend import WorkerContext
from rl_core.errors import ConfigError
from rl_core.rendezvous.interfaces import interface_variables
from rl_core.rendezvous.stores import open_store

BUCKET_BYTES = 32 * 2**20
"""Gradients are reduced in flat buckets of this size."""


def join_ranks(context: WorkerContext, *, timeout_s: float = 1800.0) -> None:
    """Join the default process group: gloo on CPUs, and gloo and NCCL on GPUs. A single rank needs none.

    `timeout_s` is the time limit of a collective in seconds.
    """
    join_group(context, on_gpu=context.device == "cuda", timeout_s=timeout_s, needs_group=context.world_size > 1)


def join_group(context: WorkerContext, *, on_gpu: bool, timeout_s: float, needs_group: bool = True) -> None:
    """As `join_ranks`; `on_gpu` decides the device, and with `needs_group`, a single rank has a group too."""
    if on_gpu:
        torch.cuda.set_device(0)
        if not context.run_in_process:  # otherwise, it is a setting of the user's process
            torch.set_float32_matmul_precision("highest")  # no TF32
    if needs_group:
        join_process_group(context, "cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=timeout_s))


def join_process_group(context: WorkerContext, backend: str, *, timeout: timedelta) -> None:
    """Create the default process group of this worker and its peers; returns once all have joined.

    `backend` is as in `torch.distributed`, such as `cpu:gloo,cuda:nccl`; `timeout` is that of a collective, and of joining.
    """
    for variable, value in interface_variables(context.master_address).items():
        os.environ.setdefault(variable, value)
    store = open_store(context.master_address, context.master_port, is_master=context.rank == 0, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=context.rank, world_size=context.world_size, timeout=timeout)


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


class FullyShard(Parallel):
    """Weights, gradients and optimizer state are sharded over the ranks (FSDP2): one unit per decoder layer, then the root.

    Parameters that are not sharded, such as adapters, are the same on all ranks, and their gradients are summed over all.

    With fewer shards than ranks (HSDP), consecutive ranks share one copy, and gradients are summed over the copies.

    Args:
        context: this rank.
        compute_dtype: dtype to which float32 shards are rounded when gathered.
        num_shards: number of ranks that share one copy; all by default.
        prefetched_layers: number of layers whose weights are gathered while another one is computed; 0 leaves it to torch.
    """

    shards = True

    def __init__(
        self, context: WorkerContext, *, compute_dtype: torch.dtype, num_shards: int | None = None, prefetched_layers: int = 0
    ) -> None:
        super().__init__(context)
        self._compute_dtype, self._prefetched_layers = compute_dtype, prefetched_layers
        self.num_shards = num_shards or self.world_size
        copies = self.world_size // self.num_shards
        if copies * self.num_shards != self.world_size:
            raise ConfigError(f"{self.world_size} ranks cannot be divided into groups of {self.num_shards} that share a copy.")
        sizes: tuple[int, ...] = (self.num_shards,) if copies == 1 else (copies, self.num_shards)
        names = ("copy", "shard")[-len(sizes) :]
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)

    def distribute(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        *,
        trainable: bool = True,
        offloads: bool = True,
        unsharded: Collection[nn.Parameter] = (),
        forward_methods: Sequence[str] = (),
    ) -> None:
        """Shard a model over the ranks.

        Args:
            model: the full model, identical on all ranks; or without values, on the device `meta`.
            layers: its decoder layers.
            trainable: whether the weights are trained; otherwise they are frozen and keep their data type.
            offloads: whether a frozen model is kept in CPU memory and moved to the device when used.
            unsharded: parameters that each rank keeps whole. Like those that are added later, such as adapters, they may be
                trained with a frozen model.
            forward_methods: methods that compute with the weights, besides `forward`.
        """
        offload = OffloadPolicy()
        if trainable:
            model.float()
        else:
            model.requires_grad_(False)
            if offloads and self.device.type == "cuda":
                model.cpu()
                offload = CPUOffloadPolicy()
        precision = MixedPrecisionPolicy()
        if trainable:
            precision = MixedPrecisionPolicy(param_dtype=self._compute_dtype, reduce_dtype=torch.float32)
        for module in (*layers, model):
            unit = fully_shard(
                module, mesh=self.mesh, mp_policy=precision, offload_policy=offload, ignored_params=set(unsharded)
            )
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        _prefetch([layer for layer in layers if isinstance(layer, FSDPModule)], self._prefetched_layers)
        for method in forward_methods:
            register_fsdp_forward_method(model, method)

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        fill_missing_gradients(parameters)  # torch has summed those of shards
        super().sum_gradients({name: each for name, each in parameters.items() if not isinstance(each, DTensor)})

    def gradient_norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        squared = norm_of([local(each) for each in gradients if isinstance(each, DTensor)], self.device).square()
        dist.all_reduce(squared, group=self.mesh.get_group("shard"))
        squared += norm_of([each for each in gradients if not isinstance(each, DTensor)], self.device).square()
        return squared.sqrt()

    def after_forward(self, model: nn.Module) -> None:
        reshard(model)


def _prefetch(layers: Sequence[FSDPModule], number: int) -> None:
    """Let each layer gather the weights of the `number` layers after it, and of those before it in the backward pass."""
    for index, layer in enumerate(layers if number else ()):
        layer.set_modules_to_forward_prefetch(list(layers[index + 1 : index + 1 + number]))
        layer.set_modules_to_backward_prefetch(list(reversed(layers[max(index - number, 0) : index])))


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
