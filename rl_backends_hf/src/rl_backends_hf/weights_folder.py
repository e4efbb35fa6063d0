"""A policy's weights as others take them: one by one, or as a folder that Transformers loads; knows no optimizer, no loss."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.model import AUTO_CLASSES
from rl_backends_hf.parallel import fill, whole
from rl_core.data.tokenizer import load_tokenizer_if_there
from rl_core.errors import CheckpointError
from rl_core.interfaces.policy import RefitManifest
from rl_core.training.heads import Head
from rl_core.weights.manifest import dtype_name, weights_of


class ExportedWeights(Protocol):
    """What of a model is handed on and kept; all of it is collective over the ranks."""

    def manifest(self) -> RefitManifest:
        """Name to (shape, dtype) of what `iter_weights` yields."""

    def iter_weights(self, names: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and whole tensor of each weight, under the names of the model's own folder."""

    def save(self, folder: Path, *, rank: int) -> None:
        """Write what has been trained into `folder`, from rank 0."""

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; CheckpointError where the folder is absent, torn, or of another model."""


class WholeModel:
    """A model of which all weights are trained.

    Args:
        model: whole or sharded.
        dtype: what float32 masters of another type are rounded to.
        head: what the model ends in.
    """

    def __init__(self, model: PreTrainedModel, *, dtype: torch.dtype, head: Head) -> None:
        self._model, self._dtype, self._head = model, dtype, head

    def manifest(self) -> RefitManifest:
        master = torch.float32
        return {
            name: (
                tuple(tensor.shape),
                dtype_name(self._dtype if tensor.dtype == master and tensor.requires_grad else tensor.dtype),
            )
            for name, tensor in weights_of(self._model).items()
        }

    def iter_weights(self, names: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        return full_weights(self._model, dtype=self._dtype, names=None if names is None else list(names))

    def save(self, folder: Path, *, rank: int) -> None:
        save_weights(self._model, folder, dtype=self._dtype, rank=rank)

    def load(self, folder: Path) -> None:
        load_weights(self._model, folder, head=self._head)


def full_weights(
    model: PreTrainedModel, *, dtype: torch.dtype, names: list[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and whole tensor of each weight, of tied ones the first alone; collective where they are sharded.

    Args:
        model: whole or sharded.
        dtype: float32 parameters that are the masters of another type are rounded to it.
        names: these, in this order; all by default.
    """
    weights = weights_of(model)
    for name in weights if names is None else names:
        tensor = whole(weights[name].detach())
        is_master = isinstance(weights[name], torch.nn.Parameter) and tensor.dtype == torch.float32
        yield name, tensor.to(dtype) if is_master else tensor


def save_weights(model: PreTrainedModel, folder: Path, *, dtype: torch.dtype, rank: int) -> None:
    """Write safetensors and config.json into `folder` from rank 0; collective."""
    gathered: dict[str, torch.Tensor] = {}
    for name, tensor in full_weights(model, dtype=dtype):
        if rank == 0:
            gathered[name] = tensor.cpu()
    if rank != 0:
        return
    for name, tied_to in tied_names(model).items():
        gathered[name] = gathered[tied_to]
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, state_dict=gathered)
    # Transformers writes down the type of the live weights, which under FSDP2 are float32 masters of rounded ones.
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.save_pretrained(folder)


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Each name of a tied weight that `weights_of` leaves out, to the name under which it is there."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied[name] = first[id(parameter)]
        first.setdefault(id(parameter), name)
    return tied


def load_weights(model: PreTrainedModel, folder: Path, *, head: Head) -> None:
    """Set the model's weights, whole or sharded, to those in `folder`; every rank reads them.

    Raises:
        CheckpointError: the folder is absent, torn, or of another model; the weights are as before.
    """
    if not (folder / "config.json").is_file():
        adapter = " It holds an adapter: resume with the `policy.hf_cfg.lora` that wrote it."
        there = adapter if (folder / "adapter_config.json").is_file() else ""
        raise CheckpointError(f"{folder} holds no config.json, so no weights of a whole model were saved there.{there}")
    try:
        found, report = AUTO_CLASSES[head].from_pretrained(
            folder,
            dtype=model.dtype,
            output_loading_info=True,
            # A checkpoint holds data and no code: not of the folder, not of a pickle, not of a kernel that its config names.
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation="eager",
        )
    except Exception as error:
        raise CheckpointError(f"The weights in {folder} cannot be read: {type(error).__name__}: {error}") from error
    saved, own = weights_of(found), weights_of(model)
    _check_same_model(saved, own, report, folder)
    for name, tensor in own.items():
        fill(tensor, saved[name].detach())


def _check_same_model(
    saved: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], report: Mapping[str, Any], folder: Path
) -> None:
    torn = sorted(map(str, report.get("missing_keys", ())))
    if torn:
        raise CheckpointError(f"{folder} is torn: it lacks {len(torn)} tensors, the first {torn[0]}.")
    odd = sorted(saved.keys() ^ own.keys())
    if odd:
        raise CheckpointError(f"{folder} is of another model: {odd[0]} is in one of the two only ({len(odd)} such names).")
    for name, tensor in own.items():
        if saved[name].shape != tensor.shape:
            raise CheckpointError(
                f"{folder} is of another model: {name} is {tuple(saved[name].shape)} there and {tuple(tensor.shape)} here."
            )


def save_tokenizer(config: HFPolicyConfig, folder: Path) -> None:
    """Write the tokenizer's files beside the weights, so that the folder is whole; nothing where the model has none.

    Raises:
        UserError: the tokenizer that the config names cannot be loaded.
    """
    tokenizer = find_tokenizer(config)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def find_tokenizer(config: HFPolicyConfig) -> Any:
    """The policy's tokenizer, or None where its model's folder has none and the config names no other.

    Raises:
        UserError: there should be one, and it cannot be loaded.
    """
    return load_tokenizer_if_there(
        config.model_name,
        tokenizer_name=config.tokenizer.name,
        chat_template=config.tokenizer.chat_template,
        chat_template_kwargs=config.tokenizer.chat_template_kwargs,
        trust_remote_code=config.hf_cfg.trust_remote_code,
    )
