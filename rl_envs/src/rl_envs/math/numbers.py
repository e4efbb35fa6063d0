r"""Reads numbers and quantities as they are written, exactly.

Numbers: `1,234`, `0.50`, `-\frac{3}{4}`, `1\frac12`, `2.5 \times 10^{8}`, `2516_7`. Quantities: `10\text{ cm}`, `\$5`,
`90^\circ`, `3 apples`. Units come from a list, so that words which change a number (`5 dozen`, `5 times two`, `3 fourths`)
never count as one.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]+)"
_WITHOUT_SPACES = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
"""In `1 108/117`, the space separates a whole number from a fraction, not thousands."""
_INTEGER = re.compile(rf"([+-]?)\s*({_DIGITS})")
_DECIMAL = re.compile(rf"([+-]?)\s*((?:{_DIGITS})?\.[0-9]+|{_DIGITS}\.?)")
_FRACTION = re.compile(
    rf"([+-]?)\s*(?:\\frac\s*\{{\s*([+-]?)\s*({_DIGITS})\s*\}}\s*\{{\s*([+-]?)\s*({_DIGITS})\s*\}}"
    rf"|({_WITHOUT_SPACES})\s*/\s*({_WITHOUT_SPACES}))"
)
_MIXED = re.compile(
    rf"([+-]?)\s*({_DIGITS})(?:\s*\\frac\s*\{{\s*({_DIGITS})\s*\}}\s*\{{\s*({_DIGITS})\s*\}}"
    rf"|\s+({_WITHOUT_SPACES})\s*/\s*({_WITHOUT_SPACES}))"
)
_SCIENTIFIC = re.compile(
    rf"([+-]?\s*(?:{_DIGITS})?(?:\.[0-9]+)?)\s*(?:(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{{?\s*([+-]?[0-9]+)\s*\}}?|[eE]([+-]?[0-9]+))"
)
_REPEATING = re.compile(rf"([+-]?)\s*({_DIGITS})?\.([0-9]*)\\overline\s*\{{\s*([0-9]+)\s*\}}")
_CONTINUED = re.compile(r"([+-]?\s*[0-9]*\.[0-9]*?)(?:([0-9])\2{2,}|([0-9]{2,6}?)\3+)(?:\.\.\.|\\(?:[lc]?dots)(?![A-Za-z]))")
"""A decimal that continues: `0.8333...`. One digit is repeated at least three times, more digits at least twice."""
_BASED = re.compile(
    r"(?:\\text\{\s*)?\(?([0-9A-F][0-9A-Za-z ]*?)\)?\}?\s*"
    r"(?:_\s*\{?\s*\(?(?:\\text\{\s*)?(?:base\s*\}?\s*)?|(?:\\text\{)?\s*\(?(?:in )?base\s*\}?\s*)([0-9]+|[a-z]+)[)\s}]*"
)
_CLOCK = re.compile(
    r"([0-9]{1,2})(?::([0-5][0-9]))?(?::([0-5][0-9]))?\s*(?:\\text\{\s*)?(?:([ap])\.?\s?m\.?)?\s*\}?", re.IGNORECASE
)
_BASE_NAMES = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_TIMES = re.compile(r"\\cdot(?![A-Za-z])|\\times(?![A-Za-z])|\*")
_POWER = re.compile(r"\(?([0-9]{1,9})\)?(?:\^\{([0-9]{1,4})\})?")
_LONGEST_POWER = 20
_PARENTHESES = re.compile(r"^\(\s*([^()]*?)\s*\)$")
_MOST_DIGITS = 1000
REDUCTION = "reduction"
"""The kind of unevaluated arithmetic in a fraction such as `2/4`."""
_ROUNDED_DIGITS = 6
"""A decimal with fewer significant digits is not accepted as a rounded fraction or root."""


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number as it is written."""

    value: Fraction
    places: int | None = None
    """Number of decimal places; None if it is not a decimal."""
    undone: frozenset[str] = frozenset()
    """Unevaluated arithmetic, see `rl_envs.math.formulas`: a division for `10/2`, a reduction for `2/4`."""


def read_number(text: str) -> Number | None:
    """The number that the whole text consists of, in parentheses or not; None for anything else."""
    text = _PARENTHESES.sub(r"\1", text.strip())
    if len(text) > _MOST_DIGITS:
        return None
    for read in (_integer, _decimal, _fraction, _mixed, _scientific, _repeating):
        number = read(text)
        if number is not None:
            return number
    return None


def read_numeral(text: str) -> tuple[str, int] | None:
    """Digits and base of a numeral such as `2516_7` or `1A_{16}`; None if it is not one."""
    match = _BASED.fullmatch(text)
    if match is None:
        return None
    digits, named = match.group(1).replace(" ", "").upper(), match.group(2)
    if named.isdigit():
        base = int(named)
    elif named in _BASE_NAMES:
        base = 2 + _BASE_NAMES.index(named)
    else:
        return None
    return digits.lstrip("0") or "0", base


def prime_powers(text: str) -> Counter[int] | None:
    r"""The exponent of each prime in `2^{3} \cdot 3^{2}`; None for anything that is not a product of primes."""
    factors = [_POWER.fullmatch(part.strip()) for part in _TIMES.split(text)]
    powers: Counter[int] = Counter()
    for factor in factors:
        if factor is None or len(factor.group()) > _LONGEST_POWER:
            return None
        powers[int(factor.group(1))] += int(factor.group(2) or 1)
    is_product = len(factors) > 1 or max(powers.values()) > 1
    return powers if is_product and all(map(_is_prime, powers)) else None


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


