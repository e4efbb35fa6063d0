"""Converts a NeMo RL config with the import table.

Every key (a value, a list of values or an empty section) is listed once, with its source location.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml
from omegaconf import OmegaConf

from rl_core.config.diagnostics import KeyPath, Node, Problems, SourceLocation, dotted, show
from rl_core.config.introspection import NO_DEFAULT
from rl_core.errors import ConfigError
from rl_train.config.secrets import Secrets
from rl_train.config.sources import escape, read_sources, resolve
from rlcore_cli.importing import datasets
from rlcore_cli.importing.foreign import MISSING, Decision, Defaulted, ForeignConfig, Mapped, Redundant, Unsupported
from rlcore_cli.importing.table import Table, nemo_rl

_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": lambda a, b: max(a, b),
}
_ORDER = ("loss_fn", "policy", "value", "teacher", "data", "env", "cluster", "checkpointing", "logger")
_ENVIRONMENT = re.compile(r"\$\{oc\.env:([^${}]*)\}")
_HELD = re.compile("\ue000([^\ue000\ue001]*)\ue001")


@dataclass(frozen=True, kw_only=True)
class Line:
    """The outcome of one key of the imported config.

    Attributes:
        key: The dotted key.
        value: Its value.
        location: Its source location; None for a default of NeMo RL that the file does not set.
        decision: The outcome and its reason.
        targets: The new dotted keys that the value went to; empty if there are none.
    """

    key: str
    value: Any
    location: SourceLocation | None
    decision: Decision
    targets: tuple[str, ...] = ()

    @property
    def outcome(self) -> str:
        """`kept`, `renamed`, `redundant` or `unsupported`."""
        match self.decision:
            case Unsupported():
                return "unsupported"
            case Redundant():
                return "redundant"
            case Mapped():
                return "kept" if self.targets == (self.key,) and not self.decision.note else "renamed"

    @property
    def reason(self) -> str:
        """The reason of the outcome, or how the meaning changes; empty if there is nothing to add."""
        return self.decision.note if isinstance(self.decision, Mapped) else self.decision.reason


@dataclass(frozen=True, kw_only=True)
class Imported:
    """The new config, and the outcome of each imported key.

    Attributes:
        values: The new config as plain values, sections in their usual order.
        lines: One for each imported key, in the order of the file.
        added: Keys that the new config needs in addition.
    """

    values: dict[str, Any]
    lines: tuple[Line, ...]
    added: tuple[Defaulted, ...]

    def to_yaml(self) -> str:
        """The new config as YAML. References to environment variables are kept."""
        text = yaml.safe_dump(escape(self.values), sort_keys=False, allow_unicode=True, width=120)
        return re.sub(r"\\+\$\{oc\.env:", "${oc.env:", text)


def import_config(path: str | os.PathLike[str]) -> Imported:
    """Converts a NeMo RL config.

    Args:
        path: The file; `defaults:` and `${...}` are resolved.

    Raises:
        ConfigError: The file cannot be read, is not a YAML mapping, has no known section, or is an rlcore config.
    """
    problems = Problems()
    written = read_sources(path, problems=problems)
    problems.raise_if_any()
    values = _resolved(written, problems)
    problems.raise_if_any()
    table, foreign = nemo_rl(), ForeignConfig(values)
    if foreign.get("policy.backend") is not None:
        raise ConfigError(
            f"{os.fspath(path)} is already an rlcore config: it sets policy.backend, which NeMo RL does not have. Check it "
            "with `rlcore validate`."
        )
    lines = [_line(key, value, table, foreign, written.nearest(key).key_location) for key, value in _leaves(values)]
    if not any(line.key.split(".")[0] in table.sections for line in lines):
        sections = ", ".join(sorted({line.key.split(".")[0] for line in lines})) or "none"
        raise ConfigError(
            f"{os.fspath(path)} is not a NeMo RL config: it should have sections such as {', '.join(table.sections)}, but has "
            f"{sections}."
        )
    lines += _defaults(table, foreign)
    native: dict[str, Any] = {}
    for line in lines:
        if isinstance(line.decision, Mapped):
            native |= line.decision.values
    added = (*_additions(foreign, native), *datasets.additions(foreign, native), *_environments(foreign, native))
    native |= {one.key: one.value for one in added}
    return Imported(values=_in_order(_tree(native)), lines=tuple(lines), added=added)


def _resolved(written: Node, problems: Problems) -> dict[str, Any]:
    """The plain values. `???` and `${oc.env:...}` are kept for the user to fill in, so no secret is read."""
    written = _with_environment_held(written)
    missing = [path for path, leaf in written.leaves() if leaf.value == MISSING]
    before = {name for name in _ARITHMETIC if OmegaConf.has_resolver(name)}
    for name in _ARITHMETIC.keys() - before:
        OmegaConf.register_resolver(name, _ARITHMETIC[name])
    try:
        values, _ = resolve(written, default_at=lambda path: NO_DEFAULT, known=(), problems=problems, secrets=Secrets())
    finally:
        for name in _ARITHMETIC.keys() - before:
            OmegaConf.clear_resolver(name)
    problems.found = [problem for problem in problems.found if problem.path not in missing]
    for path in missing:
        holder: Any = values
        for part in path[:-1]:
            holder = holder[part]
        holder[path[-1]] = MISSING
    released: dict[str, Any] = _with_environment_released(values)
    return released


def _with_environment_held(written: Node) -> Node:
    """The tree with `${oc.env:...}` hidden from the resolver, except as an argument of another interpolation.

    The variable may be unset on this machine, and its value (a secret, a local folder) must not be written to the new config.
    """
    value = written.value
    if isinstance(value, dict):
        value = {key: _with_environment_held(item) for key, item in value.items()}
    elif isinstance(value, list):
        value = [_with_environment_held(item) for item in value]
    elif isinstance(value, str):
        value = _ENVIRONMENT.sub(_held, value)
    return replace(written, value=value)


def _held(found: re.Match[str]) -> str:
    before = found.string[: found.start()]
    is_argument = before.count("${") > before.count("}")
    return found.group() if is_argument else f"\ue000{found.group(1)}\ue001"


def _with_environment_released(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_environment_released(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_environment_released(item) for item in value]
    return _HELD.sub(r"${oc.env:\1}", value) if isinstance(value, str) else value


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    elif path:
        yield path, value


def _line(path: KeyPath, value: Any, table: Table, foreign: ForeignConfig, location: SourceLocation | None) -> Line:
    key = dotted(path)
    decision = table.decide(key, value, foreign)
    values = decision.values if isinstance(decision, Mapped) else ()
    # The keys of a section that is kept as one value keep their names.
    targets = tuple(key if key.startswith(f"{target}.") else target for target in values)
    return Line(key=key, value=value, location=location, decision=decision, targets=targets)


def _defaults(table: Table, foreign: ForeignConfig) -> list[Line]:
    """Lines for the defaults of NeMo RL that differ from those of rlcore and that the file does not set."""
    defaults = next((table.defaults[name] for name in table.defaults if name in foreign.values), {})
    return [
        _line(tuple(key.split(".")), value, table, foreign, None) for key, value in defaults.items() if _is_silent(foreign, key)
    ]


def _is_silent(foreign: ForeignConfig, key: str) -> bool:
    section, _, name = key.rpartition(".")
    value = foreign.get(section, {})
    return not (isinstance(value, Mapping) and name in value)


def _additions(foreign: ForeignConfig, native: Mapping[str, Any]) -> Iterator[Defaulted]:
    """Keys that rlcore needs and that correspond to no key of the config."""
    algorithm = foreign.algorithm
    if algorithm is not None and not any(key.startswith(f"{algorithm}.") for key in native):
        yield Defaulted(key=algorithm, value={}, reason="algorithm with its default settings")
    for section in ("policy", "value", "teacher"):
        if not any(key.startswith(f"{section}.") for key in native):
            continue
        backend = native.get(f"{section}.backend")
        if backend is None:
            yield Defaulted(
                key=f"{section}.backend", value="hf", reason="NeMo RL trains with PyTorch's DTensor unless Megatron is enabled"
            )
        if backend != "megatron" and f"{section}.hf_cfg.lora" not in native and foreign.ranks > 1:
            reason = "NeMo RL shards weights over the ranks"
            yield Defaulted(key=f"{section}.hf_cfg.data_parallel", value="fsdp2", reason=reason)
        yield from _scored_tokens(section, native)
    if foreign.samples:
        yield from _engine_additions(foreign, native)
    if native.get("logger.loggers.wandb.enabled") is True:
        yield Defaulted(key="logger.loggers.wandb.mode", value="online", reason="NeMo RL uploads; the default here is offline")


def _engine_additions(foreign: ForeignConfig, native: Mapping[str, Any]) -> Iterator[Defaulted]:
    if native.get("policy.generation.backend") == "vllm":
        at = "policy.generation.vllm_cfg"
        size = foreign.number(f"{at}.tensor_parallel_size", 1) * foreign.number(f"{at}.pipeline_parallel_size", 1)
        if size > 1:
            reason = f"{foreign.ranks} GPUs, {size} per replica"
            yield Defaulted(key="policy.generation.num_workers", value=max(1, foreign.ranks // size), reason=reason)
        yield Defaulted(key=f"{at}.sleep_level", value=1, reason="NeMo RL frees the engine's memory during training")
    if "policy.generation.val_temperature" not in native and foreign.get("policy.generation") is not None:
        value = foreign.get("policy.generation.temperature", 1.0)
        yield Defaulted(
            key="policy.generation.val_temperature", value=value, reason="NeMo RL validates at the training temperature"
        )
    if any(key.startswith("data.") for key in native):
        yield Defaulted(key="data.on_long_prompt", value="drop", reason="NeMo RL drops longer prompts from training")


def _scored_tokens(section: str, native: Mapping[str, Any]) -> Iterator[Defaulted]:
    """`logprob_mb_tokens`, if it is not set: the default may be smaller than the longest row."""
    longest = native.get(f"{section}.max_total_sequence_length")
    for batching in ("dynamic_batching", "sequence_packing"):
        at = f"{section}.{batching}"
        if native.get(f"{at}.enabled") is True and f"{at}.logprob_mb_tokens" not in native and isinstance(longest, int):
            yield Defaulted(key=f"{at}.logprob_mb_tokens", value=longest, reason="the token budget must fit the longest row")


def _environments(foreign: ForeignConfig, native: Mapping[str, Any]) -> Iterator[Defaulted]:
    tasks = foreign.get("env")
    for task, section in tasks.items() if foreign.samples and isinstance(tasks, Mapping) else ():
        # `env` also has switches (`should_use_...: false`), which are not tasks.
        if not isinstance(section, Mapping | None):
            continue
        if not any(key.startswith(f"env.{task}.") for key in native):
            yield Defaulted(key=f"env.{task}", value={}, reason="task with its default settings")
        if native.get(f"env.{task}.name", task) == "math":
            reason = "NeMo RL also grades answers without a box, as false does here; false rewards more wrong answers"
            yield Defaulted(key=f"env.{task}.require_box", value=True, reason=reason)


def _tree(native: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested sections."""
    root: dict[str, Any] = {}
    for key, value in native.items():
        *way, last = key.split(".")
        section = root
        for part in way:
            if not isinstance(section.get(part), dict):
                section[part] = {}
            section = section[part]
        if value == {} and isinstance(section.get(last), dict):
            continue
        section[last] = dict(value) if isinstance(value, Mapping) else value
    return root


def _in_order(values: dict[str, Any]) -> dict[str, Any]:
    algorithm = [name for name in values if name not in _ORDER]
    return {name: values[name] for name in (*algorithm, *_ORDER) if name in values}


def describe(line: Line) -> str:
    """One line of the list: source location, key, value, new keys and reason."""
    location = str(line.location) if line.location is not None else "(framework default)"
    went = f" -> {', '.join(line.targets)}" if line.targets and line.targets != (line.key,) else ""
    why = f": {line.reason}" if line.reason else ""
    return f"{location}  {line.key} = {show(line.value)}{went}{why}"
