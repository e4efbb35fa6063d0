"""Stand-ins for functions, classes, instances, generators and coroutines of the other process. Used inside the sandbox.

A class of the program becomes a class here, so `isinstance`, `except` and `type` work, and its methods run in the program's
process. Its instances have the builtin base of the class, if any: an `IntEnum` is an `int`, a namedtuple a `tuple`, an
exception a `ValueError`. That base decides comparisons, in this process.

A stand-in in the tests' process does not leave the result of a comparison to the program, which could accept everything:

- It equals, or is less than, other stand-ins only. Compared with a value of the tests, it is not equal.
- Operators and `in` are forwarded only if the tests name its class by a name that begins with a capital letter. Otherwise
  `abs(area(2) - 4) < 1e-9` would be true for an object whose `-` always returns 0.
- An operator with a value of the tests as operand must return an object, and that object has no value, length or truth.
- Methods such as `startswith`, `isdigit` and `issubset` are not called on objects of other classes.
"""

from __future__ import annotations

import types

TYPE_CHECKING = False  # `typing` would double the start time
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    class Peer(Protocol):
        """`rl_envs.code.link.Peer`."""

        strict: bool
        busy: int
        mixed: dict[int, Any]

        def request(self, operation: str, *operands: Any) -> Any: ...
        def is_foreign(self, value: Any) -> bool: ...
        def subclass(self, cls: type, bases: tuple[type, ...], namespace: dict[str, Any]) -> None: ...


def _dunders(names: str) -> frozenset[str]:
    return frozenset(f"__{name}__" for name in names.split())


COMPARISONS = _dunders("eq ne lt le gt ge")
_ARITHMETIC = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor"
OPERATORS = _dunders(f"{_ARITHMETIC} {' '.join(letter + name for letter in 'ri' for name in _ARITHMETIC.split())}")
VALUES = _dunders("bool int float complex index abs round trunc floor ceil len")
SPECIALS = (COMPARISONS | OPERATORS | VALUES) | _dunders(
    "init str repr format bytes hash contains iter next reversed getitem setitem delitem enter exit call neg pos invert"
)
_READABLE = _dunders("name qualname doc module wrapped annotations")
_PREDICATES = frozenset(
    name
    for kind in (str, bytes, set, float)
    for name in dir(kind)
    if name in ("startswith", "endswith") or (name.startswith("is") and callable(getattr(kind, name)))
)
BASES: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__pos__,
    str: str.__str__,
    bytes: lambda v: bytes.__add__(v, b""),
    bytearray: lambda v: bytes(bytearray.__add__(v, b"")),
    tuple: lambda v: tuple(tuple.__iter__(v)),
    list: lambda v: list(list.__iter__(v)),
    set: lambda v: list(set.__iter__(v)),
    frozenset: lambda v: list(frozenset.__iter__(v)),
    dict: lambda v: list(dict.items(v)),
    BaseException: lambda v: tuple(v.args),
}
"""Builtin types that classes derive from, with functions that copy the contents; a class cannot override these."""
NUMBERS = (int, float, complex)
_MUTABLE = (list, dict, set, bytearray)


def base_of(kind: type) -> Any:
    """The builtin base of a class, or None."""
    return next((base for base in BASES if issubclass(kind, base)), None)