@dataclass(frozen=True, kw_only=True)
class Clock:
    """A time of day, or a duration in hours and minutes: `2:30`, `3 pm`."""

    hour: int
    minute: int
    second: int
    half: str | None = None
    """`a` for am, `p` for pm; None without either."""

    def is_same_time(self, other: Clock) -> bool:
        """Whether both are the same time. Either may omit am or pm, or use 24 hours."""
        if None in (self.half, other.half) and replace(self, half=None) == replace(other, half=None):
            return True
        return self._on_24_hours() == other._on_24_hours()

    def _on_24_hours(self) -> Clock:
        hour = self.hour if self.half is None else self.hour % 12 + 12 * (self.half == "p")
        return replace(self, hour=hour, half=None)


def read_clock(text: str) -> Clock | None:
    """The time that the whole text consists of, with minutes or am or pm; None for anything else."""
    match = _CLOCK.fullmatch(text)
    if match is None:
        return None
    hour, minute, second, half = match.groups()
    if (half or minute) is None or (half is not None and not 1 <= int(hour) <= 12):
        return None
    return Clock(hour=int(hour), minute=int(minute or 0), second=int(second or 0), half=half and half.lower())


def is_rounded(value: Fraction, decimal: Number) -> bool:
    """Whether the decimal, of six significant digits or more, is the value rounded or cut off at its last digit."""
    if decimal.places is None or len(str(abs(int(decimal.value * 10**decimal.places)))) < _ROUNDED_DIGITS:
        return False
    unit = Fraction(1, 10**decimal.places)
    distance = abs(value - decimal.value)
    is_cut = abs(decimal.value) <= abs(value) and distance < unit
    return 2 * distance <= unit or is_cut


def is_rounding_of(value: Fraction, rounded: Number) -> bool:
    """Whether a number is the value, rounded to the number's decimal places."""
    is_decimal = rounded.places is not None or rounded.value.denominator == 1
    return is_decimal and 2 * abs(value - rounded.value) <= Fraction(1, 10 ** (rounded.places or 0))


def _integer(text: str) -> Number | None:
    match = _INTEGER.fullmatch(text)
    return None if match is None else Number(value=_signed(match.group(1), _whole(match.group(2))))


def _decimal(text: str) -> Number | None:
    match = _DECIMAL.fullmatch(text)
    if match is None:
        return None
    digits = match.group(2).replace(",", "").replace(" ", "").removesuffix(".")
    return Number(value=_signed(match.group(1), Fraction(digits)), places=len(digits.partition(".")[2]))


def _fraction(text: str) -> Number | None:
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    sign, above_sign, above, below_sign, below, plain_above, plain_below = match.groups()
    numerator, denominator = _whole(above or plain_above), _whole(below or plain_below)
    if denominator == 0:
        return None
    is_negative = [sign, above_sign, below_sign].count("-") % 2 == 1
    return Number(
        value=_signed("-" if is_negative else "", Fraction(numerator, denominator)), undone=reducible(numerator, denominator)
    )


def _mixed(text: str) -> Number | None:
    match = _MIXED.fullmatch(text)
    if match is None:
        return None
    sign, whole, above, below, plain_above, plain_below = match.groups()
    numerator, denominator = _whole(above or plain_above), _whole(below or plain_below)
    if denominator == 0:
        return None
    undone = reducible(numerator, denominator) | (frozenset({"sum"}) if numerator >= denominator else frozenset())
    return Number(value=_signed(sign, _whole(whole) + Fraction(numerator, denominator)), undone=undone)


def _scientific(text: str) -> Number | None:
    match = _SCIENTIFIC.fullmatch(text)
    if match is None or not any(character.isdigit() for character in match.group(1)):
        return None
    mantissa = Fraction(match.group(1).replace(" ", "").replace(",", ""))
    written = match.group(2) or match.group(3)
    if len(written) > 4 or not 1 <= abs(mantissa) < 10:
        return None
    exponent = int(written)
    # `3 \times 10^4` may be the question itself; 8.64 \times 10^4 and 6 \times 10^{23} are how such numbers are written.
    largest = 4 if mantissa.denominator == 1 else 3
    undone = frozenset({"power of ten"}) if match.group(2) and -4 < exponent <= largest else frozenset()
    return Number(value=mantissa * Fraction(10) ** exponent, undone=undone)


def _repeating(text: str) -> Number | None:
    text = _CONTINUED.sub(lambda digits: rf"{digits.group(1)}\overline{{{digits.group(2) or digits.group(3)}}}", text)
    match = _REPEATING.fullmatch(text.replace(" ", ""))
    if match is None:
        return None
    sign, whole, first, period = match.groups()
    start = Fraction(f"{_whole(whole or '0')}.{first}0")
    return Number(value=_signed(sign, start + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(first))))


def _whole(digits: str) -> int:
    return int(digits.replace(",", "").replace(" ", ""))


def _signed(sign: str, value: Fraction | int) -> Fraction:
    return Fraction(-value if sign == "-" else value)


def reducible(numerator: int, denominator: int) -> frozenset[str]:
    """How a fraction can be simplified: by division if it is a whole number, by reduction if it is not in lowest terms."""
    if numerator % denominator == 0:
        return frozenset({"division"})
    return frozenset() if math.gcd(numerator, denominator) == 1 else frozenset({REDUCTION})


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
_UNIT_POWER = re.compile(r"\^?\{?(-?\d+)")
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
    text = _UNIT_POWER.sub(r"^\1", unit.replace("}", "")).lower().replace("\\cdot", " ")
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
