"""Base classes of config sections, the section `cluster`, and checks of values that several sections share.

Relative paths in fields annotated as `Annotated[str, INPUT_PATH]` or `Annotated[str, NAME_OR_PATH]` are relative to the working
directory, else to the file that contains them. Outputs of a run (the run folder, checkpoints) are not marked, and are relative
to the working directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os.path import isdir, isfile  # False for a name that is too long for the file system; Path would raise
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from rl_core.config.diagnostics import KeyPath
from rl_core.plugins.component import did_you_mean


class Section(BaseModel):
    """A section of the config: keyword-only, frozen, and closed to unknown keys. `section["key"]` is `section.key`."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
    )

    def __contains__(self, key: object) -> bool:
        return key in type(self).model_fields

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise KeyError(f"{type(self).__name__} has no key {key!r}.{did_you_mean(key, [*type(self).model_fields])}")
        return getattr(self, key)


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices that a component runs on, from which it derives defaults.

    Attributes:
        use_gpus: whether it runs on GPUs.
        trains: whether a run trains on them, so that policy and engine share them.
        have_bfloat16: whether they are GPUs that all compute in bfloat16.
    """

    use_gpus: bool
    trains: bool = False
    have_bfloat16: bool = False


class ComponentSection(Section):
    """Section of a component, which may add its own checks."""

    def for_devices(self, devices: Devices) -> Self:
        """This section with the values of keys that are null, if their defaults depend on the devices."""
        return self

    def conflicts(self, run: Any) -> Iterator[tuple[KeyPath, str]]:
        """Checks the section against the rest of the run: each wrong key, relative to this section, and the reason.

        `run` has the sections of `rl_core.config.schema.RunSections`. The section of a policy backend is checked for the
        policy, the value model and the teacher alike; `run.policy is self` tells which of them it is.

        `rlcore validate` calls it, so it must not import torch, ray, numpy or transformers.
        """
        yield from ()

    def deep_conflicts(self, run: Any) -> Iterator[tuple[KeyPath, str]]:
        """Like `conflicts`, but may import torch and read a tokenizer or a model's config; it must not load weights.

        `rlcore validate --deep` calls it. A `UserError` that it raises is reported at the key that its message names.
        """
        yield from ()


class DeadlineConfig(Section):
    """Timeouts of remote calls, in seconds. When one expires, the error names the workers that did not answer."""

    start_s: float = Field(default=600.0, gt=0.0)
    """Timeout for starting workers and loading models, in seconds."""
    generate_s: float = Field(default=1800.0, gt=0.0)
    """Timeout for one generation call, in seconds."""
    train_s: float = Field(default=1800.0, gt=0.0)
    """Timeout for one training or scoring call, in seconds."""
    refit_s: float = Field(default=600.0, gt=0.0)
    """Timeout for one refit, in seconds."""
    checkpoint_s: float = Field(default=1800.0, gt=0.0)
    """Timeout for saving or loading a checkpoint, in seconds."""
    environment_s: float = Field(default=1800.0, gt=0.0)
    """Timeout for one environment turn of the whole batch, in seconds."""


class ResourcesConfig(Section):
    """Nodes and workers of a group of processes."""

    num_nodes: int = Field(default=1, ge=1)
    """Number of nodes."""
    workers_per_node: int = Field(default=1, ge=1)
    """Number of ranks per node. On GPUs, each rank uses one GPU."""
    use_gpus: bool | None = None
    """Whether to use GPUs. By default, GPUs are used if there are any; for an engine, if the policy uses them."""
    cpus_per_worker: int | None = Field(default=None, ge=1)
    """Number of CPUs (and threads) per rank. By default, the CPUs of the node are divided evenly among its ranks."""


class ClusterConfig(ResourcesConfig):
    """Nodes, workers and timeouts of a run (`cluster`)."""

    backend: Literal["ray", "in_process"] = "ray"
    """How workers run. `in_process` runs one worker of each kind in the driver process, without Ray, for debugging and fast
    tests."""
    deadlines: DeadlineConfig = Field(default_factory=DeadlineConfig)
    """Timeouts of remote calls."""


_RESERVED = (
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs",
    "tools", "truncation",
)  # fmt: skip


def check_template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The variables, if they are valid.

    Raises:
        ValueError: A name is reserved or is not an identifier, or a value is not plain YAML.
    """
    for name, value in kwargs.items():
        if name in _RESERVED:
            raise ValueError(f"{name!r} is set by rlcore for every conversation: remove it")
        if not name.isidentifier():
            raise ValueError(f"{name!r} cannot be a template variable: use letters, digits and underscores")
        _check_value(name, value)
    return kwargs


