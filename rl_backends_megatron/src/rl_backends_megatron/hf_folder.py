"""Reads and writes a Transformers model folder: config and safetensors, which can be read partially."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, GenerationConfig

from rl_core.data.hub import model_source, require_model
from rl_core.errors import CheckpointError, DataError, UserError

_INDEX = "model.safetensors.index.json"
_GENERATION = "generation_config.json"
_SHARD_BYTES = 4 * 2**30


def find_folder(name: str, *, weights: bool = True) -> Path:
    """The folder of a model, downloaded from the hub if it is not a local folder.

    Args:
        name: folder, or name on the hub (or in its cache).
        weights: whether to download weights, not only the config.

    Raises:
        UserError: there is no such model with safetensors.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"The folder {name} has no config.json, so it is not a Transformers model.")
        return path
    if path.suffix == ".gguf":
        raise UserError(
            f"{name} is a GGUF file, but the Megatron backend reads only safetensors. Load it with Transformers and write it "
            "with `save_pretrained`, or use `backend: hf`.",
            key="backend",
        )
    try:
        require_model(name)
    except DataError as error:
        raise UserError(f"`model_name`: {error}.", key="model_name") from error
    try:
        patterns = ["*.json", *(["*.safetensors"] if weights else [])]
        source, revision = model_source(name)
        return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise UserError(
            f"Model {name!r} not found: there is no folder {path.absolute()}, and the hub failed with {type(error).__name__}: "
            f"{error}. Give the path of a model folder, or connect to the hub (HF_ENDPOINT selects another hub, HF_TOKEN gives "
            "access to gated models)."
        ) from error


def read_config(folder: Path) -> Any:
    """The Hugging Face config in a folder.

    Raises:
        UserError: Transformers does not support it.
    """
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"Cannot read config.json in {folder}: {type(error).__name__}: {error}") from error


def read_generation_config(folder: Path) -> GenerationConfig | None:
    """The generation config in a folder, or None if it has none.

    Raises:
        UserError: it cannot be read.
    """
    if not (folder / _GENERATION).is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read {_GENERATION} in {folder}: {error}") from error


def copy_generation_config(source: Path, folder: Path) -> None:
    """Copy the generation config, which may have end tokens that config.json lacks; `folder` is created."""
    folder.mkdir(parents=True, exist_ok=True)
    if (source / _GENERATION).is_file() and source.resolve() != folder.resolve():
        shutil.copyfile(source / _GENERATION, folder / _GENERATION)


class SafetensorsFolder:
    """The tensors in a folder, read from disk on access; a context manager.

    Args:
        folder: contains `model.safetensors`, or shards with their index.

    Raises:
        CheckpointError: there are none, or one is incomplete or corrupt.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = _tensor_files(folder)
        self._open: dict[str, Any] = {}
        self._exits = ExitStack()

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> Sequence[str]:
        """Names of all tensors."""
        return tuple(self._files)

    def dtype(self, name: str) -> str:
        """The tensor's dtype, as named by safetensors."""
        dtype: str = self._read(name).get_dtype()
        return dtype

    def whole(self, name: str) -> torch.Tensor:
        """The full tensor with this name."""
        tensor: torch.Tensor = self._read(name)[:]
        return tensor

    def read_slice(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """Entries from `start` to `stop` along `dim`; reads only these from disk."""
        tensor: torch.Tensor = self._read(name)[(slice(None),) * dim + (slice(start, stop),)]
        return tensor

    def size(self, name: str, dim: int) -> int:
        """The tensor's length along `dim`."""
        length: int = self._read(name).get_shape()[dim]
        return length

    def _read(self, name: str) -> Any:
        if name not in self._files:
            raise CheckpointError(
                f"{self._folder} has no tensor {name}, which its config.json requires: it is incomplete, or has another model."
            )
        file = self._files[name]
        if file not in self._open:
            self._open[file] = self._exits.enter_context(_opened(self._folder / file))
        return self._open[file].get_slice(name)


def write_folder(folder: Path, weights: Iterator[tuple[str, torch.Tensor]], config: Any) -> None:
    """Write weights in shards of at most a few gigabytes, then the config; from one rank.

    Args:
        folder: created if it does not exist.
        weights: name and full tensor; copied to the CPU one by one.
        config: the Hugging Face config; written last, so a folder with a config is complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("model*.safetensors"), folder / _INDEX, folder / "config.json"):
        old.unlink(missing_ok=True)
    shards: list[list[str]] = []
    tensors_of_file: dict[str, torch.Tensor] = {}
    size = total = 0
    for name, tensor in weights:
        if tensors_of_file and size + tensor.nbytes > _SHARD_BYTES:
            shards.append(_write_shard(folder, tensors_of_file, len(shards)))
            tensors_of_file, size = {}, 0
        tensors_of_file[name] = tensor.detach().cpu().contiguous().clone()
        size += tensor.nbytes
        total += tensor.nbytes
    shards.append(_write_shard(folder, tensors_of_file, len(shards)))
    _name_shards(folder, shards, total)
    config.save_pretrained(folder)


def _write_shard(folder: Path, tensors: dict[str, torch.Tensor], number: int) -> list[str]:
    save_file(tensors, folder / f"model-{number + 1:05d}.safetensors", metadata={"format": "pt"})
    return list(tensors)


def _name_shards(folder: Path, shards: list[list[str]], total: int) -> None:
    """Rename files to the names that Transformers expects: one file, or numbered shards and an index."""
    if len(shards) == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"model-{number:05d}.safetensors").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _tensor_files(folder: Path) -> dict[str, str]:
    """Name of each tensor to its file."""
    if (folder / _INDEX).is_file():
        return _indexed_files(folder)
    single = folder / "model.safetensors"
    if not single.is_file():
        raise CheckpointError(
            f"{folder} has neither model.safetensors nor {_INDEX}. Convert weights in other formats with Transformers: "
            "`AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)`."
        )
    with _opened(single) as tensors:
        return dict.fromkeys(tensors.keys(), single.name)


def _indexed_files(folder: Path) -> dict[str, str]:
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"Cannot read {folder / _INDEX}: {type(error).__name__}: {error}") from error
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(
            f"{folder / _INDEX} has no valid `weight_map` of tensor names to file names. Download the folder again, or write "
            "it again with `save_pretrained`."
        )
    absent = sorted({file for file in files.values() if not (folder / file).is_file()})
    if absent:
        raise CheckpointError(
            f"{folder} lacks {len(absent)} of the {len(set(files.values()))} files listed in its {_INDEX}, the first "
            f"{absent[0]}. Download it again."
        )
    return files


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is incomplete or corrupt: {type(error).__name__}: {error}") from error
