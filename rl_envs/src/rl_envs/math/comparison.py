r"""Compares two answers: numbers exactly, lists element by element, formulas by their values at several points.

The rule is documented for users in `docs/math.md`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import sympy

from rl_envs.math.formulas import are_proportional, formula_of, has_same_value, is_verified
from rl_envs.math.notation import brackets, choice, compact, is_words, normalize, plain, split_top
from rl_envs.math.number_literals import REDUCTION, Number, is_rounded, read_number, read_numeral
from rl_envs.math.unevaluated import more_undone, undone_arithmetic
from rl_envs.math.units import are_different, quantity

LONGEST_ANSWER = 4000
"""Maximum length of an answer, in characters; a longer one is correct only if it equals the expected text."""
_SEPARATORS = r"[,;]"
_UNION = r"\\cup(?![A-Za-z])"
_EQUALS = r"(?<![<>!:])=(?!=)|\\approx(?![A-Za-z])"
_ORDER = re.compile(r"[<>]|\\(?:le|ge|lt|gt|ne)(?![A-Za-z])")
_MEMBER = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?\s*\\in(?![A-Za-z])")
_LEFT_SIDE = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?'*(?:\s*\([A-Za-z](?:\s*,\s*[A-Za-z])*\))?|\\text\{[^{}]*\}(?:\s*\w+)?")


class Comparison(IntEnum):
    """How an answer compares with the expected one. A list has the result of its worst element, the largest value."""

    EQUAL = 0
    UNEVALUATED = 1
    """It has unevaluated arithmetic that the expected answer does not have: `3 + 2` for 5."""
    UNREADABLE = 2
    """It is neither a formula that can be parsed nor the expected text."""
    DIFFERENT = 3


def compare(expected: str, answer: str, *, allow_unevaluated: bool = False, lowest_terms: bool = False) -> Comparison:
    """Compare an answer with the expected one.

    Args:
        expected: a number, LaTeX with or without dollars, or words.
        answer: the model's answer, without the box.
        allow_unevaluated: accept `3 + 2` for 5.
        lowest_terms: whether `2/4` for 1/2 is unevaluated too.
    """
    has_same_letters = plain(expected).casefold() == plain(answer).casefold()
    if is_words(expected):
        return _equal_if(has_same_letters)
    if has_same_letters and "\\text" in expected:
        return Comparison.EQUAL
    if choice(expected) is not None and choice(expected) == choice(answer):
        return Comparison.EQUAL
    if plain(expected) == plain(answer):
        return Comparison.EQUAL
    if len(answer) > LONGEST_ANSWER:
        return Comparison.UNREADABLE
    return _Comparer(allow_unevaluated=allow_unevaluated, lowest_terms=lowest_terms).of(normalize(expected), normalize(answer))


class _Comparer:
    """Compares normalized texts."""

    def __init__(self, *, allow_unevaluated: bool, lowest_terms: bool = False) -> None:
        self._allow_unevaluated = allow_unevaluated
        self._allowed = frozenset() if lowest_terms else frozenset({REDUCTION})

    def of(self, expected: str, answer: str) -> Comparison:
        """Compares any two answers. Lists and equations are split into scalars."""
        if not answer:
            return Comparison.UNREADABLE
        if compact(expected) == compact(answer):
            return Comparison.EQUAL
        expected, answer = _without_membership(expected), _without_membership(answer)
        if "\\begin" in expected or "\\begin" in answer or _ORDER.search(expected) or _ORDER.search(answer):
            return self._whole(expected, answer)
        for structured in (self._plus_minus, self._collection, self._equation):
            found = structured(expected, answer)
            if found is not None:
                return found
        return self._scalar(expected, answer)

    def _plus_minus(self, expected: str, answer: str) -> Comparison | None:
        if not any(text.count("\\pm") == 1 for text in (expected, answer)):
            return None
        return self._unordered(_both_signs(expected), _both_signs(answer))

    def _collection(self, expected: str, answer: str) -> Comparison | None:
        r"""Tuples, intervals, sets, unions and bare lists; None if both are single."""
        unions = split_top(expected, _UNION), split_top(answer, _UNION)
        if max(map(len, unions)) > 1:
            return self._unordered(*unions)
        gold, given = _elements(expected), _elements(answer)
        if len(gold[1]) == 1 and len(given[1]) == 1 and "\\{" not in (gold[0][:2], given[0][:2]):
            return None
        if len(gold[1]) != len(given[1]):
            return Comparison.DIFFERENT
        if not _kinds_agree(gold[0], given[0]):
            return Comparison.DIFFERENT
        is_ordered = gold[0][:2] not in ("", "\\{") or given[0][:2] not in ("", "\\{")
        if is_ordered or _only_one_has_equations(gold[1], given[1]):
            return max(self.of(one, other) for one, other in zip(gold[1], given[1], strict=True))
        return self._unordered(gold[1], given[1])

    def _unordered(self, expected: Sequence[str], answers: Sequence[str]) -> Comparison:
        if len(expected) != len(answers):
            return Comparison.DIFFERENT
        left, worst = list(answers), Comparison.EQUAL
        for one in expected:
            found = [self.of(one, other) for other in left]
            best = min(found)
            worst = max(worst, best)
            left.pop(found.index(best))
        return worst

    def _equation(self, expected: str, answer: str) -> Comparison | None:
        gold, given = split_top(expected, _EQUALS), split_top(answer, _EQUALS)
        if len(gold) == 1 and len(given) == 1:
            return None
        if not all(gold) or not all(given):
            return Comparison.UNREADABLE
        if _is_named(gold) and _is_named(given) and _left_side(gold) != _left_side(given):
            return Comparison.DIFFERENT
        if _is_named(gold) and len(given) > 1 and not _is_named(given) and self._same_equation(gold, given) is Comparison.EQUAL:
            return Comparison.EQUAL
        gold, given = list(_without_name(gold)), list(_without_name(given))
        if len(gold) == 1:
            return self._stated_value(gold[0], given, is_rounded="\\approx" in answer)
        if len(given) == 1:
            return Comparison.DIFFERENT if "\\approx" not in expected else min(self.of(one, given[0]) for one in gold)
        return self._same_equation(gold, given)

    def _stated_value(self, expected: str, given: Sequence[str], *, is_rounded: bool) -> Comparison:
        r"""`3 + 2 = 5` means 5, if its sides are equal; `\pi \approx 3.14` means either side."""
        if is_rounded:
            return min(self.of(expected, given[0]), self.of(expected, given[-1]))
        last = self.of(expected, given[-1])
        if last is Comparison.EQUAL and len(given) > 1:
            lenient = _Comparer(allow_unevaluated=True)
            return _equal_if(all(lenient.of(given[-1], side) is Comparison.EQUAL for side in given[:-1]))
        return last

    def _same_equation(self, gold: Sequence[str], given: Sequence[str]) -> Comparison:
        if len(gold) != 2 or len(given) != 2:
            return _equal_if(list(map(compact, gold)) == list(map(compact, given)))
        trees = [[formula_of(side) for side in sides] for sides in (gold, given)]
        if None in trees[1]:
            return Comparison.UNREADABLE
        if None in trees[0]:
            return Comparison.DIFFERENT
        differences = [left - right for left, right in trees]
        return _equal_if(are_proportional(*differences))

    def _scalar(self, expected: str, answer: str) -> Comparison:
        numerals = read_numeral(expected), read_numeral(answer)
        if numerals[0] is not None or (numerals[1] is not None and read_number(expected) is not None):
            return _equal_if(numerals[0] == numerals[1])
        gold = quantity(expected, read_letters=False)
        is_number = read_number(gold.value) is not None
        given = quantity(answer, read_letters=is_number)
        if are_different(gold.unit, given.unit):
            return Comparison.DIFFERENT
        found = self._value(gold.value, given.value)
        if gold.is_percent == given.is_percent:
            return found
        return self._percent(gold.value, given.value, found, expected_is_percent=gold.is_percent)

    def _percent(self, expected: str, answer: str, as_unit: Comparison, *, expected_is_percent: bool) -> Comparison:
        """If only one of them has a percent sign, it is an optional unit (50 for 50%) or a factor of 1/100 (0.5)."""
        gold, given = read_number(expected), read_number(answer)
        if gold is None or given is None:
            return Comparison.DIFFERENT if as_unit is Comparison.EQUAL else as_unit
        if as_unit is Comparison.EQUAL and (expected_is_percent or abs(gold.value) > 1):
            return Comparison.EQUAL
        factor = 100 if expected_is_percent else sympy.Rational(1, 100)
        return self._undone_or(_equal_if(given.value * factor == gold.value), given.undone - gold.undone)

    def _value(self, expected: str, answer: str) -> Comparison:
        gold, given = read_number(expected), read_number(answer)
        if gold is not None and given is not None:
            is_equal = gold.value == given.value or is_rounded(given.value, gold) or is_rounded(gold.value, given)
            return self._undone_or(_equal_if(is_equal), given.undone - gold.undone)
        return self._formula(expected, answer, gold, given)

    def _formula(self, expected: str, answer: str, gold: Number | None, given: Number | None) -> Comparison:
        answer_tree = _as_tree(answer, given)
        if answer_tree is None:
            return Comparison.UNREADABLE
        expected_tree = _as_tree(expected, gold)
        if expected_tree is None:
            return Comparison.DIFFERENT
        undone = more_undone(
            given.undone if given else undone_arithmetic(answer, answer_tree),
            gold.undone if gold else undone_arithmetic(expected, expected_tree),
        )
        if undone - self._allowed and not self._allow_unevaluated:
            return Comparison.UNEVALUATED
        if not isinstance(expected_tree, sympy.Expr) or not isinstance(answer_tree, sympy.Expr):
            return _equal_if(is_verified(expected_tree, answer_tree))
        return _equal_if(has_same_value(expected_tree, answer_tree, gold, given))

    def _whole(self, expected: str, answer: str) -> Comparison:
        """Inequalities, sets and matrices, compared by math-verify."""
        trees = formula_of(expected), formula_of(answer)
        if trees[1] is None:
            return Comparison.UNREADABLE
        if trees[0] is None:
            return Comparison.DIFFERENT
        undone = more_undone(undone_arithmetic(answer, trees[1]), undone_arithmetic(expected, trees[0]))
        return self._undone_or(_equal_if(is_verified(*trees)), undone)

    def _undone_or(self, found: Comparison, undone: frozenset[str]) -> Comparison:
        return Comparison.UNEVALUATED if undone - self._allowed and not self._allow_unevaluated else found


def _equal_if(condition: bool) -> Comparison:
    return Comparison.EQUAL if condition else Comparison.DIFFERENT


def _without_membership(text: str) -> str:
    r"""`x \in [0, 1)` without `x \in`."""
    found = _MEMBER.match(text)
    return text if found is None else text[found.end() :].strip()


def _both_signs(text: str) -> list[str]:
    if text.count("\\pm") == 1:
        return [text.replace("\\pm", sign).strip().removeprefix("+").strip() for sign in "+-"]
    opening, elements = _elements(text)
    return elements if opening in ("", "\\{\\}") else [text]


def _elements(text: str) -> tuple[str, list[str]]:
    r"""The pair of brackets (`()`, `[)`, `\{\}`, empty for none) and the elements; one element if it is not a list."""
    if read_number(quantity(text, read_letters=False).value) is not None:
        return "", [text]
    enclosed = brackets(text)
    if enclosed is not None:
        opening, content, closing = enclosed
        parts = [part for part in split_top(content, _SEPARATORS) if part]
        is_set = opening == "\\{" and closing == "\\}"
        if is_set or len(parts) > 1:
            return opening + closing, parts
        return "", [text]
    parts = [part for part in split_top(text, _SEPARATORS) if part]
    return "", _with_shared_name(parts) or [text]


def _with_shared_name(parts: list[str]) -> list[str]:
    """`x = 1, 2` and `x = 1, x = 2` become `1, 2`: a name that all elements share is dropped."""
    if len(parts) < 2:
        return parts
    sides = [split_top(part, _EQUALS) for part in parts]
    names = {_left_side(side) for side in sides if _is_named(side)}
    if len(names) != 1 or not _is_named(sides[0]):
        return parts
    return [
        _without_name(side)[0] if len(side) == 2 and _is_named(side) else part for side, part in zip(sides, parts, strict=True)
    ]


def _kinds_agree(expected: str, answer: str) -> bool:
    """Whether the brackets are interchangeable: only a bare list and a tuple or set are, in both directions."""
    if expected == answer:
        return True
    return "" in (expected, answer) and {expected, answer} <= {"", "()", "\\{\\}"}


def _only_one_has_equations(expected: Sequence[str], answers: Sequence[str]) -> bool:
    return any("=" in part for part in expected) != any("=" in part for part in answers)


def _is_named(sides: Sequence[str]) -> bool:
    return len(sides) > 1 and _LEFT_SIDE.fullmatch(sides[0]) is not None


def _left_side(sides: Sequence[str]) -> str:
    return compact(sides[0])


def _without_name(sides: Sequence[str]) -> Sequence[str]:
    return sides[1:] if _is_named(sides) else sides


def _as_tree(text: str, number: Number | None) -> Any:
    return formula_of(text) if number is None else sympy.Rational(number.value.numerator, number.value.denominator)
