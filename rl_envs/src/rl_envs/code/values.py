"""The text form of the values that a program and its tests exchange. Also used inside the sandbox; standard library only.

A text is a line of tokens separated by spaces, then the characters of all strings. Each value begins with one token: a whole
number is its digits, everything else a letter and a count, such as `l3` for a list of three values or `s5` for the next five
characters. Nothing in a text is ever evaluated or imported. Only exact builtin types are values; an object of another type is
passed to `foreign`, which describes it by a handle.

Lists, dicts and other mutable values are numbered in the order in which they begin. `&2` is the third one again, so values
that are shared or contain themselves stay so, and a reply can refer to the arguments of its request.
"""

from __future__ import annotations

import itertools
import sys

TYPE_CHECKING = False  # `typing` would double the start time
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

_LARGEST = 10**4000
"""Python converts at most 4,300 digits of larger whole numbers, so these are hexadecimal."""
_SHORTEST_BULK = 4
_SINGLES: dict[Any, str] = {None: "n", True: "T", False: "F", ...: "E", NotImplemented: "N"}
_DIGITS = frozenset("-0123456789")
_BULK = {int: "i", float: "f"}


class InvalidError(ValueError):
    """A text does not have the form of this module."""


# Types of the standard library that are values: by module and name, the arguments that make an equal one.
_MADE: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "builtins.range": lambda v: (v.start, v.stop, v.step),
    "builtins.slice": lambda v: (v.start, v.stop, v.step),
    "collections.Counter": lambda v: (dict(v),),
    "collections.OrderedDict": lambda v: (list(v.items()),),
    "collections.defaultdict": lambda v: (v.default_factory, dict(v)),
    "collections.deque": lambda v: (list(v), v.maxlen),
    "datetime.date": lambda v: (v.year, v.month, v.day),
    "datetime.datetime": lambda v: (v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond),
    "datetime.time": lambda v: (v.hour, v.minute, v.second, v.microsecond),
    "datetime.timedelta": lambda v: (v.days, v.seconds, v.microseconds),
    "decimal.Decimal": lambda v: (str(v),),
    "fractions.Fraction": lambda v: (v.numerator, v.denominator),
    "pathlib.PosixPath": lambda v: (str(v),),
    "uuid.UUID": lambda v: (str(v),),
}


class Encoder:
    """Writes values.

    Args:
        foreign: Called with the encoder and each object that is not a value.
        containers: Mutable values that the reader has numbered already.
    """

    def __init__(self, foreign: Callable[[Encoder, Any], None], containers: Sequence[Any] = ()) -> None:
        self.tokens: list[str] = []
        self.characters: list[str] = []
        self.containers = list(containers)
        self._foreign = foreign
        self._numbers = {id(container): number for number, container in enumerate(self.containers)}

    def add(self, value: Any) -> None:
        """Write a value."""
        write = _WRITERS.get(type(value))
        if write is not None:
            write(self, value)
        else:
            self._other(value)

    def text(self) -> str:
        """The text of all values."""
        return " ".join(self.tokens) + "\n" + "".join(self.characters)

    def _other(self, value: Any) -> None:
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in _MADE and kind is _class(name) and getattr(value, "tzinfo", None) is None:
            if not self._again(value, name.startswith("collections.")):
                self.tokens += ("v", name)
                self.add(_MADE[name](value))
        elif name.startswith("numpy.") and kind.__module__ == "numpy":
            self._array(value)
        else:
            self._foreign(self, value)

    def _array(self, value: Any) -> None:
        """NumPy's scalars are the numbers of Python; arrays are their type, shape and bytes."""
        if type(value).__name__ != "ndarray":
            scalar = value.item() if hasattr(value, "item") else value
            (self.add if type(scalar) in _WRITERS else lambda v: self._foreign(self, v))(scalar)
        elif value.dtype.kind not in "biufc":
            self.add(value.tolist())
        elif not self._again(value, True):
            self.tokens += ("a", value.dtype.str, ",".join(map(str, value.shape)))
            self.add(value.tobytes())

    def _again(self, value: Any, mutable: bool) -> bool:
        """Number a mutable value; write a reference to it instead if it has a number."""
        if not mutable:
            return False
        number = self._numbers.setdefault(id(value), len(self.containers))
        if number < len(self.containers):
            self.tokens.append(f"&{number}")
            return True
        self.containers.append(value)
        return False

    def _int(self, value: int) -> None:
        self.tokens.append(str(value) if -_LARGEST < value < _LARGEST else f"x{value:x}")

    def _str(self, value: str) -> None:
        self.tokens.append(f"s{len(value)}")
        self.characters.append(value)

    def _bytes(self, letter: str, value: bytes | bytearray, mutable: bool = False) -> None:
        if not self._again(value, mutable):
            self.tokens.append(f"{letter}{len(value)}")
            self.characters.append(value.decode("latin-1"))

    def _dict(self, value: dict[Any, Any]) -> None:
        if not self._again(value, True):
            self.tokens.append(f"d{len(value)}")
            for key, item in value.items():
                self.add(key)
                self.add(item)

    def _items(self, letter: str, items: Any, mutable: bool = False) -> None:
        if self._again(items, mutable):
            return
        kinds = set(map(type, items)) if len(items) >= _SHORTEST_BULK else ()
        bulk = _BULK.get(*kinds) if len(kinds) == 1 else None
        if bulk == "i" and not -_LARGEST < min(items) <= max(items) < _LARGEST:
            bulk = None
        self.tokens.append(f"{letter}{len(items)}{bulk or ''}")
        if bulk is not None:
            self.tokens += map(repr, items)
        else:
            for item in items:
                self.add(item)


