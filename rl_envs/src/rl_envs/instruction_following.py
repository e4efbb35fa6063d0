"""The environment `instruction_following`: checks an answer against the instructions of its row.

Identifiers and parameters of the constraints are those of IFEval (https://arxiv.org/abs/2311.07911), so rows in its form can be
used. Checks are strict: the whole answer counts, as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_core.environments import Score, ScorerEnvironment
from rl_core.errors import DataError, format_value
from rl_envs.completions import visible
from rl_envs.config import InstructionFollowingConfig

FOLLOWED_KEY = "followed"
"""Metadata key of the list that says which instructions were followed."""
UNSUPPORTED = frozenset({"language:response_language"})
"""Identifiers of IFEval that are not checked here, because no reliable check is available."""


class InstructionFollowingEnvironment(ScorerEnvironment):
    """Rewards answers that follow the instructions of their row, see `rl_envs.instruction_following`.

    A row's metadata contains `instruction_id_list`, a list of identifiers, and `kwargs`, a list of their parameters, which may
    be JSON text. `step` adds `followed`, a list of booleans. A row with an instruction that cannot be checked is not scored.
    Metrics: `accuracy`, the fraction of answers that follow all their instructions, and `instruction_accuracy`, the fraction of
    instructions that are followed.

    Args:
        config: `InstructionFollowingConfig`, a dict of its keys, or None for its defaults.
    """

    config_class = InstructionFollowingConfig
    config: InstructionFollowingConfig

    def score(self, text: str, info: Mapping[str, Any]) -> Score:
        """Check an answer.

        Raises:
            DataError: the row has no instructions, or an unknown one, or its parameters are wrong.
        """
        followed = [follows(text, name, parameters) for name, parameters in read_instructions(info)]
        fraction = sum(followed) / max(len(followed), 1)
        return Score(
            fraction if self.config.reward == "fraction" else float(fraction == 1.0),
            {"accuracy": all(followed), "instruction_accuracy": followed},
            metadata={FOLLOWED_KEY: followed},
            scored=set(info["instruction_id_list"]).isdisjoint(UNSUPPORTED),
        )


def read_instructions(info: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The identifiers and parameters of a row's instructions that can be checked.

    Args:
        info: The row's metadata.

    Raises:
        DataError: see `InstructionFollowingEnvironment.score`.
    """
    names = info.get("instruction_id_list")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise DataError(
            "the metadata of `instruction_following` needs `instruction_id_list`, a list of identifiers, and "
            f"`kwargs`, a list of their parameters; found {format_value(info)}. Add both to `env_keys` of the dataset."
        )
    given = _decoded(info.get("kwargs") or [{}] * len(names))
    if not isinstance(given, list) or len(given) != len(names):
        raise DataError(
            f"there are {len(names)} instructions, but `kwargs` is {format_value(given)}: it needs one entry for each."
        )
    read = []
    for name, own in zip(names, given, strict=True):
        parameters = _decoded(own)
        if not isinstance(parameters, Mapping | None):
            raise DataError(f"the entry of `kwargs` for {name} is {format_value(own)}: expected an object.")
        if name not in UNSUPPORTED:
            read.append((name, parameters_of(name, parameters)))
    return read


