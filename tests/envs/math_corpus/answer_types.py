r"""Few-shot prompts for 22 types of answers: three worked examples, then questions and their expected answers.

Some questions ask to restate an answer that they contain, because SmolLM2-135M-Instruct rarely solves the others.
"""

from __future__ import annotations

SHOWN: dict[str, list[tuple[str, str]]] = {
    "interval": [
        ("Write 1 < x < 4 as an interval.", r"(1, 4)"),
        ("Write the interval [0, 3] as an inequality.", r"0 \le x \le 3"),
        ("Solve x + 1 > 3.", r"x > 2"),
    ],
    "set": [
        ("List the even digits.", r"\{0, 2, 4, 6, 8\}"),
        ("Which real x satisfy x^2 = -1?", r"\emptyset"),
        ("Solve x^2 = 4.", r"x = 2 \text{ or } x = -2"),
    ],
    "fraction": [
        ("What is 1/2 + 1/4?", r"\frac{3}{4}"),
        ("Write 3/2 as a mixed number.", r"1\frac{1}{2}"),
        ("Write 2/5 as a decimal.", r"0.4"),
    ],
    "large number": [
        ("Write 3 million in digits.", r"3{,}000{,}000"),
        ("Write 20,000 in words and digits.", r"20 \text{ thousand}"),
        ("How many people live in the town of two thousand five hundred?", r"2,500"),
    ],
    "unit": [
        ("A square has sides of 3 cm. What is its area?", r"9 \text{ cm}^2"),
        ("How fast is a car that drives 100 km in 2 hours?", r"50 \text{ km/h}"),
        ("How long is a pen of 12 cm?", r"12 \text{ centimeters}"),
    ],
    "money": [
        ("A pen costs 2 dollars. What do 3 pens cost?", r"\$6"),
        ("What is half of 5 dollars?", r"2.50 \text{ dollars}"),
        ("Write 75 cents in dollars.", r"\$0.75"),
    ],
    "percent": [
        ("Write 1/2 as a percentage.", r"50\%"),
        ("What percent of 20 is 5?", r"25\%"),
        ("Write 0.1 as a percentage.", r"10 \text{ percent}"),
    ],
    "expression": [
        ("Expand (x + 1)^2.", r"x^2 + 2x + 1"),
        ("Factor x^2 - 9.", r"(x - 3)(x + 3)"),
        ("Simplify 2a + 3a + b.", r"5a + b"),
    ],
    "root": [
        ("Simplify the square root of 12.", r"2\sqrt{3}"),
        ("What is the area of a circle of radius 3?", r"9\pi"),
        ("Solve x^2 = 5.", r"\pm\sqrt{5}"),
    ],
    "time": [
        ("School starts at 8:15 and a lesson takes 45 minutes. When does it end?", r"9:00"),
        ("Write quarter past four in the afternoon.", r"4:15 \text{ pm}"),
        ("How long is it from 2:00 to 3:30?", r"1 \text{ hour } 30 \text{ minutes}"),
    ],
    "word": [
        ("Which day follows Monday?", r"\text{Tuesday}"),
        ("Who is taller, Ann (150 cm) or Bob (160 cm)?", r"\text{Bob}"),
        ("What is the capital of France?", r"\text{Paris}"),
    ],
    "choice": [
        ("What is 2 + 2? (A) 3 (B) 4 (C) 5", r"\text{(B)}"),
        ("Which is the largest? (A) 9 (B) 4 (C) 1", r"A"),
        ("Which is even? (A) 1 (B) 3 (C) 8", r"\textbf{(C) } 8"),
    ],
    "matrix": [
        ("Write the matrix with rows 1 2 and 3 4.", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"),
        ("What is the identity matrix of size 2?", r"\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}"),
        ("Write the vector from (0, 0) to (2, 5) as a column.", r"\begin{pmatrix} 2 \\ 5 \end{pmatrix}"),
    ],
    "point": [
        ("Where do y = x and y = 2 meet?", r"(2, 2)"),
        ("Solve x + y = 3, x - y = 1.", r"x = 2, y = 1"),
        ("What is the midpoint of (0, 0) and (4, 6)?", r"(2, 3)"),
    ],
    "equation": [
        ("Solve 2x = 8.", r"x = 4"),
        ("Find the line with slope 2 through (0, 1).", r"y = 2x + 1"),
        ("Find the circle of radius 2 around the origin.", r"x^2 + y^2 = 4"),
    ],
    "ratio": [
        ("There are 3 cats and 5 dogs. What is the ratio of cats to dogs?", r"3:5"),
        ("Simplify the ratio 4:6.", r"2:3"),
        ("Write the ratio 1 to 4 as a fraction.", r"\frac{1}{4}"),
    ],
    "base": [
        ("Write 5 in base 2.", r"101_2"),
        ("Write 10 in base 3.", r"101_{3}"),
        ("What is 7_8 + 1_8?", r"10_8"),
    ],
    "no solution": [
        ("Solve x + 1 = x.", r"\text{no solution}"),
        ("What is 1/0?", r"\text{undefined}"),
        ("Solve 0x = 0.", r"\text{all real numbers}"),
    ],
    "letters": [
        ("Which flips are tail, tail, head?", r"TTH"),
        ("Order by height: A is taller than B, and B is taller than C.", r"ABC"),
        ("Write D, A, B, C in reverse.", r"CBAD"),
    ],
    "complex": [
        ("What is (1 + i) + (2 + i)?", r"3 + 2i"),
        ("What is i^2?", r"-1"),
        ("What is the conjugate of 4 - i?", r"4 + i"),
    ],
    "angle": [
        ("How many degrees has a right angle?", r"90^\circ"),
        ("Write 180 degrees in radians.", r"\pi"),
        ("How large is each angle of an equilateral triangle?", r"60 \text{ degrees}"),
    ],
    "scientific": [
        ("Write 300000 in scientific notation.", r"3 \times 10^5"),
        ("Write 0.00002 in scientific notation.", r"2 \times 10^{-5}"),
        ("Write 4.5 \\times 10^3 in digits.", r"4500"),
    ],
}

ASKED: dict[str, list[tuple[str, str]]] = {
    "interval": [
        ("Write 2 <= x < 5 as an interval.", r"[2,5)"),
        ("Write the interval (-1, 6] as an inequality.", r"(-1, 6]"),
        ("Solve x + 2 > 7.", r"x > 5"),
    ],
    "set": [
        ("List the odd digits.", r"\{1, 3, 5, 7, 9\}"),
        ("Solve x^2 = 9.", r"3, -3"),
        ("Which real x satisfy x^2 = -4?", r"\emptyset"),
    ],
    "fraction": [
        ("What is 1/3 + 1/3?", r"\frac{2}{3}"),
        ("Write 7/4 as a mixed number.", r"\frac{7}{4}"),
        ("Write 3/5 as a decimal.", r"\frac{3}{5}"),
    ],
    "large number": [
        ("Write 5 million in digits.", "5000000"),
        ("Write 40,000 in words and digits.", "40000"),
        ("How many people live in the town of 12,500?", r"12{,}500"),
    ],
    "unit": [
        ("A square has sides of 5 cm. What is its area?", r"25 \text{ cm}^2"),
        ("How fast is a car that drives 120 km in 2 hours?", r"60 \text{ km/h}"),
        ("How long is a rope of 7 m?", "7"),
    ],
    "money": [
        ("A book costs 5 dollars. What do 2 books cost?", r"\$10"),
        ("Write 50 cents in dollars.", "0.50"),
        ("What is half of 7 dollars?", r"\$3.50"),
    ],
    "percent": [
        ("Write 1/4 as a percentage.", r"25\%"),
        ("Write 0.3 as a percentage.", r"30\%"),
        ("What percent of 10 is 4?", "40"),
    ],
    "expression": [
        ("Expand (x + 2)^2.", "x^2 + 4x + 4"),
        ("Factor x^2 - 4.", "(x-2)(x+2)"),
        ("Simplify 3a + 4a + b.", "7a+b"),
    ],
    "root": [
        ("Simplify the square root of 18.", r"3\sqrt{2}"),
        ("What is the area of a circle of radius 2?", r"4\pi"),
        ("Solve x^2 = 7.", r"\pm \sqrt{7}"),
    ],
    "time": [
        ("A film starts at 2:00 and takes 30 minutes. When does it end?", "2:30"),
        ("Write half past five in the afternoon.", r"5:30 \text{ pm}"),
        ("How long is it from 1:00 to 3:15?", r"2 \text{ hours } 15 \text{ minutes}"),
    ],
    "word": [
        ("Which day follows Friday?", r"\text{Saturday}"),
        ("Who is taller, Tim (140 cm) or Eva (150 cm)?", r"\text{Eva}"),
        ("What is the capital of Italy?", "Rome"),
    ],
    "choice": [
        ("What is 3 + 2? (A) 5 (B) 6 (C) 7", "A"),
        ("Which is the smallest? (A) 9 (B) 4 (C) 1", r"\text{(C)}"),
        ("Which is odd? (A) 2 (B) 7 (C) 8", "(B)"),
    ],
    "matrix": [
        ("Write the matrix with rows 5 6 and 7 8.", r"\begin{pmatrix} 5 & 6 \\ 7 & 8 \end{pmatrix}"),
        ("Write the matrix with rows 2 0 and 0 2.", r"\begin{bmatrix} 2 & 0 \\ 0 & 2 \end{bmatrix}"),
        ("Write the vector from (0, 0) to (3, 4) as a column.", r"\begin{pmatrix} 3 \\ 4 \end{pmatrix}"),
    ],
    "point": [
        ("Where do y = x and y = 5 meet?", "(5, 5)"),
        ("Solve x + y = 7, x - y = 1.", "x = 4, y = 3"),
        ("What is the midpoint of (0, 0) and (2, 8)?", "(1,4)"),
    ],
    "equation": [
        ("Solve 3x = 12.", "x=4"),
        ("Find the line with slope 3 through (0, 2).", "y = 3x + 2"),
        ("Find the circle of radius 3 around the origin.", "x^2 + y^2 = 9"),
    ],
    "ratio": [
        ("There are 2 cats and 7 dogs. What is the ratio of cats to dogs?", "2:7"),
        ("Simplify the ratio 6:9.", "2:3"),
        ("Write the ratio 3 to 5 as a fraction.", "3/5"),
    ],
    "base": [
        ("Write 6 in base 2.", "110_2"),
        ("Write 9 in base 3.", "100_{3}"),
        ("What is 5_8 + 4_8?", "11_8"),
    ],
    "no solution": [
        ("Solve x + 2 = x.", r"\text{no solution}"),
        ("What is 5/0?", r"\text{undefined}"),
        ("Solve 2x - 2x = 0.", r"\text{all real numbers}"),
    ],
    "letters": [
        ("Which flips are head, tail, head?", "HTH"),
        ("Order by height: C is taller than A, and A is taller than B.", "CAB"),
        ("Write A, B, C in reverse.", r"\text{CBA}"),
    ],
    "complex": [
        ("What is (2 + i) + (3 + i)?", "5 + 2i"),
        ("What is the conjugate of 1 - 2i?", "1 + 2i"),
        ("What is 2i times i?", "-2"),
    ],
    "angle": [
        ("How many degrees has a straight angle?", r"180^\circ"),
        ("Write 90 degrees in radians.", r"\frac{\pi}{2}"),
        ("How large is each angle of a square?", "90"),
    ],
    "scientific": [
        ("Write 500000 in scientific notation.", r"5 \times 10^5"),
        ("Write 0.00007 in scientific notation.", r"7 \times 10^{-5}"),
        ("Write 2.5 \\times 10^3 in digits.", "2500"),
    ],
}

COPIED = [
    ("Put x + 1 in a box.", r"x + 1"),
    ("Put 12 apples in a box.", r"12 \text{ apples}"),
    ("Put (1, 2] in a box.", r"(1, 2]"),
]
"""Worked examples of copying an answer."""

STATED: dict[str, list[tuple[str, str]]] = {
    # What the question states, and the expected answer.
    "interval": [
        (r"3 \le x < 8", "[3,8)"),
        (r"(-\infty, 2]", r"x \le 2"),
        ("x > 4", r"(4, \infty)"),
        ("-1 < x < 1", "(-1, 1)"),
    ],
    "set": [(r"\{2, 4, 6\}", r"\{6, 4, 2\}"), (r"\{\}", r"\emptyset"), (r"x = 1 \text{ or } x = -5", r"\{-5, 1\}")],
    "fraction": [(r"1\frac{3}{4}", r"\frac{7}{4}"), ("0.125", r"\frac{1}{8}"), (r"-\frac{2}{9}", "-2/9")],
    "large number": [(r"6 \text{ million}", "6000000"), ("75,000", "75000"), (r"1.5 \text{ billion}", "1500000000")],
    "unit": [(r"18 \text{ cm}^2", "18"), ("30 km/h", r"30 \text{ km/h}"), ("5 meters", r"5 \text{ m}"), (r"9 \text{ kg}", "9")],
    "money": [("$15", "15"), ("4.25 dollars", r"\$4.25"), ("80 cents", r"80 \text{ cents}")],
    "percent": [(r"45\%", "0.45"), ("60 percent", r"60\%"), (r"2.5\%", r"2.5\%")],
    "expression": [("2x^2 - 3x + 1", "1 - 3x + 2x^2"), ("(a + 2)(a - 5)", "(a-5)(a+2)"), (r"\frac{x + 3}{2}", "(x+3)/2")],
    "root": [(r"2\sqrt{5}", r"\sqrt{20}"), (r"\pm\sqrt{3}", r"\sqrt{3}, -\sqrt{3}"), (r"\frac{\pi}{6}", r"\pi/6")],
    "time": [("4:20", "4:20"), ("6:45 pm", r"6:45 \text{ p.m.}"), ("9:05 am", r"\text{9:05 am}")],
    "word": [("Thursday", r"\text{Thursday}"), ("a triangle", r"\text{triangle}"), ("14 July", r"\text{July 14}")],
    "choice": [("(D)", "D"), ("B", r"\text{(B)}"), (r"\textbf{(A)}", "A")],
    "matrix": [
        (r"\begin{bmatrix} 1 & 0 \\ 2 & 3 \end{bmatrix}", r"\begin{pmatrix} 1 & 0 \\ 2 & 3 \end{pmatrix}"),
        (r"\begin{pmatrix} 7 \\ -1 \end{pmatrix}", r"\begin{pmatrix} 7 \\ -1 \end{pmatrix}"),
    ],
    "point": [("x = 2, y = 9", "(2, 9)"), ("(-1, 4)", "(-1,4)"), ("y = 3, x = 8", "(8, 3)")],
    "equation": [("y = 2x - 7", "2x - y = 7"), ("x = 11", "11"), ("3 + 4 = 7", "7")],
    "ratio": [("3 : 7", "3:7"), ("2 to 9", "2:9"), ("1:4", "1/4")],
    "base": [("1011_2", "1011_{2}"), ("24_{5}", "24_5")],
    "no solution": [
        ("no solution", r"\emptyset"),
        ("undefined", r"\text{undefined}"),
        ("all real numbers", r"(-\infty,\infty)"),
    ],
    "letters": [("HTT", "HTT"), ("BDAC", r"\text{BDAC}"), (r"\text{TH}", "TH")],
    "complex": [("2 - 5i", "-5i + 2"), ("3i", "3i")],
    "angle": [(r"30^\circ", "30"), ("72 degrees", r"72^\circ")],
    "scientific": [(r"4 \times 10^7", "40000000"), (r"1.6 \times 10^{-6}", "0.0000016")],
    "number": [(r"\mathbf{36}", "36"), (r"\pi \approx 3.14", r"\pi"), ("x = 19", "19")],
}