_WRITERS: dict[type, Callable[[Encoder, Any], None]] = {
    int: Encoder._int,
    float: lambda encoder, value: encoder.tokens.append(f"f{value!r}"),
    complex: lambda encoder, value: encoder.tokens.append(f"c{value.real!r},{value.imag!r}"),
    str: Encoder._str,
    bytes: lambda encoder, value: encoder._bytes("b", value),
    bytearray: lambda encoder, value: encoder._bytes("B", value, mutable=True),
    list: lambda encoder, value: encoder._items("l", value, mutable=True),
    tuple: lambda encoder, value: encoder._items("t", value),
    set: lambda encoder, value: encoder._items("S", value, mutable=True),
    frozenset: lambda encoder, value: encoder._items("Z", value),
    dict: Encoder._dict,
    **{type(single): lambda encoder, value: encoder.tokens.append(_SINGLES[value]) for single in _SINGLES},
}


class Decoder:
    """Reads values. The text may come from a hostile program; every error is an exception of `ERRORS`.

    Args:
        text: The text.
        foreign: Called with the decoder and the token of each object that is not a value.
        containers: Mutable values that have numbers already.
    """

    def __init__(self, text: str, foreign: Callable[[Decoder, str], Any], containers: Sequence[Any] = ()) -> None:
        head, _, self._characters = text.partition("\n")
        self._tokens = iter(head.split(" "))
        self.token = self._tokens.__next__
        self.containers = list(containers)
        self._foreign, self._position = foreign, 0

    def value(self) -> Any:
        """The next value."""
        token = self.token()
        if token[0] in _DIGITS:
            return int(token)
        read = _READERS.get(token[0])
        return read(self, token[1:]) if read is not None else self._foreign(self, token)

    def string(self) -> str:
        """The next value, which must be a string."""
        value = self.value()
        if type(value) is not str:
            raise InvalidError
        return value

    def items(self) -> tuple[Any, ...]:
        """The next value, which must be a tuple."""
        value = self.value()
        if type(value) is not tuple:
            raise InvalidError
        return value

    def _take(self, count: str) -> str:
        start, self._position = self._position, self._position + int(count)
        if not start <= self._position <= len(self._characters):
            raise InvalidError
        return self._characters[start : self._position]

    def _numbered(self, container: Any) -> Any:
        self.containers.append(container)
        return container

    def _values(self, count: str) -> Iterable[Any]:
        if count[-1] in "if":
            found: list[Any] = list(map(int if count[-1] == "i" else float, itertools.islice(self._tokens, int(count[:-1]))))
            if len(found) != int(count[:-1]):
                raise InvalidError
            return found
        return [self.value() for _ in range(int(count))]

    def _filled(self, container: Any, count: str) -> Any:
        """A list or set, numbered before its values are read, because they may contain it."""
        self._numbered(container)
        replace(container, self._values(count))
        return container

    def _dict(self, count: str) -> dict[Any, Any]:
        made: dict[Any, Any] = self._numbered({})
        for _ in range(int(count)):
            key = self.value()
            made[key] = self.value()
        return made

    def _made(self, _: str) -> Any:
        name = self.token()
        number = len(self.containers)
        if name.startswith("collections."):
            self.containers.append(None)
        if name not in _MADE:
            raise InvalidError
        made = _class(name)(*self.items())
        if name.startswith("collections."):
            self.containers[number] = made
        return made

    def _array(self, _: str) -> Any:
        kind, sizes, number = self.token(), self.token(), len(self.containers)
        self.containers.append(None)
        data, shape = self.value(), tuple(int(size) for size in sizes.split(",") if size)
        if type(data) is not bytes or kind[1:2] not in "biufc" or any(size < 0 for size in shape):
            raise InvalidError
        import numpy

        self.containers[number] = found = numpy.frombuffer(data, kind).reshape(shape).copy()
        return found

    def _complex(self, pair: str) -> complex:
        real, imaginary = pair.split(",")
        return complex(float(real), float(imaginary))


