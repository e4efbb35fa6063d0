"""A task of a verifiers taskset as the agent of a run, in its own interpreter."""

import json
import subprocess
import sys

import pytest
from other_interpreters import make_environment, see_our_packages, site_packages

from rl_train.metrics.jsonl import read_jsonl

TASKSET = """
import verifiers.v1 as vf

class Sum(vf.TaskData):
    answer: str

class SumTask(vf.Task[Sum, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def short(self, trace):
        if str(sum(map(int, self.data.prompt_text.rstrip("=").split("+")))) != self.data.answer:
            raise RuntimeError("another row")
        return float(len(trace.last_reply) <= 2)

    @vf.reward
    async def right(self, trace):
        return float(trace.last_reply == self.data.answer)

class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        raise RuntimeError("rows come from the run")

__all__ = ["Sums"]
"""

WRONG = """
import asyncio, json, sys
from rl_core.errors import ConfigError
from rl_train.agents.verifiers_task import solve
for change in json.loads(sys.argv[1]):
    row = {"messages": [{"role": "user", "content": "1+1="}], "metadata": {"expected_answer": "2"}}
    config = {"name": "verifiers", "taskset": "sums", **change}
    try:
        asyncio.run(solve(base_url="http://127.0.0.1:9/v1", api_key="key", model="model", config=config, **row))
    except ConfigError as error:
        print(f"{error.key}: {error}".splitlines()[0])
"""


@pytest.mark.full("the agents of tests/e2e/test_environment_python.py run the same way; this one installs verifiers")
def test_a_verifiers_task_runs_and_scores_the_rollouts(train_here, tmp_path):
    folder = make_environment(tmp_path / "venv")
    python = see_our_packages(folder)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", site_packages(folder)]
    subprocess.run([*pip, "verifiers==0.4.0", "transformers<5.20"], check=True)
    (tmp_path / "sums.py").write_text(TASKSET)
    changes = {
        "grpo": {"max_num_steps": 2, "val_period": 0},
        "env": {"arithmetic": {"name": "verifiers", "python": str(python), "taskset": "sums", "num_workers": 2}},
        "checkpointing": {"enabled": False, "save_period": None, "keep_latest_k": None},
    }
    code, output = train_here(changes)
    assert code == 0, output
    [run] = (tmp_path / "runs").glob("*")
    rows = read_jsonl(run / "rollouts" / "step_000002.jsonl")
    assert [row["failure"] for row in rows] == [None] * 16
    for row in rows:
        answer = row["completion"]
        assert row["reward_parts"] == {"short": 2.0 * (len(answer) <= 2), "right": float(answer == row["expected_answer"])}, row

    wrong = [{"taskset": "nope"}, {"taskset_args": {"size": 1}}, {"fields": {"anser": "answer"}}, {"harness": {"id": "nope"}}]
    done = subprocess.run([python, "-c", WRONG, json.dumps(wrong)], cwd=tmp_path, capture_output=True, text=True)
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [next(iter(change)) for change in wrong], (
        done.stderr
    )
