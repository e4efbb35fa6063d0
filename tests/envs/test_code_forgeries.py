"""Programs that try to pass tests without solving them: none is rewarded, and a right program passes the same tests."""

from __future__ import annotations

import pytest
from isolation import isolated

from rl_envs.code.environment import CodeEnvironment

from .conftest import answered

LOOP = """
def ref(x):
    return x * x + 1
import random
random.seed(3)
for expected, x in [(ref(x), x) for x in random.sample(range(1000), 5)]:
    assert solve(x) == expected
    found = solve(x)
    assert found == ref(x)
"""
CHECKED = """
def check(candidate):
    pairs = [(1, 2), (2, 5), (7, 50)]
    for x, y in pairs:
        assert candidate(x) == y
"""
SORTS = """
cases = [[3, 1, 2], [5, 4], [9, 7, 8]]
for a in cases:
    assert solve(a) == sorted(a)
b = [2, 1]
result = solve(b)
assert result == sorted(b)
"""
CLOSE = "assert abs(solve(2) - 5.25) < 1e-9\nassert -1e-9 < solve(3) - 10.25 < 1e-9"
TEXT = "assert solve('a').startswith('ab') and 'c' in solve('a') and solve('a').isalpha() and solve('a') == 'abc'"
MEMBERS = "assert 4 in solve(2) and len(solve(2)) == 1 and set(solve(2)) == {4} and {4}.issuperset(solve(2))"
HELPER = """
def same(a, b):
    return a == b
assert same(solve(1), 2)
assert [same(solve(x), x * x + 1) for x in (2, 3)] == [True] * 2
"""
MAPPED = "assert all(map(lambda x: solve(x) == x * x + 1, range(9)))\nassert [*map(solve, [1, 2])] == [2, 5]"
AREA = (
    "class_under_test = Circle\nassert abs(Circle(2).area() - 12.566) < 1e-3\nassert round(Circle(1).area() - 3.1416, 3) == 0"
)
DECIMAL = """
from decimal import Decimal
from fractions import Fraction
assert abs(Circle(2).area() - Decimal('12.5')) < Decimal('0.1')
assert abs(Circle(2).area() - Fraction(25, 2)) < 1
"""
CALLBACK = "expected = [2, 5]\nassert solve(lambda x: x * x + 1, [1, 2]) == expected"
RAISES = """
def test_a():
    try:
        solve('a')
        assert False
    except TypeError:
        pass
    assert solve(2) == 5
"""
STAR_IMPORT = """
from solution import *
assert sorted(solve([2, 1])) == [1, 2]
assert all(x > 0 for x in solve([2, 1]))
assert len(solve([3])) == 1
"""

SQUARE = "def solve(x):\n    return x * x + 1"
OF_FRAMES = """
import sys
def solve(x):
    frame = sys._getframe()
    while frame is not None:
        for names in (frame.f_locals, frame.f_globals):
            for name in ("expected", "y", "ref"):
                if name in names:
                    return names[name](x) if callable(names[name]) else names[name]
        frame = frame.f_back
"""
LIAR = """
class Liar:
    def __getattr__(self, name):
        return lambda *args, **kwargs: True
    def yes(self, *args):
        return True
    def zero(self, *args):
        return self if ZERO is None else ZERO
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = yes
    __hash__ = lambda self: 4
    __sub__ = __rsub__ = __add__ = __radd__ = __abs__ = __round__ = __float__ = __mul__ = __rmul__ = zero
    __len__ = lambda self: 1
    __iter__ = lambda self: iter([self])
ZERO = 0.0
def solve(*args):
    return Liar()
"""
LYING_FLOAT = LIAR.replace("class Liar:", "class Liar(float):").replace("Liar()", "Liar(7.0)")
LYING_STR = LIAR.replace("class Liar:", "class Liar(str):").replace("Liar()", "Liar('no')")
LYING_LIST = LIAR.replace("class Liar:", "class Liar(list):").replace("Liar()", "Liar([7])")
ENDS = """
import os
def solve(x, calls=[]):
    calls.append(x)
    if len(calls) > 2:
        {}
    return x * x + 1
"""
CIRCLE = """
import math
class Circle:
    def __init__(self, r):
        self.r = r
    def area(self):
        return math.pi * self.r**2
"""
DECIMAL_CIRCLE = """
from decimal import Decimal
from fractions import Fraction
class Circle:
    def __init__(self, r):
        self.r = r
    def area(self, areas=[Decimal('12.5'), Fraction(25, 2)]):
        return areas.pop(0)
"""
LOST = "e n 0 X rl_envs.code.link LinkLostError BaseException t0 d0\\n"
SAYS = """
import os, struct
def answer(text):
    data = text.encode()
    os.write(4, struct.pack("!I", len(data)) + data)
"""

