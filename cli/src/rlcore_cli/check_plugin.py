"""`rlcore check plugin`: runs the conformance tests of a plugin without a test file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_core.errors import ConfigError, UnknownComponentError
from rl_core.plugins.component import Capability, Kind, did_you_mean
from rl_core.plugins.manager import discover
from rlcore_cli.arguments import AsJson

if TYPE_CHECKING:
    from rl_core.testing.promises import Conformance, PromiseResult

_CREATION = "test_it_is_created_from_its_section"
_NOT_TESTED = """{title} {component!r}: not tested with its default config:
{reason}
Test it with `pytest tests/test_conformance.py` in the repository of the plugin; docs/conformance.md shows such a file."""
_OF_EVERY_RUN = ("jsonl", "console")
"""Loggers that a run creates itself, with other arguments than those of a plugin's logger."""
Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="Plugin (name of its entry point or distribution), or one of its components as KIND:NAME.",
        show_default=False,
    ),
]


def check_plugin(name: Name, as_json: AsJson = False) -> None:
    """Check whether a plugin keeps the promises of its interfaces: its package, and each component that the kit can test.

    Runs the tests of the conformance kit (`rl_core.testing`, `rl_train.testing`) with default configs. Components that need
    a config or rows are reported as not tested. They are tested from a test file, which `docs/conformance.md` shows.

    Exit code: 1 if a promise is broken.

    Example:
        rlcore check plugin acme
        rlcore check plugin generation:hf
    """
    from rl_core.testing.promises import Status

    records, broken = [], False
    for tests in _tests_of(name):
        for result in _results(tests):
            broken = broken or result.status is Status.BROKEN
            records.append(_record(tests, result))
            if not as_json and result.status is Status.BROKEN:
                print(tests.failure_text(result) + "\n")
        if not as_json:
            print(_summary(tests))
    if as_json:
        print(json.dumps(records, indent=2))
    if broken:
        raise typer.Exit(1)


def _results(tests: type[Conformance[Any]]) -> list[PromiseResult]:
    """The result of each promise. An error of the creation is one broken promise, or none if a config or rows are missing."""
    from rl_core.testing.promises import PromiseResult, Status, described
    from rl_core.testing.pytest_plugin import results_of

    results, error = results_of(tests), tests.creation_error
    if error is None or not any(each.promise.name == _CREATION and each.status is Status.BROKEN for each in results):
        return results
    needs_values = isinstance(error, ConfigError)
    for stated in tests.promises():
        status = Status.BROKEN if stated.name == _CREATION and not needs_values else Status.NOT_CHECKED
        found = described(error) if needs_values or status is Status.BROKEN else "the component could not be created"
        tests.results[stated.name] = PromiseResult(stated, status, found)
    return [*tests.results.values()]


def _summary(tests: type[Conformance[Any]]) -> str:
    from rl_core.testing.promises import Status

    results = [*tests.results.values()]
    if all(result.status is Status.NOT_CHECKED for result in results):
        return _NOT_TESTED.format(title=tests.title(), component=tests.component, reason=results[0].found)
    if getattr(tests, "kind", None) is Kind.POLICY and Capability.MULTIPLE_RANKS in tests.capabilities():
        return f"{tests.summary()}; `multiple_ranks` is declared, but was not tested: run `pytest --ray` in its repository"
    return tests.summary()


def _record(tests: type[Conformance[Any]], result: Any) -> dict[str, str]:
    return {
        "component": f"{tests.title()} {tests.component}",
        "test": result.promise.name,
        "promise": result.promise.statement,
        "status": result.status.value,
        "found": result.found,
    }


def _tests_of(name: str) -> Iterator[type[Conformance[Any]]]:
    """The test classes of a plugin or of one component."""
    from rl_core.testing import PackagingConformance

    kits = _kits()
    kind, colon, component = name.partition(":")
    if colon and kind in (each.value for each in kits):
        yield _tests(kits[Kind(kind)], component)
        return
    plugins = discover(strict=False).plugins
    matching = [plugin for plugin in plugins if name in (plugin.name, plugin.distribution)]
    if not matching:
        names = [plugin.name for plugin in plugins]
        raise UnknownComponentError(
            f"No plugin named {name!r}.{did_you_mean(name, names)} Installed: {', '.join(sorted(names))}. One component is "
            f"named KIND:NAME, with a kind of {', '.join(kits)}."
        )
    yield _tests(PackagingConformance, matching[0].name)
    for registered, described in matching[0].components:
        if registered in kits and not (registered is Kind.LOGGER and described.name in _OF_EVERY_RUN):
            yield _tests(kits[registered], described.name)


def _kits() -> dict[Kind, type[Conformance[Any]]]:
    """The test class of each kind of component that has one."""
    import rl_core.testing as core
    import rl_train.testing as train
    from rl_core.testing.promises import Conformance

    classes = (getattr(module, name) for module in (core, train) for name in module.__all__)
    return {
        tests.kind: tests
        for tests in classes
        if isinstance(tests, type) and issubclass(tests, Conformance) and hasattr(tests, "kind")
    }


def _tests(kit: type[Conformance[Any]], component: str) -> type[Conformance[Any]]:
    return type(kit.__name__, (kit,), {"component": component})
