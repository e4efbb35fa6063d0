"""The constraints: each with a check of an answer and a sentence that asks for it.

The identifiers and parameters are those of IFEval (https://arxiv.org/abs/2311.07911), so rows in its form can be used. Checks
are strict: the whole answer counts, as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.errors import DataError
from rl_envs.completions import visible
from rl_envs.instruction_following import text as units
from rl_envs.instruction_following.text import compare, joined

Check = Callable[..., bool]


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """A checkable constraint.

    Attributes:
        check: `check(answer, **parameters)`, whether the answer follows it.
        describe: `describe(**parameters)`, the instruction in a sentence.
        parameters: name and type of each parameter.
    """

    check: Check
    describe: Callable[..., str]
    parameters: Mapping[str, type]


CONSTRAINTS: dict[str, Constraint] = {}
"""All constraints by identifier."""

UNSUPPORTED = frozenset({"language:response_language"})
"""Identifiers of IFEval that are not checked here, because no reliable check is available."""

_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_IN_BRACKETS = re.compile(r"(?<!\w)\[(?! *[xX] *\])([^\[\]\n]*+)\](?!\()")
"""Not an index such as `a[i]`, a link or a ticked box."""
_LETTER = re.compile(r"[^\W\d_]")
_COMMAS = ",，、،﹐︐﹑"
_FENCE = re.compile(r"^```(?:json)?[^\S\n]*\n(.*?)\n?```$", re.DOTALL | re.IGNORECASE)


def parameters_of(name: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The parameters of a constraint, without null values.

    Raises:
        DataError: the constraint is unknown, or a parameter is missing, unknown or of another type.
    """
    if name not in CONSTRAINTS:
        raise DataError(f"There is no constraint {name!r}. Constraints: {', '.join(sorted(CONSTRAINTS))}.")
    wanted = CONSTRAINTS[name].parameters
    parameters = {key: value for key, value in (given or {}).items() if value is not None}
    if set(parameters) != set(wanted):
        raise DataError(f"The constraint {name} has the parameters {sorted(wanted)}, but the row has {sorted(parameters)}.")
    return {key: _converted(name, key, value, wanted[key]) for key, value in parameters.items()}


def follows(answer: str, name: str, parameters: Mapping[str, Any]) -> bool:
    """Whether an answer follows a constraint; an answer without a letter or digit follows none.

    Args:
        answer: the model's text. Characters that are not shown are ignored.
        name: identifier of the constraint.
        parameters: from `parameters_of`.
    """
    shown = visible(answer)
    return bool(units.words(shown)) and CONSTRAINTS[name].check(shown, **parameters)


def _converted(name: str, key: str, value: Any, kind: type) -> Any:
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)  # data that went through a table of numbers
    wrong = not isinstance(value, kind) or isinstance(value, bool)
    if wrong or (kind is list and not (value and all(isinstance(item, str) and item.strip() for item in value))):
        raise DataError(f"The parameter {key} of the constraint {name} is {value!r}, not {_KINDS[kind]}.")
    if key.endswith("relation") and value not in units.RELATIONS:
        raise DataError(f"The parameter {key} of the constraint {name} is {value!r}, not one of {', '.join(units.RELATIONS)}.")
    return value


_KINDS = {int: "a whole number", str: "a text", list: "a list of texts"}


def _register(name: str, describe: Callable[..., str], **parameters: type) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        CONSTRAINTS[name] = Constraint(check=check, describe=describe, parameters=parameters)
        return check

    return add


@_register("keywords:existence", lambda keywords: f"Include the words {joined(keywords)}.", keywords=list)
def _existence(answer: str, keywords: Sequence[str]) -> bool:
    return all(units.count_phrase(answer, keyword) > 0 for keyword in keywords)


@_register(
    "keywords:frequency",
    lambda keyword, frequency, relation: f'Use the word "{keyword}" {relation} {frequency} times.',
    keyword=str,
    frequency=int,
    relation=str,
)
def _frequency(answer: str, keyword: str, frequency: int, relation: str) -> bool:
    return compare(units.count_phrase(answer, keyword), relation, frequency)


