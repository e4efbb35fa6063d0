r"""Separates a number from its unit: `10\text{ cm}`, `\$5`, `90^\circ`, `3 apples`.

Units come from a list, so that words which change a number (`5 dozen`, `5 times two`, `3 fourths`) never count as one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

_MEASURES = {
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre",
    "inch": "in", "ft": "foot feet", "yd": "yard", "mi": "mile", "mg": "milligram", "g": "gram gm", "kg": "kilogram",
    "lb": "pound", "oz": "ounce", "ton": "tonne", "ml": "milliliter millilitre", "l": "liter litre", "gal": "gallon",
    "quart": "qt", "pint": "", "cup": "", "s": "sec second", "min": "minute", "h": "hr hour", "day": "", "week": "wk",
    "month": "", "year": "yr", "decade": "", "century": "", "dollar": "usd buck us\\$ us$", "cent": "", "penny": "",
    "euro": "eur", "sterling": "gbp", "degree": "deg", "radian": "rad", "celsius": "", "fahrenheit": "", "kelvin": "",
    "mph": "", "kmh": "kph", "acre": "", "hectare": "", "am": "a.m", "pm": "p.m", "unit": "", "newton": "n", "joule": "j",
    "watt": "w", "kilowatt": "kw", "volt": "v", "hertz": "hz", "pascal": "pa", "mole": "mol", "ampere": "amp", "ohm": "",
    "bit": "", "byte": "",
}  # fmt: skip
_COUNTED = """
animal apple arrangement bag ball balloon banana bead bean bird block boat book bottle bowl box boy brownie bug bus cake
candle candy car card cat chair chicken child children chocolate choice class club coin color combination cookie cow crayon
cube cupcake customer dish dog donut duck edge egg element employee face fish flower fork friend game girl glass guest
horse item jar kid leg lemon letter man marble match meal member men message muffin nut orange outcome page painting
paper pear pen pencil people permutation person photo piece pizza plant plate player point potato present prize question
rabbit rock room rose row sandwich seat shape sheep shell shirt shoe side slice solution song spoon square stamp star stick
sticker stone story student sweet teacher team term ticket tile toy tree triangle trip truck vertex vertices vote way win
woman women word worker
"""
_NAMES = {alias: name for name, aliases in _MEASURES.items() for alias in (name, *aliases.split())} | {
    noun: noun for noun in _COUNTED.split()
}
RATES = {"mi/h": "mph", "km/h": "kmh"}
"""Rates with their names."""
PERCENT = "percent"
_TEMPERATURES = ("celsius", "fahrenheit")
_SUBUNITS = {
    "week": ("day", 7), "day": ("h", 24), "h": ("min", 60), "min": ("s", 60), "year": ("month", 12), "ft": ("inch", 12),
    "lb": ("oz", 16), "dollar": ("cent", 100), "km": ("m", 1000), "m": ("cm", 100), "kg": ("g", 1000),
}  # fmt: skip
"""The unit that may follow a unit, and how many of it are one: `2 h 30 min`."""
_TWO_UNITS = re.compile(r"(\d{1,12}) ?([a-z.]+),?(?: and)? ?(\d{1,12}(?:\.\d{1,12})?) ?([a-z.]+)")
_WHOLE_OR_DECIMAL = re.compile(r"\d{1,12}(?:\.\d{1,12})?")
_LETTERS_OF_UNITS = frozenset("mglsh")
"""Single letters that are a unit also outside `\\text`, as in `5 m`; other letters are variables."""
_ATTACHED = "mm|cm|km|kg|mg|ml|lb|lbs|oz|ft|mph|pm|am"
CURRENCIES = {"\\$": "dollar", "$": "dollar", "€": "euro", "£": "sterling"}
_CODE = re.compile(r"(?:\\text\{\s*)?(USD|EUR|GBP|US\\?\$(?=\s*\}))\s*\}?\s*|(?:\\text\{\s*)?US\s*\}?\s*(?=\\?\$)")
_DEGREES = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?\s*(?:\\text\{\s*)?([CF])?\s*\}?$")
_TEXT = r"\\text\{((?:[^{}]|\{-?\d+\})*)\}"
_RATE = re.compile(rf"\\frac\{{{_TEXT}\}}\{{{_TEXT}\}}")
_MACROS = re.compile(rf"(?:(?:{_RATE.pattern}|{_TEXT})(?:\^\{{?-?\d+\}}?|/|\\cdot|[ .])*)+$")
_POWER = re.compile(r"\^?\{?(-?\d+)")
_WORDS = re.compile(r"(?:(?<=[\d}%)])|(?<=\\pi))\s+([A-Za-z][A-Za-z .]*(?:\^\{?\d\}?)?(?:\s*/\s*[A-Za-z]+(?:\^\{?-?\d\}?)?)?)$")
_LETTERS = re.compile(rf"(?<=\d)({_ATTACHED})$")
_TERM = r"[a-z]+(?:\^(?:2|3|-1|-2))?"
_UNIT = re.compile(rf"({_TERM})(?:[ /]({_TERM}))?(?:[ /]({_TERM}))?")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*(?:\\?%|per ?cent)\s*\}|(?<=[\d}])\s*per ?cent)$")


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """An answer without its unit."""

    value: str
    unit: str | None = None
    """As returned by `canonical`; None without a unit."""
    is_percent: bool = False
    parts: tuple[str, int] | None = None
    """For two units, the smaller one and how many of it are `unit`."""


def quantity(text: str, *, read_letters: bool = False, expected: Quantity | None = None, asked: Sequence[str] = ()) -> Quantity:
    r"""A normalized answer as value and unit.

    Args:
        text: an answer normalized by `rl_envs.math.notation.normalize`.
        read_letters: Whether `5 m` is five meters; otherwise `m` is a variable.
        expected: the expected answer, if `text` is the model's. It may have any unit (`14 \text{ zebras}`), the model's answer
            only this, a listed one or one of `asked`.
        asked: the units that the question asks for.
    """
    if (amount := _amount(text) or _sum_of_units(text)) is not None:
        return amount
    if percent := _PERCENT.search(text):
        return Quantity(value=text[: percent.start()].strip(), is_percent=True)
    if degrees := _DEGREES.search(text):
        unit = {"C": "celsius", "F": "fahrenheit", None: "degree"}[degrees.group(1)]
        return Quantity(value=text[: degrees.start()].strip(), unit=unit)
    for pattern in (_MACROS, _LETTERS, _WORDS):
        match = pattern.search(text)
        if match is None or not text[: match.start()].strip():
            continue
        unit, in_text = canonical(match.group()), "\\text" in match.group()
        written = match.group().strip()
        if expected is not None and expected.unit in _TEMPERATURES and unit == expected.unit[0]:
            return Quantity(value=text[: match.start()].strip(), unit=expected.unit)
        if len(written) == 1 and not (read_letters and written in _LETTERS_OF_UNITS):
            continue
        if is_listed(unit) or unit in asked or (in_text if expected is None else unit == expected.unit):
            return Quantity(value=text[: match.start()].strip(), unit=unit)
    return Quantity(value=text)


def _amount(text: str) -> Quantity | None:
    """An amount of money with the sign or code of its currency; None for anything else."""
    if code := _CODE.match(text):
        text = text[code.end() :]
        if code.group(1):
            return Quantity(value=text, unit=_name(code.group(1).lower()))
    for symbol, unit in CURRENCIES.items():
        if text.removeprefix("-").startswith(symbol) or text.endswith(symbol):
            return Quantity(value=text.replace(symbol, "", 1).replace("- ", "-").strip(), unit=unit)
    return None


def _sum_of_units(text: str) -> Quantity | None:
    r"""`\frac{5}{2}` hours for `2 h 30 min`; None for anything else."""
    words = " ".join(re.sub(_TEXT, r" \1 ", text).lower().replace(" ,", ",").split())
    match = _TWO_UNITS.fullmatch(words)
    if match is None:
        return None
    whole, unit, part, smaller = match.groups()
    unit, smaller = _name(unit), _name(smaller)
    smaller = "min" if (unit, smaller) == ("h", "m") else smaller
    expected, number = _SUBUNITS.get(unit, ("", 0))
    if smaller != expected or Fraction(part) >= number:
        return None
    value = Fraction(whole) + Fraction(part) / number
    return Quantity(value=str(value), unit=unit, parts=(smaller, number))


def in_larger_unit(answer: Quantity, expected: Quantity) -> Quantity:
    r"""`\frac{3}{2}` hours for 90 minutes, if hours and minutes are expected; any other answer unchanged."""
    if expected.parts is None or answer.unit != expected.parts[0] or not _WHOLE_OR_DECIMAL.fullmatch(answer.value):
        return answer
    return Quantity(value=str(Fraction(answer.value) / expected.parts[1]), unit=expected.unit)


def canonical(unit: str) -> str:
    r"""The canonical spelling of a unit: `cm^2` for `square centimeters` and `\text{ cm}^2`."""
    unit = re.sub(_TEXT, r"\1", _RATE.sub(r"\1/\2", unit))
    text = _POWER.sub(r"^\1", unit.replace("}", "")).lower().replace("\\cdot", " ")
    text = re.sub(r"\b(?:square|sq\.?)\s+([a-z]+)", r"\1^2", text)
    text = re.sub(r"\b(?:cubic|cu\.?)\s+([a-z]+)", r"\1^3", text)
    text = re.sub(r"\s*(?:\bper\b|/)\s*", "/", text.strip(" ."))
    text = re.sub(r"degrees? (celsius|fahrenheit|c$|f$)", r"\1", text)
    text = re.sub(r"(?<=[a-z]) (?:old|tall|long|wide|high|deep|of [a-z]+)$", "", text)
    text = " ".join(re.sub(r"[a-z][a-z.]*", lambda word: _name(word.group()), text).split())
    text = re.sub(r" ([a-z]+)\^-(\d)", r"/\1^\2", text).removesuffix("^1")
    return RATES.get(text, text)


def is_listed(unit: str) -> bool:
    """Whether a canonical unit consists of known units."""
    match = _UNIT.fullmatch(unit)
    return match is not None and all(term.partition("^")[0] in _NAMES for term in match.groups() if term is not None)


def is_among(unit: str, units: Sequence[str]) -> bool:
    """Whether a canonical unit, or each of its terms, is among the given ones: `km/h` if km and h are."""
    rate = next((rate for rate, same in RATES.items() if same == unit), unit)
    return unit in units or rate in units or all(term in units for term in re.split("[ /]", rate))


def are_different(expected: str | None, answer: str | None) -> bool:
    """Whether two canonical units disagree. One may be left out, or be the general `unit`, if the other one is listed."""
    if expected == answer or (expected in _TEMPERATURES and answer == "degree"):
        return False
    if expected and answer and expected.partition("^")[1:] != answer.partition("^")[1:]:
        return True
    if "unit" in (_base(expected), _base(answer)) or None in (expected, answer):
        return expected is not None and not is_listed(expected)
    return True


def _base(unit: str | None) -> str:
    return (unit or "").partition("^")[0]


def _name(word: str) -> str:
    word = word.rstrip(".")
    singular = (re.sub(ending, with_, word) for ending, with_ in (("s$", ""), ("es$", ""), ("ies$", "y")))
    for form in (word, *(each for each in singular if len(each) > 1)):
        if form in _NAMES:
            return _NAMES[form]
    return word
