"""The link between the process of a program and the process of its tests; both run this module inside their sandboxes.

Each side sends requests (call this, read that attribute) and answers those of the other side, also while it waits for an
answer: a test can pass a function to the program, which calls it back. A message is four bytes with its length, then a text of
`rl_envs.code.values`. Values are copied. An object of another type stays in its process; the other side gets its number and
makes a stand-in for it (`rl_envs.code.proxies`). After a call, mutable arguments that have changed are copied back.

The tests' side is strict. All that it receives may come from a hostile program that has replaced this module:

- A message is at most `LARGEST` bytes, and is only read as values and numbers of objects.
- The program can refer to objects of the tests only by numbers that it was given: arguments of calls. It can call functions,
  and read and set public attributes of instances. So it reaches no globals, frames, expected values or reference solutions.
- `StopIteration` from anything but an iterator becomes a RuntimeError, so it cannot end a loop of the tests early.

Standard library only; imports little, because each program would pay for it.
"""

from __future__ import annotations

import os
import sys
import types

from rl_envs.code import proxies
from rl_envs.code.values import ERRORS, Decoder, Encoder, InvalidError, contents, differs, replace

TYPE_CHECKING = False  # `typing` would double the start time
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

READER, WRITER = 3, 4
"""File descriptors of the link inside a sandbox."""
LARGEST = 1 << 24
"""Largest message in bytes."""
_CHUNK = 1 << 16
_NEXT = ("__next__", "send", "throw", "close")
_CALLED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_CLOSED = (*_CALLED, types.ModuleType, types.CodeType, types.FrameType, types.TracebackType)
"""Types of the tests' objects whose attributes the program may not read."""
_LETTERS = {types.GeneratorType: "G", types.CoroutineType: "C", **dict.fromkeys(_CALLED, "P")}


class LinkLostError(BaseException):
    """The other process has ended. Not an Exception, so the tests do not handle it as an error of the program."""


