"""Digests of models and data files, which tell whether two of them are equal. They take seconds for files of any size."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from os.path import isdir, isfile  # False for a text that is too long for the file system; Path would raise
from pathlib import Path
from typing import Any, BinaryIO, Final

import xxhash

from rl_core.config.section import model_files
from rl_core.data.hub import model_source

ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
"""The file of weights in an adapter folder of peft's format."""
BASE_WEIGHTS: Final = "base_weights"
"""Name of the digest of the base's weights in the metadata of that file. peft would warn of an unknown key in its config."""
_WHOLE: Final = 1 << 30
"""Bytes of a model or file, 0.2 CPU-seconds: of a larger one, only blocks of each tensor or file are read."""
_JSON: Final = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "chat_template.json"),
)
"""JSON files of a model that decide what is loaded, except for the list of shards."""
_BLOCK: Final = 1 << 12
_BLOCKS_OF_TENSOR: Final = 3
_BLOCKS_OF_FILE: Final = 256
_CHUNK: Final = 1 << 24


def path_digests(path: str) -> dict[str, str]:
    """The digests of what a path has, by tensor and file; by commit for a model in the hub's cache; empty for other names."""
    location = Path(path)
    if isdir(path):
        names = [name for name in model_files(location) if not name.endswith(".json") or name in _JSON]
        files = [*(location / name for name in names), *location.glob("pytorch_model*.bin"), *location.glob("*.py")]
        whole = sum(file.stat().st_size for file in files) <= _WHOLE
        return {name: digest for file in files for name, digest in _file_digests(file, file.name, whole=whole)}
    if isfile(path):
        return dict(_file_digests(location, "the file", whole=location.stat().st_size <= _WHOLE))
    cached = _snapshot(path)
    return {} if cached is None else {"the commit of the hub": cached.name}


def base_weights(digests: Mapping[str, str]) -> dict[str, str]:
    """Those of the digests of a model that its adapters depend on: without tokenizer, templates and settings of generation."""
    return {
        name: digest
        for name, digest in digests.items()
        if name == "config.json" or not name.endswith((".json", ".jinja", ".model", ".txt"))
    }


def weights_digest(name: str) -> str | None:
    """One digest of the tensors of a model, equal for a copy of it; None if its files are not on this machine.

    Args:
        name: a folder, a GGUF file, or a name of the hub as in `model_source`, which is read from the hub's cache.
    """
    path = str(Path(name).expanduser())
    location = path if isdir(path) or isfile(path) else _snapshot(name)
    digests = {} if location is None else base_weights(path_digests(str(location)))
    lines = sorted(f"{tensor}={digest}\n" for tensor, digest in digests.items() if not tensor.endswith((".json", ".py")))
    return f"xxh3:{xxhash.xxh3_128_hexdigest(''.join(lines).encode())}" if lines else None


def recorded_base(adapter: Path) -> str | None:
    """The `weights_digest` of the base that an adapter folder was trained on; None if it has none.

    Raises:
        OSError: its file of weights cannot be read.
        ValueError: that is not a safetensors file.
    """
    digest: str | None = safetensors_header(adapter / ADAPTER_WEIGHTS).get("__metadata__", {}).get(BASE_WEIGHTS)
    return digest


def safetensors_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: tensor name to `dtype`, `shape` and `data_offsets`; `__metadata__` to texts by name.

    https://github.com/huggingface/safetensors#format

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a safetensors file.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("it has no header of safetensors")
        header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("it has no header of safetensors")
        return header


def _snapshot(name: str) -> Path | None:
    """The folder of a model in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        source, revision = model_source(name)
        cached = try_to_load_from_cache(source, "config.json", revision=revision)
    except (HFValidationError, OSError):  # no name of a model, but that of a packaged template or the text of one
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _file_digests(path: Path, name: str, *, whole: bool) -> Iterator[tuple[str, str]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if path.suffix != ".safetensors" or length > size:
            yield name, _digest(file, 0, size, _BLOCKS_OF_FILE, whole=whole)
            return
        for tensor, entry in safetensors_header(path).items():
            if tensor != "__metadata__":
                start, end = (8 + length + offset for offset in entry["data_offsets"])
                digest = _digest(file, start, end - start, _BLOCKS_OF_TENSOR, whole=whole)
                yield f"tensor {tensor}", f"{entry['dtype']} {entry['shape']} {digest}"


def _digest(file: BinaryIO, start: int, size: int, blocks: int, *, whole: bool) -> str:
    digest = xxhash.xxh3_64(str(size).encode())
    if whole or size <= blocks * _BLOCK:
        ranges = [(at, min(_CHUNK, size - at)) for at in range(0, size, _CHUNK)]
    else:
        ranges = [(math.floor(i * (size - _BLOCK) / (blocks - 1)), _BLOCK) for i in range(blocks)]
    for at, count in ranges:
        file.seek(start + at)
        digest.update(file.read(count))
    return str(digest.hexdigest())
