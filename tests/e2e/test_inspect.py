"""A task of inspect-ai as the agent of a run, in its own interpreter."""

import subprocess
import sys

import pytest
from e2e_runs import ROOT
from other_interpreters import make_environment, see_our_packages, site_packages

from rl_train.metrics.jsonl import read_jsonl

TASK = """
from inspect_ai import Task
from inspect_ai.scorer import Score, mean, scorer
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

@tool
def calculator():
    async def execute(expression: str):
        '''Calculates the value of an arithmetic expression.

        Args:
            expression: A product.
        '''
        left, right = expression.split("*")
        return str(int(left) * int(right))
    return execute

def length(limit):
    @scorer(metrics=[mean()])
    def short():
        async def score(state, target):
            if state.metadata["expected_answer"] != target.text:
                raise RuntimeError("another row")
            return Score(value=len(state.output.completion) <= limit)
        return score
    @scorer(metrics={"chars": [mean()], "is_empty": [mean()]})
    def parts():
        async def score(state, target):
            text = state.output.completion
            return Score(value={"chars": len(text), "is_empty": "no" if text else "C"})
        return score
    @scorer(metrics=[mean()])
    def undecided():
        async def score(state, target):
            return Score.unscored(reason="no judge")
        return score
    return Task(solver=[use_tools(calculator()), generate()], scorer=[short(), parts(), undecided()])

def word():
    @scorer(metrics=[])
    def judged():
        async def score(state, target):
            return Score(value="correct")
        return score
    return Task(solver=generate(), scorer=judged())
"""


@pytest.mark.full("the agents of tests/e2e/test_environment_python.py run the same way; this one installs inspect-ai")
def test_an_inspect_task_with_a_tool_runs_and_scores_the_rollouts(train_here, tmp_path):
    folder = make_environment(tmp_path / "venv")
    python = see_our_packages(folder)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", site_packages(folder)]
    subprocess.run([*pip, "inspect-ai==0.3.285"], check=True)
    (tmp_path / "inspect_length.py").write_text(TASK)
    section = {"python": str(python), "task": "inspect_length:length", "task_args": {"limit": 11}, "num_workers": 2}
    changes = {
        "grpo": {"max_num_steps": 2, "val_period": 0},
        "policy": {
            "model_name": str(ROOT / "examples" / "tools" / "model"),
            "max_total_sequence_length": 192,
            "generation": {"max_new_tokens": 40},
        },
        "data": {"train": {"style": "chat", "operations": ["*"], "min_digits": 2, "max_digits": 2}},
        "env": {"arithmetic": {"name": "inspect", **section}},
        "checkpointing": {"enabled": False, "save_period": None, "keep_latest_k": None},
    }
    code, output = train_here(changes)
    assert code == 0, output
    assert "Running 1 tasks" not in output
    [run] = (tmp_path / "runs").glob("*")
    rows = read_jsonl(run / "rollouts" / "step_000002.jsonl")
    assert [row["failure"] for row in rows] == [None] * 16
    for row in rows:
        chars = len(row["messages"][-1]["content"])
        assert row["reward_parts"] == {"short": float(chars <= 11), "parts_chars": chars, "parts_is_empty": float(chars == 0)}
    results = [(row, row["messages"][-2]["content"]) for row in rows if row["messages"][-2]["role"] == "tool"]
    assert len(results) > 1
    assert all(row["turns"] == 2 and row["expected_answer"] == result for row, result in results), results
    changes["env"] = {"arithmetic": {"name": "inspect", "python": str(python), "task": "inspect_length:word", "num_workers": 2}}
    code, output = train_here(changes)
    assert code == 1, output
    assert "InspectTaskError: the score judged is 'correct': expected a number or one of C, P, I, N, yes" in output
