"""The example that adds a judge to the checks of instructions: junk that follows the instructions is not rewarded."""

from pathlib import Path

import pytest
from loopback_judge import reply, serving

from rl_train.diagnostics import DiagnosisStatus
from rl_train.workbench.check import check_environment
from rl_train.workbench.play import open_trial

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "instructions_and_judge" / "train.yaml"


def judge_of_sense(body, number):
    """Scores an answer by whether it mentions light."""
    return reply("Score: 10" if "scattered light" in body["messages"][-1]["content"] else "It says nothing.\nScore: 0")


@pytest.fixture
def example(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))

    def opened(url):
        monkeypatch.setenv("JUDGE_URL", url)
        return open_trial("writing", config=CONFIG)

    return opened


def test_junk_that_follows_the_instructions_gets_nothing_and_breaking_them_costs_no_request(example):
    with serving(judge_of_sense) as (url, script):
        trial = example(url)
        environment = trial.make()
        row = trial.rows[0]  # at most 60 words without commas
        texts = ["a " * 50, "Because of scattered light.", "Well, because of scattered light."]
        logs = [[*row.messages, {"role": "assistant", "content": text}] for text in texts]
        step_return = environment.step(logs, [row.metadata] * 3)
        environment.shutdown()
    assert step_return.rewards.tolist() == [0.0, 1.0, 0.0]
    assert step_return.scored.tolist() == [True] * 3
    assert [row["followed"] for row in step_return.metadata] == [[True, True], [True, True], [True, False]]
    assert len(script.requests) == 2


def test_check_env_accepts_the_example(example):
    with serving(judge_of_sense) as (url, _):
        results = {result.name: result for result in check_environment(example(url))}
    assert [name for name, result in results.items() if result.status is DiagnosisStatus.FAILED] == []
    assert "accuracy 0" in results["metrics"].found
