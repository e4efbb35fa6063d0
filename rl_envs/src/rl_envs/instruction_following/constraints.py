"""The constraints: each with a check of an answer and a sentence that asks for it.

The identifiers and parameters are those of IFEval (https://arxiv.org/abs/2311.07911), so rows in its form can be used. Checks
are strict: the whole answer counts, as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
    parameters: Mapping[str, type] = field(default_factory=dict)


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


def _first_word(answer: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = units.paragraphs(answer)
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= len(paragraphs):
        return False
    words = units.words(paragraphs[nth_paragraph - 1])
    return bool(words) and words[0].casefold() == first_word.strip().casefold()


def _postscript(answer: str, postscript_marker: str) -> bool:
    letters = [re.escape(letter) for letter in re.findall(r"\w", postscript_marker)]
    pattern = r"\w\W*\n[ \t*_]*" + r"\.?\s?".join(letters) + r"(?!\w)\W*\w"
    return bool(letters) and re.search(pattern, answer, re.IGNORECASE) is not None


def _sections(answer: str, section_spliter: str, num_sections: int) -> bool:
    pattern = rf"^[ \t#*_]*{re.escape(section_spliter.strip())}\s+(\d+|[IVXLC]+)\b"
    parts = re.split(pattern, answer, flags=re.MULTILINE | re.IGNORECASE)[1:]
    filled = {number.upper() for number, content in zip(parts[::2], parts[1::2], strict=True) if units.words(content)}
    return len(filled) >= num_sections


def _json(answer: str) -> bool:
    fenced = _FENCE.match(answer.strip())
    try:
        value = json.loads(fenced.group(1) if fenced else answer, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict | list)


def _two_responses(answer: str) -> bool:
    found = [part.strip() for part in re.split(r"(?<!\*)\*{6}(?!\*)", answer)]
    responses = [[word.casefold() for word in units.words(part)] for part in found]
    return len(found) == 2 and all(responses) and responses[0] != responses[1]


def _repeats(answer: str, prompt_to_repeat: str) -> bool:
    start, rest = prompt_to_repeat.strip(), answer.strip()
    return rest.casefold().startswith(start.casefold()) and bool(units.words(rest[len(start) :]))


def _ends(answer: str, end_phrase: str) -> bool:
    text, phrase = answer.strip().strip("\"'“”").casefold(), end_phrase.strip().casefold()
    return text.endswith(phrase) and not _continues_word(text[: -len(phrase)][-1:], phrase[:1])


def _starts(answer: str, start_phrase: str) -> bool:
    text, phrase = answer.strip().strip("\"'“”").casefold(), start_phrase.strip().casefold()
    return text.startswith(phrase) and not _continues_word(phrase[-1:], text[len(phrase) :][:1])


def _quoted(answer: str) -> bool:
    text = answer.strip()
    return len(text) > 2 and (text[0], text[-1]) in {('"', '"'), ("“", "”")}


def _continues_word(before: str, after: str) -> bool:
    return before.isalnum() and after.isalnum()


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


CONSTRAINTS: dict[str, Constraint] = {
    "keywords:existence": Constraint(
        check=lambda answer, keywords: all(units.count_phrase(answer, keyword) > 0 for keyword in keywords),
        describe=lambda keywords: f"Include the words {joined(keywords)}.",
        parameters={"keywords": list},
    ),
    "keywords:frequency": Constraint(
        check=lambda answer, keyword, frequency, relation: compare(units.count_phrase(answer, keyword), relation, frequency),
        describe=lambda keyword, frequency, relation: f'Use the word "{keyword}" {relation} {frequency} times.',
        parameters={"keyword": str, "frequency": int, "relation": str},
    ),
    "keywords:forbidden_words": Constraint(
        check=lambda answer, forbidden_words: not any(units.count_phrase(answer, word) for word in forbidden_words),
        describe=lambda forbidden_words: f"Do not use the words {joined(forbidden_words)}.",
        parameters={"forbidden_words": list},
    ),
    "keywords:letter_frequency": Constraint(
        check=lambda answer, letter, let_frequency, let_relation: compare(
            answer.casefold().count(letter.casefold()), let_relation, let_frequency
        ),
        describe=lambda letter, let_frequency, let_relation: f'Use the letter "{letter}" {let_relation} {let_frequency} times.',
        parameters={"letter": str, "let_frequency": int, "let_relation": str},
    ),
    "length_constraints:number_words": Constraint(
        check=lambda answer, num_words, relation: compare(len(units.words(answer)), relation, num_words),
        describe=lambda num_words, relation: f"Answer with {relation} {num_words} words.",
        parameters={"num_words": int, "relation": str},
    ),
    "length_constraints:number_sentences": Constraint(
        check=lambda answer, num_sentences, relation: compare(len(units.sentences(answer)), relation, num_sentences),
        describe=lambda num_sentences, relation: f"Answer with {relation} {num_sentences} sentences.",
        parameters={"num_sentences": int, "relation": str},
    ),
    "length_constraints:number_paragraphs": Constraint(
        check=lambda answer, num_paragraphs: (
            len(units.paragraphs(answer, separator=r"(?m)^[ \t]*\*\*\*[ \t]*$")) == num_paragraphs
        ),
        describe=lambda num_paragraphs: f"Write exactly {num_paragraphs} paragraphs, separated by the line ***.",
        parameters={"num_paragraphs": int},
    ),
    "length_constraints:nth_paragraph_first_word": Constraint(
        check=_first_word,
        describe=lambda num_paragraphs, nth_paragraph, first_word: (
            f"Write {num_paragraphs} paragraphs, separated by blank lines. Start paragraph {nth_paragraph} with the word "
            f'"{first_word}".'
        ),
        parameters={"num_paragraphs": int, "nth_paragraph": int, "first_word": str},
    ),
    "detectable_content:number_placeholders": Constraint(
        # Without a letter it is a reference such as [1].
        check=lambda answer, num_placeholders: (
            sum(_LETTER.search(content) is not None for content in _IN_BRACKETS.findall(answer)) >= num_placeholders
        ),
        describe=lambda num_placeholders: (
            f"Include at least {num_placeholders} placeholders in square brackets, such as [address]."
        ),
        parameters={"num_placeholders": int},
    ),
    "detectable_content:postscript": Constraint(
        check=_postscript,
        describe=lambda postscript_marker: f"At the end, add a postscript that starts with {postscript_marker}",
        parameters={"postscript_marker": str},
    ),
    "detectable_format:number_bullet_lists": Constraint(
        check=lambda answer, num_bullets: units.bullets(answer) == num_bullets,
        describe=lambda num_bullets: f"Write exactly {num_bullets} bullet points, such as: * This is a point.",
        parameters={"num_bullets": int},
    ),
    "detectable_format:constrained_response": Constraint(
        check=lambda answer: sum(answer.count(option) for option in _CONSTRAINED) == 1,
        describe=lambda: f"Answer with one of: {' / '.join(_CONSTRAINED)}",
    ),
    "detectable_format:number_highlighted_sections": Constraint(
        check=lambda answer, num_highlights: units.highlights(answer) >= num_highlights,
        describe=lambda num_highlights: f"Highlight at least {num_highlights} sections with Markdown, such as *section*.",
        parameters={"num_highlights": int},
    ),
    "detectable_format:multiple_sections": Constraint(
        check=_sections,
        describe=lambda section_spliter, num_sections: (
            f"Write {num_sections} sections. Start each with {section_spliter} X, its number."
        ),
        parameters={"section_spliter": str, "num_sections": int},
    ),
    "detectable_format:json_format": Constraint(
        check=_json,
        describe=lambda: "Write the whole answer as JSON, optionally in a Markdown code block.",
    ),
    "detectable_format:title": Constraint(
        check=lambda answer: re.search(r"<<[^<>\n]*\w[^<>\n]*>>", answer) is not None,
        describe=lambda: "Include a title in double angle brackets, such as <<poem of joy>>.",
    ),
    "combination:two_responses": Constraint(
        check=_two_responses,
        describe=lambda: "Give two different responses, separated by ******.",
    ),
    "combination:repeat_prompt": Constraint(
        check=_repeats,
        describe=lambda prompt_to_repeat: "First repeat the request word for word, without change, then answer it.",
        parameters={"prompt_to_repeat": str},
    ),
    "startend:end_checker": Constraint(
        check=_ends,
        describe=lambda end_phrase: f'End with exactly this phrase: "{end_phrase}"',
        parameters={"end_phrase": str},
    ),
    "startend:start_checker": Constraint(
        check=_starts,
        describe=lambda start_phrase: f'Start with exactly this phrase: "{start_phrase}"',
        parameters={"start_phrase": str},
    ),
    "startend:quotation": Constraint(
        check=_quoted,
        describe=lambda: "Put the whole answer in double quotation marks.",
    ),
    "change_case:capital_word_frequency": Constraint(
        check=lambda answer, capital_frequency, capital_relation: compare(
            len(units.capital_words(answer)), capital_relation, capital_frequency
        ),
        describe=lambda capital_frequency, capital_relation: (
            f"Use words in all capital letters {capital_relation} {capital_frequency} times."
        ),
        parameters={"capital_frequency": int, "capital_relation": str},
    ),
    "change_case:english_capital": Constraint(
        check=lambda answer: any(character.isupper() for character in answer) and answer == answer.upper(),
        describe=lambda: "Answer in capital letters only.",
    ),
    "change_case:english_lowercase": Constraint(
        check=lambda answer: any(character.islower() for character in answer) and answer == answer.lower(),
        describe=lambda: "Answer in lowercase letters only.",
    ),
    "punctuation:no_comma": Constraint(
        check=lambda answer: not any(comma in answer for comma in _COMMAS),
        describe=lambda: "Do not use commas.",
    ),
}
"""All constraints by identifier."""
