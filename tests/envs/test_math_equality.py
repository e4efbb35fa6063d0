"""Laws of the comparison of answers, on generated numbers: equal values are equal however they are written, others are not."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rl_envs.math.asked import AskedForm, needs_lowest_terms
from rl_envs.math.comparison import Comparison, compare

FORMS = (r"\frac{{{0}}}{{{1}}}", r"\dfrac{{{0}}}{{{1}}}", "{0}/{1}", "${0}/{1}$", r"\frac {{ {0} }} {{ {1} }}")
WHOLE = st.integers(-999, 999)
NOT_WHOLE = st.fractions(min_value=-50, max_value=50, max_denominator=60).filter(lambda value: value.denominator > 1)
few = settings(max_examples=30, deadline=None)


def equal(expected, answer, **options):
    return compare(str(expected), str(answer), **options) is Comparison.EQUAL


@few
@given(NOT_WHOLE, st.integers(1, 30), st.sampled_from(FORMS))
def test_a_fraction_equals_its_multiples_in_every_form_unless_lowest_terms_are_required(value, factor, form):
    answer = form.format(value.numerator * factor, value.denominator * factor)
    assert equal(value, answer)
    in_lowest_terms = compare(str(value), answer, form=AskedForm(lowest_terms=True))
    assert in_lowest_terms is (Comparison.EQUAL if factor == 1 else Comparison.UNEVALUATED)
    assert equal(answer, value)  # also if the expected answer is not in lowest terms


@few
@given(NOT_WHOLE, NOT_WHOLE, st.integers(1, 30), st.sampled_from(FORMS))
def test_fractions_of_other_values_are_wrong(value, other, factor, form):
    assume(value != other)
    assert not equal(value, form.format(other.numerator * factor, other.denominator * factor))


@few
@given(NOT_WHOLE, st.integers(1, 9), st.sampled_from([("-", "", ""), ("", "-", ""), ("", "", "-"), ("-", "-", "-")]))
def test_one_sign_anywhere_in_a_fraction_makes_it_negative(value, factor, signs):
    above, below = abs(value.numerator) * factor, value.denominator * factor
    answer = rf"{signs[0]}\frac{{{signs[1]}{above}}}{{{signs[2]}{below}}}"
    assert equal(-abs(value), answer)
    assert not equal(abs(value), answer)


@few
@given(st.integers(1, 99), NOT_WHOLE, st.integers(1, 9), st.booleans())
def test_a_mixed_number_equals_its_improper_fraction(whole, value, factor, negative):
    part = abs(value) % 1
    above, below = part.numerator * factor, part.denominator * factor
    sign, expected = ("-", -(whole + part)) if negative else ("", whole + part)
    assert equal(expected, rf"{sign}{whole}\frac{{{above}}}{{{below}}}")
    assert equal(expected, f"{sign}{whole} {above}/{below}")
    assert not equal(expected, rf"{sign}{whole + 1}\frac{{{above}}}{{{below}}}")


@few
@given(st.integers(-99_999, 99_999), st.integers(1, 4))
def test_a_decimal_equals_its_fraction_and_its_percentage(digits, places):
    value = Fraction(digits, 10**places)
    decimal = f"{'-' if digits < 0 else ''}{abs(digits) // 10**places}.{abs(digits) % 10**places:0{places}d}"
    assert equal(value, decimal)
    assert equal(decimal, f"{decimal}0")
    assert not equal(value + Fraction(1, 10**places), decimal)
    percent = Fraction(digits, 10 ** (places - 1)) * 10
    if percent.denominator == 1:
        assert equal(decimal, rf"{percent}\%")


@few
@given(st.integers(1000, 10**12), st.sampled_from([",", "{,}", r"\,", r"\!,", r",\! ", "{,} ", r"\, ", " "]))
def test_thousands_may_be_separated(number, separator):
    assert equal(number, f"{number:,}".replace(",", separator))
    assert not equal(number + 1, f"{number:,}".replace(",", separator))


def test_a_number_with_latex_separators_is_not_a_list():
    assert not equal(r"11,\! 111,\! 100", "(11, 111, 100)")
    assert not equal("(11, 111, 100)", "11111100")


@few
@given(st.lists(WHOLE, min_size=2, max_size=5), st.randoms())
def test_order_matters_in_tuples_and_not_in_sets(numbers, random):
    shuffled = list(numbers)
    random.shuffle(shuffled)
    first, second = ", ".join(map(str, numbers)), ",".join(map(str, shuffled))
    assert equal(rf"\{{{first}\}}", rf"\{{{second}\}}")
    assert equal(f"({first})", f"({second})") is (numbers == shuffled)
    assert not equal(rf"\{{{first}\}}", rf"\{{{second}, 1000\}}")
    assert not equal(f"({first})", f"({first}, 1000)")


@few
@given(WHOLE, st.integers(1, 99), st.sampled_from(["()", "[]", "(]", "[)"]), st.sampled_from(["()", "[]", "(]", "[)"]))
def test_the_ends_of_intervals_must_agree(start, length, one, other):
    ends = f"{start}, {start + length}"
    assert equal(f"{one[0]}{ends}{one[1]}", rf"\left{other[0]}{ends}\right{other[1]}") is (one == other)


@few
@given(
    WHOLE,
    st.sampled_from(
        [r"\text{{ {} or {}}}", r"{} \text{{ or }} {}", r"{} \text{{ maybe {}}}", r"{} \text{{ but not {}}}", "{}, {}"]
    ),
)
def test_a_second_number_is_another_answer_and_not_a_unit(number, form):
    assert not equal(number, form.format(number, number + 1))
    assert not equal(number, form.format(number + 1, number))


@pytest.mark.parametrize("answer", [r"12 \text{ is wrong}", r"12 \text{ or more}", r"12 \text{cm or 13 cm}", r"12 \text{ 13}"])
def test_a_text_other_than_a_unit_does_not_belong_to_a_number(answer):
    assert not equal(12, answer)


@pytest.mark.parametrize(
    "answer", [r"12 \text{ cm}^2", r"12 \text{ cm2}", "12 square meters", r"12 \text{ miles per hour}", "12 apples"]
)
def test_units_after_a_number_are_still_read(answer):
    assert equal(12, answer)


@pytest.mark.parametrize(
    ("question", "asked"),
    [
        ("What is the chance of heads?", False),
        ("The price is reduced by 3/4 of a dollar.", False),
        ("Simplify your answer.", True),
        ("Write 0.5 in lowest terms.", True),
        ("Find $m + n$ for relatively prime $m$ and $n$.", True),
        ("Express it as a common fraction.", True),
        ("What is 2/4 as a decimal?", True),
        (r"What is \frac{6}{8} of a meter?", True),
        ("Compute 10/2 + 1/2.", False),
        ("Divide 1/0 by 3.", False),
    ],
)
def test_a_question_asks_for_lowest_terms_in_words_or_by_a_fraction_to_reduce(question, asked):
    assert needs_lowest_terms(question) is asked


def test_repeating_decimals_and_small_numbers_are_exact():
    third, small = r"0.\overline{3}", r"6.67 \times 10^{-11}"
    equal = [(third, r"\frac{1}{3}"), (r"\frac{1}{3}", third), (r"2.\overline{45}", r"\frac{27}{11}")]
    different = [
        (third, "0"),
        (r"2.\overline{45}", "2"),
        ("0.0000001", "0.0000004"),
        (small, "0.0"),
        (small, r"1.38 \times 10^{-23}"),
    ]
    assert [compare(*pair) for pair in equal] == [Comparison.EQUAL] * len(equal)
    assert [compare(*pair) for pair in different] == [Comparison.DIFFERENT] * len(different)
