"""The environment `code`: real programs are run, tests decide, and results cannot be forged."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl_core.errors import DataError
from rl_envs.code.assertions import split_tests
from rl_envs.code.environment import CodeEnvironment
from rl_envs.code.evaluation import Observation, holds
from rl_envs.code.extraction import last_code_block
from rl_envs.code.scoring import same_output
from rl_sandbox.interface import Outcome, Result, SandboxError, SandboxInterface, SandboxUnavailableError, SessionInterface

from .conftest import answered, descendants, wait_until

MBPP = {
    "tests": [
        "assert remove_Occ('hello', 'l') == 'heo'",
        "assert remove_Occ('abcda', 'a') == 'bcd'",
        "assert remove_Occ('PHP', 'P') == 'H'",
    ]
}
HUMAN_EVAL = {
    "entry_point": "below_zero",
    "tests": """
METADATA = {'author': 'someone'}
def check(candidate):
    assert candidate([]) == False
    assert candidate([1, 2, -3, 1, 2, -3]) == False
    for operations in ([1, 2, -4, 5], [-1]):
        assert candidate(operations) == True, "falls below zero"
    assert isinstance(candidate([1]), bool) and abs(candidate([]) - 0.0) < 1e-6
""",
}
SUMS = {"stdin_stdout": [{"input": "1 2\n", "output": "3\n"}, {"input": "5 -5\n", "output": "0\n"}, ["7 1", "8"]]}
REMOVE_OCC = """
def remove_Occ(s, ch):
    i, j = s.find(ch), s.rfind(ch)
    return s[:i] + s[i + 1 : j] + s[j + 1 :] if i != j else s[:i] + s[i + 1 :]
"""
BELOW_ZERO = """
def below_zero(operations):
    balance = 0
    return any((balance := balance + op) < 0 for op in operations)