def _decoded(value: Any) -> Any:
    """A value that may be JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise DataError(f"`kwargs` has the text {format_value(value)}, which is invalid JSON: {error}.") from error


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


_KINDS = {int: "a whole number", str: "a text", list: "a list of texts"}


def _converted(name: str, key: str, value: Any, kind: type) -> Any:
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)  # data that went through a table of numbers
    wrong = not isinstance(value, kind) or isinstance(value, bool)
    if wrong or (kind is list and not (value and all(isinstance(item, str) and item.strip() for item in value))):
        raise DataError(f"The parameter {key} of the constraint {name} is {value!r}, not {_KINDS[kind]}.")
    if key.endswith("relation") and value not in RELATIONS:
        raise DataError(f"The parameter {key} of the constraint {name} is {value!r}, not one of {', '.join(RELATIONS)}.")
    return value


def follows(answer: str, name: str, parameters: Mapping[str, Any]) -> bool:
    """Whether an answer follows a constraint; an answer without a letter or digit follows none.

    Args:
        answer: the model's text. Characters that are not shown are ignored.
        name: identifier of the constraint.
        parameters: from `parameters_of`.
    """
    shown = visible(answer)
    return bool(words_of(shown)) and CONSTRAINTS[name].check(shown, **parameters)


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """A checkable constraint.

    Attributes:
        check: `check(answer, **parameters)`, whether the answer follows it.
        describe: `describe(**parameters)`, the instruction in a sentence.
        parameters: name and type of each parameter.
    """

    check: Callable[..., bool]
    describe: Callable[..., str]
    parameters: Mapping[str, type] = field(default_factory=dict)


_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_IN_BRACKETS = re.compile(r"(?<!\w)\[(?! *[xX] *\])([^\[\]\n]*+)\](?!\()")
"""Not an index such as `a[i]`, a link or a ticked box."""
_LETTER = re.compile(r"[^\W\d_]")
_COMMAS = ",，、،﹐︐﹑"
_FENCE = re.compile(r"^```(?:json)?[^\S\n]*\n(.*?)\n?```$", re.DOTALL | re.IGNORECASE)


def _first_word(answer: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = paragraphs_of(answer)
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= len(paragraphs):
        return False
    words = words_of(paragraphs[nth_paragraph - 1])
    return bool(words) and words[0].casefold() == first_word.strip().casefold()


def _postscript(answer: str, postscript_marker: str) -> bool:
    letters = [re.escape(letter) for letter in re.findall(r"\w", postscript_marker)]
    pattern = r"\w\W*\n[ \t*_]*" + r"\.?\s?".join(letters) + r"(?!\w)\W*\w"
    return bool(letters) and re.search(pattern, answer, re.IGNORECASE) is not None


def _sections(answer: str, section_spliter: str, num_sections: int) -> bool:
    pattern = rf"^[ \t#*_]*{re.escape(section_spliter.strip())}\s+(\d+|[IVXLC]+)\b"
    parts = re.split(pattern, answer, flags=re.MULTILINE | re.IGNORECASE)[1:]
    filled = {number.upper() for number, content in zip(parts[::2], parts[1::2], strict=True) if words_of(content)}
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
    responses = [[word.casefold() for word in words_of(part)] for part in found]
    return len(found) == 2 and all(responses) and responses[0] != responses[1]


def _repeats(answer: str, prompt_to_repeat: str) -> bool:
    start, rest = prompt_to_repeat.strip(), answer.strip()
    return rest.casefold().startswith(start.casefold()) and bool(words_of(rest[len(start) :]))


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
        check=lambda answer, keywords: all(count_phrase(answer, keyword) > 0 for keyword in keywords),
        describe=lambda keywords: f"Include the words {joined(keywords)}.",
        parameters={"keywords": list},
    ),
    "keywords:frequency": Constraint(
        check=lambda answer, keyword, frequency, relation: compare(count_phrase(answer, keyword), relation, frequency),
        describe=lambda keyword, frequency, relation: f'Use the word "{keyword}" {relation} {frequency} times.',
        parameters={"keyword": str, "frequency": int, "relation": str},
    ),
    "keywords:forbidden_words": Constraint(
        check=lambda answer, forbidden_words: not any(count_phrase(answer, word) for word in forbidden_words),
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
        check=lambda answer, num_words, relation: compare(len(words_of(answer)), relation, num_words),
        describe=lambda num_words, relation: f"Answer with {relation} {num_words} words.",
        parameters={"num_words": int, "relation": str},
    ),
    "length_constraints:number_sentences": Constraint(
        check=lambda answer, num_sentences, relation: compare(len(sentences(answer)), relation, num_sentences),
        describe=lambda num_sentences, relation: f"Answer with {relation} {num_sentences} sentences.",
        parameters={"num_sentences": int, "relation": str},
    ),
    "length_constraints:number_paragraphs": Constraint(
        check=lambda answer, num_paragraphs: (
            len(paragraphs_of(answer, separator=r"(?m)^[ \t]*\*\*\*[ \t]*$")) == num_paragraphs
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
        check=lambda answer, num_bullets: bullets(answer) == num_bullets,
        describe=lambda num_bullets: f"Write exactly {num_bullets} bullet points, such as: * This is a point.",
        parameters={"num_bullets": int},
    ),
    "detectable_format:constrained_response": Constraint(
        check=lambda answer: sum(answer.count(option) for option in _CONSTRAINED) == 1,
        describe=lambda: f"Answer with one of: {' / '.join(_CONSTRAINED)}",
    ),
    "detectable_format:number_highlighted_sections": Constraint(
        check=lambda answer, num_highlights: highlights(answer) >= num_highlights,
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
            len(capital_words(answer)), capital_relation, capital_frequency
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
_WORD = re.compile(r"\w+(?:['’.,-]\w+)*")
_SENTENCE_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’)\]*_]*+(?=\s|$)")
_BEFORE_NAMES = frozenset(("mr", "mrs", "ms", "dr", "prof", "e.g", "i.e", "vs", "cf"))
"""Abbreviations that never end a sentence."""
_ANYWHERE = frozenset(("etc", "inc", "ltd", "co", "jr", "sr", "dept", "approx", "a.m", "p.m", "u.s"))
"""Abbreviations that end a sentence only before a capital letter."""
_WRAPPED = re.compile(r"(?<![.!?…:\s])[ \t]*\n(?=[a-z])")
_BULLET = re.compile(r"^[^\S\n]*(?:[*+•-])\s+\S", re.MULTILINE)
_HIGHLIGHT = re.compile(r"(?<![*\w])(\*{1,2})(?!\s|\*)([^*\n]+?)(?<!\s)\1(?![*\w])")


def words_of(text: str) -> list[str]:
    """The words of a text; "don't", "well-known" and "3.5" are one word each."""
    return _WORD.findall(text)


def sentences(text: str) -> list[str]:
    """The sentences of a text, which end at `.`, `!` or `?` before white space, or with their line.

    Abbreviations such as "e.g.", initials and the numbers of list items do not end a sentence. A line that continues in
    small letters is part of the same sentence.
    """
    pieces = []
    for line in _WRAPPED.sub(" ", text).splitlines():
        start = 0
        for end in _SENTENCE_END.finditer(line):
            if not _is_abbreviation(line[start : end.start()], end.group(), line[end.end() :].lstrip()):
                pieces.append(line[start : end.end()])
                start = end.end()
        pieces.append(line[start:])
    return [sentence.strip() for sentence in pieces if words_of(sentence)]


def paragraphs_of(text: str, *, separator: str = r"\n\s*\n") -> list[str]:
    """The parts of a text between separators (a regular expression) that are not blank."""
    return [part.strip() for part in re.split(separator, text) if part.strip()]


def bullets(text: str) -> int:
    """Number of list items that start with `*`, `-`, `+` or a bullet character; a rule such as `***` is not an item."""
    return len(_BULLET.findall(text))


def highlights(text: str) -> int:
    """Number of sections in Markdown emphasis, `*one*` or `**one**`, that are not empty."""
    return len(_HIGHLIGHT.findall(text))


def count_phrase(text: str, phrase: str) -> int:
    """How often a phrase occurs as whole words, ignoring case and the kind of white space."""
    pieces = [re.escape(piece) for piece in phrase.split()]
    pattern = r"(?<![^\W_])" + r"\s+".join(pieces) + r"(?![^\W_])"  # `_word_` is a word in italics
    return len(re.findall(pattern, text, re.IGNORECASE)) if pieces else 0


def capital_words(text: str) -> list[str]:
    """The words in which all letters are capitals, and which have at least one letter."""
    return [word for word in words_of(text) if word.isupper()]


def compare(count: int, relation: str, threshold: int) -> bool:
    """Whether a count is in a relation to a threshold: `at least`, `less than`, `at most`, `more than` or `exactly`."""
    return RELATIONS[relation](count, threshold)


RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "at least": lambda count, threshold: count >= threshold,
    "less than": lambda count, threshold: count < threshold,
    "at most": lambda count, threshold: count <= threshold,
    "more than": lambda count, threshold: count > threshold,
    "exactly": lambda count, threshold: count == threshold,
}
"""Relations by their names in the data."""


def joined(items: Sequence[str]) -> str:
    """Items of a list in a sentence: `"a", "b" and "c"`."""
    quoted = [f'"{item}"' for item in items]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


def _is_abbreviation(before: str, mark: str, after: str) -> bool:
    """Whether the mark after a text belongs to an abbreviation, an initial or the number of a list item."""
    if not after or not before.strip() or mark.rstrip("\"'”’)]*_") != ".":
        return False
    last = before.split()[-1].lstrip("(\"'“‘[*_")
    is_initial = len(last) == 1 and last.isupper() and last != "I"
    is_item = before.strip() == last and last.isdigit()
    before_small = last.casefold() in _ANYWHERE and not after[0].isupper()
    return last.casefold() in _BEFORE_NAMES or is_initial or is_item or before_small
