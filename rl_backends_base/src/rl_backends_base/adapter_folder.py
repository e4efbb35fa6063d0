"""Adapter folders in peft's format: their settings and contents, and the base model that they belong to. Imports no torch."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from os.path import isdir, isfile  # False for a name that is too long for the file system; Path would raise
from pathlib import Path
from typing import Any, Final

from rl_core.config.section import checkpoint_hint
from rl_core.data.hub import model_source, require_model
from rl_core.data.model_digests import ADAPTER_WEIGHTS, recorded_base, safetensors_header, weights_digest
from rl_core.errors import CheckpointError, UserError

ADAPTER_CONFIG: Final = "adapter_config.json"
ALL_LINEAR: Final = "all-linear"
SAVED_NAMES: Final = {
    "rank": "r",
    "alpha": "lora_alpha",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "target_modules": "target_modules",
    "exclude_modules": "exclude_modules",
    "target_parameters": "target_parameters",
}
"""Key of the section `lora` to the key of peft's config; these are read from a folder if they are not set."""
_OF_TENSOR: Final = re.compile(r"base_model\.model\.(.+)\.(lora_A\.weight|lora_B\.weight|lora_magnitude_vector)")
_A: Final = "lora_A.weight"
_OF_HEAD: Final = "base_model.model.score.weight"
_UNSUPPORTED: Final = (
    *("bias", "lora_bias", "rank_pattern", "alpha_pattern", "layers_to_transform", "layer_replication"),
    *("trainable_token_indices", "alora_invocation_tokens", "use_bdlora", "use_qalora", "kasa_config", "monteclora_config"),
)
"""Keys of peft's config that make it compute something other than W x + s B A x on whole linear layers, if they are set."""
_CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq")
"""Beginnings of `init_lora_weights` with which peft changes the base weights when it loads the adapter."""


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter folder; it is read when it is first needed.

    Attributes:
        name: a folder, or a name of the hub as in `model_source`.
    """

    name: str

    @cached_property
    def path(self) -> Path:
        """The folder. Files of the hub are downloaded unless they are in its cache.

        Raises:
            UserError: there is none.
        """
        folder = Path(self.name).expanduser()
        return folder if isdir(folder) else _from_hub(self.name)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The config that peft wrote.

        Raises:
            UserError: it is missing or invalid.
        """
        file = self.path / ADAPTER_CONFIG
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            is_whole = (self.path / "config.json").is_file()
            whole = " It contains a full model: use it as `policy.model_name`."
            hint = whole if is_whole else checkpoint_hint(self.path, file=ADAPTER_CONFIG)
            raise UserError(f"{self.name} has no {ADAPTER_CONFIG}, so it is not an adapter in peft's format.{hint}") from error
        except (OSError, ValueError) as error:
            raise UserError(f"Cannot read {file}: {error}") from error
        if not isinstance(config, dict):
            raise UserError(f"{file} must contain a JSON object.")
        return config

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name to shape of each tensor in the file of weights.

        Raises:
            UserError: it is missing or invalid.
        """
        file = self.path / ADAPTER_WEIGHTS
        try:
            header = safetensors_header(file)
            return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
        except (OSError, ValueError, KeyError, TypeError) as error:
            pickled = " An adapter_model.bin is not read, because a pickle can contain code: save it again with a current peft."
            hint = pickled if (self.path / "adapter_model.bin").is_file() else ""
            raise UserError(f"Cannot read {file}: {error}.{hint}") from error

    def settings(self) -> dict[str, Any]:
        """The values of the keys of the section `lora` that decide what the adapter computes."""
        return {key: self.config[name] for key, name in SAVED_NAMES.items() if self.config.get(name) is not None}

    def base_problem(self, model_name: str) -> str | None:
        """Why a model is not the base of the adapter, by the digest of its weights; None if it is, or if that is not known."""
        saved = recorded_base(self.path)
        now = None if saved is None else weights_digest(model_name)
        if saved is None or now in (None, saved):
            return None
        return (
            f"{self.name} was trained on {self.base or 'another model'} (weights {saved}), but policy.model_name is "
            f"{model_name}, which has other weights ({now}). Set policy.model_name to the model that it was trained on."
        )

    @property
    def base_name(self) -> str | None:
        """The name or path of its base model, without a revision; None if it has none."""
        name: str | None = self.config.get("base_model_name_or_path")
        return name

    @property
    def base(self) -> str | None:
        """The name of its base model, with the revision."""
        revision = self.config.get("revision")
        return f"{self.base_name}@{revision}" if self.base_name and revision else self.base_name

    def check(self, section: Mapping[str, Any], *, model_name: str, head: str, at: str) -> None:
        """Raise the first of `problems` as `UserError`; `at` is the section, such as `policy.hf_cfg.lora`."""
        for key, problem in self.problems(section, model_name=model_name, head=head):
            raise UserError(f"`{at}.{key}`: {problem}", key=f"{at}.{key}")

    def problems(self, section: Mapping[str, Any], *, model_name: str, head: str) -> Iterator[tuple[str, str]]:
        """Why training cannot continue from the folder, each by key of the section `lora`. Reads no tensors.

        Args:
            section: the values of the section.
            model_name: `policy.model_name`.
            head: head type of the model.
        """
        try:
            if unsupported := ", ".join(self._unsupported(head)):
                yield (
                    "adapter_path",
                    f"{self.name} has {unsupported}, which is not supported. Merge it into its base with peft.",
                )
                return
            if (problem := self.base_problem(model_name)) is not None:
                yield "adapter_path", problem
        except UserError as error:
            yield "adapter_path", str(error)
            return
        for key, saved in self.settings().items():
            if key not in section:
                if saved:
                    yield "adapter_path", f"{self.name} has `{key}: {saved}`, which only the backend `hf` supports."
            elif not key.endswith("modules") and _unordered(section[key]) != _unordered(saved):
                there = f"`{SAVED_NAMES[key]}: {saved}`"
                yield (
                    key,
                    f"{section[key]} differs from the adapter in {self.name}, which has {there}. Remove {key} to use that.",
                )
        layers = {match[1] for name in self.shapes if (match := _OF_TENSOR.fullmatch(name))} - self._experts
        targets = section["target_modules"]
        if odd := sorted(layers - (matching(targets, layers) - matching(section["exclude_modules"] or [], layers))):
            yield (
                "target_modules",
                f"{targets!r} does not include {odd[0]}, which the adapter in {self.name} adapts. Remove target_modules and "
                "exclude_modules to use those of the adapter.",
            )
        elif isinstance(targets, list) and (unmatched := [name for name in targets if not matching([name], layers)]):
            yield (
                "target_modules",
                f"{unmatched[0]!r} is not adapted in {self.name}. Remove target_modules to use those of the adapter.",
            )

    @cached_property
    def _experts(self) -> set[str]:
        """The modules, one inside another, with adapters of experts: the rows of A are those of all experts of a layer."""
        rank = self.config.get("r") or 1
        rows = {
            match[1]: shape[0]
            for name, shape in self.shapes.items()
            if (match := _OF_TENSOR.fullmatch(name)) and match[2] == _A
        }
        given = self.config.get("target_parameters")
        return {module for module, size in rows.items() if given and size > rank and size % rank == 0}

    def _unsupported(self, head: str) -> Iterator[str]:
        """The settings and tensors that cannot be continued, in words."""
        config = self.config
        if (kind := config.get("peft_type")) != "LORA":
            yield f"peft_type: {kind}"
            return
        modules = config.get("modules_to_save") or []
        if modules and (head != "scalar" or modules != ["score"]):
            yield f"modules_to_save: {modules}"
        yield from (f"{key}: {config[key]}" for key in _UNSUPPORTED if config.get(key) not in (None, False, "none", {}, []))
        if str(config.get("init_lora_weights")).lower().startswith(_CHANGES_BASE):
            yield f"init_lora_weights: {config['init_lora_weights']}"
        for name, shape in self.shapes.items():
            match = _OF_TENSOR.fullmatch(name)
            is_head = match is not None and match[1].rpartition(".")[2] == "lm_head"
            if name == _OF_HEAD and modules:
                continue
            if match is None or is_head:
                yield f"the tensor {name}"
                return
            if match[2] == _A and shape[:1] != (config.get("r"),) and match[1] not in self._experts:
                yield f"{name} with rank {shape[0]} instead of `r: {config.get('r')}`"
                return


def _unordered(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def check_same_adapter(folder: Path, settings: Mapping[str, Any], *, at: str) -> None:
    """Compare settings that the shapes of tensors do not show: the scale of B A.

    Args:
        folder: the weights of a checkpoint.
        settings: the config of the adapter that is trained here, in peft's names.
        at: the section that decides it, such as `policy.hf_cfg.lora`.

    Raises:
        CheckpointError: the folder has no adapter, or another one.
    """
    try:
        saved = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        whole = " It contains the weights of a full model." if (folder / "config.json").is_file() else ""
        raise CheckpointError(
            f"{folder} has no {ADAPTER_CONFIG}, so no adapter was saved there.{whole} Resume with the same `{at}` that "
            "wrote it.",
            key=at,
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"Cannot read {folder / ADAPTER_CONFIG}: {error}") from error
    for key in ("r", "lora_alpha", "use_rslora", "use_dora"):
        there, here = saved.get(key), settings[key]
        if there != here:
            raise CheckpointError(f"{folder} has a different adapter: `{key}` is {there} there and {here} here.", key=key)


def check_same_tensors(folder: Path, saved: Mapping[str, Sequence[int]], here: Mapping[str, Sequence[int]], *, at: str) -> None:
    """Compare the names and shapes of the tensors in a folder with those of the adapter that is trained here.

    Raises:
        CheckpointError: they differ.
    """
    if odd := sorted(saved.keys() ^ here.keys()):
        raise CheckpointError(
            f"{folder} has a different adapter: {odd[0]} exists in only one of the two ({len(odd)} such names). Use "
            f"the `{at}` and model that wrote it.",
            key=at,
        )
    for name, shape in here.items():
        if tuple(saved[name]) != tuple(shape):
            raise CheckpointError(
                f"{folder} has a different adapter: {name} is {tuple(saved[name])} there and {tuple(shape)} here."
            )


def adapter_as_model(name: str) -> str | None:
    """What to write instead of an adapter folder as `policy.model_name`; None if the name is not that of an adapter folder."""
    folder = Path(name).expanduser()
    if not isfile(folder / ADAPTER_CONFIG) or isfile(folder / "config.json"):
        return None
    base = None
    with suppress(UserError):
        base = AdapterFolder(name).base
    return (
        f"{name} contains only a LoRA adapter, not a whole model. To continue it, set `policy.model_name: {base or 'BASE'}` "
        f"and `policy.hf_cfg.lora.adapter_path: {name}`. To train all weights, merge it into its base with `rlcore convert "
        "CHECKPOINT --to hf --merge OUTPUT`, and use OUTPUT."
    )


def matching(targets: str | Sequence[str], layers: Iterable[str]) -> set[str]:
    """The layers that peft would match: full names or suffixes in a list, or a regular expression for full names.

    All layers for `all-linear`, and for an invalid expression, which is another error.
    """
    if isinstance(targets, str):
        try:
            return {layer for layer in layers if targets == ALL_LINEAR or re.fullmatch(targets, layer)}
        except re.error:
            return set(layers)
    return {layer for layer in layers if any(layer == name or layer.endswith(f".{name}") for name in targets)}


def copy_files(source: Path, output: Path, names: Iterable[str]) -> None:
    """Copy files of a folder, which may be in its subfolders, to a conversion's output."""
    for name in names:
        (output / name).parent.mkdir(exist_ok=True)
        shutil.copy(source / name, output / name)


def _from_hub(name: str) -> Path:
    """The folder in the hub's cache with both files of an adapter, which are downloaded if they are not there."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    source, revision = model_source(name)
    path = ""
    try:
        for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            cached = try_to_load_from_cache(source, file, revision=revision)
            if not isinstance(cached, str):
                require_model(name, query_cached=True)
            path = cached if isinstance(cached, str) else hf_hub_download(source, file, revision=revision)
    except Exception as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(f"{name} is neither an adapter folder nor an adapter on the hub: {reason}.") from error
    return Path(path).parent
