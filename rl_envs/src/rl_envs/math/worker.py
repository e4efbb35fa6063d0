"""The grading process of `math`, started as `python -m rl_envs.math.worker`; does not import torch."""

from __future__ import annotations

from typing import Any

from rl_envs.grading_worker import serve
from rl_envs.math.answers import grade_answer
from rl_envs.math.asked import AskedForm


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    grade = grade_answer(
        request["expected"],
        request["completion"],
        require_box=request["require_box"],
        allow_unevaluated=request["allow_unevaluated"],
        form=AskedForm(**request["form"]),
    )
    comparison = None if grade.comparison is None else grade.comparison.name
    return {"comparison": comparison, "answer": grade.answer, "boxed": grade.boxed}


if __name__ == "__main__":
    # The first comparison loads the parser, which takes longer than any other.
    serve(_answer, warm_up=lambda: grade_answer("1", "\\boxed{1}", require_box=True))
