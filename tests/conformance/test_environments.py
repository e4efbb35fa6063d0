"""Our own environments keep the promises of environments."""

from rl_core.testing import EnvironmentConformance

SUMS = [{"prompt": f"{number}+2=", "expected_answer": str(number + 2)} for number in range(4)]


class TestArithmetic(EnvironmentConformance):
    component = "arithmetic"


class TestGuess(EnvironmentConformance):
    component = "guess"


class TestSlidingPuzzle(EnvironmentConformance):
    component = "sliding_puzzle"


class TestReasoningGym(EnvironmentConformance):
    component = "reasoning_gym"


class TestMath(EnvironmentConformance):
    component = "math"
    rows = SUMS


class TestTools(EnvironmentConformance):
    component = "tools"
    rows = SUMS


class TestWeather(EnvironmentConformance):
    component = "weather"
    rows = SUMS


class TestMultipleChoice(EnvironmentConformance):
    component = "multiple_choice"
    rows = [{**row, "expected_answer": "B", "choices": ["1", "2"]} for row in SUMS]  # noqa: RUF012


class TestShortAnswer(EnvironmentConformance):
    component = "short_answer"
    rows = SUMS


class TestInstructions(EnvironmentConformance):
    component = "instruction_following"
    rows = [{**row, "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]} for row in SUMS]  # noqa: RUF012


class TestGymnasium(EnvironmentConformance):
    component = "gymnasium"
    config = {"id": "FrozenLake-v1"}  # noqa: RUF012
    rows = [{"prompt": "Play.", "seed": number} for number in range(4)]  # noqa: RUF012
