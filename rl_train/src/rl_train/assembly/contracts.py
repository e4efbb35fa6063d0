"""Checks the classes of a run against their contracts before a model is loaded: base class, methods, constructor.

Only the methods that the configured run calls are required. `rlcore train`, `eval`, `validate --deep`, `doctor --deep` and the
Python trainers use the same checks.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rl_core.cluster.remote_actor import plain_class
from rl_core.dispatch.worker_facade import WorkerFacade
from rl_core.errors import ConfigError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import (
    ColocatablePolicyInterface,
    LossFunction,
    PolicyInterface,
    TrainableInterface,
    ValueInterface,
    WeightTransport,
)
from rl_core.interfaces.worker import GenerationWorker, PolicyWorker
from rl_core.plugins.component import Capability, Component, Kind, capability_problem
from rl_core.testing.outputs.models import class_label
from rl_train.algorithms.rewards import kl_in_reward
from rl_train.config.schema import RunConfig
from rl_train.metrics.logger import Logger
from rl_train.pools.component_probe import argument_problem

_REFERENCE = "get_reference_policy_logprobs"
_WEIGHT_STATE = ("weight_version", "weight_fingerprint")
_REFIT = ("prepare_refit_info", "invalidate_kv_cache", *_WEIGHT_STATE)
"""What weight synchronization calls on every engine."""
_PAGES: Mapping[type, str] = {
    GenerationInterface: "write_a_generation_backend",
    LossFunction: "write_an_algorithm",
    Logger: "write_a_logger",
    WeightTransport: "write_a_weight_transport",
}
MODEL_ARGUMENTS = ("config", "cluster", "deadlines")
_BY_HANDLES = (Capability.BY_REFERENCE, Capability.SHARED_MEMORY, Capability.DISK)
_WEIGHTS_BY: Mapping[Kind, Mapping[str, str]] = {
    Kind.POLICY: {
        **dict.fromkeys(_BY_HANDLES, "get_weights_ipc_handles"),
        Capability.COLLECTIVE: "broadcast_weights_for_collective",
    },
    Kind.GENERATION: {
        **dict.fromkeys(_BY_HANDLES, "update_weights"),
        Capability.COLLECTIVE: "update_weights_from_collective",
    },
}


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What a run expects of a class."""

    bases: tuple[type, ...]
    """It must be a subclass of one of them."""
    methods: tuple[str, ...] = ()
    """Methods and properties that it must define, in addition to the abstract ones."""
    arguments: tuple[str, ...] = ()
    """Keyword arguments of its constructor; empty if it is not called."""
    caller: str = "a run"
    """Who calls the methods, in errors."""

    def problem(self, component: Any) -> str | None:
        """What a class lacks, or None. For a function that creates the component, only the arguments are checked."""
        target: Any = plain_class(component)
        if not callable(target):
            return f"{component!r} is not a class. Name a class, or a function that returns the component."
        problems = list(self._class_problems(target)) if isinstance(target, type) else []
        if self.arguments and (problem := argument_problem(target, self.arguments)) is not None:
            problems.append(problem)
        if not problems:
            return None
        return f"{_label(target)} cannot be used: {'; '.join(problems)}. See docs/{self._page}.md."

    def _class_problems(self, target: type) -> Iterator[str]:
        if not issubclass(target, self.bases):
            yield f"it is not a subclass of {' or '.join(f'{base.__module__}.{base.__name__}' for base in self.bases)}"
        missing = {method for method in self.methods if _lacks(target, method)}
        if missing := missing.union(getattr(target, "__abstractmethods__", ())):
            yield f"it does not define {', '.join(sorted(missing))}, which {self.caller} calls"
        names = {name for base in self.bases if issubclass(target, base) for name in dir(base) if not is_async(base, name)}
        if awaited := sorted(name for name in names if is_async(target, name)):
            yield f"it defines {', '.join(awaited)} as async, but {self.caller} does not await its result"
        if issubclass(target, WeightTransport) and (problem := capability_problem(target.requires)) is not None:
            yield f"it `requires` {', '.join(map(repr, target.requires))}, but {problem.rstrip('.')}"

    @property
    def _page(self) -> str:
        """The page of the documentation about this kind of class."""
        return next((page for base, page in _PAGES.items() if base in self.bases), "write_a_policy")


CONTRACTS: Mapping[Kind, Contract] = {
    Kind.POLICY: Contract(bases=(PolicyInterface, ValueInterface), arguments=MODEL_ARGUMENTS),
    Kind.GENERATION: Contract(bases=(GenerationInterface,), arguments=MODEL_ARGUMENTS),
    Kind.LOSS: Contract(bases=(LossFunction,)),
    Kind.LOGGER: Contract(bases=(Logger,)),
    Kind.WEIGHT_TRANSPORT: Contract(bases=(WeightTransport,)),
}
"""The contract of each kind, for any run."""
EVALUATION_CONTRACTS: Mapping[str, Contract] = {
    "policy": Contract(bases=(ColocatablePolicyInterface,), methods=("get_logprobs", *_WEIGHT_STATE), caller="an evaluation")
}
"""The contract of the policy in an evaluation, which sends its weights to the engine and is not trained."""


def is_async(owner: type, name: str) -> bool:
    """Whether a class has an async method of this name."""
    return inspect.iscoroutinefunction(getattr(owner, name, None))


