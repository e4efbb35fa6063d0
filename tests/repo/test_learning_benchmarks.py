"""The learning benchmarks: demonstrations that partly succeed, valid configs, and intervals."""

import random
import sys
from itertools import islice
from pathlib import Path

import pytest

from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.config.loader import load_config
from rl_train.runtime.build import read_sources

LEARNING = Path(__file__).parents[2] / "benchmarks" / "learning"
TASKS = ("code", "reasoning_gym", "sliding_puzzle", "tools")


@pytest.fixture(scope="module", autouse=True)
def _on_the_path():
    pytest.importorskip("reasoning_gym")
    sys.path.insert(0, str(LEARNING))
    yield
    sys.path.remove(str(LEARNING))


@pytest.mark.parametrize("name", TASKS)
def test_some_demonstrations_of_each_task_succeed_and_most_do_not(name):
    from tasks import TASKS as tasks

    task = tasks[name]
    if task.problems is None:
        registry = Registry(discover())
        records = read_sources(load_config(LEARNING / f"{name}.yaml", [], registry=registry).run, registry)[0].records
    else:
        records = list(islice(task.problems(), 100))
    draw, won = random.Random(0), 0
    for index in range(100):
        record = records[index]
        said = [m["content"] or "" for m in task.demonstrate(record, draw) if m["role"] == "assistant"]
        won += task.succeeded(record["messages"][-1]["content"], "".join(said))
    assert 10 <= won <= 60


def test_the_success_of_a_game_is_its_reward_also_after_illegal_moves():
    from tasks import MOVES
    from tasks import TASKS as tasks

    from rl_envs.sliding_puzzle.dataset import SlidingPuzzleDataset
    from rl_envs.sliding_puzzle.environment import SlidingPuzzleEnvironment

    environment, draw, rewards = SlidingPuzzleEnvironment({"max_moves": MOVES}), random.Random(0), []
    for record in SlidingPuzzleDataset({"num_samples": 100, "max_shuffles": 3}):
        state, texts, reward, done = record["extra_env_info"], [], 0.0, False
        while not done:
            texts.append(draw.choice([*(f"<move>{way}</move>" for way in ("up", "down", "left", "right", "9")), "!"]))
            made = environment.step([[{"role": "assistant", "content": texts[-1]}]], [state])
            state, done, reward = made.metadata[0], bool(made.terminateds[0]), reward + float(made.rewards["solved"][0])
        rewards.append(reward)
        prompt = record["messages"][-1]["content"]
        assert tasks["sliding_puzzle"].succeeded(prompt, "".join(texts)) == (reward == 1.0)
    assert 10 < sum(rewards) < 60


def test_the_data_of_a_benchmark_is_refused_if_held_out_problems_are_trained():
    from run import training_records

    few = ["data.train.num_samples=300", "data.validation.num_samples=100"]
    assert len(training_records(LEARNING / "sliding_puzzle.yaml", few)) == 300
    with pytest.raises(AssertionError, match="held-out problems are in the training data"):
        training_records(LEARNING / "sliding_puzzle.yaml", [*few, "data.train.split=validation"])


def test_the_agent_succeeds_if_both_of_its_sums_are_right(monkeypatch):
    monkeypatch.syspath_prepend(str(LEARNING.parents[1]))
    from run import training_records
    from tasks import TASKS as tasks

    succeeded = tasks["agents"].succeeded
    assert succeeded("76+18=", "9494")
    assert not any(succeeded("76+18=", wrong) for wrong in ("94", "9484", "8494", "8484", "94 94", ""))
    assert len(training_records(LEARNING / "agents.yaml", ["data.train.num_samples=300"])) == 300


def test_intervals_of_proportions_and_of_paired_differences():
    from intervals import difference, wilson

    low, high = wilson(8, 10)
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)  # statsmodels' proportion_confint(8, 10, method="wilson")
    problems = [str(i // 2) for i in range(40)]
    before, after = [False] * 40, [i % 4 < 2 for i in range(40)]
    low, high = difference(problems, before, after)
    assert 0.2 < low < 0.35
    assert 0.65 < high < 0.8
    assert difference(problems, after, after) == (0.0, 0.0)