def _check_value(name: str, value: Any) -> None:
    if isinstance(value, dict) and (odd := [key for key in value if not isinstance(key, str)]):
        raise ValueError(f"{name!r} has the key {odd[0]!r}: keys must be text")
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_value(name, inner)
    elif not (value is None or isinstance(value, str | bool | int | float)) or value in (float("inf"), float("-inf")):
        raise ValueError(f"{name!r} is {value!r}: expected text, a number, true, false, null, or lists and mappings of them")


@dataclass(frozen=True)
class PathRule:
    """Marks a field that may contain a path.

    Attributes:
        must_exist: Whether a path that does not exist is an error; otherwise it is unchanged, as the name of something.
    """

    must_exist: bool


INPUT_PATH = PathRule(must_exist=True)
"""A file or folder that the run reads."""
NAME_OR_PATH = PathRule(must_exist=False)
"""The name of something (a model of a hub, a packaged template), or the path of a file or folder."""


_DATA_SUFFIXES = {".safetensors", ".json", ".jinja", ".model", ".spm", ".tiktoken"}
_VOCABULARIES = {"merges.txt", "vocab.txt"}


def model_path_problem(name_or_path: str) -> str | None:
    """Why a local path is not a Transformers model; None if it is one, or the name of a model on the hub.

    Args:
        name_or_path: The value of a key `model_name`.
    """
    path = Path(name_or_path).expanduser()
    if path.suffix == ".gguf":
        return None if isfile(path) else f"there is no GGUF file {name_or_path}."
    if isfile(path):
        return (
            f"{name_or_path} is a file, but a model is a folder with config.json and weights, or a .gguf file. "
            f"Use a folder written by `save_pretrained`, such as {path.parent}."
        )
    if isdir(path) and not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            return (
                f"{name_or_path} contains only a LoRA adapter, not a whole model. Merge it into its base with `rlcore "
                "convert CHECKPOINT --to hf --merge OUTPUT` and use OUTPUT."
            )
        return f"{name_or_path} has no config.json, so it is not a model folder.{checkpoint_hint(path)}"
    return None


def checkpoint_hint(path: Path, *, file: str = "config.json") -> str:
    """Where a model is in the folder: the last checkpoint of a run, or a folder at most three levels below.

    Args:
        path: a folder.
        file: name of a file that the folder of the model has.
    """
    for pattern in ("policy/weights", "*/policy/weights", "checkpoints/*/policy/weights", "*", "*/*", "*/*/*"):
        if inner := sorted(path.glob(f"{pattern}/{file}")):
            return f" {'The weights of a checkpoint are' if 'policy' in pattern else 'A model is'} in {inner[-1].parent}."
    return " Use a folder written by `save_pretrained` or `rlcore convert`."


def model_files(folder: Path) -> list[str]:
    """Paths in a model folder of its weights, configs, tokenizer and templates: data only, no Python and no pickles."""
    files = [path for path in folder.iterdir() if path.is_file()]
    files = [path for path in files if path.suffix in _DATA_SUFFIXES or path.name in _VOCABULARIES]
    files += folder.glob("additional_chat_templates/*.jinja")
    return sorted(path.relative_to(folder).as_posix() for path in files)
