r"""Separates a number from its unit: `10\text{ cm}`, `\$5`, `90^\circ`, `3 apples`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ALIASES = {
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre",
    "inch": "in inches", "ft": "foot feet", "yd": "yard", "mi": "mile", "mg": "milligram", "g": "gram gm", "kg": "kilogram",
    "lb": "pound", "oz": "ounce", "ml": "milliliter millilitre", "l": "liter litre", "gal": "gallon", "s": "sec second",
    "min": "minute", "h": "hr hour", "day": "", "week": "", "month": "", "year": "yr", "dollar": "usd buck", "cent": "",
    "euro": "", "degree": "deg", "radian": "rad", "mph": "", "kmh": "", "acre": "", "am": "a.m", "pm": "p.m", "unit": "",
    "celsius": "", "fahrenheit": "",
}  # fmt: skip
_NAMES = {alias: name for name, aliases in _ALIASES.items() for alias in (name, *aliases.split())}
_ATTACHED = "mm|cm|km|kg|mg|ml|lb|lbs|oz|ft|mph|pm|am"
_CURRENCIES = {"\\$": "dollar", "$": "dollar", "€": "euro", "£": "pound sterling"}
_DEGREES = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?\s*(?:\\text\{\s*)?([CF])?\s*\}?$")
_MACROS = re.compile(r"(?:\\frac\{\\text\{[^{}]*\}\}\{\\text\{[^{}]*\}\}|\\text\{[^{}]*\}|\^\{?-?\d+\}?|/|\\cdot|[ .])+$")
_POWER = re.compile(r"\^\{?(-?\d+)\}?")
_WORDS = re.compile(r"(?<=[\d}%)])\s+([A-Za-z][A-Za-z .]*(?:\^\{?\d\}?)?(?:\s*/\s*[A-Za-z]+)?)$")
_LETTERS = re.compile(rf"(?<=\d)({_ATTACHED})$")
_QUALIFIED = re.compile(
    r"\b(?:or|and|not|but|is|are|isn|aren|no|maybe|perhaps|possibly|probably|either|wrong|incorrect|than|to|more|less|fewer)\b"
    r"|,|(?<![\^{A-Za-z\d-])\d",
    re.IGNORECASE,
)
r"""What makes a text after a number another answer, and not its unit: in `12 \text{ maybe 13}` and `12 \text{ is wrong}`."""
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*(?:\\?%|percent)\s*\}|(?<=[\d}])\s*percent)$")


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """An answer without its unit."""

    value: str
    unit: str | None = None
    """As returned by `canonical`; None without a unit."""
    is_percent: bool = False


def quantity(text: str, *, read_letters: bool) -> Quantity:
    """A normalized answer as value and unit.

    Args:
        text: an answer normalized by `rl_envs.math.notation.normalize`.
        read_letters: Whether `5 m` is five meters; otherwise `m` is a variable.
    """
    for symbol, unit in _CURRENCIES.items():
        if text.startswith(symbol):
            return Quantity(value=text[len(symbol) :].strip(), unit=unit)
        if text.startswith("-" + symbol):
            return Quantity(value="-" + text[len(symbol) + 1 :].strip(), unit=unit)
    if percent := _PERCENT.search(text):
        return Quantity(value=text[: percent.start()].strip(), is_percent=True)
    if degrees := _DEGREES.search(text):
        unit = {"C": "celsius", "F": "fahrenheit", None: "degree"}[degrees.group(1)]
        return Quantity(value=text[: degrees.start()].strip(), unit=unit)
    for pattern in (_MACROS, _LETTERS, _WORDS):
        match = pattern.search(text)
        if match is not None and _is_unit(text[: match.start()], match.group(), read_letters=read_letters):
            return Quantity(value=text[: match.start()].strip(), unit=canonical(match.group()))
    return Quantity(value=text)


def canonical(unit: str) -> str:
    r"""The canonical spelling of a unit: `cm^2` for `square centimeters` and `\text{ cm}^2`."""
    unit = re.sub(r"\\frac\{(\\text\{[^{}]*\})\}\{(\\text\{[^{}]*\})\}", r"\1/\2", unit)
    text = _POWER.sub(r"^\1", re.sub(r"\\text\{([^{}]*)\}", r"\1", unit)).lower().replace("\\cdot", " ")
    text = re.sub(r"\b(?:square|sq\.?)\s+([a-z]+)", r"\1^2", text)
    text = re.sub(r"\bcubic\s+([a-z]+)", r"\1^3", text)
    text = re.sub(r"\s*(?:\bper\b|/)\s*", "/", text.strip(" ."))
    return re.sub(r"[a-z][a-z.]*", lambda word: _name(word.group()), text)


def are_different(one: str | None, other: str | None) -> bool:
    """Whether both are known units of measurement and differ; `3 apples` and `3 pieces` are not different."""
    if one is None or other is None or one == other:
        return False
    return all(set(re.findall(r"[a-z]+", unit)) <= set(_ALIASES) and unit != "unit" for unit in (one, other))


def _name(word: str) -> str:
    for form in (word, word.removesuffix("."), word.rstrip(".").removesuffix("s")):
        if form in _NAMES:
            return _NAMES[form]
    return word


def _is_unit(value: str, unit: str, *, read_letters: bool) -> bool:
    letters = re.findall(r"[A-Za-z]+", re.sub(r"\\(?:text|cdot|frac)", "", unit))
    if not value.strip() or not letters or _QUALIFIED.search(unit):
        return False
    return "\\text" in unit or read_letters or all(len(word) > 1 for word in letters)
