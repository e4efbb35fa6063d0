"""A task of Inspect with a calculator: the answer is the last number in a box."""

from __future__ import annotations

from inspect_ai import Task
from inspect_ai.scorer import pattern
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, ToolError, tool


@tool
def calculator() -> Tool:
    """The tool; Inspect shows its function's docstring to the model."""

    async def execute(expression: str) -> str:
        """Calculates the value of an arithmetic expression.

        Args:
            expression: A product of whole numbers, such as "12 * 34".
        """
        left, _, right = expression.partition("*")
        try:
            return str(int(left) * int(right))
        except ValueError:
            raise ToolError(f"{expression!r} is not a product of two whole numbers.") from None

    return execute


def products() -> Task:
    """Inspect's own loop of calls, and its own scorer."""
    return Task(solver=[use_tools(calculator()), generate()], scorer=pattern(r"\\boxed\{(\d+)\}"), message_limit=6)
