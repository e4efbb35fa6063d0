r"""An answer with two values, another quantity, or the letters of the expected answer in another order is never rewarded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rl_envs.math.answers import grade_answer
from rl_envs.math.asked import AskedForm, asked_form, units_of_answer
from rl_envs.math.comparison import Comparison, compare

few = settings(max_examples=60, deadline=None)
CORPUS = Path(__file__).parent / "math_corpus"


def rewarded(expected, answer, **options):
    return grade_answer(expected, rf"\boxed{{{answer}}}", require_box=True, **options).is_correct


NOT_REWARDED = {
    "42": r"""
        41 \approx 42; 42 \pm 1; \pm 42; 41-42; 41--42; 41 to 42; 42 (or 41); 42 (41); 42 / 41; 42 41; 42 \\ 41; 42 \quad 41
        42 \le 43; 41 < 42; x \ge 42; \ge 42; \ne 42; x \ne 42; \not= 42; \text{not } 42; \lnot 42; x \le 42; 42 \ne 41
        \sim 42; 42 \sim 41; 42 \to 41; 41 \Rightarrow 42; 42 \equiv 41; 41 \equiv 42; 42 \cong 41; 42≅41; 41≒42; 41 \lor 42
        42 \mid 84; 42 | 41; 42 \& 41; x=42, y=41; x = 42, 41; 42 = 41; 41 = 42; x = 41 = 42; 42.4 \approx 42
        42 \text{ thousand}; 42 hundred; 42 dozen; 42 pairs; 42 squared; 42 doubled; 42 halves; 42 tenths; 42 percent of 3
        42 plus one; 42 times two; 42 over two; 42k; 42 M; 42 below zero; 42 base eight; 42 factorial; 42 negative; 42nd
        42 approximately; 42 \text{ wrong}; 42 \text{ remainder } 3; 42 R 3; 42 \text{ mod } 5; 42^{\text{nd}}; 42 vs; 42 hes
        42 \text{ cm} + 1; \text{41 or 42}; \text{42, 41}; \{41, 42\}; (41, 42); [41, 42]; \max(41, 42); \ge 42
        \begin{pmatrix} 42 & 41 \end{pmatrix}
        \overline{42}; 42_{41}; 42_x; 42'; 42^*; 42!; 42...; \ldots 42; 42 \% 41; 42 ? 41; 6 \cdot 7
        42 + 0x; |42|; 1 \times 42; 42 \cdot 1; x - x + 42
    """,
    "5": r"5 million; 5 dozen; 5 times two; five or six; 5 x; 5 n; 5 \text{ fifths}; \$5 or \$6; 5 cm or 6 cm; 5^2 \text{ cm}",
    "3": r"3\text{ fourths}; 3 \text{ quarters}; 3 \text{ and } \frac{1}{2}",
    "41": r"41 \approx 42",
    "42.4": r"42.4 \approx 42; 42",
    r"\pi": r"\pi \approx 3.2; 3.14 \approx \pi; \pi \approx 3.14 \approx 3",
    "3.14": r"e \approx 3.14; 3 \approx 3.14",
    r"\frac{1}{2}": r"\frac{1}{2} \approx \frac{1}{3}; \frac{1}{3} \equiv \frac{1}{2}; 0.5 or 0.6",
    "1": r"\sin^2 x + \cos^2 x; 1^{42}; 1 \text{ st}",
    r"5 \text{ cm}": r"5 apples; 5 \text{ cm}^2; 5 m; 5 s; 6",
    "2024-01-05": "2024-05-01; 2018",
    "2/4/2024": "1/2/2024",
    "3-4": "4-5; -1",
    r"x < 1 \text{ or } x > 4": r"x < 1 \text{ and } x > 4; 1 < x < 4; x < 1",
    "2 < x < 5": r"x > 2 \text{ or } x < 5; x > 2 \text{ and } x > 5; x > 2 \text{ and } y < 5; x > 2",
    "5 marbles": "5 markers; marbles 5; 5 march",
    "5 apples": r"5 pears; 5 cm; 5 apples and 1 pear",
    "14 zebras": "14 cm; 14 lions; 15 zebras",
    r"5 \text{ million}": "5; 5 thousand; 5 dollars",
    "5000000": r"5\text{ thousand}; 5; 50 \text{ million}",
    r"\$5": r"5 cents; €5; 5 euros; 5\%; 5 \text{ percent}",
    r"5\%": r"\$5; 5 dollars; 5 \text{ cm}; 5^\circ",
    r"5 \text{ km}": r"5\%; 5^\circ",
    r"90^\circ": r"90 \text{ radians}; 90 \text{ cm}",
    "HTH": r"HHT; H^2T; \text{HHT}; H \cdot T",
    "CAB": "ABC; A*C*B",
    "cat": "act; c*t*a",
    "AB": "BA",
    r"\{HHT, THH\}": r"\{HTH, HHT\}",
    r"\angle ABC": r"\angle CAB",
    "(2, 3)": "y=2, x=3; (3, 2); (y, x) = (2, 3); [2, 3]; b=2, a=3; x=2, x=3; x=3, y=2",
    "2, 3": "y=2, x=3; 2, 4; 2, 3, 3",
    "(1, 2, 3)": "z=1, y=2, x=3",
    "2:30": r"5:75; 4:60; 1:15; 2:31; \frac{1}{15}; 2.5",
    "12:30 pm": "12:30 am; 0:30; 1:30 pm",
    "3:15": "1:5; 3:15:01",
    "1:2:3": "1:3:2; 1:2; 2:4:5; 0:0:0",
    "[2,5)": r"2 < x < 5; 2 \le x \le 5; 2 \le x; x < 5; 5 \le x < 2; [2,5]; 2 \le x > 5; x \ge 2, x < 5 or x = 7",
    r"(-\infty, 5)": r"x \le 5; x > 5; 5 < x",
    "x > 3": r"x < 3; y > 3; x \ge 3; x > 3 or x < 2; x = 3; 3",
    r"(-\infty,-1) \cup (1,\infty)": r"-1 < x < 1; x < -1; x \le -1 \text{ or } x \ge 1",
    r"\emptyset": r"\{0\}; \{\emptyset\}; 0; \text{undefined}",
    r"\{\}": r"\{1\}",
    r"\text{undefined}": r"0; \emptyset; \infty",
    "A": r"1A; A apples; A \text{ apples}; A or B; A, B; AB; (A)(B); (A) or (B); (A) 5 or 6; (A) 5, (B)",
    "June 20": "June 21; July 20; 20",
    "1.234": "1,234",
    "3.5": "3,5",
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}": r"\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}",
    "x^2 + 1": "y^2 + 1",
    "x = 5": "x = 5, y = 6; y = 5; x = 5 or 6",
    "(2x - 1)(3x + 4)": r"""
        x(6x+5) - 4; -4 + x(6x + 5); 6x^2 + 5x - 4; (6x^2+5x-4)^1; (6x^2+5x-4)^{1}; 6x^2 + x(5) - 4; 2x(3x+4) - (3x+4)
        \frac{(6x^2+5x-4)(x+1)}{x+1}; x(6x + 5 - \frac{4}{x}); (6x^2+5x-4)(\sin^2 x + \cos^2 x); (6x^2+5x-4) \cdot \frac{x}{x}
        -(4 - 5x - 6x^2)
    """,
    "(x-1)(x+1)(x+2)": "(x^2-1)(x+2); x(x+1)(x+2) - (x+1)(x+2)",
    "x(x-3)(x+3)": "x(x^2-9); x^3 - 9x",
    "(x-2)^2 + 3": "x^2 - 4x + 7; x(x-4) + 7; (x-2)(x-2) + 4",
    "4n - 1": "3 + 4(n-1); 4(n-1) + 3; 2(2n - 1) + 1; 4n + 2(1) - 3",
    r"4\sqrt{2} - 1": r"3 + 4(\sqrt{2} - 1)",
    r"\frac{x+3}{2}": r"1 + \frac{x+1}{2}",
    "-2, 0, 2": r"0, \pm 3; \pm 2; 0, \pm 2, 2; (0, \pm 2)",
    r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}": r"""
        A^T = \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}; 2A = \begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}
        A = B = \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
    """,
    r"A = \begin{pmatrix} 1 & 3 \end{pmatrix}": r"B = \begin{pmatrix} 1 & 3 \end{pmatrix}",
    "39": r"\text{Answer: not } 39; \text{Answer: } 39, 40; \text{The answer is not } 39; \text{Answer } 39; 3\phantom{9}",
    r"\$60": "EUR 60; GBP 60; USD 61; USD60 60",
    "(x-2)^2 - 1": "(x-3)(x-1); x^2 - 4x + 3",
    "x + 1": r"\frac{x^2-1}{x-1}; \frac{x(x+1)}{x}; (x+1)(\sin^2 x + \cos^2 x); e^{\ln(x+1)}; \sqrt{(x+1)^2}",
    r"\frac{3}{7}": r"""
        P(\text{red}) = \frac{4}{7}; 1 - P(\text{red}) = \frac{3}{7}; P(A) = P(B) = \frac{4}{7}; P(A) + P(B) = \frac{3}{7}
    """,
    "0": "x(x + 1) = 0; x(2) = 0; f(x) + 1 = 0; 2P(A) = 0",
    "4": "x^2 = 4; 2x = 4; x(2) = 4; f(2) = 4 = 5",
    "x^2": "f(x+1) = x^2; f(2) = x^2 + 1",
    "(3, 6)": "P(6, 3); P(3, 6, 9); -(3, 6); 2(3, 6); P(3, 6) + Q(3, 6); P(3, 6), Q(3, 6); P = Q = (3, 7); P'(3, 7); P(3) = 6",
    "P(3, 6)": "Q(3, 6); 3, 7",
    "14": r"""
        {\color{red}15}; \cancel{14}; \cancel{28} 14; \textcolor{red}{1} 4; \color{14}; \sout{14}; \text{\color{red}not } 14
    """,
}
"""Expected answers, each with answers that are not rewarded, separated by semicolons or line ends."""

REWARDED = {
    "42": r"""
        \mathbf{42}; \boldsymbol{42}; \textbf{42}; \underline{42}; \text{42}; $42$; 42 \text{ cm}; 42 ways; \$42; 42\$
        6 \cdot 7 = 42
    """,
    r"\frac12": r"\mathbf{\frac{1}{2}}; \mathbf{0.5}",
    "[2,5)": r"2 \le x < 5; 5 > x \ge 2; x \in [2,5); \{x \mid 2 \le x < 5\}; \{x \in \mathbb{R} : 2 \leq x < 5\}",
    r"2 \le x < 5": "[2,5); 2 <= x < 5; 5 > x >= 2",
    r"(3,\infty)": r"x > 3; 3 < x; (3, +\infty)",
    r"(-\infty,3]": r"x \le 3",
    r"(-\infty,-1) \cup (1,\infty)": r"x < -1 \text{ or } x > 1; x > 1 or x < -1",
    r"\emptyset": r"\{\}; \{ \}; \varnothing; \text{no solution}; no real solutions",
    r"\{\}": r"\emptyset",
    r"(-\infty,\infty)": r"\mathbb{R}; \text{all real numbers}",
    r"\text{DNE}": r"\text{does not exist}; DNE",
    "5000000": r"5\text{ million}; 5 million; 5 million dollars; \$5 \text{ million}; 5{,}000{,}000",
    "5 million": "5000000; 5,000,000; 5000 thousand",
    "2.5 billion": "2500000000",
    r"2.5\%": r"(2.5)\%; (2.5); 2.5 \text{ percent}",
    r"\pi": r"\pi \approx 3.14; \pi",
    "3.14": r"\pi \approx 3.14",
    "HTH": r"HTH; \text{HTH}",
    "xyz": r"x y z; x \cdot y \cdot z",
    "ab": "ba",
    r"\frac{1}{2}CV^2": r"CV^2/2",
    "(2,3)": "x=2, y=3; y=3, x=2; (x, y) = (2, 3)",
    "x=2, y=3": "(2, 3); (x,y) = (2,3); y=3, x=2",
    "2:30": r"02:30; 2:30 pm; \text{2:30}",
    "3:30 pm": "3:30 p.m.; 15:30; 3:30",
    "3 pm": "3:00 pm; 3",
    "3:4": r"6:8; \frac{3}{4}; 3 to 4; 3 \text{ to } 4",
    "1:2:3": "1 : 2 : 3; 2:4:6",
    "3.1": r"x \approx 3.1; \approx 3.1; \pi \approx 3.1",
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}": r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}",
    "14 zebras": r"14 \text{ zebras}",
    "14 apples": "14; 14 apples",
    "25": r"25 \text{ cm^2}; 25\,\mathrm{m/s^2}; 25 \mathrm{cm}^2",
    r"25 \text{ cm}^2": r"25 \text{ cm^2}; 25 cm^2",
    "12": r"12 \text{ miles per hour}; 12 \text{ cubic feet}; 12 \text{ years old}; 12 square units; 12 m/s^2",
    r"12 \text{ mph}": "12 miles per hour; 12 mi/h",
    "2024-01-05": r"2024-01-05; \text{2024-01-05}",
    "3-4": "3 - 4",
    "2 < x < 5": r"x > 2 \text{ and } x < 5; x < 5 and x > 2; (2, 5)",
    "March 5, 2024": "5 March 2024; Mar 5, 2024",
    "June 20": r"20 June; June 20th; \text{20th of June}",
    "B": r"\textbf{(B)}\ 12; (B) 12; B",
    r"\{\text{red}, \text{blue}\}": r"\{blue, red\}; \text{red}, \text{blue}",
    r"\text{square}": r"a square; \text{Square}",
    "14": r"""
        {\color{red}14}; \color{red} 14; \color{red}{14}; \textcolor{red}{14}; \textcolor{blue}{\mathbf{14}}
        \color[rgb]{1,0,0} 14
        {\bf 14}; \Large 14; {\large 14}; \mathbf 14; \ensuremath{14}; \hspace{1cm} 14; \hbox{14}; \bold{14}; \boldsymbol 14
        \rm 14
        14\ \checkmark; 14 \quad \blacksquare; 14 \square
    """,
    "x^2 + 1": r"{\color{blue}x^2} + 1; \textcolor{red}{x}^2 + 1",
    r"\frac{3}{7}": r"""
        P(\text{red}) = \frac{3}{7}; P(red) = \frac{3}{7}; \mathbb{P}(A) = \frac37; \Pr(A) = 3/7; P(A|B) = \frac{3}{7}
        P(A \cap B) = \frac{3}{7}; P(A \mid B) = \frac{3}{7}; P(X = 3) = \frac{3}{7}; P(X > 3) = \frac{3}{7}; E[X] = \frac{3}{7}
        \mathbb{E}[X] = \frac{3}{7}; E(X) = \frac{3}{7}; \text{P(red)} = \frac{3}{7}; P_1 = \frac{3}{7}
        P(\text{not blue}) = \frac{3}{7}
        P(\text{red}) = \frac{6}{14} = \frac{3}{7}; \text{Var}(X) = \frac{3}{7}
    """,
    "7": "f(2) = 7; g(-1) = 7; f(2)=7; f^{-1}(3) = 7; |AB| = 7; \\overline{AB} = 7; AB = 7; a_{10} = 7; S_{10} = 7; n = 7",
    "2x": r"f'(x) = 2x; y' = 2x; \frac{dy}{dx} = 2x; \frac{d}{dx} f(x) = 2x; f(x) = 2x",
    "3": r"\lim_{x \to 0} f(x) = 3",
    r"30^\circ": r"\angle ABC = 30^\circ; m\angle ABC = 30^\circ; \angle A = 30^\circ; \theta = 30^\circ",
    "(3, 6)": r"""
        P(3, 6); P = (3, 6); P_1(3, 6); P\,(3, 6); \text{P}(3, 6); A'(3, 6); P: (3, 6); \left(3, 6\right); (x, y) = (3, 6)
    """,
    "P(3, 6)": "(3, 6); P(3, 6); P = (3, 6)",
    "(2x - 1)(3x + 4)": r"""
        (3x+4)(2x-1); (1-2x)(-3x-4); 6(x - \frac{1}{2})(x + \frac{4}{3}); -(1 - 2x)(3x + 4); (2x-1) \cdot (3x+4)
    """,
    "(x-1)^2": "(x-1)(x-1); (1-x)^2",
    "4n - 1": "-1 + 4n; a_n = 4n - 1",
    "y = -2x + 7": "y = 5 - 2(x - 1); y - 5 = -2(x - 1)",
    "-2, 0, 2": r"0, \pm 2; x = 0, \pm 2; \{0, \pm 2\}; x = \pm 2, x = 0; x = \pm 2, 0; \pm 2 \text{ and } 0",
    r"\{-2, -1, 0, 1, 2\}": r"0, \pm 1, \pm 2; \{\pm 2, \pm 1, 0\}",
    r"1 + \sqrt{2}, 1 - \sqrt{2}, 3": r"3, 1 \pm \sqrt{2}",
    r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}": r"""
        A^T = \begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}; A = \begin{bmatrix} 1 & 3 \\ 2 & 4 \end{bmatrix}
        A^{-1} = \begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}
    """,
    r"A = \begin{pmatrix} 1 & 3 \end{pmatrix}": r"\begin{pmatrix} 1 & 3 \end{pmatrix}; A = \begin{pmatrix} 1 & 3 \end{pmatrix}",
    "39": r"""
        \phantom{x}39\phantom{x}; \text{Answer: } 39; \text{Answer: 39}; Answer: 39
        \text{The final answer is } 39; The answer is $39$
        \textbf{Answer:} 39
    """,
    r"\$60": r"USD 60; US\$60; \text{USD } 60; 60 USD; \text{US}\$60",
    "(x^2-1)(x+2)": "(x-1)(x+1)(x+2)",
    "2(x-3)(x+3)": "(2x-6)(x+3)",
    "(x-2)^2 + 3": "3 + (x-2)^2; (2-x)^2 + 3",
    "x^2 + 2x + 1": "1 + 2x + x^2",
    r"\frac{x^2-1}{2}": r"\frac{1}{2}x^2 - \frac{1}{2}; \frac12(x^2 - 1)",
    r"\frac{x+1}{x-1}": r"1 + \frac{2}{x-1}; -\frac{x+1}{1-x}",
}
"""Expected answers, each with answers that are rewarded."""


def pairs(table):
    return [
        (expected, answer.strip())
        for expected, lines in table.items()
        for line in lines.split("\n")
        for answer in line.split(";")
        if answer.strip()
    ]


def test_hedges_and_other_quantities_are_not_rewarded():
    assert [pair for pair in pairs(NOT_REWARDED) if rewarded(*pair)] == []


def test_the_same_answer_in_another_notation_is_rewarded():
    assert [pair for pair in pairs(REWARDED) if not rewarded(*pair)] == []


CONNECTIVES = r"""
    or; and; to; vs; maybe; \text{ or }; \text{ and }; \text{ not }; \text{, }; \text{ instead of }; ,; ;; :; |; ||; =; ==; <; >
    \approx; \sim; \simeq; \cong; \equiv; \to; \Rightarrow; \implies; \iff; \lor; \vee; \land; \mid; \&; \\; \quad; \,; ~
    \ne; \not=; \le; \ge; \pm; \mp; \cup; \cap; \setminus; \in; \oplus; \circ; \bmod; \ldots; ...; '; "; ?; @; #; \%; $
    \$; ≅; ∨; →; ∼; ≒; 、; ／