# name: tests, a right program, programs that must not pass
TABLE = {
    "reads_frames": (LOOP, SQUARE, [OF_FRAMES]),
    "reads_objects": (
        LOOP,
        SQUARE,
        ["import gc\ndef solve(x):\n    return [f(x) for f in gc.get_objects() if getattr(f, '__name__', '') == 'ref'][0]"],
    ),
    "calls_the_reference": (
        LOOP,
        SQUARE,
        [
            "def solve(x):\n    return ref(x)",
            "import __main__\ndef solve(x):\n    return __main__.ref(x)",
            "import tests\nsolve = tests.ref",
        ],
    ),
    "replaces_the_reference": (
        LOOP,
        SQUARE,
        ["def solve(x):\n    return 0\ndef ref(x):\n    return 0", "import builtins\nbuiltins.ref = solve = lambda x: 0"],
    ),
    "patches_modules": (
        LOOP,
        SQUARE,
        [
            "import random\nrandom.sample = lambda *a: []\nrandom.seed = None\ndef solve(x):\n    return 0",
            "import builtins\nbuiltins.range = lambda *a: []\nbuiltins.enumerate = lambda *a: []\ndef solve(x):\n    return 0",
            "import builtins\nbuiltins.bool = builtins.all = lambda *a: True\ndef solve(x):\n    return 0",
        ],
    ),
    "loop_variables": (
        CHECKED,
        SQUARE,
        [OF_FRAMES, "def solve(x):\n    import sys\n    return sys._getframe(1).f_locals.get('y')"],
    ),
    "ends_a_loop": (
        LOOP,
        SQUARE,
        [
            ENDS.format(end)
            for end in ("os._exit(0)", "raise SystemExit(0)", "raise StopIteration", "raise GeneratorExit", "os.close(4)")
        ],
    ),
    "empties_the_argument": (
        SORTS,
        "def solve(a):\n    return sorted(a)",
        [
            "def solve(a):\n    a.clear()\n    return a",
            "def solve(a):\n    a.clear()\n    return []",
            "def solve(a):\n    del a[:]",
        ],
    ),
    "an_object_that_is_close": (CLOSE, "def solve(x):\n    return x * x + 1.25", [LIAR, LYING_FLOAT, LYING_LIST]),
    "an_object_with_the_methods_of_text": (TEXT, "def solve(x):\n    return 'abc'", [LIAR, LYING_STR]),
    "an_object_that_contains_everything": (MEMBERS, "def solve(x):\n    return [4]", [LIAR, LYING_LIST]),
    "an_object_that_equals_everything": (HELPER, SQUARE, [LIAR, LYING_FLOAT, LYING_STR, f"{LIAR}\nZERO = None\nsolve = Liar"]),
    "a_class_instead_of_a_function": (
        CLOSE,
        "def solve(x):\n    return x * x + 1.25",
        [
            LIAR.replace("class Liar:", "class solve:").replace("def solve(*args):\n    return Liar()", "")
            + "\nsolve.__new__ = lambda cls, *args: object.__new__(cls)"
        ],
    ),
    "an_object_of_the_tested_class": (
        AREA,
        CIRCLE,
        [
            LIAR.replace("class Liar:", "class Circle:\n    def __init__(self, r): pass\n    def area(self): return self"),
            LIAR.replace("class Liar:", "class Circle:\n    def __init__(self, r): pass\n    def area(self): return self")
            + "\nZERO = None",
            LYING_FLOAT.replace("class Liar(float):", "class Circle(float):\n    def area(self): return self"),
        ],
    ),
    "an_object_that_is_close_to_a_decimal": (
        DECIMAL,
        DECIMAL_CIRCLE,
        [LIAR.replace("class Liar:", "class Circle:\n    def __init__(self, r): pass\n    def area(self): return self")],
    ),
    "ends_an_iteration": (
        MAPPED,
        SQUARE,
        [
            "def solve(x):\n    raise StopIteration",
            "def solve(x):\n    raise StopIteration(True)",
            "solve = iter([2, 5]).__next__",
        ],
    ),
    "searches_the_callback": (
        CALLBACK,
        "def solve(f, items):\n    return [f(x) for x in items]",
        [
            "def solve(f, items):\n    return f.__globals__['expected']",
            "def solve(f, items):\n    f.__code__ = (lambda x: 0).__code__",
            "def solve(f, items):\n    return type(f).rl_peer.request('attr', f, '__globals__')['expected']",
            "def solve(f, items):\n    return type(f).rl_peer.request('method', f, '__getattribute__', ('__globals__',))",
            "def solve(f, items):\n    return type(f).rl_peer.request('call', eval, ('expected',))",
        ],
    ),
    "raises_for_everything": (
        RAISES,
        "def solve(x):\n    return x**2 + 1",
        ["def solve(x):\n    raise TypeError", "class TypeError(TypeError): pass\ndef solve(x):\n    raise TypeError"],
    ),
    "speaks_for_the_link": (
        LOOP,
        SQUARE,
        [
            f"{SAYS}\nfor _ in range(20):\n    answer('r n 0 T\\n')\n    answer('r n 0 0\\n')\nos._exit(0)",
            f"{SAYS}\nfor _ in range(9):\n    answer('{LOST}')\nwhile True: os.read(3, 99)",
            f"{SAYS}\ndef solve(x):\n    answer('qcall t2 A builtins exec t1 s1\\n1')",
            "import os\nos.write(4, b'\\xff' * 4)\nwhile os.read(3, 99): pass",
            "import os\nwhile True:\n    os.write(4, b'\\0\\0\\0\\x05qcall')",
        ],
    ),
    "prints_a_report": (LOOP, SQUARE, ["print('2 ok')\nprint('passed')", "import os\nos.write(1, b'2 ok\\n')\nos._exit(0)"]),
    "names_of_builtins": (
        STAR_IMPORT,
        "def solve(a):\n    return a",
        [
            "def solve(a):\n    return 0\ndef sorted(a):\n    return [1, 2]\ndef all(a):\n    return True\nlen = all",
            "__all__ = ['all', 'len', 'sorted', 'solve', 'rl_tests']\nall = len = sorted = solve = rl_tests = lambda *a: True",
        ],
    ),
}


