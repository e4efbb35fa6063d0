"""What a run reads from an environment class and an agent, or requires of a backend, before it starts their workers.

The driver runs the source of this module with the interpreter that a key `python` names, so it imports only rl-core.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rl_core.cluster.remote_actor import is_wrapped, plain_class
from rl_core.errors import ConfigError, RLCoreError
from rl_core.interfaces.environment import EnvironmentInterface, keeps_sessions
from rl_core.plugins.component import Component
from rl_core.plugins.import_path import resolve
from rl_core.plugins.requirements import check_requirements, unmet_needs
from rl_core.testing.environments.checks import first_argument


def check_environment_class(worker_class: Any, name: str) -> None:
    """Check that a class has a method `step`, and a constructor that takes at most its section.

    Raises:
        ConfigError: no turn of a rollout could be answered, or the class could not be created.
    """
    environment_class = plain_class(worker_class)
    abstract = sorted(getattr(environment_class, "__abstractmethods__", ()))
    missing = abstract or ([] if callable(getattr(environment_class, "step", None)) else ["step"])
    if not missing:
        if (problem := argument_problem(environment_class, tuple(first_argument(environment_class, None)))) is not None:
            raise ConfigError(f"The environment {name} cannot be used: {problem}.")
        return
    try:
        location = f" ({inspect.getsourcefile(environment_class)}:{inspect.getsourcelines(environment_class)[1]})"
    except (TypeError, OSError):
        location = ""
    raise ConfigError(
        f"The environment {name}{location} has no method {' and no method '.join(missing)}. Define "
        "`step(self, message_log_batch, metadata)`, which returns an EnvironmentReturn."
    )


def argument_problem(target: Any, names: tuple[str, ...]) -> str | None:
    """Why a call with these keyword arguments would fail, or None; None as well if the signature is not known."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        call = ", ".join(f"{name}=..." for name in names)
        return (
            f"a run creates it with ({call}), but the constructor takes {signature}: {error}. Write `def __init__(self, *, "
            f"{', '.join(names)})`"
        )
    return None


def report(request: Mapping[str, Any]) -> dict[str, Any]:
    """What the driver asks for, from an interpreter that has the components.

    Args:
        request: `distributions`, versions by name; `needs`, requirements of the component itself; `folders` to search for
            modules; and `environment` (a component's fields as `component`, its section as `values`) or `agent` (its path).

    Returns:
        `problems`, a list of clauses, and, without any, the facts of `environment` and the parameters of `agent`.
    """
    sys.path.extend(request["folders"])
    problems = [problem for name, wanted in request["distributions"].items() for problem in _lacks(name, wanted)]
    if (unmet := unmet_needs(request["needs"])) is not None:
        problems.append(unmet)
    readers: dict[str, Callable[[Any], Any]] = {"environment": _environment, "agent": _parameters}
    facts: dict[str, Any] = {"problems": problems}
    for key, read in readers.items():
        if not problems and key in request:
            try:
                facts[key] = read(request[key])
            except RLCoreError as error:
                problems.append(str(error))
    return facts


def _environment(request: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of an environment class, see `rl_train.pools.elsewhere.EnvironmentFacts`."""
    given = request["component"].items()
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given}
    component = Component(**fields)
    found = component.load()
    check_environment_class(found, component.name)
    if is_wrapped(found) or not issubclass(found, EnvironmentInterface):
        raise ConfigError(f"{component.target} is not a subclass of rl_core.interfaces.EnvironmentInterface")
    model = component.load_config()
    config = request["values"] if model is None else model(**request["values"])
    return {
        "parameter": next(iter(first_argument(found, None)), None),
        "keeps_sessions": keeps_sessions(found),
        "reads_token_ids": getattr(found, "reads_token_ids", False),
        "min_turns": getattr(found, "min_turns", 1),
        "tools": list(found.offered_tools(config)),
        "reads_tool_calls": found.reads_tool_calls,
    }


def _parameters(path: str) -> list[tuple[str, str, bool]]:
    """Name and kind of each parameter of a function, and whether it is required."""
    found = resolve(path, key="agent")
    if not callable(found):
        raise ConfigError(f"{path} is a {type(found).__name__}, not a function")
    return [(p.name, p.kind.name, p.default is p.empty) for p in inspect.signature(found).parameters.values()]


def _lacks(name: str, wanted: str) -> Iterator[str]:
    """What this interpreter lacks of a distribution: its version, or what that version requires."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        yield f"{name} is not installed"
        return
    if distribution.version != wanted:
        yield f"it has {name} {distribution.version}, but the driver {wanted}"
        return
    for check in check_requirements(distribution):
        if check.problem is not None:
            yield f"{name}: {check.problem}"


if __name__ == "__main__":
    print("rlcore-probe " + json.dumps(report(json.loads(sys.argv[1]))))
