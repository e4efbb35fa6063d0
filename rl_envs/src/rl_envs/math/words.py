r"""Compares answers in words: names, multiple-choice letters, dates, and names of symbols such as "no solution".

Letters are words, too: `HHT` is not `HTH`, although both are the same product of variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rl_envs.math.notation import compact, has_text, normalize, plain

_SYMBOLS = {
    "no solution": "\\emptyset", "no solutions": "\\emptyset", "no real solution": "\\emptyset", "empty set": "\\emptyset",
    "no real solutions": "\\emptyset", "the empty set": "\\emptyset", "all real numbers": "(-\\infty,\\infty)",
    "all reals": "(-\\infty,\\infty)", "\\mathbb{r}": "(-\\infty,\\infty)", "\\r": "(-\\infty,\\infty)",
    "dne": "does not exist", "not defined": "undefined", "limit does not exist": "does not exist",
    "the limit does not exist": "does not exist", "none": "\\emptyset", "infinity": "\\infty", "positive infinity": "\\infty",
    "negative infinity": "-\\infty", "minus infinity": "-\\infty", "-infinity": "-\\infty",
}  # fmt: skip
_NOTHING = re.compile(r"(?:there (?:is|are) )?no (?:real |such |integer )?(?:solutions?|roots?|numbers?|values?)(?: exists?)?")
_BELOW_TWENTY = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_NUMBER = re.compile(
    rf"(?:({'|'.join(_TENS)})(?:[- ]({'|'.join(_BELOW_TWENTY[1:10])}))?|({'|'.join(_BELOW_TWENTY)}))"
    r"( (?:hundred|thousand|million|billion))?"
)
_WORDS = re.compile(r"[^\W\d_]+(?:[ '.-]+[^\W\d_]+)*")
_SHORTEST_WORD = 4
_SHORT_WORDS = frozenset({"yes", "no", "odd", "all", "max", "min"})
_TRUTH_VALUES = frozenset({"yes", "no", "true", "false"})
_RETRACTED = re.compile(
    r"\b(?:yes|no|true|false|or|but|maybe|perhaps|actually|wait|however|though|doubt|idea|sure|wrong|both|unless|if)\b"
)
"""What a reason after yes or no may not have: it could take the answer back."""
_DIVISION = re.compile(r"(\d+) ?(?:,|with|and)? ?(?:a )?(?:remainder|rem\.?|r\.?)(?: of)? ?(\d+)")
_ARTICLE = re.compile(r"^(?:an?|the) ")
_CHOICE = re.compile(r"(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer) )?\(?([A-Z])[).]?")
_LETTER_IN_BRACKETS = 3
_CHOICE_AND_TEXT = re.compile(r"(?:\(([A-Z])\)|([A-Z])[).:])\s*(?:\\ )?\s*([^()]{1,60})")
_ALTERNATIVE = re.compile(r"[,;/]|\b(?:or|and|not|but|[A-Z])\b|\\(?:or|lor|vee)\b")
_MONTH = re.compile(
    r"\b(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?"
    r"|dec(?:ember)?)\b"
)
_DATE = re.compile(r"[a-z]+|\d+")
_OF_DATE = re.compile(r"(?<=\d)(?:st|nd|rd|th)\b|\bof\b|\bthe\b|,")
_COMMAND = re.compile(r"\\(?:begin|end)\{[a-z]+\}|\\[A-Za-z]+")
_TIMES = re.compile(r"\\cdot(?![A-Za-z])|\*")
_CONSTANTS = frozenset("ck")
_VARIABLES = re.compile(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])")
_LETTERS = re.compile(r"[A-Z]{2,}|[A-Za-z]{3,}")


def symbol_of(text: str) -> str:
    r"""What an answer names: `\emptyset` for "no solution", 12 for "twelve"; any other text unchanged."""
    words = plain(text).casefold().strip("'\"")
    if _NOTHING.fullmatch(words):
        return "\\emptyset"
    if number := _NUMBER.fullmatch(words):
        tens, ones, below_twenty, scale = number.groups()
        above = 10 * (_TENS.index(tens) + 2) if tens else 0
        return f"{above + _BELOW_TWENTY.index(below_twenty or ones or 'zero')}{scale or ''}"
    return _SYMBOLS.get(words, text)


def is_words(text: str) -> bool:
    r"""Whether an expected answer is a name or other text and not a formula: in `\text`, or with a word of four letters."""
    words = plain(text)
    if not _WORDS.fullmatch(words):
        return False
    longest = max(map(len, re.split(r"[ '.-]+", words)))
    return has_text(text) or longest >= _SHORTEST_WORD or words.lower() in _SHORT_WORDS


def has_same_words(expected: str, answer: str, *, kind: str | None = None, question: str = "") -> bool:
    """Whether two texts have the same words, ignoring case and an article before them.

    Args:
        expected: the expected answer.
        answer: the model's answer; it may give a reason after yes, no, true or false.
        kind: the requested kind of thing, which the answer may add: `the planet Mercury` for `Mercury`.
        question: the question, which the answer may repeat: `Dan is the tallest` for "Who is the tallest?".
    """
    one, other = (_ARTICLE.sub("", plain(text).casefold().strip("'\""), count=1) for text in (expected, answer))
    if one in _TRUTH_VALUES and (reason := re.fullmatch(rf"{one}[,.;:] (.+)", other)):
        return _RETRACTED.search(reason.group(1)) is None and _is_consistent(one, reason.group(1), question)
    if kind is not None and other in (f"{kind} {one}", f"{one} {kind}", f"{kind} is {one}"):
        return True
    rest = other.removeprefix(f"{one} ")
    is_repeated = re.search(rf"\b(?:who|what|which(?: \w+)?) {re.escape(rest)}\W*$", question.casefold())
    return one == other or (rest != other and is_repeated is not None)


def _is_consistent(truth: str, reason: str, question: str) -> bool:
    """Whether a reason does not contradict its yes or no: "it is prime" does not explain why a number is not prime."""
    is_negated = re.search(r"\bnot\b|n't|\bneither\b|\bnever\b", reason) is not None
    words = set(re.findall("[a-z]{4,}", reason))
    is_repeated = bool(words) and words <= set(re.findall("[a-z]{4,}", question.casefold()))
    return not is_repeated or truth in ("true", "false") or is_negated == (truth == "no")


def is_same_division(expected: str, answer: str) -> bool:
    """Whether both are the same whole number and remainder: `4 remainder 5` and `4 R 5`."""
    read = [_DIVISION.fullmatch(plain(text).casefold()) for text in (expected, answer)]
    return read[0] is not None and read[1] is not None and read[0].groups() == read[1].groups()


def is_same_choice(expected: str, answer: str, choices: Mapping[str, str]) -> bool:
    r"""Whether both are the same letter of a multiple-choice question: `C` and `(C)`, also with the text of the choice.

    Args:
        expected: the expected letter.
        answer: the model's answer.
        choices: the text of each letter, as far as the question lists them.
    """
    letter = _CHOICE.fullmatch(plain(expected))
    given = plain(answer)
    given_letter = _CHOICE.fullmatch(
        given.upper() if len(given) <= _LETTER_IN_BRACKETS else given
    ) or _CHOICE_AND_TEXT.fullmatch(given)
    if letter is None or given_letter is None:
        return False
    chosen, *text = [group for group in given_letter.groups() if group is not None]
    if chosen != letter.group(1):
        return False
    if text and chosen in choices:
        return compact(normalize(text[0])).casefold() == compact(normalize(choices[chosen])).casefold()
    return not any(map(_ALTERNATIVE.search, text))


def is_same_date(expected: str, answer: str) -> bool:
    """Whether both are the same date, such as `June 20` and `20 June`."""
    dates = [_date(text) for text in (expected, answer)]
    return dates[0] is not None and dates[0] == dates[1]


def has_same_letters(expected: str, answer: str) -> bool:
    """Whether the runs of letters in two formulas agree: `ABC` is not `CAB`, and `xyz` is `x y z`.

    Two small letters are a product: `ab` equals `ba`. Variables have the same case: `2a` is not `2A`. A formula of one
    variable, and a constant of integration, may have either.
    """
    one, other = (_letters(text) for text in (expected, answer))
    return one == other and _has_same_case(expected, answer)


def _letters(text: str) -> list[str]:
    factors = _COMMAND.sub("|", _TIMES.sub(" ", text)).replace(" ", "")
    return sorted(run.casefold() for run in _LETTERS.findall(factors))


def _has_same_case(expected: str, answer: str) -> bool:
    one, other = ({*_VARIABLES.findall(_COMMAND.sub("|", text))} for text in (expected, answer))
    names = {letter.casefold() for letter in one}
    differing = {letter.casefold() for letter in one ^ other}
    return len(names - _CONSTANTS) < 2 or differing <= _CONSTANTS or names != {letter.casefold() for letter in other}


def _date(text: str) -> list[str] | None:
    words = _OF_DATE.sub(" ", plain(text).casefold())
    if _MONTH.search(words) is None or not re.fullmatch(r"[a-z\d .]*\d[a-z\d .]*", words):
        return None
    return sorted(word[:3] if _MONTH.fullmatch(word) else word for word in _DATE.findall(words))