class Meta(type):
    """Class of the stand-ins of classes."""

    rl_peer: Any = None
    rl_named = False
    rl_here = False

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], described: bool = False) -> Any:
        cls = super().__new__(mcls, name, bases, namespace)
        if cls.rl_peer is not None and not described:  # a class statement of this process with a base of the other one
            cls.rl_here = True
            cls.rl_peer.subclass(cls, bases, namespace)
        return cls

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], described: bool = False) -> None:
        super().__init__(name, bases, namespace)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.rl_peer.request("call", cls, args, *([kwargs] if kwargs else []))

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name not in _READABLE:
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        return cls.rl_peer.request("attr", cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        if name.startswith(("rl_", "__", "_abc_")):
            super().__setattr__(name, value)
        else:
            cls.rl_peer.request("set", cls, name, value)

    def __iter__(cls) -> Any:
        return cls.rl_peer.request("method", cls, "__iter__", ())

    def __len__(cls) -> Any:
        return cls.rl_peer.request("method", cls, "__len__", ())

    def __bool__(cls) -> bool:
        return True

    def __getitem__(cls, key: Any) -> Any:
        return cls.rl_peer.request("item", cls, key)

    def __instancecheck__(cls, instance: Any) -> bool:
        if super().__instancecheck__(instance):
            return True
        return bool(cls.__dict__.get("rl_checks")) and bool(cls.rl_peer.request("isinstance", instance, cls))

    def __subclasscheck__(cls, other: Any) -> bool:
        if super().__subclasscheck__(other):
            return True
        return bool(cls.__dict__.get("rl_checks")) and bool(cls.rl_peer.request("issubclass", other, cls))


class Stand(metaclass=Meta):
    """Base of all stand-ins that are not generators or coroutines."""

    def __getattr__(self, name: str) -> Any:
        cls = type(self)
        if name.startswith("__") and name not in _READABLE:
            raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")
        if name in _PREDICATES and cls.rl_peer.strict and not cls.rl_named:
            raise AttributeError(f"{cls.__name__!r} object is not a builtin value, so {name!r} is not called on it")
        return cls.rl_peer.request("attr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):  # Python sets the traceback and the context of an exception
            object.__setattr__(self, name, value)
        else:
            type(self).rl_peer.request("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        type(self).rl_peer.request("delete", self, name)

    def __repr__(self) -> str:
        return str(type(self).rl_peer.request("method", self, "__repr__", ()))

    def __format__(self, form: str) -> str:
        return str(type(self).rl_peer.request("method", self, "__format__", (form,)))


class Function(Stand):
    """A function of the other process."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self).rl_peer.request("call", self, args, *([kwargs] if kwargs else []))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


def new_class(name: str, module: str, bases: tuple[Any, ...], names: tuple[str, ...], checks: bool) -> Any:
    """A stand-in for a class.

    Args:
        name: Its qualified name.
        module: The name of its module.
        bases: Stand-ins of its bases, and builtin types.
        names: Its methods.
        checks: Whether its metaclass or it has a hook for `isinstance` or `issubclass`.
    """
    stands = tuple(base for base in bases if isinstance(base, Meta))
    builtin = tuple(base for base in bases if not isinstance(base, Meta) and base_of(base) is not None)
    namespace: dict[str, Any] = {"__module__": module, "__qualname__": name, "rl_checks": checks}
    base = next(filter(None, map(base_of, bases)), None)
    methods = {each for each in names if each.isidentifier() and (each in SPECIALS or not each.startswith("__"))}
    if base in _MUTABLE:
        inherited = (each for each in dir(base) if callable(getattr(base, each)) and not hasattr(object, each))
        methods |= {each for each in inherited if each in SPECIALS or not each.startswith("__")}
        namespace.update((each, _refreshed(base, each)) for each in COMPARISONS)
        namespace["__hash__"] = None
    for each in methods - set(namespace):
        if base is None or each not in COMPARISONS | {"__hash__"}:
            namespace[each] = _forwarder(each, base)
    if "__eq__" in namespace:
        namespace.setdefault("__hash__", _hash)
    made = Meta(name.rpartition(".")[2], ((*stands, *builtin) if stands else (Stand, *builtin)), namespace, described=True)
    for each in namespace.values():
        if isinstance(each, types.FunctionType):
            each.rl_owner = made  # type: ignore[attr-defined]
    return made


def _forwarder(name: str, base: Any) -> Any:
    if name in COMPARISONS:
        return _comparison(name)
    if name in OPERATORS:
        return _operator(name, base)
    if name in ("__contains__", "__hash__"):
        return _contains if name == "__contains__" else _hash

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        cls = type(self)
        peer = cls.rl_peer
        if peer.strict and (id(self) in peer.mixed if name in VALUES else name in _PREDICATES and not cls.rl_named):
            raise TypeError(f"{name} of {cls.__name__!r} is not called: its result could follow what it is compared with")
        keywords = [kwargs] if kwargs else []
        if cls.rl_here:  # its class is of this process, so this is a call of super()
            return peer.request("base", method.rl_owner, name, self, args, *keywords)  # type: ignore[attr-defined]
        return peer.request("method", self, name, args, *keywords)

    method.__name__ = name
    return method


def _comparison(name: str) -> Any:
    def compare(self: Any, other: Any) -> Any:
        peer = type(self).rl_peer
        return peer.request("method", self, name, (other,)) if not peer.strict or peer.is_foreign(other) else NotImplemented

    return compare


def _refreshed(base: Any, name: str) -> Any:
    def compare(self: Any, other: Any) -> Any:
        for each in (self, other):
            if isinstance(each, Stand) and isinstance(each, base):
                type(each).rl_peer.request("again", each)  # reading it again brings its contents up to date
        return getattr(base, name)(self, other)

    return compare


def _operator(name: str, base: Any) -> Any:
    def operate(self: Any, other: Any, *more: Any) -> Any:
        cls = type(self)
        peer = cls.rl_peer
        if peer.strict and (not cls.rl_named or base in NUMBERS):
            own = None if base is None else getattr(base, name, None)
            return NotImplemented if own is None else own(self, other, *more)
        result = peer.request("method", self, name, (other, *more))
        if peer.strict and not peer.is_foreign(other) and result is not NotImplemented:
            if not isinstance(result, Stand):
                raise TypeError(f"{name} of {cls.__name__!r} and a value must return an object of the program")
            peer.mixed[id(result)] = result
        return result

    return operate


def _contains(self: Any, item: Any) -> bool:
    cls = type(self)
    if cls.rl_peer.strict and not cls.rl_named:
        return any(each is item or each == item for each in self)
    return bool(cls.rl_peer.request("method", self, "__contains__", (item,)))


def _hash(self: Any) -> int:
    cls, base = type(self), base_of(type(self))
    if base not in (None, BaseException):
        return int(base.__hash__(self))
    return int(cls.rl_peer.request("method", self, "__hash__", ())) if cls.rl_named or not cls.rl_peer.strict else id(self)


def new_instance(cls: Any, contents: Any) -> Any:
    """A stand-in for an instance; `contents` are those of its builtin base, if it has one."""
    base = base_of(cls)
    if base is None:
        return object.__new__(cls)
    if base is BaseException:
        return cls.__new__(cls, *contents)
    made = base.__new__(cls) if base in _MUTABLE else base.__new__(cls, contents)
    return refresh(made, contents)


def refresh(instance: Any, contents: Any) -> Any:
    """Replace the contents of a stand-in whose builtin base is mutable."""
    base = base_of(type(instance))
    if base in _MUTABLE:
        if base is dict:
            dict.clear(instance)
        base.__init__(instance, contents)
    return instance


def generator(peer: Peer, handle: object) -> Any:
    """A generator that runs in the other process; `handle` is an object that is encoded as that generator."""
    name, value = "__next__", ()
    while True:
        try:
            sent = yield peer.request("method", handle, name, value)
            name, value = ("__next__", ()) if sent is None else ("send", (sent,))  # type: ignore[assignment]
        except StopIteration as end:
            return end.value
        except GeneratorExit:
            if not peer.busy:  # else it is being deleted while another request waits for its reply
                peer.request("method", handle, "close", ())
            raise
        except BaseException as error:
            name, value = "throw", (error,)  # type: ignore[assignment]


async def coroutine(peer: Peer, handle: object) -> Any:
    """A coroutine that runs in the other process, from its start to its end."""
    return peer.request("await", handle)