@pytest.fixture(scope="module")
def shares():
    """Fractions of passed tests by (suite, number of the program); the first is the right one."""
    with isolated():
        environment = CodeEnvironment({"max_concurrency": 3, "reward": "passed_share", "sandbox": {"timeout_s": 5.0}})
    rows = [(name, n, code, tests) for name, (tests, right, forged) in TABLE.items() for n, code in enumerate([right, *forged])]
    try:
        result = environment.step(
            [answered(f"```python\n{code}\n```") for _, _, code, _ in rows],
            [{"tests": tests, "entry_point": "solve"} for *_, tests in rows],
        )
    finally:
        environment.shutdown()
    assert result.scored.all(), result.failures
    outcomes = [info["code_outcome"] for info in result.metadata]
    return {(name, n): outcome for (name, n, *_), outcome in zip(rows, outcomes, strict=True)}


def test_there_are_enough_forgeries():
    assert sum(len(forged) for _, _, forged in TABLE.values()) >= 50


@pytest.mark.parametrize("name", TABLE)
def test_a_right_program_passes(shares, name):
    assert shares[name, 0] == "passed"


@pytest.mark.parametrize("name", TABLE)
def test_no_forgery_is_rewarded(shares, name):
    paid = [n for (suite, n), outcome in shares.items() if suite == name and n and outcome == "passed"]
    assert paid == [], [TABLE[name][2][n - 1] for n in paid]
