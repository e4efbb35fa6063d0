"""Which units an answer may have although the expected one has none, read from the question."""

from __future__ import annotations

import re

from rl_envs.math.units import CURRENCIES, PERCENT, RATES, canonical, is_listed

_LENGTHS = frozenset({"unit", "mm", "cm", "m", "km", "inch", "ft", "yd", "mi"})
_TIMES = frozenset({"s", "min", "h", "day", "week", "month", "year", "decade", "century"})
_MONEY = frozenset({"dollar", "cent", "penny", "euro", "sterling"})
_MASSES = frozenset({"mg", "g", "kg", "lb", "oz", "ton"})
_AREAS = frozenset({f"{unit}^2" for unit in _LENGTHS} | {"acre", "hectare"})
_VOLUMES = frozenset({f"{unit}^3" for unit in _LENGTHS} | {"ml", "l", "gal", "quart", "pint", "cup"})
_POWERS = ("", "^2", "^3", "^-1", "^-2")
_WHAT_IS = r"\b(?:what(?:'s| is| are| was)|find|compute|calculate|determine)\s+(?:the |its |their |his |her )?(?:\w+ ){0,2}?"
_WITHIN = r"(?:[^.?!]|\.(?=\d))"
"""A character of a sentence."""
_QUANTITIES = [
    (re.compile(pattern), units)
    for pattern, units in (
        (rf"{_WHAT_IS}area\b", _AREAS),
        (rf"{_WHAT_IS}volume\b", _VOLUMES),
        (rf"{_WHAT_IS}(?:perimeter|circumference|distance|height|width|radius|diameter|side)\b", _LENGTHS),
        (rf"{_WHAT_IS}length\b|\bhow long\b", _LENGTHS | _TIMES),
        (r"\bhow (?:far|tall|high|deep|wide)\b", _LENGTHS),
        (r"\bhow old\b", _TIMES),
        (rf"\bhow heavy\b|\bhow much {_WITHIN}{{0,60}}?\bweigh", _MASSES),
        (rf"{_WHAT_IS}(?:degree|\$?\\?(?:sin|cos|tan|cot|sec|csc))\b", frozenset[str]()),
        (rf"{_WHAT_IS}(?:probability|chance|likelihood|ratio|fraction)\b|\b(?:what|which) fraction\b", frozenset[str]()),
        (rf"{_WHAT_IS}(?:cost|price|profit|wage|salary)\b", _MONEY),
        (rf"\b(?:how much(?! time)|what) {_WITHIN}{{0,80}}?\b(?:money|costs?|pay|paid|spend|spent|earn|earned|owe)\b", _MONEY),
    )
]
"""What questions ask for, with its units. Other questions leave the unit open."""
_VERBS = "remain|remains|remained|is|are|was|were|do|does|did|will|would|can|could|should|must|may|might|has|have|had"
_HOW_MANY = re.compile(
    rf"\bhow (?:many|much(?= percent))\s+(?!(?:{_VERBS})\b)([a-z%'/ -]+?)"
    rf"(?=\s(?:{_VERBS}|in|on|at|for|if|when|than|that|which|and how)\b|[^a-z%'/ -]|$)"
)
_IN_UNIT = re.compile(
    r"\bin (?:((?:square |cubic )?[a-z]+(?:(?: per |/)[a-z]+)?)(?=\s*(?:[.?!]|$|in \w+ (?:notation|form)))"
    r"|\$?(\\(?:text|mathrm)\{[^{}]*\}(?:\^\{?-?\d\}?)?)\$?(?=\s*(?:[.,?!]|$)))"
)
_MULTIPLES = re.compile(r"\b(?:dozens?|pairs?|hundreds?|thousands?|millions?|billions?|halves|quarters?)\b")
_BOX = re.compile(r"\bin (?:a|the) box\b")
_PART = re.compile(r"\\?%\$? of (?=\$?\d)")
"""15 \\% of 60 is not a percentage."""
_SHORT = re.compile(
    r"(?:\d\\?|[/{]|\bper)\s*(in(?! (?:an?|the|all|each|total|his|her|their|its|order|base)\b)|[a-z])(?![a-z'])"
)
"""Units that are also words or variables, behind a number: `5 in`, `5 m`, `m/s`."""
_ASKS_PERCENT = re.compile(r"(?<!\d)(?<!\d )(?:percent|\\?%)(?<!\d\\%)|\b(?:interest|tax) rate\b")
_PERCENT = re.compile(r"percent|%|probab|chance|likel|\brate\b")
_ANGLE = re.compile(
    r"angl|triang|gon\b|rotat|\bturn|\barc\b|sector|slope|circ|°|bearing|\blines?\b|lateral|parallelo|trapez|rhomb|temperature|theta"
)
_TIME_OF_DAY = re.compile(r"\bwhen\b|time|clock|\bnoon\b|midnight|\b[ap]\.?m\b|hour|\d:\d\d")


def units_of_answer(question: str) -> tuple[str, ...] | None:
    """The canonical units that an answer may have although the expected one has none; None without a question.

    They are, in this order, the units that are counted ("how many days"), those in which the answer is requested ("in meters"
    at the end of a sentence), those of the asked quantity that are in the question (currencies for a cost), or else all units
    in the question. The general `unit` is always among them.
    """
    text = _PART.sub("", _BOX.sub("", " ".join(question.lower().split())))
    if re.search("[a-z]", text) is None:
        return None
    named = {unit for phrase in _HOW_MANY.findall(text) for unit in _counted(phrase)}
    requested = [canonical((words or latex).replace("mathrm", "text")) for words, latex in _IN_UNIT.findall(text)]
    named = named or {*filter(is_listed, requested)}
    general = {"unit", "unit^2", "unit^3"}
    if not named:
        mentioned = _mentioned(text)
        quantities = [units for pattern, units in _QUANTITIES if pattern.search(text)]
        named = mentioned.intersection(frozenset().union(*quantities)) if quantities else mentioned
        general = general.intersection(*quantities) or general
        named |= {PERCENT} if _ASKS_PERCENT.search(text) else set()
    return tuple(sorted(general | named))


def _counted(phrase: str) -> set[str]:
    """The unit at the head of what is counted: miles in "miles of road"; all words if none is listed."""
    if "percent" in phrase or "%" in phrase:
        return {PERCENT}
    if _MULTIPLES.search(phrase):
        return set()
    for words in (part.split() for part in phrase.split(" of ")):
        for end in range(len(words), 0, -1):
            for start in range(end):
                unit = canonical(" ".join(words[start:end]))
                if is_listed(unit):
                    return {unit} if "/" in unit else {unit, unit.split()[-1]}
    phrase = phrase.partition(" of ")[0]
    return {canonical(phrase), *(canonical(word) for word in phrase.split() if len(word) > 3)}


def _mentioned(text: str) -> set[str]:
    """All units in the question in any power, percent, and times of day and angles if it is about these."""
    words = [word for word in re.findall("[a-z]{2,}", text) if word not in ("in", "am", "pm")] + _SHORT.findall(text)
    bases = {unit for unit in map(canonical, words) if is_listed(unit)}
    bases |= {unit for symbol, unit in CURRENCIES.items() if symbol in text}
    bases |= {term for rate, same in RATES.items() if same in bases for term in rate.split("/")}
    bases |= {"degree", "radian"} if _ANGLE.search(text) and not bases & {"degree", "radian"} else set()
    bases |= {"am", "pm"} if _TIME_OF_DAY.search(text) else set()
    return {base + power for base in bases for power in _POWERS} | ({PERCENT} if _PERCENT.search(text) else set())