class Peer:
    """One end of the link.

    Args:
        strict: Whether the other side may be hostile: the side of the tests.

    Attributes:
        busy: Number of requests that wait for an answer.
        mixed: Stand-ins that resulted from an operator with a value of this side, by id.
        printed: Called for the text that was printed since the last answer; sent with the next one.
        lost: Whether the other process has ended.
    """

    def __init__(self, *, strict: bool) -> None:
        self.strict, self.busy, self.lost = strict, 0, False
        self.mixed: dict[int, Any] = {}
        self.printed: Callable[[], str] = str
        self._received = b""
        self._exported: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._stands: dict[int, Any] = {}
        self._foreign: dict[int, int] = {}
        self._handles: list[_Handle] = []
        self._handlers: dict[str, Callable[..., Any]] = {
            "call": lambda target, args, kwargs=None: target(*args, **(kwargs or {})),
            "method": _method,
            "attr": getattr,
            "set": setattr,
            "delete": delattr,
            "again": lambda target: target,
            "item": lambda target, key: target[key],
            "isinstance": isinstance,
            "issubclass": issubclass,
            "base": lambda cls, name, target, args, kwargs=None: getattr(cls, name)(target, *args, **(kwargs or {})),
            "subclass": self._make_subclass,
        }
        proxies.Stand.rl_peer = self

    def handle(self, operation: str, handler: Callable[..., Any]) -> None:
        """Answer requests of another kind."""
        self._handlers[operation] = handler

    # Requests

    def request(self, operation: str, *operands: Any) -> Any:
        """Send a request, answer those of the other side until its answer arrives, and return or raise that."""
        encoder = Encoder(self._describe)
        encoder.tokens.append("q" + operation)
        encoder.add(operands)
        self.busy += 1
        try:
            self._send(encoder.text())
            while (text := self._receive())[:1] == "q":
                self._answer(text)
        finally:
            self.busy -= 1
        try:
            failed, value = self._read_answer(text, encoder.containers)
        except ERRORS as error:
            raise ValueError("the result cannot be read") from error
        if not failed:
            return value
        if isinstance(value, (StopIteration, StopAsyncIteration, GeneratorExit)) and not set(_NEXT) & set(operands[1:2]):
            raise RuntimeError(f"{type(value).__name__} was raised outside of an iterator")
        raise value

    def _read_answer(self, text: str, containers: list[Any]) -> tuple[bool, Any]:
        decoder = Decoder(text, self._read_foreign, containers)
        kind, printed = decoder.token(), decoder.value()
        changes = [(containers[int(decoder.token())], decoder.value()) for _ in range(int(decoder.token()))]
        value = decoder.value()
        if kind not in ("r", "e") or (kind == "e" and not isinstance(value, BaseException)):
            raise InvalidError
        if printed:
            sys.stdout.write(printed)
        return kind == "e", self.changed(changes, value, containers) if changes else value

    def changed(self, changes: list[tuple[Any, Any]], result: Any, arguments: list[Any]) -> Any:
        """Change the arguments of a call that the other side has changed.

        Args:
            changes: Mutable values among the arguments, and their new contents.
            result: The result of the call.
            arguments: All mutable values among the arguments.

        Returns:
            The result.
        """
        for container, new in changes:
            replace(container, new)
        return result

    # Answers

    def serve(self) -> None:
        """Answer requests until the other process ends."""
        try:
            while True:
                self._answer(self._receive())
        except LinkLostError:
            pass

    def _answer(self, text: str) -> None:
        containers: list[Any] = []
        before: list[Any] = []
        try:
            decoder = Decoder(text, self._read_foreign)
            operation, operands = decoder.token()[1:], decoder.items()
            containers = decoder.containers
            before = [None if container is None else contents(container) for container in containers]
            if self.strict:
                self._guard(operation, operands)
            kind, result = "r", self._handlers[operation](*operands)
        except LinkLostError:
            raise
        except BaseException as error:
            kind, result = "e", error
        changed = [number for number, old in enumerate(before) if old is not None and differs(containers[number], old)]
        printed = self.printed()
        try:
            self._send(self._answer_text(kind, printed, containers, changed, result))
        except (ArithmeticError, LookupError, MemoryError, RecursionError, TypeError, ValueError, AttributeError) as error:
            reason = ValueError(f"the result cannot be sent: {type(error).__name__}")
            self._send(self._answer_text("e", printed, containers, [], reason))

    def _answer_text(self, kind: str, printed: str, containers: list[Any], changed: list[int], result: Any) -> str:
        encoder = Encoder(self._describe, containers)
        encoder.tokens.append(kind)
        encoder.add(printed or None)
        encoder.tokens.append(str(len(changed)))
        for number in changed:
            encoder.tokens.append(str(number))
            encoder.add(contents(containers[number]))
        if kind == "e":
            self._describe_exception(encoder, result)
        else:
            encoder.add(result)
        return encoder.text()

    def _guard(self, operation: str, operands: tuple[Any, ...]) -> None:
        """Refuse what a program may not do with the objects of its tests."""
        if operation in ("input", "readline"):
            return
        target, name = operands[0], operands[1] if len(operands) > 1 else None
        if id(target) not in self._numbers or operation not in ("call", "again", "method", "attr", "set", "item"):
            raise PermissionError
        if operation in ("method", "attr", "set", "item") and isinstance(target, _CLOSED):
            raise PermissionError
        if isinstance(target, (types.GeneratorType, types.CoroutineType)) and name not in _NEXT:
            raise PermissionError
        if operation in ("method", "attr", "set") and not (type(name) is str and (name in proxies.SPECIALS or name[:1] != "_")):
            raise PermissionError

    # Objects

    def is_foreign(self, value: Any) -> bool:
        """Whether a value is a stand-in for an object of the other process."""
        return id(value) in self._foreign

    def adopt(self, number: int, stand: Any) -> Any:
        """Use an object as the stand-in for the other side's object with this number."""
        self._stands[number], self._foreign[id(stand)] = stand, number
        return stand

    def export(self, value: Any) -> int:
        """The number by which the other side refers to an object, which is kept from now on."""
        number = self._numbers.setdefault(id(value), len(self._exported))
        if number == len(self._exported):
            self._exported.append(value)
        return number

    def subclass(self, cls: type, bases: tuple[type, ...], namespace: dict[str, Any]) -> None:
        """Define a class of this process also in the other one, which has its bases."""
        kept = {name: v for name, v in namespace.items() if name in proxies.SPECIALS or not name.startswith(("__", "rl_"))}
        self.adopt(self.request("subclass", cls.__name__, bases, kept), cls)

    def _make_subclass(self, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> int:
        return self.export(type(bases[0])(name, bases, namespace))

    def _describe(self, encoder: Encoder, value: Any) -> None:
        """Write an object that is not a value; see `_read_foreign`."""
        if id(value) in self._foreign:
            encoder.tokens.append(f"@{self._foreign[id(value)]}")
            return
        named = self._name_of(value)
        if named is not None:
            encoder.tokens += ("A", *named)
            return
        if isinstance(value, type):
            self._describe_class(encoder, value)
            return
        is_new = id(value) not in self._numbers
        number = self.export(value)
        if is_new and type(value) in _LETTERS:
            encoder.tokens.append(f"{_LETTERS[type(value)]}{number}")
            return
        base = proxies.base_of(type(value))
        if is_new:
            encoder.tokens.append(f"H{number}")
            self._describe_class(encoder, type(value))
        else:
            encoder.tokens.append(f"h{number}" if base is None else f"V{number}")
        if is_new or base is not None:
            encoder.add(None if base is None else proxies.BASES[base](value))

    def _describe_class(self, encoder: Encoder, cls: type) -> None:
        if id(cls) in self._foreign or id(cls) in self._numbers:
            known = f"@{self._foreign[id(cls)]}" if id(cls) in self._foreign else f"h{self._numbers[id(cls)]}"
            encoder.tokens.append(known)
            return
        number = self.export(cls)
        bases = tuple(
            base for base in cls.__bases__ if base is not object and (base.__module__ != "builtins" or _is_base(base))
        )
        methods = [
            name for name, v in vars(cls).items() if callable(v) and not isinstance(v, (type, staticmethod, classmethod))
        ]
        hooks = ("__instancecheck__", "__subclasscheck__")
        checks = any(getattr(type(cls), hook) is not getattr(type, hook) for hook in hooks)
        encoder.tokens.append(f"K{number}")
        encoder.add((cls.__qualname__, str(cls.__module__), bases, tuple(methods), checks))

    def is_shared(self, value: Any) -> bool:
        """Whether the other process has the same object, for example a function of the standard library."""
        return self._name_of(value) is not None

    def _name_of(self, value: Any) -> tuple[str, str] | None:
        """Module and name of an object that both processes have; the program names only builtin types and modules."""
        if isinstance(value, types.ModuleType):
            return (value.__name__, "-") if value.__name__ in sys.modules and value.__name__ != "solution" else None
        if not isinstance(value, (type, types.BuiltinFunctionType, types.FunctionType)):
            return None
        module, name = str(value.__module__), value.__qualname__
        if module in _OWN or (not self.strict and not (module == "builtins" and isinstance(value, type))):
            return None
        return (module, name) if getattr(sys.modules.get(module), name, None) is value else None

    def _describe_exception(self, encoder: Encoder, error: BaseException) -> None:
        kind = type(error)
        if id(error) in self._foreign or kind.__module__ in _OWN:
            self._describe(encoder, error)
            return
        builtin = next(each.__name__ for each in kind.__mro__ if each.__module__ == "builtins")
        encoder.tokens += ("X", str(kind.__module__), kind.__qualname__, builtin)
        encoder.add(error.args)
        encoder.add({name: v for name, v in vars(error).items() if type(v) in (int, str, type(None)) and name[:1] != "_"})

    def _read_foreign(self, decoder: Decoder, token: str) -> Any:
        """Read an object that is not a value: one of this process, or a stand-in for one of the other process."""
        letter, number = token[0], int(token[1:] or 0)
        if number < 0 or letter not in "@hVAXKHGCP":
            raise InvalidError
        if letter == "@":
            return self._exported[number]
        if letter == "h":
            return self._stands[number]
        if letter == "V":
            return proxies.refresh(self._stands[number], decoder.value())
        if letter == "A":
            return self._find(decoder.token(), decoder.token())
        if letter == "X":
            return self._read_exception(decoder)
        return self.adopt(number, self._new_stand(decoder, letter, number))

    def _new_stand(self, decoder: Decoder, letter: str, number: int) -> Any:
        if letter == "K":
            name, module, bases, names, checks = decoder.items()
            return proxies.new_class(name, module, bases, names, checks)
        if letter == "H":
            return proxies.new_instance(decoder.value(), decoder.value())
        if letter == "P":
            return object.__new__(proxies.Function)
        handle = self.adopt(number, _Handle())
        self._handles.append(handle)
        return (proxies.generator if letter == "G" else proxies.coroutine)(self, handle)

    def _find(self, module: str, name: str) -> Any:
        if name == "-":
            __import__(module)
            return sys.modules[module]
        found = getattr(__import__(module, fromlist=["-"]) if not self.strict else sys.modules["builtins"], name)
        if self.strict and (module != "builtins" or not isinstance(found, type)):
            raise InvalidError
        return found

    def _read_exception(self, decoder: Decoder) -> BaseException:
        module, name, builtin = decoder.token(), decoder.token(), decoder.token()
        args, attributes = decoder.items(), decoder.value()
        kind = getattr(sys.modules.get(module), name, None) if module not in _OWN else None
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            kind = self._find("builtins", builtin)
        error = kind.__new__(kind, *args)
        if not isinstance(error, BaseException):
            raise InvalidError
        error.args = args
        for attribute, value in attributes.items():
            if attribute[:1] != "_":
                setattr(error, attribute, value)
        return error

    # Messages

    def _send(self, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")
        if len(data) > LARGEST:
            raise ValueError("the message is too long")
        data = len(data).to_bytes(4, "big") + data
        try:
            while data:
                data = data[os.write(WRITER, data) :]
        except OSError:
            self._lose()

    def _receive(self) -> str:
        data = self._received or os.read(READER, _CHUNK)
        size = 4
        while len(data) < size or (size == 4 and len(data) < (size := 4 + int.from_bytes(data[:4], "big"))):
            chunk = os.read(READER, _CHUNK) if size <= LARGEST + 4 else b""
            if not chunk:
                self._lose()
            data += chunk
        self._received = data[size:]
        return data[4:size].decode("utf-8", "surrogatepass")

    def _lose(self) -> NoReturn:
        self.lost = True
        raise LinkLostError


class _Handle:
    """Encoded as an object of the other process."""


_OWN = ("__main__", "solution", "tests", "rl_envs.code.link", "rl_envs.code.proxies", "rl_envs.code.values")
"""Modules that only one of the processes has, or that differ."""


def _is_base(kind: type) -> bool:
    return kind in proxies.BASES or issubclass(kind, BaseException)


def _method(target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    if name.startswith("__"):
        return getattr(type(target), name)(target, *args)
    return getattr(target, name)(*args, **(kwargs or {}))