"""


VALUES = st.sampled_from(
    ["41", "42", "7.5", r"\frac{1}{3}", r"\frac{5}{2}", r"\sqrt{2}", r"2\pi", "x", "3x+1", "-4", r"50\%", r"8 \text{ cm}"]
)


@few
@given(VALUES, VALUES, st.sampled_from([each for line in CONNECTIVES.split("\n") for each in line.split("; ") if each.strip()]))
def test_two_values_joined_in_any_way_are_rewarded_for_neither(one, other, connective):
    assume(one != other)
    assume(not (connective.strip() in ("=", r"\approx", r"\in") and one == "x"))  # `x = 42` states 42
    answer = f"{one} {connective.strip()} {other}"
    assert not rewarded(one, answer)
    assert not rewarded(other, answer)
    assert not rewarded(one, f"{one} ({connective.strip()} {other})")


@pytest.mark.parametrize(
    ("question", "answer", "is_rewarded"),
    [
        ("How many apples are left?", "5 apples", True),
        ("How many apples are left?", r"5 \text{ dollars}", False),
        ("A pen costs $1. What do 5 pens cost?", r"\$5", True),
        ("A pen costs $1. What do 5 pens cost?", "5 boxes", False),
        ("What is the area of a square of 2.5 m by 2 m?", r"5 \text{ m}^2", True),
        ("How far does a car get in 5 minutes at 60 mph?", r"5 \text{ miles}", True),
        ("What is 2 + 3?", "5 cm", False),
        ("What is 2 + 3?", "5 units", True),
        ("How large is the angle?", r"5^\circ", True),
        ("How many degrees has the angle?", r"5 \text{ radians}", False),
        ("Put the number in a box.", "5 boxes", False),
        ("", "5 cm", True),
        ("A tank of 60 litres loses 12 litres a day. After how many days is it empty?", r"5 \text{ litres}", False),
        ("A tank of 60 litres loses 12 litres a day. After how many days is it empty?", r"5 \text{ days}", True),
        ("How many more red marbles than blue balls are in 3 boxes?", "5 marbles", True),
        ("How many more red marbles than blue balls are in 3 boxes?", "5 boxes", False),
        ("How many more red marbles than blue balls are in 3 boxes?", "5 balls", False),
        ("How many miles of road does a driver see in 10 minutes?", "5 miles", True),
        ("How many miles of road does a driver see in 10 minutes?", "5 min", False),
        ("How many square feet of carpet does a room of 1 ft by 5 ft need?", r"5 \text{ ft}^2", True),
        ("How many square feet of carpet does a room of 1 ft by 5 ft need?", r"5 \text{ ft}", False),
        ("How many dozen eggs are in 60 eggs?", "5 \\%", False),
        ("A cyclist rides 10 miles in 2 hours. How many miles per hour is that?", "5 mph", True),
        ("A cyclist rides 10 miles in 2 hours. How many miles per hour is that?", "5 miles", False),
        ("A rectangle has sides of 1 cm and 5 cm. What is its area?", r"5 \text{ cm}^2", True),
        ("A rectangle has sides of 1 cm and 5 cm. What is its area?", r"5 \text{ cm}", False),
        ("A cube has edges of 2 cm. Find the volume.", r"5 \text{ cm}^2", False),
        ("A square has an area of 25 m^2. What is the length of a side?", r"5 \text{ m}", True),
        ("A square has an area of 25 m^2. What is the length of a side?", r"5 \text{ m}^2", False),
        ("A pen costs $1. How much do 5 boxes with a pen each cost?", "5 boxes", False),
        ("A pen costs $1. How much do 5 boxes with a pen each cost?", "5 dollars", True),
        ("How long does a trip of 300 km at 60 km/h take?", "5 h", True),
        ("How tall is a child of 5 years, in feet?", "5 years", False),
        ("How old is a child of 5 feet?", "5 feet", False),
        ("A film starts at noon. When does it end?", "5 pm", True),
        ("How many hours are left?", "5 pm", False),
        ("What is 2 + 3?", "5 pm", False),
        ("What is 2 + 3?", r"5^\circ", False),
        ("Which number lies in the middle of 4 and 6?", "5 inches", False),
        ("Which is Tom's number?", "5 s", False),
        ("How large is angle A?", r"5^\circ", True),
        ("What percent of 20 is 1?", r"5\%", True),
        ("How many percent of the students are ill?", r"5\%", True),
        ("By how much percent do prices rise?", r"5\%", True),
        ("What is the interest rate?", r"5\%", True),
        ("What is the percent increase of the cost?", r"5\%", True),
        ("Prices fall by 10\\%. How many dollars does a pen of $5.56 cost?", r"5\%", False),
        ("Prices fall by 10\\%. What does a pen of $5.56 cost now?", r"5\%", False),
        ("What is 2 + 3?", r"5\%", False),
        ("", r"5\%", True),
        ("What is the probability of 5 beans?", "5 beans", False),
        ("What fraction of the beans is green?", "5 beans", False),
        ("What is the ratio of apples to pears?", "5 apples", False),
    ],
)
def test_a_unit_that_the_expected_answer_lacks_must_be_in_the_question(question, answer, is_rewarded):
    assert rewarded("5", answer, form=AskedForm(units=units_of_answer(question))) is is_rewarded


@pytest.mark.parametrize(
    ("expected", "answer"), [("2:3", "6:9"), ("1:2:3", "2:4:6"), (r"3\sqrt{2}", r"\sqrt{18}"), ("1/2", "2/4")]
)
def test_ratios_roots_and_fractions_must_be_simplified_only_if_the_question_asks_for_it(expected, answer):
    assert rewarded(expected, answer)
    assert not rewarded(expected, answer, form=AskedForm(lowest_terms=True))
    assert rewarded(expected, expected, form=AskedForm(lowest_terms=True))


def corpus_rows():
    files = sorted(CORPUS.glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def test_every_expected_answer_of_the_corpus_is_rewarded_for_itself():
    expected = {row["expected"] for row in corpus_rows()} | set(REWARDED) | set(NOT_REWARDED)
    assert len(expected) > 250
    assert [answer for answer in sorted(expected) if not rewarded(answer, answer)] == []


@pytest.mark.parametrize("form", ["  {} ", "${}$", r"\({}\)", "{{{}}}", "{}.", r"\, {} \;", r"\displaystyle {}"])
def test_delimiters_and_spacing_do_not_change_a_grade(form):
    sample = (pairs(NOT_REWARDED) + pairs(REWARDED))[::7]
    # A second period or dollar sign would be part of the answer.
    assert [
        pair
        for pair in sample
        if "$" not in pair[1] and pair[1][-1] != "." and rewarded(*pair) != rewarded(pair[0], form.format(pair[1]))
    ] == []


@few
@given(
    st.fractions(min_value=-50, max_value=50, max_denominator=40), st.fractions(min_value=-50, max_value=50, max_denominator=40)
)
def test_the_comparison_of_numbers_is_symmetric(one, other):
    forms = [rf"\frac{{{value.numerator}}}{{{value.denominator}}}" for value in (one, other)]
    assert (compare(forms[0], forms[1]) is Comparison.EQUAL) is (compare(forms[1], forms[0]) is Comparison.EQUAL)
    assert (compare(forms[0], str(other)) is Comparison.EQUAL) is (one == other)


@few
@given(st.integers(-20, 20), st.integers(1, 20), st.booleans(), st.booleans(), st.integers(-1, 1))
def test_an_inequality_is_its_interval_and_no_other(start, length, left, right, shift):
    interval = f"{'[' if left else '('}{start}, {start + length}{']' if right else ')'}"
    ends = [r"\le" if closed else "<" for closed in (left, right)]
    inequality = f"{start + shift} {ends[0]} x {ends[1]} {start + shift + length}"
    assert rewarded(interval, inequality) is rewarded(inequality, interval) is (shift == 0)
    assert not rewarded(interval, f"{start} {ends[0]} x {'<' if right else chr(92) + 'le'} {start + length}")


@few
@given(st.permutations("ABCD"), st.permutations("ABCD"), st.integers(2, 4))
def test_letters_are_equal_in_the_same_order_only(one, other, length):
    first, second = "".join(one[:length]), "".join(other[:length])
    assert rewarded(first, second) is (first == second)
    assert rewarded(first, rf"\text{{{second}}}") is (first == second)


INTERVAL, POINT = "Where is x^2 - 5x + 4 < 0?", "Which point is one right and four up from the origin?"
CHOICES = "Which number is a multiple of 6? (A) 20 (B) 24 (C) 27"


@pytest.mark.parametrize(
    ("question", "expected", "right", "wrong"),
    [
        (INTERVAL, "(1, 4)", ["(1,4)", "1 < x < 4"], ["1, 4", "4, 1", "[1, 4]"]),
        (POINT, "(1, 4)", ["(1, 4)", "1, 4"], ["(4, 1)"]),
        ("What are the next three terms of 2, 4?", "8, 16, 32", ["8, 16, 32"], ["32, 16, 8", "8, 16"]),
        ("Which numbers are roots?", "8, 16, 32", ["32, 16, 8"], ["8, 16"]),
        (
            "Write 72 as a product of primes.",
            r"2^3 \cdot 3^2",
            [r"3^2 \cdot 2^3", r"2 \cdot 2 \cdot 2 \times 3^2"],
            ["72", r"8 \cdot 9"],
        ),
        ("What is 72?", r"2^3 \cdot 3^2", ["72"], ["73"]),
        (CHOICES, "B", [r"\text{B) } 24", "(B)", "B"], [r"\text{B) } 27", r"\text{(B) } 20", "C"]),
        ("Write 13 in base 2.", "1101_2", ["1101", "1101_2"], ["1101_{10}", "1011", "13"]),
        ("Write the numeral.", "1101_2", ["1101_2"], ["1101"]),
        (
            "Which planet is it?",
            r"\text{Mars}",
            [r"\text{The planet Mars}", "Mars"],
            [r"\text{The moon Mars}", r"\text{not Mars}"],
        ),
        (
            "What is the sum of the first n positive integers?",
            r"\frac{n(n+1)}{2}",
            [r"\frac{n^2+n}{2}", r"\frac{n(n+1)}{2}"],
            [r"\frac{n^2-n}{2}", r"\frac{k^2+k}{2}"],
        ),
        ("What is x(x + 1)/2?", r"\frac{x^2+x}{2}", [r"\frac{x^2+x}{2}"], [r"\frac{x(x+1)}{2}"]),
        ("9 boxes hold 5 zebus each. How many zebus remain?", "45", [r"45 \text{ zebus}"], [r"45 \text{ boxes}"]),
        (
            r"A 4 kg body falls for 3 s. What is its acceleration, in $\text{m/s}^2$, without air?",
            "9.8",
            [r"9.8 \text{ m/s}^2", r"9.8\ \mathrm{m\,s^{-2}}", r"9.8\ \frac{\text{m}}{\text{s}^2}"],
            [r"9.8 \text{ m/s}", r"9.8 \text{ kg}", r"9.8 \text{ s}"],
        ),
        (
            "Light travels 300,000 km/s. Write it in m/s in scientific notation.",
            r"3 \times 10^8",
            [r"3 \times 10^8 \text{ m/s}"],
            [r"3 \times 10^8 \text{ km/s}"],
        ),
        ("Find $p + q$.", "17", ["p + q = 17", "17"], ["p - q = 17", "p + q = 18", "p = 8, q = 9"]),
    ],
)
def test_the_question_decides_about_order_kind_and_form_of_an_answer(question, expected, right, wrong):
    form = asked_form(question)
    assert [answer for answer in right if not rewarded(expected, answer, form=form)] == []
    assert [answer for answer in wrong if rewarded(expected, answer, form=form)] == []


@pytest.mark.parametrize(
    ("expected", "right", "wrong"),
    [
        (
            r"\text{No}",
            [r"\text{No, } 91 = 7 \cdot 13"],
            [r"\text{No, yes}", r"\text{No, or yes}", r"\text{No doubt}", r"\text{No idea}"],
        ),
        (r"\text{Yes}", [r"\text{Yes, 10 is even}"], [r"\text{Yes, but no}", r"\text{Yes, maybe}"]),
        (r"4 \text{ remainder } 5", [r"4 \text{ R } 5", "4 R 5", r"4 \text{ r. } 5"], [r"5 \text{ R } 4", "4.5", "45"]),
        (
            r"1 \text{ hour } 30 \text{ minutes}",
            [r"90 \text{ min}"],
            ["90", r"90 \text{ s}", r"80 \text{ minutes}", r"90 \text{ h}"],
        ),
        (r"h = \frac{2A}{b}", [r"h = 2A/b"], [r"h = \frac{2a}{b}", r"h = \frac{2A}{B}"]),
        ("x^2 + C", ["x^2 + c", "X^2 + C"], ["x^2"]),
        ("3 + i", ["3 + 1i"], ["3 + 2i", "3 - 1i"]),
        ("86400", [r"8.64 \times 10^4"], [r"8.64 \times 10^5"]),
        ("40000", [], [r"4 \times 10^4"]),
        (r"(-\infty, -3] \cup [3, \infty)", [r"|x| \ge 3", r"\mathbb{R} \setminus (-3, 3)"], ["|x| > 3", r"|x| \le 3"]),
        ("(-3, 3)", ["|x| < 3"], [r"|x| \le 3", "|x| > 3"]),
        (
            r"[0,4) \cup (4,\infty)",
            [
                r"x \ge 0 \text{ and } x \ne 4",
                r"x \ne 4, x \ge 0",
                r"[0,\infty) \setminus \{4\}",
                r"\{x \mid x \ge 0, x \ne 4\}",
            ],
            [r"x \ge 0 \text{ or } x \ne 4", r"[0,\infty) \setminus \{5\}", r"x \ge 0, y \ne 4", r"x \ge 0 \text{ and } x = 4"],
        ),
        ("[0,4]", [], [r"[0,4] \setminus \{5\}", r"[0,4] \setminus \{4\}"]),
        (r"\{2, 5\}", [r"\{5, 2\}"], [r"\{\{2\}, \{5\}\}", r"\{\{2, 5\}\}"]),
        ("7.25", [r"\text{US\$}7.25"], [r"\text{US\$}7.52"]),
        (r"4\pi \text{ cm}^3", ["4π cm³"], ["4π cm²"]),
        ("9:40", ["9{:}40"], ["9{:}04"]),
        (r"2\sqrt{3}", [r"[ABC] = 2\sqrt{3}"], [r"[ABC] = 3\sqrt{2}"]),
        (
            r"\begin{pmatrix} 1 \\ 3 \\ 2 \end{pmatrix}",
            [r"\mathbf{i} + 3\mathbf{j} + 2\mathbf{k}"],
            [r"\mathbf{i} + 2\mathbf{j} + 3\mathbf{k}"],
        ),
    ],
)
def test_notations_of_equal_values_are_rewarded_and_those_of_near_misses_are_not(expected, right, wrong):
    assert [answer for answer in right if not rewarded(expected, answer)] == []
    assert [answer for answer in wrong if rewarded(expected, answer)] == []


@pytest.mark.parametrize(
    ("completion", "is_right"),
    [
        (r"\boxed{41} or \boxed{42}", False),
        (r"$\boxed{41}$ or maybe $\boxed{42}$", False),
        (r"It is not \boxed{42}.", False),
        (r"It isn't $\boxed{42}$.", False),
        (r"\boxed{48} is 6 times 8. The answer is \boxed{42}.", True),
        (r"It is not 41, it is \boxed{42}.", True),
    ],
)
def test_a_box_that_is_denied_or_one_of_two_alternatives_is_not_rewarded(completion, is_right):
    assert grade_answer("42", completion, require_box=True).is_correct is is_right


def test_alternatives_in_boxes_are_the_set_of_both():
    assert grade_answer(r"\{1, 2\}", r"$x = \boxed{1}$ or $\boxed{2}$", require_box=True).is_correct