@_register(
    "keywords:forbidden_words", lambda forbidden_words: f"Do not use the words {joined(forbidden_words)}.", forbidden_words=list
)
def _forbidden(answer: str, forbidden_words: Sequence[str]) -> bool:
    return not any(units.count_phrase(answer, word) for word in forbidden_words)


@_register(
    "keywords:letter_frequency",
    lambda letter, let_frequency, let_relation: f'Use the letter "{letter}" {let_relation} {let_frequency} times.',
    letter=str,
    let_frequency=int,
    let_relation=str,
)
def _letters(answer: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return compare(answer.casefold().count(letter.casefold()), let_relation, let_frequency)


@_register(
    "length_constraints:number_words",
    lambda num_words, relation: f"Answer with {relation} {num_words} words.",
    num_words=int,
    relation=str,
)
def _number_of_words(answer: str, num_words: int, relation: str) -> bool:
    return compare(len(units.words(answer)), relation, num_words)


@_register(
    "length_constraints:number_sentences",
    lambda num_sentences, relation: f"Answer with {relation} {num_sentences} sentences.",
    num_sentences=int,
    relation=str,
)
def _number_of_sentences(answer: str, num_sentences: int, relation: str) -> bool:
    return compare(len(units.sentences(answer)), relation, num_sentences)


@_register(
    "length_constraints:number_paragraphs",
    lambda num_paragraphs: f"Write exactly {num_paragraphs} paragraphs, separated by the line ***.",
    num_paragraphs=int,
)
def _number_of_paragraphs(answer: str, num_paragraphs: int) -> bool:
    return len(units.paragraphs(answer, separator=r"(?m)^[ \t]*\*\*\*[ \t]*$")) == num_paragraphs


@_register(
    "length_constraints:nth_paragraph_first_word",
    lambda num_paragraphs, nth_paragraph, first_word: (
        f"Write {num_paragraphs} paragraphs, separated by blank lines. Start paragraph {nth_paragraph} with the word "
        f'"{first_word}".'
    ),
    num_paragraphs=int,
    nth_paragraph=int,
    first_word=str,
)
def _first_word(answer: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = units.paragraphs(answer)
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= len(paragraphs):
        return False
    words = units.words(paragraphs[nth_paragraph - 1])
    return bool(words) and words[0].casefold() == first_word.strip().casefold()


@_register(
    "detectable_content:number_placeholders",
    lambda num_placeholders: f"Include at least {num_placeholders} placeholders in square brackets, such as [address].",
    num_placeholders=int,
)
def _placeholders(answer: str, num_placeholders: int) -> bool:
    # Without a letter it is a reference such as [1].
    return sum(_LETTER.search(content) is not None for content in _IN_BRACKETS.findall(answer)) >= num_placeholders


@_register(
    "detectable_content:postscript",
    lambda postscript_marker: f"At the end, add a postscript that starts with {postscript_marker}",
    postscript_marker=str,
)
def _postscript(answer: str, postscript_marker: str) -> bool:
    letters = [re.escape(letter) for letter in re.findall(r"\w", postscript_marker)]
    pattern = r"\w\W*\n[ \t*_]*" + r"\.?\s?".join(letters) + r"(?!\w)\W*\w"
    return bool(letters) and re.search(pattern, answer, re.IGNORECASE) is not None


@_register(
    "detectable_format:number_bullet_lists",
    lambda num_bullets: f"Write exactly {num_bullets} bullet points, such as: * This is a point.",
    num_bullets=int,
)
def _bullet_points(answer: str, num_bullets: int) -> bool:
    return units.bullets(answer) == num_bullets


@_register("detectable_format:constrained_response", lambda: f"Answer with one of: {' / '.join(_CONSTRAINED)}")
def _constrained(answer: str) -> bool:
    return sum(answer.count(option) for option in _CONSTRAINED) == 1


@_register(
    "detectable_format:number_highlighted_sections",
    lambda num_highlights: f"Highlight at least {num_highlights} sections with Markdown, such as *section*.",
    num_highlights=int,
)
def _highlighted(answer: str, num_highlights: int) -> bool:
    return units.highlights(answer) >= num_highlights


@_register(
    "detectable_format:multiple_sections",
    lambda section_spliter, num_sections: f"Write {num_sections} sections. Start each with {section_spliter} X, its number.",
    section_spliter=str,
    num_sections=int,
)
def _sections(answer: str, section_spliter: str, num_sections: int) -> bool:
    pattern = rf"^[ \t#*_]*{re.escape(section_spliter.strip())}\s+(\d+|[IVXLC]+)\b"
    parts = re.split(pattern, answer, flags=re.MULTILINE | re.IGNORECASE)[1:]
    filled = {number.upper() for number, content in zip(parts[::2], parts[1::2], strict=True) if units.words(content)}
    return len(filled) >= num_sections


@_register("detectable_format:json_format", lambda: "Write the whole answer as JSON, optionally in a Markdown code block.")
def _json(answer: str) -> bool:
    fenced = _FENCE.match(answer.strip())
    try:
        value = json.loads(fenced.group(1) if fenced else answer, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict | list)


@_register("detectable_format:title", lambda: "Include a title in double angle brackets, such as <<poem of joy>>.")
def _title(answer: str) -> bool:
    return re.search(r"<<[^<>\n]*\w[^<>\n]*>>", answer) is not None


@_register("combination:two_responses", lambda: "Give two different responses, separated by ******.")
def _two_responses(answer: str) -> bool:
    found = [part.strip() for part in re.split(r"(?<!\*)\*{6}(?!\*)", answer)]
    responses = [[word.casefold() for word in units.words(part)] for part in found]
    return len(found) == 2 and all(responses) and responses[0] != responses[1]


@_register(
    "combination:repeat_prompt",
    lambda prompt_to_repeat: "First repeat the request word for word, without change, then answer it.",
    prompt_to_repeat=str,
)
def _repeats(answer: str, prompt_to_repeat: str) -> bool:
    start, rest = prompt_to_repeat.strip(), answer.strip()
    return rest.casefold().startswith(start.casefold()) and bool(units.words(rest[len(start) :]))


@_register("startend:end_checker", lambda end_phrase: f'End with exactly this phrase: "{end_phrase}"', end_phrase=str)
def _ends(answer: str, end_phrase: str) -> bool:
    text, phrase = answer.strip().strip("\"'“”").casefold(), end_phrase.strip().casefold()
    return text.endswith(phrase) and not _continues_word(text[: -len(phrase)][-1:], phrase[:1])


@_register("startend:start_checker", lambda start_phrase: f'Start with exactly this phrase: "{start_phrase}"', start_phrase=str)
def _starts(answer: str, start_phrase: str) -> bool:
    text, phrase = answer.strip().strip("\"'“”").casefold(), start_phrase.strip().casefold()
    return text.startswith(phrase) and not _continues_word(phrase[-1:], text[len(phrase) :][:1])


@_register("startend:quotation", lambda: "Put the whole answer in double quotation marks.")
def _quoted(answer: str) -> bool:
    text = answer.strip()
    return len(text) > 2 and (text[0], text[-1]) in {('"', '"'), ("“", "”")}


@_register(
    "change_case:capital_word_frequency",
    lambda capital_frequency, capital_relation: (
        f"Use words in all capital letters {capital_relation} {capital_frequency} times."
    ),
    capital_frequency=int,
    capital_relation=str,
)
def _capital_words(answer: str, capital_frequency: int, capital_relation: str) -> bool:
    return compare(len(units.capital_words(answer)), capital_relation, capital_frequency)


@_register("change_case:english_capital", lambda: "Answer in capital letters only.")
def _upper(answer: str) -> bool:
    return any(character.isupper() for character in answer) and answer == answer.upper()


@_register("change_case:english_lowercase", lambda: "Answer in lowercase letters only.")
def _lower(answer: str) -> bool:
    return any(character.islower() for character in answer) and answer == answer.lower()


@_register("punctuation:no_comma", lambda: "Do not use commas.")
def _no_comma(answer: str) -> bool:
    return not any(comma in answer for comma in _COMMAS)


def _continues_word(before: str, after: str) -> bool:
    return before.isalnum() and after.isalnum()


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
