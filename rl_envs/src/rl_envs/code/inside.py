"""The main functions of the two processes inside their sandboxes: one runs a program, the other its tests."""

from __future__ import annotations

import builtins
import io
import os
import sys
import types

from rl_envs.code.link import LinkLostError, Peer
from rl_envs.code.proxies import Meta, Stand
from rl_envs.code.values import contents, replace

TYPE_CHECKING = False  # `typing` would double the start time
if TYPE_CHECKING:
    from typing import Any


def run_program(code: str) -> None:
    """Run a program as the module `solution`, then answer the requests of its tests. Tests see what it prints."""
    peer, solution, printed = Peer(strict=False), types.ModuleType("solution"), io.BytesIO()
    sys.modules["solution"] = solution
    sys.stdout = io.TextIOWrapper(printed, "utf-8", "surrogatepass", newline="", write_through=True)
    sys.stdin = _Input(peer)
    builtins.input = lambda prompt="", /: peer.request("input", str(prompt))

    def take() -> str:
        if not printed.tell():
            return ""
        data = printed.getvalue()
        printed.seek(0)
        printed.truncate()
        return data.decode("utf-8", "replace")

    def attribute(target: Any, name: str) -> Any:
        if target is solution and name == "__all__" and not hasattr(solution, name):
            return [each for each in vars(solution) if not each.startswith("_")]
        return getattr(target, name)

    def run_blocking(awaitable: Any) -> Any:
        import asyncio

        return asyncio.run(awaitable)

    peer.printed = take
    peer.handle("attr", attribute)
    peer.handle("await", run_blocking)
    peer.handle("define", lambda name, value: vars(solution).setdefault(name, value) and None)
    peer.export(solution)
    exec(compile(code, "solution.py", "exec"), vars(solution))
    peer.serve()


