"""Compares two answers: numbers exactly, lists element by element, formulas by their values at several points.

The rule is documented for users in `docs/math.md`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from enum import IntEnum
from typing import Any

import sympy

from rl_envs.math import asked, formulas
from rl_envs.math.asked import ANY_FORM, AskedForm, is_same_numeral, lacks_form
from rl_envs.math.formulas import (
    MULTIPLE,
    are_proportional,
    formula_of,
    has_form_of,
    has_same_value,
    is_verified,
    undone_arithmetic,
    value_of,
    with_parameter_of,
)
from rl_envs.math.lists import (
    EQUALS,
    ORDER,
    as_intervals,
    as_vector,
    both_signs,
    elements,
    in_order_of_names,
    in_parentheses,
    is_equation,
    is_named,
    kinds_agree,
    left_side,
    parts_of,
    stated,
    without_name,
    without_point_names,
    without_set_name,
    without_variable,
)
from rl_envs.math.notation import compact, has_text, normalize, plain, split_top, without_layout
from rl_envs.math.numbers import (
    PERCENT,
    REDUCTION,
    Number,
    Quantity,
    are_different,
    in_larger_unit,
    is_among,
    is_rounded,
    is_rounding_of,
    prime_powers,
    quantity,
    read_clock,
    read_number,
    read_numeral,
)
from rl_envs.math.words import (
    has_same_letters,
    has_same_words,
    is_same_choice,
    is_same_date,
    is_same_division,
    is_words,
    symbol_of,
)

LONGEST_ANSWER = 4000
"""Maximum length of an answer, in characters; a longer one is correct only if it equals the expected text."""
_UNION = r"\\cup(?![A-Za-z])"
_APPROXIMATELY = r"\\approx(?![A-Za-z])"
_DATE_OR_RANGE = re.compile(r"\d+(?:-\d+)+|\d+/\d+/\d+")
"""An expected answer that is not a difference or a quotient: `2024-01-05`, `3-4`, `1/5/2024`."""
_ONE_MATRIX = re.compile(r"[(\[]?\s*\\begin\{\w+\}(?:(?!\\begin).)*\\end\{\w+\}\s*[)\]]?")
_CONGRUENT = re.compile(
    r"(?:(.*?)\\equiv(?![A-Za-z]))?(.*?)(?:\\pmod\s*\{?\s*(\d+)\s*\}?|\(\s*(?:\\text\{\s*mod\s*\}|\\?mod(?![a-z]))\s*(\d+)\s*\))"
)
_LETTER = re.compile(r"\s*[A-Za-z]\s*")


class Comparison(IntEnum):
    """How an answer compares with the expected one. A list has the result of its worst element, the largest value."""

    EQUAL = 0
    UNEVALUATED = 1
    """It has unevaluated arithmetic that the expected answer does not have: `3 + 2` for 5."""
    UNREADABLE = 2
    """It is neither a formula that can be parsed nor the expected text."""
    DIFFERENT = 3


def equal_if(condition: bool) -> Comparison:
    """Equal or different."""
    return Comparison.EQUAL if condition else Comparison.DIFFERENT


def compare(
    expected: str,
    answer: str,
    *,
    allow_unevaluated: bool = False,
    form: AskedForm = ANY_FORM,
) -> Comparison:
    """Compare an answer with the expected one.

    Args:
        expected: a number, LaTeX with or without dollars, or words.
        answer: the model's answer, without the box.
        allow_unevaluated: accept `3 + 2` for 5.
        form: what the question says about the form of the answer.
    """
    expected, answer = without_layout(expected), without_layout(answer)
    if lacks_form(expected, answer, form):
        return Comparison.UNEVALUATED
    expected, answer = symbol_of(expected), symbol_of(answer)
    if is_same_numeral(expected, answer, form):
        return Comparison.EQUAL
    if is_words(expected):
        return equal_if(has_same_words(expected, answer, kind=form.kind, question=form.question))
    if plain(expected) == plain(answer) or (has_text(expected) and plain(expected).casefold() == plain(answer).casefold()):
        return Comparison.EQUAL
    is_same = is_same_choice(expected, answer, dict(form.choices)) or is_same_date(expected, answer)
    if is_same or is_same_division(expected, answer):
        return Comparison.EQUAL
    if len(answer) > LONGEST_ANSWER:
        return Comparison.UNREADABLE
    comparer = _Comparer(allow_unevaluated=allow_unevaluated, form=form)
    expected, answer = normalize(expected), _without_modulus(normalize(answer), form)
    sides = split_top(answer, EQUALS)
    if form.target and len(sides) == 2 and "=" not in expected and compact(sides[0]) == compact(normalize(form.target)):
        answer = sides[1]
    return comparer.of(expected, answer)


def _without_modulus(answer: str, form: AskedForm) -> str:
    r"""The residue 2 of `2 \pmod 7` or `2^{10} \equiv 2 \pmod 7`, if it is true and the question names this modulus."""
    match = _CONGRUENT.fullmatch(answer)
    if match is None or form.modulus is None or int(match.group(3) or match.group(4)) != form.modulus:
        return answer
    left, residue = match.group(1), match.group(2).strip()
    if left is None or _LETTER.fullmatch(left):
        return residue
    trees = formula_of(left), formula_of(residue)
    values: list[Any] = [None if tree is None else tree.doit() for tree in trees]
    is_true = all(getattr(value, "is_Integer", False) for value in values) and (values[0] - values[1]) % form.modulus == 0
    return residue if is_true else answer


class _Comparer:
    """Compares normalized texts."""

    def __init__(self, *, allow_unevaluated: bool, form: AskedForm = ANY_FORM) -> None:
        self._units, self._form = form.units, form
        self._are_roots = asked.asks_roots(form)
        self._is_exact = asked.asks_exact(form)
        self._allow_unevaluated = allow_unevaluated
        kinds = {REDUCTION: not form.lowest_terms, "function": form.is_polar}  # a polar form is `\\cos\\frac{\\pi}{4} + ...`
        self._allowed = frozenset(kind for kind, is_allowed in kinds.items() if is_allowed)

    def of(self, expected: str, answer: str) -> Comparison:
        """Compares any two answers. Lists and equations are split into scalars."""
        if not answer:
            return Comparison.UNREADABLE
        if compact(expected) == compact(answer):
            return Comparison.EQUAL
        if is_words(expected):
            return equal_if(has_same_words(expected, answer))
        if "\\emptyset" in (expected, answer) or _DATE_OR_RANGE.fullmatch(compact(expected)):
            return Comparison.DIFFERENT
        if (
            not ORDER.search(expected)
            and ORDER.search(answer)
            and elements(expected)[0] == ""
            and len(elements(expected)[1]) > 1
        ):
            return Comparison.DIFFERENT
        expected, answer = as_intervals(without_variable(expected), without_variable(answer))
        expected, answer = without_point_names(expected, answer)
        vector = as_vector(expected)
        if vector is not None and (given := as_vector(answer) or in_parentheses(answer)).startswith("("):
            found = self._collection(vector, given)
            return Comparison.DIFFERENT if found is None else found
        if any("\\begin" in text or ORDER.search(stated(text)) for text in (expected, answer)):
            return self._whole(expected, answer)
        for structured in (self._approximation, self._plus_minus, self._collection, self._equation, self._ratio):
            found = structured(expected, answer)
            if found is not None:
                return found
        return self._scalar(expected, answer)

    def _approximation(self, expected: str, answer: str) -> Comparison | None:
        r"""`\pi \approx 3.14` is an exact value and its correct rounding; it means the rounding only if that is expected."""
        gold, given = split_top(expected, _APPROXIMATELY), split_top(answer, _APPROXIMATELY)
        if len(gold) > 1:
            return min(self.of(side, answer) for side in gold if side)
        if len(given) == 1:
            return None
        exact, rounded = given[0], read_number(quantity(given[-1]).value)
        tree = formula_of(split_top(exact, EQUALS)[-1])
        value = None if tree is None else value_of(tree)
        if len(given) == 2 and value is None and is_named([exact or "x", given[1]]):
            return self.of(expected, given[1])  # `x \approx 3.14` states one value
        if len(given) > 2 or rounded is None or value is None:
            return Comparison.UNREADABLE
        if not is_rounding_of(value, rounded):
            return Comparison.DIFFERENT
        number = read_number(quantity(expected).value)
        is_decimal = number is not None and number.places is not None
        return self.of(expected, given[-1] if is_decimal else exact)

    def _plus_minus(self, expected: str, answer: str) -> Comparison | None:
        gold, given = both_signs(expected), both_signs(answer)
        return (
            None if gold is None and given is None else self._unordered(gold or parts_of(expected), given or parts_of(answer))
        )

    def _collection(self, expected: str, answer: str) -> Comparison | None:
        r"""Tuples, intervals, sets, unions and bare lists; None if both are single."""
        names = [text != without_set_name(text) for text in (expected, answer)]
        if any(names) and not all(names):
            expected, answer = without_set_name(expected), without_set_name(answer)
        unions = split_top(expected, _UNION), split_top(answer, _UNION)
        if len(unions[0]) > 1 and len(unions[1]) == 1 and elements(answer)[0] == "":
            unions = unions[0], elements(answer)[1]
        if max(map(len, unions)) > 1:
            return self._unordered(*unions)
        gold, given = elements(expected), elements(answer)
        if len(gold[1]) == 1 and len(given[1]) == 1 and "\\{" not in (gold[0][:2], given[0][:2]):
            return None
        if given[0] == "\\{\\}" and gold[0] == "()" and all(map(is_equation, given[1])):
            given = "", given[1]
        is_bare_interval = self._form.is_interval and (gold[0], given[0]) == ("()", "")
        is_bare_interval |= self._are_roots and (gold[0], given[0]) == ("", "()") and "=" not in expected
        if len(gold[1]) != len(given[1]) or not kinds_agree(gold[0], given[0]) or is_bare_interval:
            return Comparison.DIFFERENT
        has_sets = [any("\\{" in part for part in gold[1]), all(elements(part)[0] == "\\{\\}" for part in given[1])]
        if has_sets[0] != has_sets[1]:
            return Comparison.DIFFERENT  # a set of sets
        named = [any("=" in part for part in parts) for parts in (gold[1], given[1])]
        if named[0] != named[1]:
            values = in_order_of_names(gold[1] if named[0] else given[1], share_letter=gold[0] == "\\{\\}")
            if values is None or (gold[0] == "" and not asked.knows_names(given[1], self._form)):
                return Comparison.DIFFERENT
            compared = self._unordered if gold[0] == "\\{\\}" else self._ordered
            return compared(values, given[1]) if named[0] else compared(gold[1], values)
        is_ordered = (
            (self._form.in_order and gold[0] == "") or gold[0][:2] not in ("", "\\{") or given[0][:2] not in ("", "\\{")
        )
        return (self._ordered if is_ordered else self._unordered)(gold[1], given[1])

    def _ordered(self, expected: Sequence[str], answers: Sequence[str]) -> Comparison:
        return max(self.of(one, other) for one, other in zip(expected, answers, strict=True))

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
        gold, given = split_top(expected, EQUALS), split_top(answer, EQUALS)
        if len(gold) == 1 and len(given) == 1:
            return None
        if not all(gold) or not all(given):
            return Comparison.UNREADABLE
        are_named = is_named(gold) and is_named(given)
        if are_named and left_side(gold) != left_side(given):
            return Comparison.DIFFERENT
        if len(gold) == 1 and read_number(gold[0]) is not None and asked.is_other_variable(given[0], self._form):
            return Comparison.DIFFERENT
        if is_named(gold) and len(given) > 1 and not is_named(given) and self._same_equation(gold, given) is Comparison.EQUAL:
            return Comparison.EQUAL
        gold, given = list(without_name(gold)), list(without_name(given))
        if len(gold) == 1:
            return (self._with_multiples() if are_named else self)._stated_value(gold[0], given)
        return Comparison.DIFFERENT if len(given) == 1 else self._same_equation(gold, given)

    def _with_multiples(self) -> _Comparer:
        """Accepts `y = 5 - 2(x - 1)` for `y = 7 - 2x`, which is how a line through a point is written."""
        other = copy(self)
        other._allowed = self._allowed | {MULTIPLE}
        return other

    def _stated_value(self, expected: str, given: Sequence[str]) -> Comparison:
        """`3 + 2 = 5` means 5, if its sides are equal."""
        last = self.of(expected, given[-1])
        if last is Comparison.UNEVALUATED and len(given) > 1 and read_number(expected) is not None:
            last, given = self.of(expected, given[0]), given[::-1]  # `12 = 3 \times 4` states 12, too
        if last is Comparison.EQUAL and len(given) > 1:
            lenient = _Comparer(allow_unevaluated=True)
            return equal_if(all(lenient.of(given[-1], side) is Comparison.EQUAL for side in given[:-1]))
        return last

    def _same_equation(self, gold: Sequence[str], given: Sequence[str]) -> Comparison:
        if len(gold) != 2 or len(given) != 2:
            return equal_if(list(map(compact, gold)) == list(map(compact, given)))
        trees = [[formula_of(side) for side in sides] for sides in (gold, given)]
        if None in trees[1]:
            return Comparison.UNREADABLE
        if not all(isinstance(tree, sympy.Expr) for sides in trees for tree in sides):
            return Comparison.DIFFERENT
        differences = [left - right for left, right in trees]
        is_equal = are_proportional(*differences) and has_same_letters("=".join(gold), "=".join(given))
        return equal_if(is_equal)

    def _ratio(self, expected: str, answer: str) -> Comparison | None:
        """Ratios of three or more numbers, such as `1:2:3`; None for anything else."""
        gold, given = split_top(expected, ":"), split_top(answer, ":")
        if max(len(gold), len(given)) < 3 or read_clock(expected) is not None:
            return None
        numbers = [[number.value for number in map(read_number, parts) if number is not None] for parts in (gold, given)]
        if not len(gold) == len(given) == len(numbers[0]) == len(numbers[1]):
            return Comparison.DIFFERENT
        pairs = list(zip(*numbers, strict=True))
        found = equal_if(all(one * pairs[0][1] == other * pairs[0][0] for one, other in pairs) and all(numbers[1]))
        undone = frozenset({REDUCTION}) if abs(pairs[0][1]) > abs(pairs[0][0]) else frozenset[str]()
        return self._undone_or(found, undone)

    def _scalar(self, expected: str, answer: str) -> Comparison:
        if answer.startswith("[") and not expected.startswith("["):
            return Comparison.UNREADABLE
        clock = read_clock(expected)
        if clock is not None:
            given_clock = read_clock(answer) or (None if ":" in expected else read_clock(f"{answer}:00"))
            return equal_if(given_clock is not None and clock.is_same_time(given_clock))
        numerals = read_numeral(expected), read_numeral(answer)
        if numerals[0] is not None or (numerals[1] is not None and read_number(expected) is not None):
            return equal_if(numerals[0] == (numerals[1] or self._numeral(answer)))
        gold = quantity(expected)
        given = quantity(answer, read_letters=read_number(gold.value) is not None, expected=gold, asked=self._units or ())
        if gold.parts is not None and given.unit is None:
            return Comparison.DIFFERENT
        given = in_larger_unit(given, gold)
        is_unit_for_percent = (gold.is_percent and given.unit is not None) or (given.is_percent and gold.unit is not None)
        if is_unit_for_percent or are_different(gold.unit, given.unit) or not self._may_have(gold, given):
            return Comparison.DIFFERENT
        found = self._value(gold.value, given.value)
        if gold.is_percent == given.is_percent:
            return found
        return self._percent(gold.value, given.value, found, expected_is_percent=gold.is_percent)

    def _numeral(self, digits: str) -> tuple[str, int] | None:
        """Digits without a base, in the base that the question asks for."""
        return None if self._form.base is None else read_numeral(f"{digits}_{self._form.base}")

    def _may_have(self, gold: Quantity, given: Quantity) -> bool:
        """Whether the answer may have its unit. A single letter is a choice, without a unit."""
        if given.unit is None or gold.unit is not None:
            return True
        return not gold.value.isalpha() and (self._units is None or is_among(given.unit, self._units))

    def _percent(self, expected: str, answer: str, as_unit: Comparison, *, expected_is_percent: bool) -> Comparison:
        """If only one of them has a percent sign, it is an optional unit (50 for 50%) or a factor of 1/100 (0.5)."""
        gold, given = read_number(expected), read_number(answer)
        if gold is None or given is None:
            return Comparison.DIFFERENT if as_unit is Comparison.EQUAL else as_unit
        asks_percent = self._units is None or PERCENT in self._units
        if as_unit is Comparison.EQUAL and (expected_is_percent or (asks_percent and abs(gold.value) > 1)):
            return Comparison.EQUAL
        if expected_is_percent and asked.asks_percent_form(self._form):
            return Comparison.DIFFERENT  # `\frac{1}{2}` may be the question
        if given.undone - gold.undone and not self._allow_unevaluated:
            return Comparison.UNEVALUATED
        factor = 100 if expected_is_percent else sympy.Rational(1, 100)
        return equal_if(given.value * factor == gold.value)

    def _value(self, expected: str, answer: str) -> Comparison:
        if self._form.primes and (primes := prime_powers(expected)) is not None:
            return equal_if(primes == prime_powers(answer))
        gold, given = read_number(expected), read_number(answer)
        if gold is not None and given is not None:
            is_equal = gold.value == given.value
            is_equal |= not self._is_exact and (is_rounded(given.value, gold) or is_rounded(gold.value, given))
            if gold.places and REDUCTION in given.undone and asked.is_of_question(answer, self._form):
                return Comparison.UNEVALUATED  # `150/20` for 7.5 metres per second
            return self._undone_or(equal_if(is_equal), given.undone - gold.undone)
        return self._formula(expected, answer, gold, given)

    def _formula(self, expected: str, answer: str, gold: Number | None, given: Number | None) -> Comparison:
        answer_tree = formulas.tree_of(answer, given)
        if answer_tree is None:
            return Comparison.UNREADABLE
        expected_tree = formulas.tree_of(expected, gold)
        if expected_tree is None:
            return Comparison.DIFFERENT
        undone = given.undone if given else undone_arithmetic(answer, answer_tree)
        undone -= gold.undone if gold else undone_arithmetic(expected, expected_tree)
        if gold is not None and gold.places is None and given is None and answer_tree.atoms(sympy.log, sympy.Function):
            undone |= {"value"}  # `\frac{\ln 32}{\ln 2}` for 5
        if undone - self._allowed and not self._allow_unevaluated:
            return Comparison.UNEVALUATED
        if not has_same_letters(expected, answer):
            return Comparison.DIFFERENT
        if not isinstance(expected_tree, sympy.Expr) or not isinstance(answer_tree, sympy.Expr):
            return equal_if(is_verified(expected_tree, answer_tree))
        answer_tree = with_parameter_of(expected_tree, answer_tree)
        if self._is_exact:
            gold = given = None  # no rounding
        found = equal_if(has_same_value(expected_tree, answer_tree, gold, given))
        if found is Comparison.EQUAL and not self._has_form(expected_tree, answer_tree):
            return self._undone_or(found, frozenset({"form"}))
        return found

    def _has_form(self, expected: Any, answer: Any) -> bool:
        has_more_variables = bool(answer.free_symbols - expected.free_symbols)
        if self._form.is_free and not has_more_variables:
            return True
        return not has_more_variables and has_form_of(
            expected,
            answer,
            lowest_terms=REDUCTION not in self._allowed,
            factored=asked.asks_factors(self._form),
        )

    def _whole(self, expected: str, answer: str) -> Comparison:
        """Inequalities, sets and matrices, compared by math-verify."""
        if "\\begin" in expected + answer:
            names = {left_side(sides) for sides in (split_top(text, EQUALS) for text in (expected, answer)) if is_named(sides)}
            if len(names) > 1:
                return Comparison.DIFFERENT
            expected, answer = stated(expected), stated(answer)
        trees = formula_of(expected), formula_of(answer)
        if trees[1] is None:
            return Comparison.UNREADABLE
        if trees[0] is None:
            return Comparison.DIFFERENT
        undone = undone_arithmetic(answer, trees[1]) - undone_arithmetic(expected, trees[0])
        if _ONE_MATRIX.fullmatch(expected) and not _ONE_MATRIX.fullmatch(answer):
            undone |= {"matrix"}
        return self._undone_or(equal_if(has_same_letters(expected, answer) and is_verified(*trees)), undone)

    def _undone_or(self, found: Comparison, undone: frozenset[str]) -> Comparison:
        return Comparison.UNEVALUATED if undone - self._allowed and not self._allow_unevaluated else found
