"""Promises of a kind of component as the test methods of a class, which pytest runs; so does `rlcore check plugin`."""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Generic, TypeVar
from unittest import SkipTest

from pydantic import ValidationError

from rl_core.config.section import Section
from rl_core.errors import NotSupportedError, RLCoreError, WorkerError
from rl_core.plugins.component import Component, Kind, is_path
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry

_MARK, _SECONDS = "__promise__", 120.0
CheckT = TypeVar("CheckT", bound=Callable[[Any], Any])
SubjectT = TypeVar("SubjectT")
SectionT = TypeVar("SectionT", bound=Section)


class Status(StrEnum):
    """Result of the test of a promise."""

    KEPT = "kept"
    BROKEN = "broken"
    NOT_DECLARED = "not declared"
    """The component does not declare the capability that the promise belongs to."""
    NOT_CHECKED = "not checked"
    """The component could not be created, or the test needs something that is not installed."""
    EXPECTED = "expected failure"


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What a component must declare for a promise to apply."""

    text: str
    """What it does not declare, if the condition is not met."""
    holds: Callable[[type[Any]], bool]


@dataclass(frozen=True, kw_only=True)
class Promise:
    """One promise and the name of its test."""

    name: str
    statement: str
    applies: Condition | None
    after: tuple[str, ...]
    """Names of tests without whose promises this one cannot be tested."""
    check: Callable[[Any], Any]
    """Called with an instance of the test class."""

    def applies_to(self, tests: type[Any]) -> bool:
        """Whether the component of a test class declares what the promise needs."""
        return self.applies is None or self.applies.holds(tests)


@dataclass(frozen=True)
class PromiseResult:
    """Result of one test."""

    promise: Promise
    status: Status
    found: str
    """What was found, or why the promise was not tested."""


@dataclass(frozen=True, kw_only=True)
class xfail:
    """Replaces the test of a promise in a subclass: the promise is known to be broken, and the report says why.

    If the promise is kept, the test fails, so that the exception is removed.
    """

    reason: str


class Found(Exception):
    """Raised by a check: what was found instead of what was promised."""


def promise(
    statement: str, *, applies: Condition | None = None, after: str | tuple[str, ...] = ()
) -> Callable[[CheckT], CheckT]:
    """Turn a check into the test of one promise.

    Args:
        statement: the promise, as a sentence about the component.
        applies: what the component must declare; None for promises of all components of the kind.
        after: name of a test, or names. If its promise is broken, this one is not tested: it would fail for the same reason.

    The check returns what it found, as text or None. It raises `Found` if the promise is not kept. Any other exception is a
    broken promise as well.
    """

    def decorate(check: CheckT) -> CheckT:
        earlier = (after,) if isinstance(after, str) else after
        stated = Promise(name=check.__name__, statement=statement, applies=applies, after=earlier, check=check)

        @wraps(check)
        def test(self: Conformance[Any]) -> None:
            __tracebackhide__ = True
            import pytest  # where tests run: training uses `Found` without it

            tests = type(self)
            result = tests.results[stated.name] = PromiseResult(stated, *tests._tested(stated))
            if tests.created_again and tests._subject is not None and result.status in (Status.BROKEN, Status.EXPECTED):
                tests.teardown_class()
                tests._begin()
            if result.status is Status.BROKEN:
                pytest.fail(tests.failure_text(result), pytrace=False)
            if result.status is Status.EXPECTED:
                pytest.xfail(result.found)
            if result.status is not Status.KEPT:
                pytest.skip(result.found)

        setattr(test, _MARK, stated)
        return test  # type: ignore[return-value]

    return decorate


def declares(capability: str) -> Condition:
    """The component declares a capability."""
    return Condition(
        text=f"the capability `{capability}` is not declared", holds=lambda tests: capability in tests.capabilities()
    )


@contextmanager
def must_raise(*kinds: type[Exception], otherwise: str, naming: str = "") -> Iterator[None]:
    """A block in which the component must raise an error.

    Args:
        kinds: types of the error.
        otherwise: what was found if there is none.
        naming: what its message must contain.

    Raises:
        Found: there is no error, or its message does not contain `naming`. Other errors are raised as they are.
    """
    try:
        yield
    except kinds as error:
        if naming not in str(error):
            raise Found(f"the error does not name {naming!r}: {type(error).__name__}: {error}") from error
    else:
        raise Found(otherwise)


@contextmanager
def errors_of_workers() -> Iterator[None]:
    """A block in which an error of a worker is raised as the exception that the worker raised."""
    try:
        yield
    except WorkerError as error:
        raise error.__cause__ or error from None


@contextmanager
def optional(otherwise: str) -> Iterator[None]:
    """A block that a `NotSupportedError` of the component or its workers skips, for this reason."""
    try:
        with errors_of_workers():
            yield
    except NotSupportedError:
        raise SkipTest(otherwise) from None


def creation(statement: str) -> Any:
    """The test of the promise that the component can be created."""

    @promise(statement)
    def test_it_is_created_from_its_section(tests: Conformance[Any]) -> None:
        tests.subject()

    return test_it_is_created_from_its_section


class Conformance(Generic[SubjectT]):
    """Base of the test classes, one for each kind of component. A subclass for a component sets `component`.

    Attributes:
        component: registered name of the component, or the path of its class.
        config: values of the component's own config section, as in YAML; defaults by default.
        kind: kind of the component.
        page: documentation page of the promises.
        minimum: number of promises that must apply to every component of the kind: one that declares too little is not
            checked.
        created_again: whether the component is created again after a broken promise, so that its state affects no other test.
        uses_ray: whether workers run on two ranks over Ray (option `--ray` of pytest), not in this process.
    """

    component: ClassVar[str] = ""
    config: ClassVar[Mapping[str, Any]] = {}
    kind: ClassVar[Kind]
    page: ClassVar[str] = "docs/conformance.md"
    minimum: ClassVar[int] = 1
    created_again: ClassVar[bool] = False
    uses_ray: ClassVar[bool] = False
    creation_error: ClassVar[BaseException | None] = None
    expected_failures: ClassVar[dict[str, str]] = {}
    results: ClassVar[dict[str, PromiseResult]] = {}
    _exits: ClassVar[ExitStack]
    _folder: ClassVar[Path]
    _subject: ClassVar[Any] = None
    _registry: ClassVar[Registry | None] = None
    _settings: ClassVar[Mapping[str, Any]] = {}
    _cluster: ClassVar[Any] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Read `xfail` of promises; refuse other definitions under the name of a promise."""
        super().__init_subclass__(**kwargs)
        cls.expected_failures, cls.results = dict(cls.expected_failures), {}
        promised = {stated.name for base in cls.__mro__[1:] for stated in _own_promises(base)}
        for name, value in [*vars(cls).items()]:
            if isinstance(value, xfail) and name in promised:
                cls.expected_failures[name] = value.reason
                delattr(cls, name)
            elif isinstance(value, xfail):
                raise TypeError(f"{cls.__qualname__}.{name}: there is no promise of this name to expect a failure of.")
            elif name in promised:
                raise TypeError(
                    f"{cls.__qualname__}.{name} replaces the test of a promise. Only `{name} = xfail(reason=...)` may do that."
                )

    @classmethod
    def setup_class(cls) -> None:
        """Called before the first test of a class. The component is created by the first test that needs it."""
        cls.results = {}
        cls._begin()

    @classmethod
    def teardown_class(cls) -> None:
        """Called after the last test of a class: shuts the component down; a broken promise explains an error of that."""
        try:
            cls._exits.close()
        except Exception:
            if all(result.status is not Status.BROKEN for result in cls.results.values()):
                raise

    @classmethod
    def _begin(cls) -> None:
        cls._exits = ExitStack()
        cls._folder = Path(cls._exits.enter_context(TemporaryDirectory(prefix="rlcore-conformance-")))
        cls._subject, cls.creation_error, cls._registry, cls._cluster = None, None, None, None

    @classmethod
    def create(cls) -> SubjectT:
        """Create what the tests use; `cls._exits` closes it."""
        raise NotImplementedError

    @classmethod
    def subject(cls) -> SubjectT:
        """What `create` returned, created once for all tests of the class.

        Raises:
            SkipTest: an earlier test could not create it.
        """
        if cls.creation_error is not None:
            raise SkipTest("the component could not be created")
        if cls._subject is None:
            try:
                cls._subject = cls.create()
            except BaseException as error:
                cls.creation_error = error
                raise
        subject: SubjectT = cls._subject
        return subject

    @classmethod
    def cluster(cls, *, needs_ray: bool = False) -> Any:
        """Two ranks over Ray until the component is shut down, or None if workers run in this process."""
        if not (cls.uses_ray or needs_ray):
            return None
        if cls._cluster is None:
            from rl_core.cluster.virtual_cluster import RayVirtualCluster

            cls._cluster = RayVirtualCluster([2], max_colocated_worker_groups=2)
            cls._exits.callback(cls._cluster.shutdown)
        return cls._cluster

    @classmethod
    @contextmanager
    def created_with(cls, **settings: Any) -> Iterator[None]:
        """A block in which the component is another one, created with these values of its section."""
        cls.subject().shutdown()  # type: ignore[attr-defined]
        cls._subject, cls._settings = None, settings
        try:
            yield
            cls.subject().shutdown()  # type: ignore[attr-defined]
        finally:
            cls._subject, cls.creation_error, cls._settings = None, None, {}

    @classmethod
    def with_settings(cls, section: SectionT) -> SectionT:
        """The section with the values of `created_with`.

        Raises:
            SkipTest: it does not accept them.
        """
        if not cls._settings:
            return section
        try:
            return type(section).model_validate({**dict(section), **cls._settings})
        except ValidationError as error:
            refused = {problem["loc"][0] for problem in error.errors() if problem["loc"]} & {*cls._settings}
            named = ", ".join(f"`{key}: {value}`" for key, value in cls._settings.items() if key in (refused or cls._settings))
            raise SkipTest(f"its section does not accept {named} of this test") from None

    @classmethod
    def title(cls) -> str:
        """What is tested, in reports."""
        return cls.kind.label

    @classmethod
    def registry(cls) -> Registry:
        """The installed components, discovered once for all tests of the class."""
        cls._registry = cls._registry or Registry(discover())
        return cls._registry

    @classmethod
    def registered(cls) -> Component:
        """The component's description."""
        return cls.registry().find(cls.kind, cls.component)

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        """The capabilities that the component declares: in its `Component`, or as an attribute of a class given by its path."""
        component = cls.registered()
        names = getattr(component.load(), "capabilities", ()) if is_path(component.name) else component.capabilities
        return frozenset(map(str, names))

    @classmethod
    def promises(cls) -> Iterator[Promise]:
        """The promises of the kind, in the order of definition."""
        for base in reversed(cls.__mro__):
            yield from _own_promises(base)

    @classmethod
    def failure_text(cls, result: PromiseResult) -> str:
        """The error for a broken promise."""
        return (
            f"The {cls.title()} {cls.component!r} does not keep a promise ({result.promise.name}).\n"
            f"Promise: {result.promise.statement}\nFound: {result.found}\nSee {cls.page}#{cls.title().replace(' ', '-')}."
        )

    @classmethod
    def summary(cls) -> str:
        """One line: how many promises are kept, and why others were not tested."""
        kept = sum(result.status is Status.KEPT for result in cls.results.values())
        text = f"{cls.title()} {cls.component!r}: {kept} of {len([*cls.promises()])} promises kept"
        others = Counter(
            f"{result.status}: {result.found}"
            for result in cls.results.values()
            if result.status not in (Status.KEPT, Status.BROKEN)
        )
        return "; ".join([text, *(f"{number} {reason}" for reason, number in others.items())])

    @promise("It declares enough for the minimum of promises of its kind to apply.")
    def test_enough_promises_apply(self) -> str:
        cls = type(self)
        stated = [*cls.promises()]
        applying = [each for each in stated if each.name not in cls.expected_failures and each.applies_to(cls)]
        if len(applying) < cls.minimum:
            texts = dict.fromkeys(each.applies.text for each in stated if each.applies and not each.applies_to(cls))
            raise Found(
                f"{len(applying)} of {len(stated)} promises apply, and at least {cls.minimum} must: {'; '.join(texts)}."
            )
        return f"{len(applying)} of {len(stated)} promises apply"

    @classmethod
    def _tested(cls, stated: Promise) -> tuple[Status, str]:
        expected = cls.expected_failures.get(stated.name)
        try:
            if stated.applies and not stated.applies_to(cls):
                return Status.NOT_DECLARED, stated.applies.text
            for earlier in (cls.results[name] for name in stated.after if name in cls.results):
                if earlier.status in (Status.BROKEN, Status.NOT_CHECKED):
                    return Status.NOT_CHECKED, f"because of {earlier.promise.name}"
            found = stated.check(cls())
        except SkipTest as reason:
            return Status.NOT_CHECKED, str(reason)
        except (Exception, SystemExit) as error:  # of the component, which may raise anything
            if expected is not None:
                return Status.EXPECTED, expected
            return Status.BROKEN, described(error)
        if expected is not None:
            return Status.BROKEN, f"the promise is kept, but the test expects a failure ({expected}). Remove the xfail."
        return Status.KEPT, found or ""


def described(error: BaseException) -> str:
    """What a check found, from its exception: errors other than `Found` with their type and location."""
    if isinstance(error, Found | RLCoreError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def run_elsewhere(code: str, action: str) -> tuple[str, str]:
    """Run code in another interpreter with this one's import path; returns standard output and standard error.

    Raises:
        Found: the interpreter failed, and what it did.
    """
    code = f"import sys\nsys.path[:] = {sys.path}\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no error message"])[-1]
        raise Found(f"{action} ended the interpreter with exit code {done.returncode}: {last}.")
    return done.stdout, done.stderr


def _own_promises(base: type) -> Iterator[Promise]:
    return (getattr(value, _MARK) for value in vars(base).values() if hasattr(value, _MARK))
