"""Loads a model whose layers are sharded over ranks (FSDP2), and compiles its layers (`hf_cfg.compile_layers`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from transformers import PreTrainedModel

from rl_backends_base.optimizer import compile_error
from rl_backends_base.parallel import FullyShard
from rl_backends_hf.model import decoder_layers, is_gguf, load_model, load_model_shards, model_without_weights, why_read_whole
from rl_backends_hf.model_options import HFModelConfig
from rl_backends_hf.scoring.scoring_model import ScoringModel
from rl_core.backend import Head
from rl_core.errors import NotSupportedError, UserError

_log = logging.getLogger(__name__)


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
        scoring = made[0]
        parallel.distribute(scoring, decoder_layers(model), trainable=trainable, forward_methods=scoring.extra_forward_methods)

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
