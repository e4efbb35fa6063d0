"""The environment `code`: real programs are run, tests decide, and results cannot be forged."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import sys

import pytest

from rl_core.errors import DataError
from rl_envs.code.assertions import Observation, holds, split_tests
from rl_envs.code.environment import CodeEnvironment
from rl_envs.code.extraction import last_code_block
from rl_envs.code.scoring import same_output
from rl_sandbox.interface import Outcome, Result, SandboxError, SandboxInterface, SandboxUnavailableError, SessionInterface

from .conftest import answered

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


def test_programs_that_do_not_end_raise_or_do_not_compile_fail():
    environment = open_environment({"sandbox": {"timeout_s": 1.0}})
    programs = ["while True: pass", "raise ValueError", "def (", "import os; os.kill(os.getppid(), 9)"]
    try:
        result = environment.step([answered(f"```\n{code}\n```") for code in programs], [MBPP] * 4)
    finally:
        environment.shutdown()
    assert [info["code_outcome"] for info in result.metadata] == ["timeout", "error", "error", "killed"]
    assert result.rewards["all_passed"].tolist() == [0.0] * 4
    assert result.scored.tolist() == [1.0] * 4


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
    ],
)
def test_an_assertion_is_split_into_calls_inside_and_a_comparison_outside(line, inside, values, expected):
    split = split_tests(line, None)
    lambdas = ast.parse(split.statements[0]).body[0].value.args[1:]
    assert [ast.unparse(part.body) for part in lambdas] == inside
    assert holds(split.conditions[0], [Observation(False, value) for value in values]) is expected
    assert not holds(split.conditions[0], [Observation(True)] * len(values))


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
        ({"stdin_stdout": [{"input": "1"}]}, "must be {input: text, output: text}"),
    ],
)
def test_rows_with_unusable_tests_are_data_errors(environment, info, message):
    with pytest.raises(DataError, match=message):
        environment.step([answered("```\n1\n```")], [info])


def test_a_row_whose_sandbox_does_not_start_is_not_scored(environment, monkeypatch):
    def fails():
        raise SandboxError("no more user ids")

    monkeypatch.setattr(environment._sandbox, "open_session", fails)
    result = environment.step([answered("```\n1\n```")], [MBPP])
    assert result.scored.tolist() == [0.0]


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("no code", None),
        ("```python\nfirst\n```\nthen\n```\nlast\n```", "last"),
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
