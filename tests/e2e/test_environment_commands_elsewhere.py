"""`rlcore check env`, `rlcore env play` and the server's grading run an environment in its own interpreter, as in training."""

import asyncio
import importlib.util
import json

import pytest
from other_interpreters import make_environment, see_our_packages, site_packages

from rl_core.config.schema import EnvironmentConfig
from rl_core.errors import ConfigError
from rl_serve.errors import ApiError
from rl_serve.grading import Grader

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_ray")]

GAMES = """
import os, random, sys
from rl_core.environments import StepResult, environment_return
from rl_core.errors import DataError
from rl_core.interfaces import EnvironmentInterface

class Equal(EnvironmentInterface):
    '''One turn; 1.0 for the expected answer, and for `paid`.'''

    def __init__(self, config):
        self.paid = config.get("paid")

    def reward(self, text, expected):
        return float(text in (expected, self.paid))

    def step(self, message_log_batch, metadata):
        return environment_return([
            StepResult(
                observation={"role": "environment", "content": ""},
                metadata=info,
                rewards={"equal": self.reward(log[-1]["content"], info["expected_answer"])},
                terminated=True,
                answer=sys.prefix,
            )
            for log, info in zip(message_log_batch, metadata, strict=True)
        ])

    def global_post_process_and_metrics(self, batch):
        return batch, {"accuracy": float(batch["rewards"].mean())}

class Draws(Equal):
    def reward(self, text, expected):
        return random.random()

class NeverRight(Equal):
    def reward(self, text, expected):
        return 0.0

class Refuses(Equal):
    def reward(self, text, expected):
        raise DataError("expected_answer: not a number")

class Breaks(Equal):
    def __init__(self, config):
        raise ValueError("there is no game")

class Exits(Equal):
    def step(self, message_log_batch, metadata):
        os._exit(3)

class TwoTurns(Equal):
    '''Sessions of two turns, which open with a message.'''

    def __init__(self):
        self.turns, self.paid = {}, None

    def reset(self, metadata):
        self.turns[metadata["session_id"]] = 0
        return {"role": "environment", "content": "start"}

    def close(self, session):
        self.turns.pop(session, None)

    def step(self, message_log_batch, metadata):
        done = super().step(message_log_batch, metadata)
        for row, info in enumerate(metadata):
            turn = self.turns[info["session_id"]] = self.turns[info["session_id"]] + 1
            done.terminateds[row] = turn == 2
        return done._replace(observations=[{"role": "environment", "content": "again"}] * len(metadata))

class Steps:
    '''Not an environment.'''
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter with a module that this one does not have, and an old version of our environments."""
    folder = make_environment(tmp_path_factory.mktemp("envs") / "prefix")
    metadata = site_packages(folder) / "rl_envs-0.0.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: rl-envs\nVersion: 0.0.9\n")
    (site_packages(folder) / "games_there.py").write_text(GAMES)
    assert importlib.util.find_spec("games_there") is None
    return see_our_packages(folder)


@pytest.fixture
def call(rlcore, python, tmp_path):
    """A command with an environment of that interpreter and three rows: exit code and all output."""
    rows = [{"question": f"{n}+1=", "expected_answer": f"{n + 1}"} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*words, python=python):
        return rlcore(*words, f"python={python}", "--rows", "rows.jsonl", folder=tmp_path)

    return run


def checks(output):
    """Status and finding of each check."""
    return {row["name"]: (row["status"], row["found"]) for row in json.loads(output[output.index("[\n") :])}


def test_a_right_environment_passes_and_what_cannot_be_seen_is_listed(call, python):
    code, output = call("check", "env", "games_there.TwoTurns", "--json")
    assert code == 0, output
    found = checks(output)
    assert found["construction"] == ("ok", "games_there.TwoTurns was created")
    assert found["metadata and messages"] == ("note", f"not checked: runs in {python}")
    assert "3 of 3 rollouts ended, after at most 2 turns" in found["turns"][1]
    assert "3 of 3 expected answers got more than a wrong one; their mean reward is 2" in found["correct answers"][1]
    passed = [
        "step",
        "determinism",
        "independence of rows",
        "pickling",
        "sessions",
        "metrics",
        "correct answers",
        "constant answers",
    ]
    assert {name: found[name][0] for name in passed} == dict.fromkeys(passed, "ok")


