r"""Reads inequalities of one variable as intervals: `2 \le x < 5` is `[2,5)`."""

from __future__ import annotations

import re

from rl_envs.math.notation import compact, split_top
from rl_envs.math.number_literals import read_number

_SIGN = r"<|>|\\(?:le|ge|lt|gt)(?![A-Za-z])"
ORDER = re.compile(r"[<>]|\\(?:le|ge|lt|gt|ne)(?![A-Za-z])")
_HAS_SIGN = re.compile(_SIGN)
_CLOSED = ("\\le", "\\ge")
_RISING = ("<", "\\lt", "\\le")
_ALTERNATIVES = r"[,;]|\\cup(?![A-Za-z])"
_BOTH = r"\\(?:land|wedge)(?![A-Za-z])"
_NO_START, _NO_END = "(-\\infty,", ",\\infty)"
_VARIABLE = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?|\\(?!infty)[a-z]+")
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
_EXCLUDED = re.compile(rf"({_VARIABLE.pattern})\s*\\ne(?![A-Za-z])\s*(.+)")


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
        if _VARIABLE.fullmatch(sides[0]):
            return compact(sides[0]).casefold(), f"(-\\infty,{sides[1]}{_end(signs[0], '])')}"
        sides, signs = [*sides, "\\infty"], [*signs, "<"]
    if not _VARIABLE.fullmatch(sides[1]):
        return None
    return compact(sides[1]).casefold(), f"{_end(signs[0], '[(')}{sides[0]},{sides[2]}{_end(signs[1], '])')}"


def _end(sign: str, brackets: str) -> str:
    return brackets[0] if sign in _CLOSED else brackets[1]
