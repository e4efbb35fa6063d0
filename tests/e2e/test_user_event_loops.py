"""Code of users never runs in a thread with an event loop of the run: it may start its own, in process and over Ray."""

import sys

import pytest

MODULE = '''
import asyncio, sqlite3, threading
from pathlib import Path

import anyio, httpx, openai, torch
from math_verify import parse, verify

from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_train.metrics.logger import Logger

OPENED = sqlite3.connect(":memory:")  # only usable in the thread that imports this module
CALLS = Path(__file__).parent / "calls"


def start_loops(who):
    """Fails in a thread that runs an event loop."""
    assert asyncio.run(asyncio.sleep(0, 1)) == 1
    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(asyncio.sleep(0, 2)) == 2
    loop.close()
    anyio.run(anyio.sleep, 0)
    with CALLS.open("a") as file:
        main = threading.current_thread() is threading.main_thread()
        file.write(f"{who} {'main' if main else 'other'}\\n")


async def judge(text):
    await asyncio.sleep(0)
    return float(len(text) % 3)


def trl_style(completions, **kwargs):
    async def all_of_them():
        return await asyncio.gather(*map(judge, completions))

    start_loops("reward")
    return list(asyncio.run(all_of_them()))


async def waits_for_a_server(completion):
    return await judge(completion)


def in_main_thread(completion, expected_answer):
    OPENED.execute("select 1")
    assert torch.is_grad_enabled()
    return float(verify(parse(expected_answer), parse(completion)))  # its timeouts are signals


class Sessions(EnvironmentInterface):
    min_turns = 2

    def __init__(self, cfg):
        start_loops("environment.init")
        self.turns, self.database = {}, sqlite3.connect(":memory:")

    def reset(self, metadata):
        start_loops("environment.reset")
        self.turns[metadata["session_id"]] = 0

    def close(self, session):
        start_loops("environment.close")
        del self.turns[session]

    def step(self, message_log_batch, metadata):
        start_loops("environment.step")
        return self.respond(message_log_batch, metadata)

    def respond(self, message_log_batch, metadata):
        self.database.execute("select 1")
        names = [state["session_id"] for state in metadata]
        for name in names:
            self.turns[name] += 1
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "1+2="} for _ in names],
            metadata=metadata,
            next_stop_strings=[None] * len(names),
            rewards=torch.tensor([len(log[-1]["content"]) % 3 / 2 for log in message_log_batch]),
            terminateds=torch.tensor([float(self.turns[name] == 2) for name in names]),
        )

    def global_post_process_and_metrics(self, batch):
        start_loops("environment.metrics")
        return batch, {}


class AsyncSteps(Sessions):
    async def step(self, message_log_batch, metadata):
        await asyncio.sleep(0)
        return self.respond(message_log_batch, metadata)


class Logs(Logger):
    def __init__(self, config, folder):
        start_loops("logger.init")

    def log_metrics(self, metrics, step):
        start_loops("logger.metrics")

    def log_rollouts(self, rows, step):
        start_loops("logger.rollouts")

    def finish(self):
        start_loops("logger.finish")


def record(row):
    start_loops("record")
    return {"messages": [{"role": "user", "content": row["sum"]}], "extra_env_info": {"expected_answer": row["sum"]}}


def agent(base_url, api_key, model, messages):
    start_loops("agent")

    async def ask():
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            answer = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "1+1="}])
            return answer.choices[0].message.content or ""

    return float(len(asyncio.run(ask())) % 3)
'''
REWARDS = {"trl": "loops.trl_style", "server": "loops.waits_for_a_server", "math": "loops.in_main_thread"}
ENVIRONMENTS = {
    "rewards": {"sums": {"reward_fns": REWARDS}},
    "environment": {"sums": {"env_cls": "loops.Sessions"}},
    "async_environment": {"sums": {"env_cls": "loops.AsyncSteps"}},
    "agent": {"sums": {"agent": "loops.agent"}},
}
EXPECTED = {
    "rewards": {"reward main"},
    "environment": {f"environment.{call} main" for call in ("init", "reset", "step", "close", "metrics")},
    "async_environment": {"environment.close main"},
    "agent": {"agent other"},
}
IN_DRIVER = {f"{call} main" for call in ("record", "logger.init", "logger.metrics", "logger.rollouts", "logger.finish")}


@pytest.fixture
def config(tmp_path):
    """Writes the module of the user; returns the changes of a run with one of its kinds of code."""
    (tmp_path / "loops.py").write_text(MODULE)
    (tmp_path / "sums.jsonl").write_text("".join(f'{{"sum": "{n}+1="}}\n' for n in range(10, 18)))

    def make(code, cluster):
        rows = {"dataset_name": "jsonl", "path": "sums.jsonl", "record_fn": "loops.record", "task_name": "sums"}
        return {
            "grpo": {"max_num_steps": 1, "num_prompts_per_step": 2, "max_rollout_turns": 1 + ("environment" in code)},
            "policy": {"max_total_sequence_length": 40, "scheduler": None},
            "data": {"train": {**rows, "num_samples": None}},
            "env": {"arithmetic": None, **ENVIRONMENTS[code]},
            "logger": {"loggers": {"loops.Logs": {}}},
            "cluster": cluster,
            "checkpointing": {"enabled": False, "save_period": None, "keep_latest_k": None},
        }

    return make


@pytest.mark.parametrize("code", ENVIRONMENTS)
def test_code_of_users_starts_event_loops_and_keeps_its_thread_in_process(train_here, config, tmp_path, monkeypatch, code):
    monkeypatch.delitem(sys.modules, "loops", raising=False)
    code_of_run, output = train_here(config(code, {"backend": "in_process"}))
    assert code_of_run == 0, output
    assert set((tmp_path / "calls").read_text().splitlines()) >= EXPECTED[code] | IN_DRIVER


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    "code",
    [
        pytest.param("rewards", marks=pytest.mark.slow),
        pytest.param("async_environment", marks=pytest.mark.full("the test above has the same environment in process")),
    ],
)
def test_code_of_users_starts_event_loops_and_keeps_its_thread_over_ray(train, config, tmp_path, code):
    code_of_run, output = train(config(code, {"backend": "ray"})).wait()
    assert code_of_run == 0, output
    assert set((tmp_path / "calls").read_text().splitlines()) >= EXPECTED[code] | IN_DRIVER
