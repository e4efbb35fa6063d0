"""Exports a policy's weights: one by one, or as a folder for Transformers."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
import transformers
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import GenerationConfig, PreTrainedModel

from rl_backends_base.adapter_folder import ADAPTER_CONFIG
from rl_backends_base.shards import fill, whole
from rl_backends_hf.model import auto_class, sharding_class, why_read_whole
from rl_core.backend import CLASSIFIER, Head, RefitManifest, check_loaded, dtype_name, report_as_error, weights_of
from rl_core.data.hub import published_file
from rl_core.errors import CheckpointError

_GENERATION = "generation_config.json"


class ExportedWeights(Protocol):
    """Weights that are exported and saved; all methods are collective over the ranks."""

    def manifest(self) -> RefitManifest:
        """Name to (shape, dtype) of what `iter_weights` yields."""

    def iter_weights(self, names: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and full tensor of each weight, under the names of the model's own folder."""

    def save(self, folder: Path, *, rank: int) -> None:
        """Write the trained weights into `folder`, from rank 0."""

    def save_config(self, folder: Path) -> None:
        """Write what `save` writes apart from weights."""

    def load(self, folder: Path) -> None:
        """Load what `save` wrote; CheckpointError if the folder is missing, incomplete, or has another model."""


class WholeModel:
    """A model with all weights trained.

    Args:
        model: possibly sharded.
        dtype: dtype to which float32 master weights are rounded.
        head: head type.
        name: name from which the model was loaded.
    """

    def __init__(self, model: PreTrainedModel, *, dtype: torch.dtype, head: Head, name: str) -> None:
        self._model, self._dtype, self._head, self._name = model, dtype, head, name

    def manifest(self) -> RefitManifest:
        master = torch.float32
        return {
            name: (
                tuple(tensor.shape),
                dtype_name(self._dtype if tensor.dtype == master and isinstance(tensor, torch.nn.Parameter) else tensor.dtype),
            )
            for name, tensor in weights_of(self._model).items()
        }

    def iter_weights(self, names: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and full tensor of each weight, of tied weights only the first; float32 masters are rounded to the dtype."""
        weights = weights_of(self._model)
        for name in weights if names is None else names:
            tensor = whole(weights[name].detach())
            is_master = isinstance(weights[name], torch.nn.Parameter) and tensor.dtype == torch.float32
            yield name, tensor.to(self._dtype) if is_master else tensor

    def save(self, folder: Path, *, rank: int) -> None:
        gathered: dict[str, torch.Tensor] = {}
        for key, tensor in self.iter_weights():
            if rank == 0:
                gathered[key] = tensor.cpu()
        if rank != 0:
            return
        for key, tied_to in _tied_names(self._model).items():
            gathered[key] = gathered[tied_to]
        with _other_configs(self._model):
            self._model.save_pretrained(folder, state_dict=gathered)
        self.save_config(folder)

    def save_config(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        model = self._model
        config = copy.deepcopy(model.config)
        config.dtype = self._dtype
        own, named = type(model).__name__.removeprefix("FSDP"), (config.architectures or [""])[0]
        if CLASSIFIER in own or not named or hasattr(transformers, named):  # else the name of a class with its own code
            config.architectures = [own]
        config.save_pretrained(folder)
        if (file := published_file(self._name, _GENERATION)) is not None:
            shutil.copyfile(file, folder / _GENERATION)  # Transformers refuses to write some that it reads
        elif model.can_generate():
            model.generation_config.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        """Load the model's weights from `folder`; each rank reads its shards. After an error, the weights are unchanged."""
        if not (folder / "config.json").is_file():
            adapter = " It contains an adapter: resume with the same `policy.hf_cfg.lora` that wrote it."
            there = adapter if (folder / ADAPTER_CONFIG).is_file() else ""
            raise CheckpointError(f"{folder} has no config.json, so it contains no full model.{there}")
        model, first = self._model, next(self._model.parameters())
        reads_shards = isinstance(first, DTensor) and why_read_whole(model, first.device_mesh.size()) is None
        loader = (
            sharding_class(type(model), partial(_shard_like, model))
            if reads_shards
            else auto_class(model.config, self._head)[0]
        )
        try:
            with report_as_error(str(folder), CheckpointError):
                loaded, report = loader.from_pretrained(
                    folder,
                    dtype=model.dtype,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                    # Load data only: no code from the folder, from a pickle, or from a kernel that its config names.
                    trust_remote_code=False,
                    use_safetensors=True,
                    attn_implementation="eager",
                )
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"Cannot read the weights in {folder}: {type(error).__name__}: {error}") from error
        check_loaded(loaded, report, name=str(folder), error=CheckpointError)
        saved, own = weights_of(loaded), weights_of(model)
        _check_same_model(saved, own, folder)
        for name, tensor in own.items():
            fill(tensor, saved[name].detach())


@contextmanager
def _other_configs(model: PreTrainedModel) -> Iterator[None]:
    """Within the block, Transformers changes a copy of the config, and writes a generation config that it does not refuse."""
    config, generation = model.config, getattr(model, "generation_config", None)
    model.config, model.generation_config = copy.deepcopy(config), GenerationConfig()
    try:
        yield
    finally:
        model.config, model.generation_config = config, generation


def _tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Each name of a tied weight that `weights_of` omits, to the name under which it is included."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied[name] = first[id(parameter)]
        first.setdefault(id(parameter), name)
    return tied


def _shard_like(model: PreTrainedModel, empty: PreTrainedModel) -> None:
    """Shard parameters of `empty`, which is on the device `meta`, like those of `model`."""
    own = dict(model.named_parameters())
    for name, parameter in list(empty.named_parameters()):
        like = own.get(name)
        if isinstance(like, DTensor):
            holder, _, key = name.rpartition(".")
            shards = distribute_tensor(parameter.detach(), like.device_mesh, like.placements, src_data_rank=None)
            empty.get_submodule(holder).register_parameter(key, torch.nn.Parameter(shards))


def _check_same_model(saved: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    odd = sorted(saved.keys() ^ weights.keys())
    if odd:
        raise CheckpointError(
            f"{folder} has a different model: {odd[0]} exists either only in the folder or only in the policy ({len(odd)} such "
            "names). Load it with the `policy.model_name` that it was written with.",
            key="policy.model_name",
        )
    for name, tensor in weights.items():
        if saved[name].shape != tensor.shape:
            raise CheckpointError(
                f"{folder} has a different model: {name} has shape {tuple(saved[name].shape)}, but {tuple(tensor.shape)} in "
                "the policy. Load it with the `policy.model_name` that it was written with.",
                key="policy.model_name",
            )
