"""The adapter of OpenEnv: its protocol against a small server, and, with `full`, its own server in its own interpreter."""

import json
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress

import pytest
from environment_steps import step_checked
from other_interpreters import make_environment, see_our_packages, site_packages
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

from rl_core.errors import ConfigError
from rl_core.rendezvous.interfaces import free_port
from rl_envs.text_games.openenv import OpenEnvEnvironment


class Counter:
    """An environment that adds the numbers in the messages to its seed and ends at 10."""

    def __init__(self):
        self.closed, self.seeds = 0, []

    def __call__(self, socket):
        total = 0
        for text in socket:
            message = json.loads(text)
            if message["type"] == "reset":
                total = message["data"]["seed"]
                self.seeds.append(message["data"])
            elif "number" in message["data"]:
                total += int(message["data"]["number"])
            elif message["data"]["message"] == "hang":
                with suppress(ConnectionClosed):
                    socket.recv()  # until the client leaves
                break
            elif message["data"]["message"] == "break":
                socket.send(json.dumps({"type": "error", "data": {"message": "broken", "code": "EXECUTION_ERROR"}}))
                continue
            data = {"observation": {"total": total, "text": f"total {total}"}, "reward": total / 10, "done": total >= 10}
            socket.send(json.dumps({"type": "observation", "data": data}))
        self.closed += 1


@pytest.fixture
def server():
    counter = Counter()
    with serve(counter, "127.0.0.1", 0) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        counter.url = f"http://127.0.0.1:{running.socket.getsockname()[1]}"
        yield counter
        running.shutdown()
    thread.join()


def begin(environment, seed, session="a"):
    info = {"seed": seed, "session_id": session}
    return info, environment.reset(info)["content"]


def say(environment, info, text):
    returned = step_checked(environment, "openenv", [[{"role": "assistant", "content": text}]], [info])
    failures = returned.failures or [None]
    return returned, failures[0]


def test_an_episode_begins_with_the_seed_of_the_row_and_ends_when_the_server_says_so(server):
    environment = OpenEnvEnvironment(
        {"url": server.url, "kwargs": {"level": 2}, "action_key": "number", "observation_key": "text"}
    )
    info, opening = begin(environment, 4)
    other, _ = begin(environment, 8, "b")
    assert (opening, server.seeds[0]) == ("total 4", {"level": 2, "seed": 4})
    first, _ = say(environment, info, "<think>9</think>3")
    assert (first.observations[0]["content"], bool(first.terminateds[0])) == ("total 7", False)
    last, _ = say(environment, first.metadata[0], "5")
    assert bool(last.terminateds[0])
    assert last.metadata[0]["total_reward"] == pytest.approx(1.9)
    assert say(environment, other, "1")[0].observations[0]["content"] == "total 9"
    environment.close("a")
    environment.close("b")


def test_without_keys_actions_and_observations_are_json(server):
    environment = OpenEnvEnvironment({"url": server.url, "action_key": None})
    info, opening = begin(environment, 1)
    assert json.loads(opening) == {"total": 1, "text": "total 1"}
    wrong, failure = say(environment, info, "add two")
    assert wrong.observations[0]["content"] == "That is not an action: a JSON object is missing."
    assert failure is None
    right, _ = say(environment, wrong.metadata[0], 'I add {"number": 2}')
    assert json.loads(right.observations[0]["content"])["total"] == 3
    environment.close("a")


@pytest.mark.parametrize(("text", "reason"), [("break", "broken"), ("hang", "TimeoutError")])
def test_an_error_of_the_server_fails_only_its_row_and_drops_the_connection(server, text, reason):
    environment = OpenEnvEnvironment({"url": server.url, "observation_key": "text", "timeout_s": 2.0})
    info, _ = begin(environment, 1)
    other, _ = begin(environment, 2, "b")
    _, failure = say(environment, info, text)
    assert reason in failure
    _, later = say(environment, info, "more")
    assert "ConnectionClosed" in later
    assert say(environment, other, "more")[1] is None
    environment.close("a")
    environment.close("b")


def test_a_url_of_another_kind_is_an_error_of_the_config():
    with pytest.raises(ConfigError, match="url"):
        OpenEnvEnvironment({"url": "localhost:8000"})


ECHO = """
import sys, uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Word(Action):
    message: str

class Said(Observation):
    text: str

class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.secret = seed % 3
        return Said(text="0, 1 or 2?")

    def step(self, action, timeout_s=None, **kwargs):
        if action.message == "break":
            raise RuntimeError("broken")
        right = action.message == str(self.secret)
        return Said(text="yes" if right else "no", reward=float(right), done=right)

    @property
    def state(self):
        return State()

uvicorn.run(create_fastapi_app(Guess, Word, Said, max_concurrent_envs=8), port=int(sys.argv[1]), log_level="warning")
"""


@pytest.mark.full("the tests above have the same protocol; this one installs openenv")
def test_the_real_server_plays_in_its_own_interpreter(tmp_path):
    port = free_port("127.0.0.1")
    folder = make_environment(tmp_path / "venv")
    python = see_our_packages(folder)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", site_packages(folder)]
    subprocess.run([*pip, "--no-deps", "openenv==0.10.0"], check=True)
    subprocess.run([*pip, "fastmcp>=3,<4"], check=True)
    (tmp_path / "server.py").write_text(textwrap.dedent(ECHO))
    process = subprocess.Popen([python, tmp_path / "server.py", str(port)])
    try:
        environment = OpenEnvEnvironment({"url": f"http://127.0.0.1:{port}", "observation_key": "text"})
        until = time.monotonic() + 120
        while True:
            try:
                info, opening = begin(environment, 5)
                break
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.5)
        other, _ = begin(environment, 1, "b")
        assert opening == "0, 1 or 2?"
        wrong, _ = say(environment, info, "1")
        assert (wrong.observations[0]["content"], bool(wrong.terminateds[0])) == ("no", False)
        right, _ = say(environment, wrong.metadata[0], "2")
        assert right.metadata[0]["total_reward"] == 1.0
        assert "broken" in say(environment, other, "break")[1]
        environment.close("a")
        environment.close("b")
    finally:
        process.terminate()
        process.wait()
