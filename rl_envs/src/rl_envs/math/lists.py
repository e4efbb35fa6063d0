r"""Splits lists into elements: tuples, intervals, sets, bare lists, and equations that name their elements.

Inequalities of one variable are intervals: `2 \le x < 5` is `[2,5)`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rl_envs.math.notation import brackets, compact, split_top
from rl_envs.math.numbers import quantity, read_number

EQUALS = r"(?<![<>!:])=(?!=)"
"""Separates the sides of an equation."""
_SEPARATORS = r"[,;]"
_VARIABLE = r"\\?[A-Za-z]+(?:_\{?\w+(?:,\s*\w+)*\}?)?'*(?:\s*\([A-Za-z](?:\s*,\s*[A-Za-z])*\))?"
_NUMBER = r"-?\s*(?:\d+(?:[./]\d+)?|\\frac\{\d+\}\{\d+\}|\\pi)"
_OF_EVENT = r"(?:\\mathbb\{[PE]\}|\\text\{(?:Pr|Var|E|P)\}|\\?Pr|P|E)\s*(?:\([^()]*(?:\([^()]*\)[^()]*)?\)|\[[^\[\]]*\])"
_MATRIX = r"[A-Z]\^\{?(?:-1|T|\\top)\}?"
_LEFT_SIDE = re.compile(
    rf"(?!\\not(?![A-Za-z]))(?:{_VARIABLE}|\[[A-Z]{{3,5}}\]|\\text\{{[^{{}}]*\}}(?:\s*\w+)?|{_OF_EVENT}|{_MATRIX}"
    rf"|(?:[dfghpqFGHQ]|\\(?:tau|phi|varphi|sigma)(?:_\{{?\d\}}?)?)"
    rf"(?:\^\{{?-1\}}?|'+)?\s*\(\s*(?:{_NUMBER}|[A-Za-z])\s*\)"  # a function at a point
    r"|(?:\(\s*[fgh]\s*\\circ\s*[fgh]\s*\)\s*\(|[fgh]\s*\(\s*[fgh]\s*\()\s*[a-z]\s*\)+"  # a composition
    r"|\\sigma\^\{2\}|[CP]\(\d+,\s*\d+\)"
    r"|\|[A-Zz](?:\s*\\(?:cup|cap|setminus|times)\s*[A-Z])?\||\|[A-Z]{2}\||\\det\s*\(?\s*[A-Z]\s*\)?|\\(?:vec|overrightarrow)\s*\{?\s*[A-Za-z]{1,2}\s*\}?"
    r"|[A-Z]\s*\\(?:cup|cap|setminus|times)\s*[A-Z]|\\int(?![A-Za-z])[^=]*d\s*[a-z]|\([a-z],\s*\\?[a-z]+(?:,\s*\\?[a-z]+)?\)"
    r"|\\overline\s*\{[A-Z]{2}\}|m?\s*\\angle\s*[A-Z]{1,3}"
    r"|\\frac\{\\partial\s*[A-Za-z]?\}\{\\partial\s*[a-z]\}"
    r"|\\frac\{d(?:\^\{\d\})?\s*[a-z]?\}\{d\s*[a-z](?:\^\{\d\})?\}(?:\s*[a-z]\s*\([a-z]\))?"  # a derivative
    r"|\\lim_\{[^{}]*\}[^=]*)"
)
_VECTOR = re.compile(
    r"\\langle(?![A-Za-z])(.*)\\rangle"
    r"|[(\[]?\s*\\begin\{(?:[pbB]?matrix|array)\}(?:\{[clr]\})?([^&]*)\\end\{(?:[pbB]?matrix|array)\}\s*[)\]]?"
)
_TRANSPOSED_ROW = re.compile(r"\\begin\{[pb]matrix\}([^\\]*)\\end\{[pb]matrix\}\^\{?(?:T|\\top)\}?")
_COMPONENT = r"\s*([+-]?\s*(?:\d+(?:\.\d+)?|\\frac\{\d+\}\{\d+\})?)\s*\\(?:text|hat|vec)\{\s*([ijk])\s*\}"
_UNIT_VECTORS = re.compile(rf"(?:{_COMPONENT}){{2,3}}")
_POINT = re.compile(r"(?:\\text\{\s*)?([A-Z])\s*\}?((?:_\{?\w+\}?|')*)\s*[:=]?\s*(\(.*\))")


def elements(text: str) -> tuple[str, list[str]]:
    r"""The pair of brackets (`()`, `[)`, `\{\}`, empty for none) and the elements; one element if it is not a list."""
    if read_number(quantity(text).value) is not None:
        return "", [text]
    enclosed = brackets(text)
    if enclosed is not None:
        opening, content, closing = enclosed
        parts = [part for part in split_top(content, _SEPARATORS) if part]
        is_set = opening == "\\{" and closing == "\\}"
        if is_set or len(parts) > 1:
            return opening + closing, parts
        return "", [text]
    sides = split_top(text, EQUALS)
    if len(sides) == 2 and (names := _names(sides[0])):
        opening, values = elements(sides[1])
        if len(names) == len(values):
            return opening, [f"{name} = {value}" for name, value in zip(names, values, strict=True)]
    parts = [part for part in split_top(text, _SEPARATORS) if part]
    shared = _with_shared_name(parts)
    return ("", parts or [text]) if shared is None else ("\\{\\}", shared)


def in_order_of_names(parts: Sequence[str], *, share_letter: bool = False) -> list[str] | None:
    """`y = 3, x = 2` is the pair (2, 3): the values in the alphabetical order of their names; None without distinct names.

    Args:
        parts: Equations.
        share_letter: Whether the names must be one letter with different indices, such as `x_1` and `x_2`.
    """
    sides = [split_top(part, EQUALS) for part in parts]
    names = [left_side(side).lstrip("\\") for side in sides]
    if len(set(names)) < len(names) or not all(len(side) == 2 and is_named(side) for side in sides):
        return None
    if share_letter and len({name.partition("_")[0] for name in names}) > 1:
        return None
    return [value for _, (_, value) in sorted(zip(names, sides, strict=True))]


def kinds_agree(expected: str, answer: str) -> bool:
    """Whether the brackets are interchangeable: only a bare list and a tuple or set are, in both directions."""
    if expected == answer:
        return True
    return "" in (expected, answer) and {expected, answer} <= {"", "()", "\\{\\}"}


def is_named(sides: Sequence[str]) -> bool:
    r"""Whether the left side of an equation is a name such as `x`, `f(x)` or `\text{area}`."""
    return len(sides) > 1 and _LEFT_SIDE.fullmatch(sides[0]) is not None


def stated(text: str) -> str:
    """The text without the name of a value in front of an equals sign."""
    return "=".join(without_name(split_top(text, EQUALS)))


def without_point_names(expected: str, answer: str) -> tuple[str, str]:
    """Both texts; as pairs of coordinates if one is a pair and the other a named point, or both are points of the same name."""
    names, pairs = zip(*map(_point, (expected, answer)), strict=True)
    is_same = None not in pairs and (names[0] == names[1] or "" in names)
    return (pairs[0], pairs[1]) if is_same else (expected, answer)


def _point(text: str) -> tuple[str, str | None]:
    """The name of a point and its coordinates, `P` and `(3, 6)`; empty for bare coordinates, and None for another text."""
    match = _POINT.fullmatch(text)
    name, pair = ("", text) if match is None else (match.group(1) + match.group(2), match.group(3))
    enclosed = brackets(pair)
    is_pair = enclosed is not None and enclosed[0] + enclosed[2] == "()" and len(split_top(enclosed[1], ",")) > 1
    return name, pair if is_pair else None


def left_side(sides: Sequence[str]) -> str:
    """The left side without spaces; `y` for `f(x)` and `y(x)`."""
    name = compact(sides[0])
    return "y" if name in ("f(x)", "y(x)") else name


def without_set_name(text: str) -> str:
    r"""`\{1, 2\}` for `A = \{1, 2\}`."""
    sides = split_top(text, EQUALS)
    enclosed = brackets(sides[-1])
    is_set = len(sides) == 2 and is_named(sides) and enclosed is not None and enclosed[0] == "\\{"
    return sides[1] if is_set else text


def as_vector(text: str) -> str | None:
    r"""`(1,2)` for `\langle 1, 2 \rangle`, for a column and for `\mathbf{i} + 2\mathbf{j}`; None for anything else."""
    if _UNIT_VECTORS.fullmatch(stated(text)):
        found = [(letter, part.replace(" ", "")) for part, letter in re.findall(_COMPONENT, stated(text))]
        components = {letter: f"{part}1" if part in ("", "+", "-") else part for letter, part in found}
        letters = "ijk" if "k" in components else "ij"
        return f"({','.join(components.get(letter, '0') for letter in letters)})" if len(components) == len(found) else None
    if row := _TRANSPOSED_ROW.fullmatch(stated(text)):
        return f"({row.group(1).replace('&', ',')})"
    match = _VECTOR.fullmatch(stated(text))
    if match is None:
        return None
    parts = split_top(match.group(1), ",") if match.group(1) else [part for part in split_top(match.group(2), r"\\\\") if part]
    return f"({','.join(parts)})" if len(parts) > 1 else None


def without_name(sides: Sequence[str]) -> Sequence[str]:
    """The sides without a name."""
    return sides[1:] if is_named(sides) else sides


def _names(text: str) -> list[str]:
    """The variables in `(x, y)`; empty for anything else."""
    enclosed = brackets(text)
    parts = [] if enclosed is None else split_top(enclosed[1], _SEPARATORS)
    return parts if all(re.fullmatch(r"(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w+\}?)?", part) for part in parts) else []


def _with_shared_name(parts: list[str]) -> list[str] | None:
    """The set `1, 2` of `x = 1, 2` or `x = 1, x = 2`; None if the elements do not share a name."""
    sides = [split_top(part, EQUALS) for part in parts]
    names = {left_side(side) for side in sides if is_named(side)}
    if len(parts) < 2 or len(names) != 1 or not is_named(sides[0]):
        return None
    return [
        without_name(side)[0] if len(side) == 2 and is_named(side) else part for side, part in zip(sides, parts, strict=True)
    ]


def in_parentheses(vector: str) -> str:
    """`(3,4)` for `[3,4]` and for `v = (3,4)`."""
    text = stated(vector).removesuffix("^T")
    return f"({text[1:-1]})" if text.startswith("[") and text.endswith("]") else text


def is_equation(part: str) -> bool:
    """Whether a text is an equation with a name on its left side."""
    return is_named(split_top(part, EQUALS))


def both_signs(text: str) -> list[str] | None:
    """The elements of a list or set, two for each that has one plus-minus sign; None without such an element."""
    parts = parts_of(text)
    if all(part.count("\\pm") != 1 for part in parts):
        return None
    return [
        part.replace("\\pm", sign).strip().removeprefix("+").strip()
        for part in parts
        for sign in ("+-" if part.count("\\pm") == 1 else ["\\pm"])
    ]


def parts_of(text: str) -> list[str]:
    """The elements of a list or set; a tuple is one element."""
    opening, parts = elements(text)
    return parts if opening in ("", "\\{\\}") else [text]


_SIGN = r"<|>|\\(?:le|ge|lt|gt)(?![A-Za-z])"
ORDER = re.compile(r"[<>]|\\(?:le|ge|lt|gt|ne)(?![A-Za-z])")
_HAS_SIGN = re.compile(_SIGN)
_CLOSED = ("\\le", "\\ge")
_RISING = ("<", "\\lt", "\\le")
_ALTERNATIVES = r"[,;]|\\cup(?![A-Za-z])"
_BOTH = r"\\(?:land|wedge)(?![A-Za-z])"
_NO_START, _NO_END = "(-\\infty,", ",\\infty)"
_UNKNOWN = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?|\\(?!infty)[a-z]+")
_MEMBER = re.compile(r"([A-Za-z](?:_\{?\w+\}?)?)\s*\\in(?![A-Za-z])\s*(.+)")
_BUILDER = re.compile(r"\\\{\s*([A-Za-z])\s*(?:\\in\s*(?:\\mathbb\{R\}|\\R)\s*)?(?:\\mid|\\vert|:|\|)(.+)\\\}")
_ALL_EXCEPT = re.compile(
    r"(?:\\mathbb\{R\}|\(-\\infty,\s*\\infty\))\s*(?:\\setminus|\\backslash|-|\\text\{\s*except\s*\})\s*\\\{(.+)\\\}"
    r"|\\text\{\s*[Aa]ll real(?: number)?s except (?:for )?(?:\}|(?=-?\d+\}$))(.+?)\}?"
)
_ALL_OUTSIDE = re.compile(
    r"(?:\\mathbb\{R\}|\(-\\infty,\s*\\infty\))\s*(?:\\setminus|\\backslash|-)\s*([(\[])([^,]+),([^,]+)([)\]])"
)
_EXCEPT = re.compile(r"([(\[][^,()\[\]]+),([^,()\[\]]+[)\]])\s*(?:\\setminus|\\backslash|-)\s*\\\{(.+)\\\}")
_ABSOLUTE = re.compile(rf"\|\s*([A-Za-z])\s*\|\s*({_SIGN})\s*(\d+(?:\.\d+)?|\\frac\{{\d+\}}\{{\d+\}})\s*")
_EXCLUDED = re.compile(rf"({_UNKNOWN.pattern})\s*\\ne(?![A-Za-z])\s*(.+)")


def without_variable(text: str) -> str:
    r"""`[0, 1)` for `x \in [0, 1)`, and `x > 3` for `\{x \mid x > 3\}`."""
    if match := _ALL_EXCEPT.fullmatch(text):
        return _around(match.group(1) or match.group(2)) or text
    if match := _EXCEPT.fullmatch(text):
        return _around(match.group(3), match.group(1), match.group(2)) or text
    if match := _ALL_OUTSIDE.fullmatch(text):
        opening, start, end, closing = match.groups()
        return f"(-\\infty,{start}{']' if opening == '(' else ')'}\\cup {'[' if closing == ')' else '('}{end},\\infty)"
    for pattern in (_BUILDER, _MEMBER):
        match = pattern.fullmatch(text)
        if match is not None:
            return match.group(2).strip()
    return text


def as_intervals(expected: str, answer: str) -> tuple[str, str]:
    """Both texts, with inequalities as intervals if one is an interval or both have the same variable."""
    read = as_interval(expected), as_interval(answer)
    if read[0] is not None and read[1] is not None:
        return (read[0][1], read[1][1]) if read[0][0] == read[1][0] else (expected, answer)
    if ORDER.search(expected) and ORDER.search(answer):
        return expected, answer
    return (expected if read[0] is None else read[0][1]), (answer if read[1] is None else read[1][1])


def as_interval(text: str) -> tuple[str, str] | None:
    r"""The variable and the interval, or union of intervals, of an inequality or of alternatives; None for anything else."""
    sides = split_top(text, rf"{_BOTH}|,")
    for side, bound in (sides, sides[::-1]) if len(sides) == 2 else ():
        limits, excluded = _one_interval(bound), _EXCLUDED.fullmatch(side)
        if limits is not None and excluded is not None and compact(excluded.group(1)).casefold() == limits[0]:
            start, _, end = limits[1].partition(",")
            union = _around(excluded.group(2), start, end)
            return None if union is None else (limits[0], union)
    if match := _EXCLUDED.fullmatch(text):
        variable = compact(match.group(1)).casefold()
        values = re.sub(rf"(?:,|{_BOTH})\s*{re.escape(match.group(1))}\s*\\ne(?![A-Za-z])", ",", match.group(2))
        union = _around(values)
        return None if union is None else (variable, union)
    if match := _ABSOLUTE.fullmatch(text):
        variable, sign, number = match.groups()
        end, closed = number.strip(), sign in _CLOSED
        if sign in _RISING:
            return compact(variable).casefold(), f"{'[' if closed else '('}-{end},{end}{']' if closed else ')'}"
        return compact(
            variable
        ).casefold(), f"(-\\infty,-{end}{']' if closed else ')'}\\cup {'[' if closed else '('}{end},\\infty)"
    both = [_one_interval(part) for part in split_top(text, _BOTH)]
    if len(both) == 2:
        return _intersection(both[0], both[1])
    parts = [_one_interval(part) for part in split_top(text, _ALTERNATIVES)]
    intervals = [part for part in parts if part is not None]
    if len(intervals) < len(parts) or len({variable for variable, _ in intervals}) != 1:
        return None
    return intervals[0][0], "\\cup ".join(interval for _, interval in intervals)


def _around(values: str, start: str = "(-\\infty", end: str = "\\infty)") -> str | None:
    r"""The interval without listed values, `(-\infty,2)\cup (2,\infty)` for 2; None unless they are numbers in it."""
    numbers = {}
    for part in split_top(values, ","):
        for value in (part.replace("\\pm", sign).strip() for sign in ("", "-")):
            number = read_number(value)
            if number is None:
                return None
            numbers[number.value] = value
            if "\\pm" not in part:
                break
    order, low, high = sorted(numbers), read_number(start[1:]), read_number(end[:-1])
    if (low is not None and low.value >= order[0]) or (high is not None and high.value <= order[-1]):
        return None
    values_in_order = [numbers[value] for value in order]
    starts, ends = [start, *(f"({value}" for value in values_in_order)], [*(f"{value})" for value in values_in_order), end]
    return "\\cup ".join(map(",".join, zip(starts, ends, strict=True)))


def _intersection(one: tuple[str, str] | None, other: tuple[str, str] | None) -> tuple[str, str] | None:
    r"""`(2,5)` for `x > 2` and `x < 5`; None unless each bounds the same variable on another side."""
    if one is None or other is None or one[0] != other[0]:
        return None
    above, below = (one[1], other[1]) if one[1].endswith(_NO_END) else (other[1], one[1])
    if not (above.endswith(_NO_END) and below.startswith(_NO_START)):
        return None
    return one[0], f"{above.removesuffix(_NO_END)},{below.removeprefix(_NO_START)}"


def _one_interval(text: str) -> tuple[str, str] | None:
    sides, signs = split_top(text, _SIGN), _HAS_SIGN.findall(text)
    if len(signs) not in (1, 2) or len(sides) != len(signs) + 1 or not all(sides):
        return None
    is_rising = [sign in _RISING for sign in signs]
    if len(set(is_rising)) != 1:
        return None
    if not is_rising[0]:
        sides, signs = sides[::-1], signs[::-1]
    if len(signs) == 1:
        if _UNKNOWN.fullmatch(sides[0]):
            return compact(sides[0]).casefold(), f"(-\\infty,{sides[1]}{_end(signs[0], '])')}"
        sides, signs = [*sides, "\\infty"], [*signs, "<"]
    if not _UNKNOWN.fullmatch(sides[1]):
        return None
    return compact(sides[1]).casefold(), f"{_end(signs[0], '[(')}{sides[0]},{sides[2]}{_end(signs[1], '])')}"


def _end(sign: str, brackets: str) -> str:
    return brackets[0] if sign in _CLOSED else brackets[1]
