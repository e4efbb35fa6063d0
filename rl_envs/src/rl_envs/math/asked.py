"""Which form an answer must have, or may have, according to the question. Lightweight imports only.

A question may say what kind of value its answer is, which names, notation and base it has, and which units it may have although
the expected answer has none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rl_envs.math.notation import plain
from rl_envs.math.numbers import CURRENCIES, PERCENT, RATES, REDUCTION, canonical, is_listed, read_numeral, reducible

_COUNT = r"(?:two|three|four|five|six|\d+)"
_IN_ORDER = re.compile(
    rf"\bnext {_COUNT}\b|\bfirst {_COUNT} (?:terms|numbers|members)\b|\bin (?:\w+ )?order\b|\bfrom (?:the )?(?:smallest|least"
    r"|lowest|largest|greatest|highest)\b|\bsort(?:ed)?\b|\barrange\b|\brespectively\b",
    re.IGNORECASE,
)
_INTERVAL = re.compile(
    r"\binterval|\bdomain\b|\brange of\b|\bsolution set\b|\binequalit|[<>\u2264\u2265]|\\(?:le|ge|lt|gt)q?(?![a-z])",
    re.IGNORECASE,
)
_PAIR = re.compile(r"\bpairs?\b|\bpoints?\b|\bcoordinates?\b|\btuples?\b|\([A-Za-z], ?[A-Za-z]", re.IGNORECASE)
_PRIMES = re.compile(r"\bprime factor|\bproduct of (?:its |the )?prime|\bprime powers?\b|\bpowers of primes\b", re.IGNORECASE)
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "twelve": 12}
_BASE = re.compile(
    r"\b(?:in|to|into|as|the)(?: an?)? (?:base[ ~-]?\$?(\d{1,2}|[a-z]+)\b|(binary|octal|hexadecimal)\b)", re.IGNORECASE
)
_BASE_NAMES = {"binary": 2, "octal": 8, "hexadecimal": 16}
_MODULUS = re.compile(r"\b(?:divided by|mod(?:ulo)?\b|\\[bp]?mod\s*\{?)\s*\$?(\d+)", re.IGNORECASE)
POLAR_FORM = r"\b(?:polar|exponential) form\b"
_TARGET = re.compile(r"\b(?:find|what is|compute|evaluate|determine) (?:the value of )?\$([^$=]+)\$", re.IGNORECASE)
_CHOICE = re.compile(r"\(([A-Z])\)\s*((?:(?!\([A-Z]\))[^\n]){1,80})")
_WORD = re.compile(r"[A-Za-z]{3}")
_KIND = re.compile(r"\b(?:(?:which|what)(?: (?:kind|type|sort) of)?|(?:is|does) (?:the|this)) ([a-z]{3,})\b", re.IGNORECASE)
_FORMULA = re.compile(r"(?<![A-Za-z])[A-Za-z]\s*[\^+*/(]|[\d)+*/]\s*[A-Za-z](?![A-Za-z])|\\frac|(?<![A-Za-z])[A-Za-z]\s-\s")
_ASKS_FORM = re.compile(
    r"\bfactor|\bexpand|\bproduct|\bsimplif|\bform\b|\bexpress|\bwrite\b|\brewrite|\bsquare\b|\bpolynomial", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True)
class AskedForm:
    """What a question says about the form of its answer; the defaults are those of an unknown question."""

    lowest_terms: bool = False
    """Whether `2/4` for 1/2 is unevaluated, too."""
    units: tuple[str, ...] | None = None
    """Units that the answer may have although the expected one has none; None for any known unit."""
    in_order: bool = False
    """Whether the elements of a bare list have an order: `64, 32, 16` is not `16, 32, 64`."""
    is_interval: bool = False
    """Whether a pair in brackets is an interval: `1, 4` is not `(1, 4)`."""
    primes: bool = False
    """Whether a product of primes must remain one: 72 is not `2^3 \\cdot 3^2`."""
    is_free: bool = False
    """Whether any form of a polynomial is an answer, because the question has no formula that an answer could repeat."""
    base: int | None = None
    """The base of an answer that is written without it."""
    modulus: int | None = None
    """The modulus that an answer may repeat: `2 \\pmod 7` for 2."""
    is_polar: bool = False
    """Whether a complex number must have its modulus and its argument."""
    kind: str | None = None
    """What kind of thing a name is, which an answer may add: `the planet Mercury` for `Mercury`."""
    target: str | None = None
    """The formula whose value the question asks for, which an answer may repeat: `m + n = 113` for 113."""
    question: str = ""
    """The question itself, on one line."""
    choices: tuple[tuple[str, str], ...] = ()
    """Letter and text of each choice that the question lists as `(A) ... (B) ...`."""


ANY_FORM = AskedForm()
"""The form of an answer to an unknown question."""


def asked_form(question: str) -> AskedForm:
    """What a question says about the form of its answer."""
    base, kind = list(_BASE.finditer(question)), _KIND.search(question)
    return AskedForm(
        lowest_terms=needs_lowest_terms(question),
        units=units_of_answer(question),
        in_order=_IN_ORDER.search(question) is not None,
        is_interval=_INTERVAL.search(question) is not None and _PAIR.search(question) is None,
        primes=_PRIMES.search(question) is not None,
        is_free=_WORD.search(question) is not None and not _FORMULA.search(question) and not _ASKS_FORM.search(question),
        base=_base(base[-1]) if base else None,
        modulus=int(modulus.group(1)) if (modulus := _MODULUS.search(question)) else None,
        is_polar=re.search(POLAR_FORM, question, re.IGNORECASE) is not None,
        kind=kind.group(1).lower() if kind else None,
        target=target.group(1) if (target := _TARGET.search(question)) else None,
        question=" ".join(question.split()),
        choices=tuple((letter, text.strip(" .,;$")) for letter, text in _CHOICE.findall(question)),
    )


def _base(match: re.Match[str]) -> int | None:
    written, name = match.groups()
    if name:
        return _BASE_NAMES[name.lower()]
    return int(written) if written.isdigit() else _BASES.get(written.lower())


_ASKED = re.compile(
    r"\bsimplif|\bsimplest|\blowest[ -]terms?\b|\birreducible|\brelatively prime|\bco-?prime|\bcommon fraction"
    r"|\brationali[sz]|\breduce (?:the|your|it|to)\b|\breduced (?:form|fraction|to)\b",
    re.IGNORECASE,
)
_FRACTION = re.compile(
    r"\\[dtc]?frac\s*\{\s*(\d{1,300})\s*\}\s*\{\s*(\d{1,300})\s*\}|(?<![\d.])(\d{1,300})\s*/\s*(\d{1,300})(?![\d.])"
)


def needs_lowest_terms(question: str) -> bool:
    """Whether an answer such as `2/4` for 1/2 is incomplete.

    That is so if the question asks for lowest terms, in words or by relatively prime numbers, or if it contains a fraction that
    is not in lowest terms: an answer could then repeat it ("What is 2/4 as a decimal?").
    """
    if _ASKED.search(question):
        return True
    found = (pair[:2] if pair[0] else pair[2:] for pair in _FRACTION.findall(question))
    return any(int(below) != 0 and REDUCTION in reducible(int(above), int(below)) for above, below in found)


_AS_PERCENT = re.compile(r"\b(?:as|to|into|in) (?:an? )?percent", re.IGNORECASE)
_EXACT = re.compile(r"\bexact|\bsimplif|\brationali[sz]|\bradical|\blogarithm", re.IGNORECASE)
_ROOTS = re.compile(r"\b(?:solutions|roots|zeros|values|solve)\b", re.IGNORECASE)
_NAMED_PAIR = re.compile(
    r"\b(?:pairs?|points?|coordinates|tuples?|system|vectors?)\b|\b[a-z]\$? and \$?[a-z]\b|\([A-Za-z], ?[A-Za-z]", re.IGNORECASE
)
_FACTOR = re.compile(r"\bfactor", re.IGNORECASE)
_VARIABLE = re.compile(r"(?<![A-Za-z\\])[xyz](?![A-Za-z])")
_SINGLE_LETTER = re.compile(r"[A-Za-z]")


def asks_percent_form(form: AskedForm) -> bool:
    """Whether the question asks for a value as a percentage."""
    return _AS_PERCENT.search(form.question) is not None


def asks_exact(form: AskedForm) -> bool:
    """Whether the question asks for an exact value, which no decimal rounds to."""
    return _EXACT.search(form.question) is not None


def asks_roots(form: AskedForm) -> bool:
    """Whether the question asks for values of one variable: `(-3, 4)` is not the solutions -3 and 4."""
    return _ROOTS.search(form.question) is not None and _NAMED_PAIR.search(form.question) is None


def asks_factors(form: AskedForm) -> bool:
    """Whether the question asks to factor."""
    return _FACTOR.search(form.question) is not None


def knows_names(parts: Sequence[str], form: AskedForm) -> bool:
    """Whether the question has the names of all values: not `x = 2, y = 3` for two solutions of one variable."""
    names = {part.partition("=")[0].partition("_")[0].strip() for part in parts}
    patterns = [rf"(?<![A-Za-z]){re.escape(name)}(?![a-z])" for name in names]
    return not form.question or len(names) == 1 or all(re.search(pattern, form.question) for pattern in patterns)


def is_other_variable(name: str, form: AskedForm) -> bool:
    """Whether the question asks for one variable or has one, and this is the name of another one; a slope is not `y`."""
    name, target = name.strip(), (form.target or "").strip()
    if not _SINGLE_LETTER.fullmatch(name):
        return False
    variables = set(_VARIABLE.findall(form.question))
    is_foreign = name in "xyz" and variables and (name not in variables or "slope" in form.question)
    return bool(is_foreign) or (_SINGLE_LETTER.fullmatch(target) is not None and target != name)


def is_of_question(fraction: str, form: AskedForm) -> bool:
    """Whether the question has both numbers of a fraction."""
    return set(re.findall(r"\d+", fraction)) <= set(re.findall(r"\d+", form.question))


_PREFIXED = re.compile(r"0([xbo])([0-9A-F]+)", re.IGNORECASE)
_PREFIXES = {"x": 16, "b": 2, "o": 8}
_ORDER = r"[<>\u2264\u2265]|\\(?:le|ge|lt|gt)(?:q|qslant)?(?![A-Za-z])"
_WRITTEN_FRACTION = r"(?:\\[dtc]?frac|\d+\s*/)"
_FORMS = [
    (re.compile(asked, re.IGNORECASE), re.compile(written))
    for asked, written in (
        (
            POLAR_FORM,
            r"(?<![A-Za-z\\])e\s*\^|\\(?:exp|cos|angle)(?![A-Za-z])|(?<![A-Za-z])cis(?![A-Za-z])",
        ),
        (r"\bscientific notation\b|\bstandard form\b", r"10\s*(?:\^|\*\*)|\d\s*(?:\\\w+\{)?[eE]"),
        (r"\b(?:ordinary|standard) (?:notation|form)\b", r"^(?!.*10\s*\^)"),
        (
            r"(?<!or )(?<!or a )\bdecimal\b(?! or\b)|\bround(?:ed|ing)?(?: \S+){0,6} to\b",
            rf"^(?:.*=)?(?!.*%)(?:.*\.\d|(?!.*{_WRITTEN_FRACTION}))",
        ),
        (
            r"\b(?:as|into|to|in|give|write) (?:an? |the )?(?:[a-z]+ ){0,2}fractions?\b(?! or\b)|\bcommon fraction\b",
            _WRITTEN_FRACTION,
        ),
        (r"\bimproper fraction\b", rf"(?:^|=)[\s+-]*{_WRITTEN_FRACTION}"),
        (r"\bmixed (?:number|numeral|fraction)s?\b", r"\d\s*(?:\+\s*)?\\[dtc]?frac|\d\s+\d+\s*/|\d\s*\+\s*\d+\s*/"),
        (r"\binterval notation\b", rf"^(?!.*(?:{_ORDER}|setminus)).*[(\[\]].*,.*[)\]\[]"),
        (r"\binterval notation\b", r"\\cup|\bor\b|\u222a"),
        (r"\b(?:as|using) an? (?:compound )?inequality\b|\binequality (?:notation|form)\b", _ORDER),
        (r"\bslope[- ]intercept form\b", r"(?:^|\{)\s*(?:y|f\s*\(x\))\s*=(?!.*\([^)]*x)"),
        (r"\bpoint[- ]slope form\b", r"\(\s*x[^=]*$|^[^=]*\(\s*x"),
        (r"\bstandard form\b", r"\)\s*\^"),
        (r"\b(?:standard|general) form\b", r"x[^=]*y|y[^=]*x"),
        (r"\b(?:find|write|give|determine|state|what is) (?:an?|the) equation\b", "="),
        (r"\b(?:a|one) single log", r"^(?!.*(?:ln|log).*(?:ln|log))"),
        (r"\bin words\b", "[A-Za-z]{3}"),
        (r"\bin \w+ and (?:minutes|seconds|inches|ounces|cents|days|months)\b", r"\d.*[A-Za-z].*\d"),
    )
]
"""What a question asks for, and what an answer in this form contains."""
_LONGEST = 1000


def lacks_form(expected: str, answer: str, form: AskedForm) -> bool:
    """Whether the question asks for a form, such as interval notation, that the expected answer has but not the model's."""
    return any(
        asked.search(form.question) and written.search(expected) and not written.search(answer[:_LONGEST])
        for asked, written in _FORMS
    )


def is_same_numeral(expected: str, answer: str, form: AskedForm) -> bool:
    r"""Whether an answer with its base (`FF_{16}`, `0xFF`) is the expected numeral in the base that the question names."""
    if form.base is None:
        return False
    prefixed = _PREFIXED.fullmatch(plain(answer))
    if prefixed is not None:
        answer = f"{prefixed.group(2).upper()}_{_PREFIXES[prefixed.group(1).lower()]}"
    given = read_numeral(answer)
    return given is not None and given == read_numeral(f"{plain(expected)}_{form.base}")


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
