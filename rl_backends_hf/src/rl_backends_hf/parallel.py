"""Shards a model over ranks (FSDP2), and compiles its layers (`hf_cfg.compile_layers`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

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
from transformers import PreTrainedModel

from rl_backends_base.optimizer import compile_error
from rl_backends_base.parallel import Parallel, fill_missing_gradients, norm_of
from rl_backends_base.shards import local, reshard
from rl_backends_hf.model import decoder_layers, is_gguf, load_model, load_model_shards, model_without_weights, why_read_whole
from rl_backends_hf.model_options import HFModelConfig
from rl_backends_hf.scoring.scoring_model import ScoringModel
from rl_core.backend import Head, WorkerContext
from rl_core.errors import ConfigError, NotSupportedError, UserError

_log = logging.getLogger(__name__)


class FullyShard(Parallel):
    """Weights, gradients and optimizer state are sharded over the ranks (FSDP2): one unit per decoder layer, then the root.

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
            raise ConfigError(
                f"`fsdp_num_shards: {self.num_shards}`: {self.world_size} ranks cannot be divided into groups of that size.",
                key="fsdp_num_shards",
            )
        sizes: tuple[int, ...] = (self.num_shards,) if copies == 1 else (copies, self.num_shards)
        names = ("copy", "shard")[-len(sizes) :]
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)

    def distribute(self, scoring: ScoringModel, *, trainable: bool = True) -> None:
        """Shard a model over the ranks.

        Args:
            scoring: the full model, identical on all ranks; or without values, on the device `meta`.
            trainable: a frozen model is kept in CPU memory and moved to the device when used.
        """
        offload = OffloadPolicy()
        if trainable:
            scoring.float()
        else:
            scoring.requires_grad_(False)
            if self.device.type == "cuda":
                scoring.cpu()
                offload = CPUOffloadPolicy()
        precision = MixedPrecisionPolicy()
        if trainable:
            precision = MixedPrecisionPolicy(param_dtype=self._compute_dtype, reduce_dtype=torch.float32)
        layers = decoder_layers(scoring.model)
        for module in (*layers, scoring):
            unit = fully_shard(module, mesh=self.mesh, mp_policy=precision, offload_policy=offload)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        _prefetch([layer for layer in layers if isinstance(layer, FSDPModule)], self._prefetched_layers)
        for method in scoring.extra_forward_methods:
            register_fsdp_forward_method(scoring, method)

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        fill_missing_gradients(parameters)  # torch has summed the others

    def gradient_norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        squared = norm_of([local(gradient) for gradient in gradients], self.device).square()
        dist.all_reduce(squared, group=self.mesh.get_group("shard"))
        return squared.sqrt()

    def after_forward(self, model: nn.Module) -> None:
        reshard(model)


def _prefetch(layers: Sequence[FSDPModule], number: int) -> None:
    """Let each layer gather the weights of the `number` layers after it, and of those before it in the backward pass."""
    for index, layer in enumerate(layers if number else ()):
        layer.set_modules_to_forward_prefetch(list(layers[index + 1 : index + 1 + number]))
        layer.set_modules_to_backward_prefetch(list(reversed(layers[max(index - number, 0) : index])))


def load_sharded(
    name: str,
    make_scoring: Callable[[PreTrainedModel], ScoringModel],
    *,
    parallel: FullyShard,
    options: HFModelConfig,
    dtype: torch.dtype,
    head: Head = "tokens",
    trainable: bool = True,
) -> ScoringModel:
    """A model of which each rank has its shards, and has read no other weights.

    A warning is logged if each rank must read the whole model into CPU memory; see `why_read_whole`.

    Args:
        name: as in `load_model`.
        make_scoring: adds the head to a model.
        parallel: the ranks.
        options: how to load it.
        dtype: of the shards.
        head: head type.
        trainable: as in `FullyShard.distribute`.

    Raises:
        UserError: as `load_model_shards`.
    """
    made: list[ScoringModel] = []

    def shard(model: PreTrainedModel) -> None:
        made.append(make_scoring(model))
        parallel.distribute(made[0], trainable=trainable)

    empty = model_without_weights(name, options=options, head=head)
    why = "it is a GGUF file" if is_gguf(name) else why_read_whole(empty, parallel.num_shards)
    if why is None:
        load_model_shards(name, type(empty), options=options, dtype=dtype, head=head, shard=shard)
    else:
        _log.warning("Each rank reads all weights of %s into CPU memory before it keeps its shards: %s.", name, why)
        shard(load_model(name, options=options, dtype=dtype, head=head))
    (scoring,) = made
    if trainable:
        return scoring.to(parallel.device)
    for buffer in scoring.buffers():
        buffer.data = buffer.to(parallel.device)
    return scoring


_KEY: Final = "policy.hf_cfg.compile_layers"


def compile_layers(model: PreTrainedModel, *, float32_products: bool) -> None:
    """Compile each decoder layer when it is first called, once for all lengths.

    Args:
        model: the model.
        float32_products: whether products of bfloat16 matrices are replaced.

    Raises:
        NotSupportedError: the model's class does not name its layers.
        UserError: products are replaced.
    """
    if float32_products:
        raise UserError(
            "`compile_layers` has no effect on a CPU that multiplies bfloat16 matrices in float32 (`cpu_products`): torch does "
            "not compile replaced products. Remove it, or set `policy.precision: float32`.",
            key=_KEY,
        )
    layers = decoder_layers(model)
    if not layers:
        raise NotSupportedError(
            f"{type(model).__name__} does not name its decoder layers in Transformers, so they cannot be compiled. Set "
            f"`{_KEY}: false`.",
            key=_KEY,
        )
    for layer in layers:
        layer.compile(dynamic=True)


@contextmanager
def explaining_compilation(model: PreTrainedModel) -> Iterator[None]:
    """Raise a `UserError` if the layers of `model` cannot be compiled while the block calls them."""
    try:
        yield
    except compile_error() as error:
        raise UserError(
            f"The layers of {type(model).__name__} cannot be compiled on {model.device}: {str(error).strip().splitlines()[0]} "
            f"Compiling requires a C++ compiler on a CPU and Triton on a GPU. Install it, or set `{_KEY}: false`.",
            key=_KEY,
        ) from error