"""


def open_environment(config):
    try:
        return CodeEnvironment({"sandbox": {"timeout_s": 20.0}, **config})
    except SandboxUnavailableError as error:
        if os.environ.get("RLCORE_REQUIRE_SANDBOX"):
            raise
        pytest.skip(f"the tests of the environment `code` need isolation: {error}")


@pytest.fixture(scope="module")
def environment():
    opened = open_environment({"max_concurrency": 3, "reward": "passed_share"})
    yield opened
    opened.shutdown()


@pytest.fixture
def run(environment):
    def scored(*rows):
        conversations = [answered(f"Here it is.\n```python\n{code}\n```\n") for code, _ in rows]
        result = environment.step(conversations, [info for _, info in rows])
        outcomes = [info["code_outcome"] for info in result.metadata]
        return list(zip(result.rewards["passed_share"].tolist(), outcomes, strict=True))

    return scored


def test_correct_programs_pass_assert_lines_a_check_function_and_stdin(run):
    add = "a, b = map(int, input().split())\nprint(a + b)"
    assert run((REMOVE_OCC, MBPP), (BELOW_ZERO, HUMAN_EVAL), (add, SUMS)) == [(1.0, "passed")] * 3


def test_wrong_programs_get_their_share(run):
    third = "def remove_Occ(s, ch):\n    return 'H'"
    concatenated = "a, b = input().split()\nprint(a + b)"
    sometimes = "a, b = map(int, input().split())\nprint(a + b if b else 1 / b)\nassert a < 7"
    assert run((third, MBPP), (concatenated, SUMS), (sometimes, SUMS)) == [
        (pytest.approx(1 / 3), "failed"),
        (0.0, "failed"),
        (pytest.approx(2 / 3), "error"),
    ]


def test_programs_that_do_not_end_raise_or_do_not_compile_fail(environment):
    impatient = open_environment({"sandbox": {"timeout_s": 1.0}})
    try:
        [endless] = impatient.step([answered("```\nwhile True: pass\n```")], [MBPP]).metadata
    finally:
        impatient.shutdown()
    assert endless["code_outcome"] == "timeout"
    programs = ["raise ValueError", "def (", "import os; os.kill(os.getppid(), 9)", "x = bytearray(1 << 40)"]
    result = environment.step([answered(f"```\n{code}\n```") for code in programs], [MBPP] * 4)
    assert [info["code_outcome"] for info in result.metadata] == ["error", "error", "killed", "error"]
    assert (result.rewards["passed_share"].tolist(), result.scored.tolist()) == ([0.0] * 4, [True] * 4)


def test_a_completion_without_code_fails_and_metrics_count_outcomes(environment):
    result = environment.step([answered("It is 3."), answered(f"```py\n{REMOVE_OCC}```")], [MBPP, MBPP])
    assert result.answers[0] is None
    batch = {"extra_env_info": result.metadata}
    _, metrics = environment.global_post_process_and_metrics(batch)
    assert metrics == {"accuracy": 0.5, "passed_share": 0.5, "failed_frac": 0.0, "error_frac": 0.0, "timeout_frac": 0.0,
                       "killed_frac": 0.0, "no_code_frac": 0.5}  # fmt: skip


EQUALS_EVERYTHING = """
class Liar(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
    def __repr__(self): return "'heo'"
def remove_Occ(s, ch):
    return Liar("lie")
"""
CHANGES_BUILTINS = """
import ast, builtins, operator, sys
builtins.AssertionError = type("Never", (Exception,), {})
builtins.all = builtins.isinstance = lambda *_: True
sys.settrace(None)
def remove_Occ(s, ch):
    return "lie"
"""
REPLACES_THE_OBSERVER = """
import sys
main = sys.modules["__main__"]
main.__dict__["__observe__"] = lambda *_: None
main.__dict__["__text"] = lambda value: "True"
def remove_Occ(s, ch):
    return True
"""
READS_THE_TESTS = """
import gc, sys
def remove_Occ(s, ch):
    frames, frame = [], sys._getframe()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    texts = [v for f in frames for v in (*f.f_locals.values(), *f.f_globals.values())] + gc.get_objects()
    known = " ".join(str(v) for v in texts if isinstance(v, (str, tuple, list)))
    return next((w for w in ("heo", "bcd") if "'" + w + "'" in known.replace('("heo", "bcd")', "")), "not found")
"""


@pytest.mark.parametrize(
    "program",
    [
        "print('passed'); print('3 passed, 0 failed')",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        EQUALS_EVERYTHING,
        CHANGES_BUILTINS,
        REPLACES_THE_OBSERVER,
        "def remove_Occ(s, ch): raise SystemExit(0)",
        "import atexit, os; atexit.register(os._exit, 0)\ndef remove_Occ(s, ch): pass",
    ],
    ids=["prints", "sys_exit", "os_exit", "equals_everything", "builtins", "observer", "exits_later", "atexit"],
)
def test_a_program_cannot_forge_passed_assertions(run, program):
    [(reward, outcome)] = run((program, MBPP))
    assert reward == 0.0
    assert outcome != "passed"


def test_expected_values_are_not_in_the_process_of_the_program(run):
    assert "'heo'" not in "".join(split_tests("\n".join(MBPP["tests"]), None).statements)
    hidden = READS_THE_TESTS.replace('("heo", "bcd")', "(bytes([104, 101, 111]).decode(), bytes([98, 99, 100]).decode())")
    assert run((hidden, MBPP)) == [(0.0, "failed")]
    # The control: in an expression that only the sandbox can evaluate, the program finds the expected value.
    inside = {"tests": "assert (lambda found: found == 'heo')(remove_Occ('hello', 'l'))"}
    assert run((hidden, inside)) == [(1.0, "passed")]


def test_a_comparison_inside_of_the_sandbox_can_be_forged_as_documented(run):
    inside = {"tests": "def same(a, b): return a == b\nassert same(remove_Occ('hello', 'l'), 'heo')"}
    assert run((EQUALS_EVERYTHING, inside)) == [(1.0, "passed")]


LOOP = "for i in range(5):\n    assert square(i) == i * i"
ASSIGNING_LOOP = "for i in range(5):\n    found = square(i)\n    assert found == i * i"
HELPER = "def same(a, b):\n    assert a == b\nsame(square(0), 0)\nsame(square(2), 4)\nsame(square(3), 9)"
LOOP_IN_CHECK = """
def check(candidate):
    inputs, results = [[0], [2], [3]], [0, 4, 9]
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assert candidate(*inp) == exp
"""


@pytest.mark.parametrize("tests", [LOOP, ASSIGNING_LOOP, HELPER, LOOP_IN_CHECK], ids=["loop", "assigning", "helper", "check"])
def test_an_assertion_in_a_loop_or_helper_fails_if_its_tests_do_not_finish(run, tests):
    """The first round of each passes: square(0) is 0."""
    info = {"tests": tests, "entry_point": "square"}
    ends = "import os\ndef square(x):\n    if x:\n        {}\n    return 0"
    programs = [ends.format(end) for end in ("os._exit(0)", "raise SystemExit(0)", "1 / 0", "raise KeyboardInterrupt")]
    assert [reward for reward, _ in run(*((program, info) for program in programs))] == [0.0] * 4
    assert run(("def square(x): return x * x", info)) == [(1.0, "passed")]


def test_a_statement_that_raises_after_the_assertions_fails_a_test(run):
    tests = {"tests": ["import no_such_module", "assert square(2) == 4", "square('')"]}
    assert run(("def square(x): return x * x", tests)) == [(0.0, "error")]
    assert run(("def square(x): return x and x * x", tests)) == [(1.0, "passed")]


def test_assert_false_must_not_be_reached_and_assert_true_tests_nothing(run):
    info = {
        "tests": """
def check(candidate):
    try:
        candidate("a")
        assert False, "must raise"
    except TypeError:
        pass
    assert candidate(3) == 9
    assert True, "good"
""",
        "entry_point": "square",
    }
    accepts_text, exits = "def square(x): return 9", "import os\ndef square(x): os._exit(0)"
    wrong = "def square(x): return x * 'a'"
    rows = [(program, info) for program in ("def square(x): return x * x", accepts_text, exits, wrong)]
    assert [reward for reward, _ in run(*rows)] == [1.0, 0.5, 0.0, 0.5]
    with pytest.raises(DataError, match="have no assert statement"):
        split_tests("assert True", None)


def test_values_that_the_tests_assign_are_not_among_the_globals_of_the_program(run):
    expected = {"tests": ["import math", "expected = 4", "assert square(2) == expected"]}
    reads = "def square(x): return globals().get('expected')"
    imports = "def square(x): return int(math.pow(x, 2))"
    assert [reward for reward, _ in run((reads, expected), (imports, expected))] == [0.0, 1.0]


def test_large_whole_numbers_are_compared(run):
    program = "import math\ndef large(n): return -math.factorial(n)"
    assert run((program, {"tests": ["assert large(2000) % 1999 == 0", "assert large(2000) < 0"]})) == [(1.0, "passed")]


def test_output_after_what_is_read_is_not_ignored(run):
    info = {"stdin_stdout": [["1 2", "3"]]}
    correct = "print(sum(map(int, input().split())))"
    floods = f"{correct}\nprint(' ' * 100_000)\nprint(4)"
    logs = f"import sys\n{correct}\nprint('log' * 100_000, file=sys.stderr)"
    assert [reward for reward, _ in run((floods, info), (logs, info))] == [0.0, 1.0]


def test_objects_that_equal_everything_are_read_as_their_base_type(run):
    [(reward, _)] = run((EQUALS_EVERYTHING.replace('Liar("lie")', 'Liar("heo")'), MBPP))
    assert reward == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("line", "inside", "values", "expected"),
    [
        ("assert f(1) == 2", ["f(1)"], [2], True),
        ("assert f(1) == 2 and g(2) != 'x', 'message'", ["f(1)", "g(2)"], [2, "y"], True),
        ("assert abs(f(2) - 1.41) < 0.01", ["f(2)"], [1.414], True),
        ("assert math.isclose(f(2), 1.41, rel_tol=0.1)", ["f(2)"], [1.0], False),
        ("assert not f(7)", ["f(7)"], [False], True),
        ("assert f(7) is None", ["f(7)"], [0], False),
        ("assert sorted(f([3, 1])) == [1, 3]", ["f([3, 1])"], [[3, 1]], True),
        ("assert set(f(1)) <= {1, 2}", ["f(1)"], [[1, 3]], False),
        ("assert len(f('a')) == 3 and 'a' in f('b')", ["f('a')", "f('b')"], ["abc", "ab"], True),
        ("assert {'a': f(1), **g()} == {'a': 1}", ["{'a': f(1), **g()}"], [{"a": 1}], True),
        ("assert all(f(i) == i for i in range(3))", ["all((f(i) == i for i in range(3)))"], [True], True),
        ("assert f(2) * 2 == 4", ["f(2)"], ["x"], False),
        ("assert f(2) % 0 == 4", ["f(2)"], [1], False),
        ("assert [f(x) for x in data] == [1]", ["[f(x) for x in data]"], [[1]], True),
        ("assert f(3) == [0] * 3 + [1]", ["f(3)"], [[0, 0, 0, 1]], True),
        ("assert f(3) == 'a' * 3 + 'b'", ["f(3)"], ["aaab"], True),
        ("assert f(3) == 2 ** 10", ["f(3)"], [1024], True),
        ("assert f(3) == ('%03d' % 7)", ["f(3)", "'%03d' % 7"], ["007", "007"], True),
        ("assert set(f(3)) - {1} == {2}", ["f(3)"], [[1, 2]], True),
        ("assert sorted(f(3), key=len) == ['a', 'bb']", ["f(3)"], [["bb", "a"]], True),
        ("assert sorted(f(3), key=order) == [1]", ["sorted(f(3), key=order)"], [[1]], True),
        ("assert isinstance(f(3), Decimal)", ["isinstance(f(3), Decimal)"], [True], True),
        ("assert math.isclose(a=f(3), b=1.0)", ["f(3)"], [1.0], True),
    ],
)
def test_an_assertion_is_split_into_calls_inside_and_a_comparison_outside(line, inside, values, expected):
    split = split_tests(line, None)
    lambdas = ast.parse(split.statements[0]).body[0].value.args[1:]
    assert [ast.unparse(part.body) for part in lambdas] == inside
    assert holds(split.conditions[0], [Observation(False, value) for value in values]) is expected
    assert not holds(split.conditions[0], [Observation(True)] * len(values))


@pytest.mark.parametrize(
    ("tests", "inside"),
    [
        (["assert sum(10, 15) == 6"], ["sum(10, 15)"]),
        (["assert 6 == sum(10, 15)"], ["sum(10, 15)"]),
        (["assert set(max([1, 2], 3)) == set([3])"], ["max([1, 2], 3)"]),
        (["assert abs(round(2.5, 'up') - 3) < 1e-6"], ["round(2.5, 'up')"]),
        (["assert len(f(3)) == 1", "assert f(2) == max(1, 4)"], ["f(3)"]),
        (["assert len([]) == 0", "assert len(f(3)) == 1"], ["len([])"]),
        (["def sorted(items): return items", "assert sorted(f(3)) == [1]"], ["sorted(f(3))"]),
    ],
)
def test_a_tested_function_with_the_name_of_a_built_in_one_is_called_inside(tests, inside):
    statements = split_tests("\n".join(tests), None).statements
    first = next(each for each in statements if each.startswith("__observe__"))
    assert [ast.unparse(part.body) for part in ast.parse(first).body[0].value.args[1:]] == inside


def test_a_program_may_define_functions_with_names_of_built_in_ones(run):
    digit_sums = "def sum(a, b):\n    return (a + b) % 19"
    assert (
        run(
            (digit_sums, {"tests": ["assert sum(10, 15) == 6", "assert abs(sum(1, 2) - 3) < 1"]}),
            (digit_sums, {"tests": "def check(candidate):\n    assert candidate(10, 15) == sum(0, 6)", "entry_point": "sum"}),
        )
        == [(1.0, "passed")] * 2
    )


def test_generators_are_transferred_as_their_items(run):
    program = """
def evens(n):
    for i in range(n):
        yield 2 * i
def endless():
    while True:
        yield 1
"""
    tests = [
        "assert list(evens(3)) == [0, 2, 4]",
        "assert sorted(evens(3), key=abs) == [0, 2, 4]",
        "assert sum(evens(4)) == 12 and 4 in evens(3)",
        "values = evens(2)",
        "assert list(values) == [0, 2]",
        "assert any(endless()) == 1",
    ]
    assert run((program, {"tests": tests})) == [(pytest.approx(4 / 5), "failed")]


def test_the_program_is_the_module_solution(run):
    program = """
from __future__ import annotations
import dataclasses, pickle
@dataclasses.dataclass
class Point:
    x: int
def roundtrip(x):
    return pickle.loads(pickle.dumps(Point(x))).x
"""
    tests = ["import solution", "from solution import roundtrip as r", "assert solution.roundtrip(3) == 3", "assert r(4) == 4"]
    assert run((program, {"tests": tests})) == [(1.0, "passed")]


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("assert f(1) * 10**9 == 1", [[0]]),
        ("assert 'x' * f(1) == 1", [10**12]),
        ("assert [[f(1)] * 1000] * 1000 == f(2)", ["aa", 1]),
        ("assert f(1) + f(1) == 1", ["a" * 600_000, "a" * 600_000]),
        ("assert 2 ** f(1) == 1", [10**9]),
        ("assert round(f(1), f(2)) == 0", [1, -(10**9)]),
    ],
)
def test_values_that_would_fill_the_memory_are_not_computed(line, values):
    assert not holds(split_tests(line, None).conditions[0], [Observation(False, value) for value in values])


def test_the_second_operand_of_or_may_raise_if_the_first_is_true():
    [condition] = split_tests("assert f(1) == 2 or g()[0] == 1", None).conditions
    assert holds(condition, [Observation(False, 2), Observation(True)])


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({}, "Row 0 has no tests"),
        ({"tests": "f(1) == 2"}, "have no assert statement"),
        ({"tests": "assert f(1) =="}, "not valid Python"),
        ({"tests": "def check(candidate):\n    assert candidate(1)"}, "needs `entry_point`"),
        ({"tests": 3}, "`tests` must be Python source"),
        ({"tests": "assert f(1) =="}, "^Row 0: "),
        ({"tests": "assert f(1) == 1", "entry_point": "f(1)"}, "`entry_point` must be the name of a function"),
        ({"stdin_stdout": [{"input": "1"}]}, "must be {input: text, output: text}"),
        ({"stdin_stdout": {"inputs": ["1"], "outputs": ["1"]}}, "`stdin_stdout` must be a list"),
        ({"stdin_stdout": '[["1", "1"]]'}, "`stdin_stdout` must be a list"),
        ({"stdin_stdout": ["ab"]}, "must be {input: text, output: text}"),
        ({"stdin_stdout": [3]}, "must be {input: text, output: text}"),
        ({"stdin_stdout": [["", "x" * 65_537]]}, "Row 0: an expected output .* 65537 bytes, but only the first 65536 "),
        ({"tests": ["assert f(1) == 'x' * 40_000"] * 2}, "Row 0: the expected values of `tests` together have 80004 bytes"),
        ({"tests": "assert f(1) == [0] * 10**9"}, "Row 0: an expected value of `tests` has more than a million elements"),
    ],
)
def test_rows_with_unusable_tests_are_data_errors(environment, info, message):
    with pytest.raises(DataError, match=message):
        environment.step([answered("```\n1\n```")], [info])


def test_a_program_whose_sandbox_dies_in_mid_call_is_not_scored_and_passes_when_it_is_repeated():
    environment = open_environment({})
    try:
        waits = "```\nimport time\nwhile True:\n    time.sleep(0.01)\n```"
        with ThreadPoolExecutor(2) as threads:
            steps = [threads.submit(environment.step, [answered(waits)], [MBPP]) for _ in range(2)]
            launcher = environment._sandbox.process_id
            wait_until(lambda: len(descendants(launcher)) >= 8)  # twice: bubblewrap, process 1, agent, program
            os.kill(launcher, signal.SIGKILL)
            results = [step.result(timeout=60) for step in steps]
        for result in results:
            assert result.scored.tolist() == [False]
            assert result.failures[0].startswith("the sandbox does not work: The session was ended from outside")
            assert "code_outcome" not in result.metadata[0]
        repeated = environment.step([answered(f"```{REMOVE_OCC}```")], [MBPP])
        assert (repeated.rewards["all_passed"].tolist(), repeated.failures) == ([1.0], [None])
    finally:
        environment.shutdown()


def test_many_slow_tests_reach_a_limit_of_the_row_before_the_timeout_of_the_step():
    environment = open_environment({"step_timeout_s": 2.0, "reward": "passed_share"})
    pairs = [["", ""], *[["wait", ""]] * 30]
    waits = "```\nimport sys, time\nif sys.stdin.read():\n    time.sleep(0.4)\n```"
    try:
        result = environment.step([answered(waits)], [{"stdin_stdout": pairs}])
    finally:
        environment.shutdown()
    [info] = result.metadata
    assert (info["code_outcome"], result.scored.tolist()) == ("timeout", [True])
    assert info["tests_passed"] <= 3


def test_a_row_whose_sandbox_does_not_start_fails_and_is_not_scored(environment, monkeypatch):
    def fails():
        raise SandboxError("no more user ids")

    monkeypatch.setattr(environment._sandbox, "open_session", fails)
    result = environment.step([answered("```\n1\n```")], [MBPP])
    assert result.scored.tolist() == [False]
    assert result.failures == ["the sandbox does not work: no more user ids"]


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("no code", None),
        ("```python\nfirst\n```\nthen\n```python\nlast\n```", "last"),
        ("```\nfirst\n```\nthen\n```\nlast\n```", "last"),
        ("```python\nprogram\n```\nIt prints:\n```\n3\n```", "program"),
        ("```{python}\nprogram\n```", "program"),
        ("1. Here:\n   ```python\n   def f():\n       return 1\n   ```", "def f():\n    return 1"),
        ("<think>\n```python\nconsidered\n```\n</think>\nI do not know.", None),
        ("```python\nconsidered\n```\n</think>\n```python\nprogram\n```", "program"),
        ("<think>\n```python\nconsidered\n```", None),
        ("```python\nprogram\n```\n```text\noutput\n```", "program"),
        ("~~~py\na = '```'\n~~~", "a = '```'"),
        ("````\n```\ninner\n```\n````", "```\ninner\n```"),
        ("```python\ncut off", "cut off"),
        ("`inline` and ```x``` are no blocks", None),
    ],
)
def test_the_last_fenced_block_is_the_program(completion, code):
    assert last_code_block(completion) == code


class TrustingSession(SessionInterface):
    """A sandbox of a plugin; this one runs programs in its own process."""

    def run(self, code, *, timeout_s=None):
        raise NotImplementedError

    def run_program(self, code, *, stdin="", timeout_s=None):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, {"input": lambda: stdin})
        return Result(
            outcome=Outcome.OK,
            exit_code=0,
            stdout=printed.getvalue(),
            stderr="",
            truncated=False,
            seconds=0.0,
            state_lost=False,
        )

    def close(self):
        pass


class TrustingSandbox(SandboxInterface):
    def __init__(self, config):
        assert config.options == {"trust": True}

    def open_session(self):
        return TrustingSession()

    def close(self):
        pass


def test_another_sandbox_can_be_chosen_by_its_path(monkeypatch):
    monkeypatch.setitem(sys.modules, "acme_sandbox", sys.modules[__name__])
    chosen = {"backend": "acme_sandbox.TrustingSandbox", "options": {"trust": True}}
    environment = CodeEnvironment({"sandbox": chosen})
    doubled = {"stdin_stdout": [{"input": "21", "output": "42"}]}
    result = environment.step([answered("```\nprint(2 * int(input()))\n```")], [doubled])
    environment.shutdown()
    assert result.rewards["all_passed"].tolist() == [1.0]


def test_outputs_are_equal_apart_from_trailing_white_space():
    assert same_output("1 2 \n3\n\n", "1 2\n3")
    assert not same_output("1  2", "1 2")
    assert not same_output("", "0")
    assert not same_output("1\x0c2", "1\n2")


def test_of_two_test_functions_with_one_name_the_last_is_called_as_in_python(run):
    tests = {"tests": "def test_a():\n    assert f(1) == 2\ndef test_a():\n    for i in range(2):\n        assert f(i) == i"}
    assert run(("def f(x): return x", tests)) == [(0.5, "failed")]
