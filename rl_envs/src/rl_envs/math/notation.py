r"""Normalizes the notation of answers: delimiters, spacing, `\dfrac`, `**`, Unicode signs, units.

Every function is applied to the expected answer and to the model's, so both are compared in the same notation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "×": "\\times ", "⋅": "\\cdot ", "·": "\\cdot ", "÷": "\\div ", "≤": "\\le ", "≥": "\\ge ",
        "≠": "\\ne ", "≈": "\\approx ", "π": "\\pi ", "∞": "\\infty ", "°": "^\\circ ", "∪": "\\cup ", "∈": "\\in ",
        "√": "\\sqrt", "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "±": "\\pm ", "∓": "\\mp ",
        "º": "^\\circ ", "∅": "\\emptyset ", "ℝ": "\\mathbb{R}", "…": "\\ldots ", "’": "'",
        "\u00a0": " ", "\u202f": " ", "\n": " ", "\t": " ", "“": '"', "”": '"',
    }
)  # fmt: skip
_STYLES = (
    "text|textbf|textit|textrm|textnormal|textsf|texttt|emph|mathrm|mathbf|mathit|mathsf|mathcal|boldsymbol|bm|bold|mbox|hbox"
    "|underline"
)
_SWITCHES = (
    "displaystyle|textstyle|limits|bf|rm|it|sf|tt|bfseries|tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge"
    "|ensuremath"
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_LABEL = (
    r"(?:[Tt]he )?(?:[Ff]inal )?(?:[Aa]nswer|[Ss]olution|[Rr]esult|[Ss]um|[Pp]roduct|[Dd]ifference|[Qq]uotient|[Rr]emainder"
    r"|[Tt]otal|[Vv]alue)\s*(?:is\b:?|:)"
)
_DEGREE = (
    r"(?:\^\s*(?:\\degree|o)(?![A-Za-z])|\\degree(?![A-Za-z])|\^\s*\{\s*(?:\\(?:text|mathrm)\s*\{\s*o\s*\}|o|\\degree)\s*\})"
)
_INTEGER = r"([a-zA-Z])\s*(?:\\in\s*\\mathbb\{[ZNRC]\}|(?:\\text\{\s*)?is\s+an(?:y)?\s+(?:integer|constant)\s*\}?)"
_DECLARATION = re.compile(
    rf"(?:[,;]\s*|\(\s*|(?=\s*\\text\{{))(?:\\text\{{[,\s]*(?:where|for|with)[^{{}}\d]*\}})?\s*{_INTEGER}\s*\)?$"
)
"""What a parameter stands for at the end of an answer: `, k \\in \\mathbb{Z}`."""
_FUNCTIONS = "arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln|exp|gcd|lcm|det"
_LAYOUT: Sequence[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|big|Big|bigg|Bigg)[lr]?(?![A-Za-z])", ""),
        (rf"\\(?:{_SWITCHES})(?![A-Za-z])", ""),
        (r"\\color\s*(?:\[[A-Za-z]*\])?\s*\{[^{}]*\}", ""),
        (r"\\textcolor\s*(?:\[[A-Za-z]*\])?\s*\{[^{}]*\}\s*(?=\{)", ""),
        (r"\\[hv]?phantom\s*\{[^{}]*\}", ""),
        (r"\\hspace\*?\s*\{[^{}]*\}", " "),
        (rf"\\(?:{_STYLES})(?![A-Za-z])(?!\s*\{{)", " "),
        (r"(?<=\d)(?:(?:\{,\}|\\!,|,\\!)\s*|\\,|')(?=\d{3}(?!\d))", ","),
        (r"(?<!\\)\\[,;:> ]|\\q?quad(?![A-Za-z])|~", " "),
        (r"\\!", ""),
        (r"\\\\\s*\[-?[\d.]+\s*[a-z]{2}\]", r"\\\\"),
        (r"(?<!\\)\\\s*$|^\s*=(?=[^=]*$)", ""),
        (r"\\textdollar(?![A-Za-z])", r"\\$"),
        (rf"(?<=\d)\s*{_DEGREE}", r"^\\circ "),
        (r"\s+", " "),
        (rf"^\\(?:{_STYLES})\s*\{{\s*{_LABEL}\s*\}}\s*(?=.)", ""),
        (rf"^(\\(?:{_STYLES})\s*\{{)?\s*{_LABEL}\s*(?=.)", r"\1"),
        (r"(?<=[ }])\s*(?:\\(?:checkmark|blacksquare|square|qed)|[\u2713\u2714\u220e])\s*$", ""),
    )
]
_REWRITES: Sequence[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (rf"\\(?:{_STYLES}|operatorname)\s*\{{", r"\\text{"),
        (r"^\\text\{\s*(?:negative|minus)\s*\}\s*(?=\d)", "-"),
        (r"^(\\text\{)?\s*(?:negative|minus)\s+(?=\d)", r"\1-"),
        (r"\\text\{(-?[\d.,]+)\}", r"\1"),
        (rf"\\text\{{\s*({_FUNCTIONS}|(?:max|min)(?=\s*\}}\s*[({{]))\s*\}}", r"\\\1 "),
        (r"\\text\{\s*\}", ""),
        (r"(?<=\d)\\text\{\s*([eE][+-]?)\s*\}(?=\d)", r"\1"),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\frac(?:\s*(\d|\\pi)|\s+([A-Za-z]))\s*", r"\\frac{\1\2}"),
        (r"(\\frac\s*\{(?:[^{}]|\{[^{}]*\})*\})\s*(\d|[A-Za-z]|\\pi)", r"\1{\2}"),
        (r"\\sqrt\s*([0-9A-Za-z])", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (rf"(?<![\\A-Za-z])({_FUNCTIONS}|(?:max|min)(?=\s*[({{\\]))(?![A-Za-z])", r"\\\1 "),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"\\log_\{?e\}?(?![A-Za-z])", r"\\ln "),
        (r"\\text\{\s*\^\\circ\s*([CF]?)\s*\}", r"^\\circ \1"),
        (r"\\lg(?![A-Za-z])", r"\\log_{10} "),
        (r"(\\(?:ln|log)(?:_\{?\w+\}?)?)\s*(\d+)(?=\s*/\s*\\?(?:ln|log))", r"\1(\2)"),
        (r"\\text\{\s*e\s*\}", "e"),
        (r"\\([ij])math(?![A-Za-z])", r"\1"),
        (r"(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty "),
        (r"\*\*", "^"),
        (r"(?<=\d)\s*x\s*(?=10\s*\^)", r"\\times "),
        (r"(?<![\d.])(\d{1,3})\.(\d{3})\.(\d{3})(?![\d.])", r"\1\2\3"),
        (r"(\.\d*)(?:\\(?:bar|dot|overline)\s*\{?\s*(\d+)\s*\}?|\((\d+)\)(?=$))", r"\1\\overline{\2\3}"),
        (r"(?<![\d.])(\d+)\s*(?:\\text\{\s*(?:in|out of)\s*\}|\s(?:in|out of)\s)\s*(\d+)$", r"\\frac{\1}{\2}"),
        (r"(?<![\\^_])\{([:=-])\}", r"\1"),
        (r"\^\s*(-?\d+)", r"^{\1}"),
        (r"\\frac\{\s*\\text\{\s*([^{}]*?)\s*\}\s*\}\{\s*\\text\{\s*([^{}]*?)\s*\}\s*(\^\{\d\})?\s*\}", r"\\text{\1/\2}\3"),
        (r"_\s*(\d+)", r"_{\1}"),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"\\leq(?:slant)?(?![A-Za-z])", r"\\le "),
        (r"\\geq(?:slant)?(?![A-Za-z])", r"\\ge "),
        (r"\\neq(?![A-Za-z])", r"\\ne "),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"(?<![\w)}])\+\s*(?=\\infty)", ""),
        (r"\\(?:varnothing|empty)(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"(?<=\d)\s*(?:\\text\{\s*to\s*\}|(?<=\s)to)\s*(?=\d)", ":"),
        (r"\\colon(?![A-Za-z])", ":"),
        (r"\+\s*\\text\{\s*(?:a )?constant\s*\}", "+ C"),
        (r"\+\s*/\s*-", r"\\pm "),
        (r"^<([^<>]*,[^<>]*)>$", r"\\langle \1\\rangle "),
        (r"(^|\\(?:cup|in)\s*)\]([^\[\]()]*,[^\[\]()]*)(?=[\[\]])", r"\1(\2"),
        (r"(?<=[\[(])([^\[\]()]*,[^\[\]()]*)\[(?=\s*(?:\\cup|$))", r"\1)"),
        (r"\\(?:lor|vee)(?![A-Za-z])|\\text\{\s*,?\s*or\s*\}|(?<![A-Za-z\\])or(?![A-Za-z])", ";"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (
            r"^([^,]*(?:[<>]|\\(?:[lg][et]|ne)\b)[^,]*?)(?:\\text\{\s*and\s*\}|\band\b)([^,]*(?:[<>]|\\(?:[lg][et]|ne)\b))",
            r"\1\\land \2",
        ),
        (r"\\text\{\s*,?\s*and\s*\}|(?<![A-Za-z\\])and(?![A-Za-z])", ","),
        (r",\s*([,;])", r"\1"),
        (r"\s+", " "),
    )
]
_CASES = re.compile(
    r"(?:\\begin\{cases\}|\\\{\s*\\begin\{array\}\{l+\})([^&]*?)(?:\\\\\s*)?\\end\{(?:cases|array)\}(?!\s*\\\})"
)
_TEXT_MACRO = re.compile(rf"\\(?:{_STYLES})\s*\{{([^{{}}]*)\}}")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALED = re.compile(rf"(?<![\w.,])(\d[\d,]*(?:\.\d+)?)\s*(\\text\{{)?\s*({'|'.join(_SCALES)})s?\b(?(2)\s*(\}})?)")
_FINAL = re.compile(r"(?<!\.)[.,;:]\s*$")
_OPENING, _CLOSING = "([{", ")]}"


def without_delimiters(text: str) -> str:
    """The text without enclosing math delimiters."""
    text = text.strip()
    for opening, closing in _DELIMITERS:
        inner = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing) and len(text) > 2 and opening not in inner:
            return inner.strip()
    return text


def without_layout(text: str) -> str:
    r"""The text without what only changes how it looks: delimiters, spacing, `\left`, outer braces, a final period."""
    text = without_delimiters(text).translate(_CHARACTERS)
    text = _SUPERSCRIPT.sub(lambda digits: f"^{{{digits.group().translate(_SUPERSCRIPTS)}}}", text)
    for pattern, replacement in _LAYOUT:
        text = pattern.sub(replacement, text)
    return without_delimiters(_without(r"\{", _FINAL.sub("", text).strip()))


def normalize(text: str) -> str:
    r"""The text without layout, in one notation: `\frac{a}{b}`, `^{n}` for `**n`, `\pi` for `pi`, `5000000` for `5 million`."""
    text = _CASES.sub(lambda rows: rows.group(1).replace("\\\\", ","), without_layout(text))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    declared = _DECLARATION.search(text)
    if declared and declared.group(1) in text[: declared.start()]:
        text = text[: declared.start()].strip()
    if "\\pm" not in text:
        text = text.replace("\\mp", "\\pm")
    return _without(r"(?:\\text)?\{", _FINAL.sub("", _SCALED.sub(_written_out, text)).strip())


def _without(opening: str, text: str) -> str:
    """The text without braces that enclose it."""
    while (match := re.match(opening, text)) and _matching(text, match.end() - 1) == len(text) - 1:
        text = text[match.end() : -1].strip()
    return text


def _written_out(scaled: re.Match[str]) -> str:
    r"""`5000000` for `5 \text{ million}`; what follows in the same `\text` keeps it."""
    digits, opening, scale, closing = scaled.groups()
    whole, _, decimals = digits.replace(",", "").partition(".")
    places = _SCALES[scale]
    whole, decimals = whole + decimals[:places].ljust(places, "0"), decimals[places:]
    number = (whole.lstrip("0") or "0") + (f".{decimals}" if decimals else "")
    return number if opening is None or closing else number + opening


def compact(text: str) -> str:
    """The normalized text without spaces, except between two digits. Answers with the same compact text are equal."""
    return re.sub(r"(?<!\d) +| +(?!\d)", "", text)


def plain(answer: str) -> str:
    r"""The answer as words: without `\text{}` and delimiters, with single spaces."""
    return " ".join(_TEXT_MACRO.sub(r"\1", without_delimiters(answer)).split()).removesuffix(".")


def has_text(answer: str) -> bool:
    r"""Whether a part of the answer is set as text, as in `\text{red}`."""
    return _TEXT_MACRO.search(answer) is not None


def split_top(text: str, separators: str) -> list[str]:
    """The text split at separators (a regular expression) outside all brackets."""
    parts, start, depth = [], 0, 0
    position = 0
    separator = re.compile(separators)
    while position < len(text):
        match = separator.match(text, position) if depth == 0 else None
        if match is not None and match.end() > position:
            parts.append(text[start:position].strip())
            start = position = match.end()
            continue
        character = text[position]
        depth += (character in _OPENING) - (character in _CLOSING)
        position += 1
    return [*parts, text[start:].strip()]


def brackets(text: str) -> tuple[str, str, str] | None:
    r"""Opening bracket, content and closing bracket, if one pair encloses the whole text: `(`, `[`, `\{` and their partners."""
    opening = "\\{" if text.startswith("\\{") else text[:1]
    if opening not in ("(", "[", "\\{"):
        return None
    end = _matching(text, len(opening) - 1)
    if end != len(text) - 1:
        return None
    closing = "\\}" if text.endswith("\\}") else text[-1]
    return opening, text[len(opening) : -len(closing)].strip(), closing


def _matching(text: str, start: int) -> int:
    """The index of the bracket that closes the one at `start`, of whatever kind (`[0,1)` is an interval); -1 if none does."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] in _OPENING) - (text[position] in _CLOSING)
        if depth == 0:
            return position
    return -1


_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


class Box(NamedTuple):
    r"""A closed `\boxed{...}` or `\fbox{...}` without another one inside."""

    start: int
    end: int
    """Index of the character after its closing brace."""
    content: str


def last_box(completion: str) -> str | None:
    r"""The content of the last closed `\boxed{...}`; the innermost if boxes are nested, None if there is none.

    Runs in linear time for any input.
    """
    boxes = closed_boxes(completion)
    return boxes[-1].content if boxes else None


def closed_boxes(completion: str) -> list[Box]:
    """All innermost closed boxes in their order, in linear time."""
    boxes: list[Box] = []
    open_braces: list[tuple[bool, int, int]] = []
    for token in _BRACE.finditer(completion):
        text = token.group()
        if text == "}" and open_braces:
            is_box, start, inside = open_braces.pop()
            if is_box and not (boxes and boxes[-1].start > start):
                boxes.append(Box(start, token.end(), completion[inside : token.start()].strip()))
        elif text[-1] == "{" and text != "\\{":
            open_braces.append((text != "{", token.start(), token.end()))
    return boxes
