"""A generation worker without a group: the context and the config of `VllmGenerationWorker("path/to/model", ...)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl_backends_vllm.config import VllmConfig
from rl_core.config.validator import section_from_keywords
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import ConfigError, DataError
from rl_core.interfaces.policy import RefitManifest
from rl_core.interfaces.worker_context import WorkerContext


def standalone_context() -> WorkerContext:
    """The context of a single worker in this process, on the GPU if there is one."""
    return WorkerContext(
        rank=0,
        world_size=1,
        local_rank=0,
        node_rank=0,
        master_address="127.0.0.1",
        master_port=0,
        device="cuda" if torch.cuda.is_available() else "cpu",
        run_in_process=True,
    )


def standalone_config(models: Sequence[str], fields: Mapping[str, Any]) -> VllmConfig:
    """The section `policy.generation` of keyword arguments, which may also be fields of `vllm_cfg`.

    Raises:
        ConfigError: There is no model or more than one, a field does not exist, or a value is not allowed.
    """
    if len(models) > 1:
        raise ConfigError(f"VllmGenerationWorker has two models: {models[0]!r} and model_name={models[1]!r}. Give only one.")
    model_name = models[0] if models else None
    return section_from_keywords("VllmGenerationWorker", VllmConfig, own="vllm_cfg", fields=fields, model_name=model_name)


def only_config(config: VllmConfig, models: Sequence[str], fields: Mapping[str, Any]) -> VllmConfig:
    """`config` itself.

    Raises:
        ConfigError: A model or fields are given as well, which would have no effect.
    """
    unused = [*([f"the model {models[0]!r}"] if models else []), *sorted(fields)]
    if unused:
        raise ConfigError(
            f"VllmGenerationWorker has `config`, so {', '.join(unused)} would have no effect. Set it in `config`, or leave "
            "`config` out."
        )
    return config


def as_sent(expected: RefitManifest, weights_handle: Mapping[str, Any]) -> RefitManifest:
    """The manifest of a refit, of which the first bucket is known.

    Args:
        expected: Name to (shape, dtype) of the engine's weights.
        weights_handle: The bucket; other weights are converted from the engine's data types in the same way.
    """
    placements = weights_handle.get("placements", {})
    sent = {expected[name][1]: placement.dtype for name, placement in placements.items() if name in expected}
    return {name: (shape, sent.get(dtype, dtype)) for name, (shape, dtype) in expected.items()}


def as_batch(data: BatchedDataDict[Any] | torch.Tensor | None, columns: Mapping[str, Any]) -> BatchedDataDict[Any]:
    """A batch of prompts; token ids [B, T] become one, without padding unless an `attention_mask` is given.

    Args:
        data: The batch, or its `input_ids`, which may also be a column.
        columns: Further columns of token ids, such as `attention_mask` or `max_new_tokens`.

    Raises:
        DataError: A batch and further columns were given, or the token ids are not [B, T].
    """
    if data is None:
        if "input_ids" not in columns:
            raise DataError("generate takes a batch or input_ids [B, T], and has neither.")
        columns = dict(columns)
        data = columns.pop("input_ids")
    if not isinstance(data, torch.Tensor):
        if columns:
            raise DataError(f"{', '.join(sorted(columns))} must be columns of the batch, not arguments of generate.")
        return data
    if data.dim() != 2:
        raise DataError(f"input_ids has shape {list(data.shape)}: expected [B, T].")
    lengths = {} if {"attention_mask", "input_lengths"} & columns.keys() else {"attention_mask": torch.ones_like(data)}
    return BatchedDataDict({"input_ids": data, **lengths, **columns})
