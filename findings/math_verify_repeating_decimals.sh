#!/usr/bin/env bash
# math-verify 0.9: the digits under the line of a repeating decimal are dropped, so `0.\overline{3}` is read as 0 and `2.\overline{45}` as 2. If that
# is the expected answer, 0 is right and 1/3 is wrong. Decimals are compared after rounding to 6 places, whatever their size: all numbers below
# 5e-7 are equal, so `0.0` is right for any of them. There is no message. A good guess would be that a notation which cannot be read is an
# error or no answer, and that decimals are compared with a tolerance that is relative.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet math-verify==0.9.0 latex2sympy2-extended==1.11.0 sympy==1.14.0
"$folder/venv/bin/python" - 2>"$folder/messages" <<'PY'
from importlib.metadata import version

from math_verify import parse, verify

print(*(f"{name} {version(name)}" for name in ("math-verify", "latex2sympy2-extended", "sympy")))
PAIRS = [  # expected answer, the answer of a model, whether math-verify accepts it
    (r"0.\overline{3}", r"\frac{1}{3}", False),
    (r"0.\overline{3}", "0", True),
    (r"2.\overline{45}", "2", True),
    (r"\frac{1}{3}", r"0.\overline{3}", False),
    ("0.0000001", "0.0000004", True),
    (r"10^{-7}", "0.0", True),
    (r"\frac{1}{3}", "0.333", False),
]
for expected, answer, accepted in PAIRS:
    gold, given = parse(f"${expected}$"), parse(f"${answer}$")
    found = verify(gold, given)
    print(f"expected {expected}, read as {gold[0]}; answer {answer}, read as {given[0]}: {'right' if found else 'wrong'}")
    assert found == accepted, (expected, answer)
PY
if grep -qi "overline\|tolerance" "$folder/messages"; then echo "there is a message now"; exit 1; fi
echo "no message"
