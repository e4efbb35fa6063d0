"""The environment `code`: real programs are run, tests decide, and results cannot be forged."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from isolation import isolated

from rl_core.errors import DataError, UserError
from rl_envs.code import environment as environment_module
from rl_envs.code.environment import CodeEnvironment, last_code_block, same_output
from rl_envs.code.suites import read_suite
from rl_sandbox.interface import Outcome, Result, SandboxError, SandboxInterface, SessionInterface
from rl_sandbox.session import LocalSession

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
    with isolated():
        return CodeEnvironment({"sandbox": {"timeout_s": 20.0}, **config})


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
    outcomes = [info["code_outcome"] for info in result.metadata]
    ended_session = outcomes.pop(2)
    assert outcomes == ["error", "error", "error"]
    # Until its session has ended, the program still runs and may answer the tests, without the function that they call.
    assert ended_session in ("killed", "failed")
    assert (result.rewards["passed_share"].tolist(), result.scored.tolist()) == ([0.0] * 4, [True] * 4)


def test_a_completion_without_code_fails_and_metrics_count_outcomes(environment):
    result = environment.step([answered("It is 3."), answered(f"```py\n{REMOVE_OCC}```")], [MBPP, MBPP])
    assert result.answers[0] is None
    batch = {"extra_env_info": result.metadata}
    _, metrics = environment.global_post_process_and_metrics(batch)
    assert metrics == {"accuracy": 0.5, "passed_share": 0.5, "failed_frac": 0.0, "error_frac": 0.0, "timeout_frac": 0.0,
                       "killed_frac": 0.0, "no_code_frac": 0.5}  # fmt: skip


COLLIDING = """
import os
def f(n):
    if n:  # sent as text, because to make the dict would take as long as to read it
        text = "r n 0 d200000 " + " ".join(f"{i * (2**61 - 1)} 0" for i in range(200_000)) + "\\n"
        data = len(text).to_bytes(4, "big") + text.encode()
        while data:
            data = data[os.write(4, data):]
    return 1
"""
NESTED = """
def f(n):
    found = []
    for _ in range(100_000):
        found = [found]
    return found if n else 1
"""
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
    hidden = READS_THE_TESTS.replace('("heo", "bcd")', "(bytes([104, 101, 111]).decode(), bytes([98, 99, 100]).decode())")
    assert run((hidden, MBPP)) == [(0.0, "failed")]
    in_a_function = {"tests": "assert (lambda found: found == 'heo')(remove_Occ('hello', 'l'))"}
    assert run((hidden, in_a_function)) == [(0.0, "failed")]
    # The control: the search finds an argument, which is in the process.
    as_argument = {"tests": "assert remove_Occ('xheo', ['heo']) == 'heo'"}
    assert run((hidden, as_argument)) == [(1.0, "passed")]


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
        read_suite("assert True", None)


def test_values_that_the_tests_assign_are_not_among_the_globals_of_the_program(run):
    expected = {"tests": ["import math", "expected = 4", "assert square(2) == expected"]}
    reads = "def square(x): return globals().get('expected')"
    imports = "def square(x): return int(math.pow(x, 2))"
    assert [reward for reward, _ in run((reads, expected), (imports, expected))] == [0.0, 1.0]


def test_large_whole_numbers_are_compared(run):
    program = "import math\ndef large(n): return -math.factorial(n)"
    assert run((program, {"tests": ["assert large(2000) % 1999 == 0", "assert large(2000) < 0"]})) == [(1.0, "passed")]


def test_results_that_take_long_to_read_stall_neither_the_grader_nor_other_rows(monkeypatch):
    """Whole numbers with one hash make a dict of n items take n * n steps. They are read in the tests' sandbox."""
    monkeypatch.setattr(environment_module, "_GRACE_S", 0.2)
    environment = open_environment({"sandbox": {"timeout_s": 2.0}, "max_concurrency": 2, "reward": "passed_share"})
    rows = [COLLIDING, "def f(n): return [[]] * 10**7", "def f(n): return n + 1", NESTED, "def f(n): return 'x' * (1 << 24)"]
    tests = {"tests": ["assert f(0) == 1", "assert f(1) == 2"]}
    try:
        result = environment.step([answered(f"```\n{code}\n```") for code in rows], [tests] * 5)
        again = environment.step([answered("```\ndef f(n): return n + 1\n```")], [tests])
    finally:
        environment.shutdown()
    shares = result.rewards["passed_share"].tolist()
    assert result.metadata[0]["code_outcome"] == "timeout"
    assert (shares[2], max(*shares[:2], *shares[3:])) == (1.0, 0.5)
    assert again.rewards["passed_share"].tolist() == [1.0]


def test_tests_run_in_a_sandbox_that_does_not_preload_modules(monkeypatch):
    monkeypatch.setattr(LocalSession, "preload", lambda self, code: False)
    environment = open_environment({})
    try:
        result = environment.step([answered(f"```{REMOVE_OCC}```")] * 2, [MBPP] * 2)
    finally:
        environment.shutdown()
    assert result.rewards["all_passed"].tolist() == [1.0, 1.0]


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
    ("tests", "tested"),
    [
        (["assert sum(10, 15) == 6"], {"sum"}),
        (["assert 6 == sum(10, 15)"], {"sum"}),
        (["assert set(max([1, 2], 3)) == set([3])"], {"max"}),
        (["assert abs(round(2.5, 'up') - 3) < 1e-6"], {"round"}),
        (["assert abs(sum(10, 15) - 6) < 1", "assert abs(f(1)) == sum([1])"], {"sum"}),
        (["assert len(f(3)) == 1", "assert f(2) == max(1, 4)"], set()),
        (["found = f(3)", "assert found == sorted([2, 1])"], set()),
    ],
)
def test_a_builtin_function_belongs_to_the_program_if_an_assertion_calls_nothing_else(tests, tested):
    assert read_suite("\n".join(tests), None).tested == tested
    assert read_suite("\n".join(tests), "sorted").tested == tested | {"sorted"}


def test_a_program_may_define_functions_with_names_of_built_in_ones(run):
    digit_sums = "def sum(a, b):\n    return (a + b) % 19"
    assert (
        run(
            (digit_sums, {"tests": ["assert sum(10, 15) == 6", "assert abs(sum(1, 2) - 3) < 1"]}),
            (digit_sums, {"tests": "def check(candidate):\n    assert candidate(10, 15) == sum(0, 6)", "entry_point": "sum"}),
        )
        == [(1.0, "passed")] * 2
    )


def test_generators_are_read_item_by_item(run):
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
        "assert any(endless())",
    ]
    assert run((program, {"tests": tests})) == [(1.0, "passed")]


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
            wait_until(
                lambda: len(descendants(launcher)) >= 16
            )  # bubblewrap, process 1, agent, program; the same for the tests
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


def test_one_failed_row_discards_all_idle_sessions_of_a_dead_sandbox():
    environment = open_environment({})
    try:
        rows = [answered(f"```{REMOVE_OCC}```")] * 3
        assert environment.step(rows, [MBPP] * 3).failures == [None] * 3  # leaves idle sessions for tests
        idle = environment._runner._idle.qsize()
        os.kill(environment._sandbox.process_id, signal.SIGKILL)
        wait_until(lambda: not environment._sandbox._launcher.alive)
        attempts = [environment.step(rows[:1], [MBPP]).failures for _ in range(2)]
        assert idle >= 1
        assert attempts[1] == [None]
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
    with pytest.raises(UserError, match=r"TrustingSession.run_program has no argument `link`"):
        environment.step([answered("```\nprint(1)\n```")], [MBPP])
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