@pytest.mark.parametrize(
    ("environment", "check", "says"),
    [
        ("Breaks", "construction", "ValueError: there is no game"),
        ("Draws", "determinism", "two equal calls had different results"),
        ("Equal paid=A", "constant answers", "the answer 'A' is rewarded like the expected one on 3 of 3 problems"),
    ],
)
def test_a_wrong_environment_fails_its_check(call, environment, check, says):
    name, *settings = environment.split()
    code, output = call("check", "env", f"games_there.{name}", *settings, "--json")
    assert code == 1, output
    status, found = next(result for result in checks(output).items() if result[1][0] == "failed")[1]
    assert says in found, output
    assert checks(output)[check][0] == status


def test_that_no_answer_is_rewarded_is_noted_because_reads_of_the_metadata_are_not_seen(call, python):
    code, output = call("check", "env", "games_there.NeverRight", "--json")
    assert code == 0, output
    status, found = checks(output)["correct answers"]
    assert status == "note"
    assert found.endswith(f"whether the environment reads it is not checked: runs in {python}")


def test_a_rollout_is_played_turn_by_turn(call, tmp_path):
    (tmp_path / "answers.txt").write_text("1\n2\n3\n")
    code, output = call("env", "play", "games_there.TwoTurns", "--script", "answers.txt")
    assert code == 0, output
    assert [line for line in output.splitlines() if line.startswith(("user", "environment", "assistant"))] == [
        "user: 0+1=",
        "environment: start",
        "assistant: 1",
        "environment: again",
        "assistant: 2",
    ]
    assert "total reward 1 after 2 turns" in output
    code, output = call("env", "play", "games_there.Exits", "--script", "answers.txt")
    assert (code, "died in step()" in output) == (1, True), output


@pytest.mark.parametrize("command", [("check", "env"), ("env", "play", "--player", "random")])
def test_what_the_interpreter_lacks_is_an_error_with_the_command_that_installs_it(call, command, python, tmp_path):
    for name, says in (
        ("games_there.Steps", "The environment games_there.Steps"),
        ("games_there.Gone", "games_there:Gone does not exist: games_there has no 'Gone'"),
        ("module_of_nobody.Game", "module_of_nobody"),
        ("math", f"rl-envs 0.0.9, but the driver 0.1.0. Install what is missing: {python} -m pip install rl-envs==0.1.0"),
    ):
        code, output = call(*command, name)
        assert code == 2, output
        text = " ".join(output.split())
        assert f"cannot run with {python}" in text, output
        assert says in text, output
    code, output = call(*command, "games_there.Equal", python=tmp_path / "nowhere")
    assert (code, f"{tmp_path / 'nowhere'} does not exist" in output) == (2, True), output


def test_the_server_grades_with_the_interpreter_of_the_task(python):
    section = EnvironmentConfig.model_validate({"env_cls": "games_there.TwoTurns", "python": str(python)})
    with pytest.raises(ConfigError, match="games_there has no 'Gone'"):
        Grader("game", section.model_copy(update={"env_cls": "games_there.Gone"}))
    grader = Grader("game", section.model_copy(update={"env_cls": "games_there.NeverRight"}))
    try:
        grade = asyncio.run(grader.grade([{"role": "user", "content": "0+1="}], "1", {"expected_answer": "1"}))
    finally:
        grader.close()
    assert grade == {"predicted_answer": str(python.parent.parent), "is_correct": False}


@pytest.mark.parametrize(("environment", "status"), [("Refuses", 400), ("Exits", 503)])
def test_the_server_tells_a_refused_record_from_an_environment_that_failed(python, environment, status):
    grader = Grader("game", EnvironmentConfig.model_validate({"env_cls": f"games_there.{environment}", "python": str(python)}))
    try:
        with pytest.raises(ApiError) as caught:
            asyncio.run(grader.grade([{"role": "user", "content": "0+1="}], "1", {"expected_answer": "x"}))
    finally:
        grader.close()
    assert caught.value.status == status
