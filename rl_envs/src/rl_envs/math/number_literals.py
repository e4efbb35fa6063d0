r"""Reads numbers as they are written, exactly: `1,234`, `0.50`, `-\frac{3}{4}`, `1\frac12`, `2.5 \times 10^{8}`, `2516_7`."""

from __future__ import annotations

import math
import re
from collections import Counter
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
    """Unevaluated arithmetic, see `rl_envs.math.unevaluated`: a division for `10/2`, a reduction for `2/4`."""


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