class _Input(io.TextIOBase):
    """The standard input of the tests."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        return str(self._peer.request("readline"))

    def read(self, size: int | None = -1, /) -> str:
        return "".join(iter(self.readline, ""))


class _Solution(types.ModuleType):
    """The program, as a module of the tests."""

    def __init__(self, peer: Peer, tested: frozenset[str]) -> None:
        super().__init__("solution")
        self.__dict__.update(rl_peer=peer, rl_tested=tested)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module 'solution' has no attribute {name!r}")
        value = self.__dict__["rl_peer"].request("attr", self, name)
        if isinstance(value, Meta) and name.lstrip("_")[:1].isupper():
            value.rl_named = True
        if name == "__all__":
            return [each for each in value if each in self.__dict__["rl_tested"] or not hasattr(builtins, each)]
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            self.__dict__["rl_peer"].request("set", self, name, value)


class _Names(dict[str, object]):
    """The globals of the tests: the names of Python and of the tests, then those of the program."""

    def __init__(self, solution: _Solution, tested: frozenset[str]) -> None:
        super().__init__((name, value) for name, value in vars(builtins).items() if name not in tested)
        self._solution = solution

    def __missing__(self, name: str) -> Any:
        try:
            value = getattr(self._solution, name)
        except AttributeError:
            raise KeyError(name) from None
        if isinstance(value, (Meta, Stand)):
            self[name] = value
        return value


class _Tests:
    """Runs the statements of tests and counts the assertions that hold.

    An argument that a call changes is changed here at once if the call returns None, else after the assertion in which the call
    is. So in `assert f(a) == sorted(a)`, `f` cannot choose what it is compared with by emptying `a`. If a call returns the
    argument itself, its result is a new object; the argument changes only if the result is not used or is in an assertion.
    """

    def __init__(self, peer: Peer) -> None:
        self.peer, self.depth = peer, 0
        self.held: dict[int, bool] = {}
        self.pending: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """Wait until the program has started."""
        self.peer.request("again", sys.modules["solution"])

    def begin(self) -> None:
        if not self.depth:
            self.pending.clear()
        self.depth += 1

    def end(self, number: int, holds: object) -> None:
        self.held[number] = self.held.get(number, True) and bool(holds)
        self._leave()

    def failed(self, number: int) -> None:
        self.held[number] = False
        self._leave()

    def apply(self, _: object, result: object) -> None:
        if not self.depth:
            self._leave()

    def discard(self) -> None:
        if not self.depth:
            self.pending.clear()

    def _leave(self) -> None:
        self.depth = max(0, self.depth - 1)
        if not self.depth:
            for container, new in self.pending:
                replace(container, new)
            self.pending.clear()

    def changed(self, changes: list[tuple[Any, Any]], result: Any, arguments: list[Any]) -> Any:
        before = [(container, contents(container)) for container, _ in changes]
        for container, new in changes:
            replace(container, new)
        if result is None or not (self.depth or any(result is argument for argument in arguments)):
            return result
        result = _copied(result, {})
        for container, old in before:
            replace(container, old)
        self.pending += changes
        return result


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """A copy of a result, including the builtin containers in it."""
    kind = type(value)
    if id(value) in copies or kind not in (list, dict, set, tuple):
        other_container = kind is bytearray or kind.__module__ in ("collections", "numpy")
        return copies[id(value)] if id(value) in copies else value.copy() if other_container else value
    if kind is tuple:
        return tuple(_copied(item, copies) for item in value)
    copies[id(value)] = copy = kind()
    new = [(key, _copied(item, copies)) for key, item in value.items()] if kind is dict else [_copied(v, copies) for v in value]
    replace(copy, new)
    return copy


def run_tests(
    statements: tuple[tuple[str, tuple[str, ...]], ...],
    owners: dict[int, int | None],
    unreachable: frozenset[int],
    required: frozenset[int],
    tested: frozenset[str],
    total: int,
) -> None:
    """Run tests, and print the number of assertions that passed and how the tests ended: `ok`, `error` or `lost`.

    Args:
        statements: The source of each statement, and the names that it defines.
        owners: See `rl_envs.code.suites.Suite`, also for the other arguments.
        unreachable: Assertions that must not be reached.
        required: Statements that must finish.
        tested: Builtin names that are functions of the program.
        total: Number of assertions.
    """
    report = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.path[:] = [path for path in sys.path if path != os.getcwd()]  # the sandbox is used again for other tests
    peer = Peer(strict=True)
    solution, tests = _Solution(peer, tested), _Tests(peer)
    peer.adopt(0, solution)
    peer.changed = tests.changed  # type: ignore[method-assign]
    peer.handle("input", lambda prompt: builtins.input(prompt))
    peer.handle("readline", lambda: sys.stdin.readline())
    sys.modules["solution"] = solution
    names = _Names(solution, tested)
    names.update(__name__="tests", rl_tests=tests)
    sys.modules["tests"] = types.ModuleType("tests")  # dataclasses look it up
    finished, outcome = set(), "ok"
    for number, (statement, definitions) in enumerate((("rl_tests.start()", ()), *statements), -1):
        try:
            exec(compile(statement, f"test {number}", "exec"), names)
            _share(peer, names, definitions)
        except LinkLostError:
            pass
        except BaseException:
            outcome = "error"
        else:
            finished.add(number)
        if peer.lost:
            outcome, finished = "lost", finished - {number}
            break

    def passes(number: int) -> bool:
        """Whether an assertion held each time it ran, and ran as often as it had to."""
        if number in owners:
            owner = owners[number]
            if not (required if owner is None else {owner}) <= finished:
                return False
        return number not in tests.held if number in unreachable else tests.held.get(number, False)

    passed = sum(map(passes, range(total)))
    if passed == total and not required <= finished:
        passed -= 1  # a statement after the assertions raised or did not finish
    os.write(report, f"{passed} {outcome}\n".encode())


def _share(peer: Peer, names: _Names, definitions: tuple[str, ...]) -> None:
    """Let the program use the modules that the tests import and the classes that they define, but not their functions."""
    for name in definitions:
        value = names.get(name)
        if not peer.is_foreign(value) and (isinstance(value, (type, types.ModuleType)) or peer.is_shared(value)):
            peer.request("define", name, value)