def kind_problem(component: Any, kind: Kind | None) -> str | None:
    """What a class lacks for every run, or None.

    Args:
        component: the class.
        kind: its kind; None for that of its base class, if it has one.
    """
    if kind is None and isinstance(component, type):
        kind = next((each for each, contract in CONTRACTS.items() if issubclass(component, contract.bases)), None)
    contract = CONTRACTS.get(kind) if kind is not None else None
    return contract.problem(component) if contract is not None else None


def model_contracts(run: RunConfig, loss_fn: LossFunction | None, *, own_weights: bool = False) -> dict[str, Contract]:
    """The contracts of the models and the engine of a run: `policy`, `value`, `teacher`, `policy.generation`.

    Args:
        run: the config.
        loss_fn: its loss; None if it could not be created.
        own_weights: whether the engine has its own weights, so that it is not refitted.
    """
    samples, saves = run.algorithm.runtime_needs.samples, run.checkpointing.enabled
    needed = loss_fn.required_keys if loss_fn is not None else frozenset()
    penalty = kl_in_reward(run.loss_fn)
    if penalty is not None:
        needed |= penalty.required_keys
    saved = ("save_checkpoint",) if saves else ()
    policy = ["train", *saved]
    if samples:
        policy += ["get_logprobs", *_WEIGHT_STATE]
    if "reference_policy_logprobs" in needed:
        policy.append(_REFERENCE)
    teacher = ["get_logprobs"] if "teacher_logprobs" in needed else []
    if loss_fn is not None and loss_fn.candidates_key is not None:
        teacher.append("get_topk_logprobs")
    if run.algorithm.runtime_needs.teaches_itself:
        policy += teacher
    if run.algorithm.runtime_needs.teacher_decay is not None:
        policy.append("average_weights")
    base = ColocatablePolicyInterface if samples else PolicyInterface
    scalar = run.policy.head == "scalar"
    contracts = {
        "policy": Contract(bases=(TrainableInterface,) if scalar else (base,), methods=tuple(policy)),
        "value": Contract(bases=(ValueInterface,), methods=("train", *saved)),
        "teacher": Contract(bases=(ColocatablePolicyInterface,), methods=tuple(teacher)),
        "policy.generation": Contract(bases=(GenerationInterface,), methods=() if own_weights else _REFIT),
    }
    return {name: replace(contract, caller=run.algorithm_name) for name, contract in contracts.items()}


def check_class(component: Any, kind: Kind, arguments: Collection[str] = ()) -> None:
    """Refuse a class that a run cannot use, whatever its algorithm is.

    Args:
        component: the class, or a function that creates the component.
        kind: its kind.
        arguments: keyword arguments of the call that creates it; empty if there is none.

    Raises:
        ConfigError: its base class, an abstract method or the arguments of its constructor are wrong.
    """
    contract = replace(CONTRACTS[kind], arguments=tuple(arguments))
    if (problem := contract.problem(component)) is not None:
        raise ConfigError(problem)


def capabilities_of(component: Component) -> tuple[str, ...]:
    """The registered capabilities of a component, or those declared on its class if it is given by its path.

    Raises:
        ConfigError: one does not exist.
    """
    capabilities = component.capabilities or tuple(getattr(component.load(), "capabilities", ()))
    if (problem := capability_problem(capabilities)) is not None:
        raise ConfigError(f"{component.name}: {problem}")
    return capabilities


def check_capabilities(created: Any, kind: Kind, declared: Collection[str]) -> None:
    """Compare the capabilities that a backend declares with what its code shows.

    Args:
        created: the policy or the engine.
        kind: its kind.
        declared: its capabilities.

    Raises:
        ConfigError: it declares one that its code does not have, or has several ranks without declaring support for them.
    """
    worker = created.worker_class if isinstance(created, WorkerFacade) else type(created)
    methods = {**_WEIGHTS_BY[kind], Capability.SCALAR_HEAD: "get_values", Capability.TOPK_LOGPROBS: "get_topk_logprobs"}
    for capability in declared:
        if capability == Capability.ASYNC_ROWS and not created.streams_rows:
            missing = "poll" if isinstance(created, WorkerFacade) else "generate_async"
        elif capability in methods and _lacks(worker, methods[capability]):
            missing = methods[capability]
        else:
            continue
        raise ConfigError(
            f"{class_label(type(created))} declares the capability {str(capability)!r}, but {class_label(worker)} does not "
            f"implement `{missing}`. Implement it, or remove the capability."
        )
    ranks = created.group.world_size if kind is Kind.POLICY and isinstance(created, WorkerFacade) else 1
    if ranks > 1 and Capability.MULTIPLE_RANKS not in declared:
        raise ConfigError(
            f"{class_label(type(created))} has {ranks} ranks, but does not declare the capability 'multiple_ranks'. Ranks that "
            "exchange no gradients train different models. Set cluster.num_nodes and cluster.workers_per_node to 1. If the "
            "ranks exchange gradients, declare the capability."
        )


def _lacks(component: type, method: str) -> bool:
    """Whether a class has no such method or only the default of an interface, which raises an error."""
    if method == _REFERENCE and not _lacks(component, "get_reference_logprobs"):
        return False
    own = getattr(component, method, None)
    interfaces = (ColocatablePolicyInterface, ValueInterface, GenerationInterface, PolicyWorker, GenerationWorker)
    return own is None or any(own is getattr(base, method, None) for base in interfaces)


def _label(target: Any) -> str:
    if not isinstance(target, type):
        return f"{target.__module__}.{target.__qualname__}"
    try:
        return f"{class_label(target)}, defined in {inspect.getsourcefile(target)}:{inspect.getsourcelines(target)[1]},"
    except (TypeError, OSError):
        return class_label(target)