_READERS: dict[str, Callable[[Decoder, str], Any]] = {
    "x": lambda _, digits: int(digits, 16),
    "f": lambda _, digits: float(digits),
    "c": Decoder._complex,
    "s": Decoder._take,
    "b": lambda decoder, count: decoder._take(count).encode("latin-1"),
    "B": lambda decoder, count: decoder._numbered(bytearray(decoder._take(count).encode("latin-1"))),
    "l": lambda decoder, count: decoder._filled([], count),
    "t": lambda decoder, count: tuple(decoder._values(count)),
    "S": lambda decoder, count: decoder._filled(set(), count),
    "Z": lambda decoder, count: frozenset(decoder._values(count)),
    "d": Decoder._dict,
    "v": Decoder._made,
    "a": Decoder._array,
    "&": lambda decoder, number: decoder.containers[int(number)],
    "n": lambda _, __: None,
    "T": lambda _, __: True,
    "F": lambda _, __: False,
    "E": lambda _, __: ...,
    "N": lambda _, __: NotImplemented,
}
ERRORS = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    RecursionError,
    StopIteration,
    TypeError,
    ValueError,
)
"""What reading a text that is not valid raises."""


def _class(name: str) -> Any:
    module, _, attribute = name.partition(".")
    return getattr(sys.modules.get(module) or __import__(module), attribute)


def contents(container: Any) -> Any:
    """A copy of what a mutable value contains, for `differs` and `replace`."""
    if isinstance(container, dict):
        return list(container.items())
    if isinstance(container, bytearray):
        return bytes(container)
    return container.copy() if type(container).__name__ == "ndarray" else list(container)


def differs(container: Any, before: Any) -> bool:
    """Whether the contents of a mutable value have changed; equal objects are not the same."""
    if isinstance(container, bytearray) or type(container).__name__ == "ndarray":
        return bytes(container) != bytes(before)
    now = contents(container)
    if isinstance(container, dict):
        pairs = zip(now, before)  # noqa: B905 (Python 3.9)
        return len(now) != len(before) or any(key is not old or value is not was for (key, value), (old, was) in pairs)
    return len(now) != len(before) or any(item is not old for item, old in zip(now, before))  # noqa: B905


def replace(container: Any, new: Any) -> None:
    """Replace the contents of a mutable value."""
    if isinstance(container, bytearray) or type(container).__name__ == "ndarray":
        container[:] = new
        return
    container.clear()
    (container.update if isinstance(container, (dict, set)) else container.extend)(new)
