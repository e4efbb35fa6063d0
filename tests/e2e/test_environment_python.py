"""Environments and agents with their own interpreter: the driver cannot import them, and trains with them all the same."""

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import textwrap

import pytest
from e2e_runs import TINY, merged
from other_interpreters import make_environment, see_our_packages, site_packages

from rl_train.metrics.jsonl import read_jsonl

STEPS = {
    "grpo": {"max_num_steps": 3, "val_period": 0},
    "checkpointing": {"enabled": False, "save_period": None, "keep_latest_k": None},
}
GAME = """
import sys
from rl_core.environments import StepResult, environment_return
from rl_core.interfaces import EnvironmentInterface

class Game(EnvironmentInterface):
    '''Two turns with sessions; rewards even lengths.'''

    min_turns = 2

    def __init__(self, cfg):
        self.sessions = {}

    def reset(self, metadata):
        self.sessions[metadata["session_id"]] = 0

    def step(self, message_log_batch, metadata):
        results = []
        for log, info in zip(message_log_batch, metadata, strict=True):
            turn = self.sessions[info["session_id"]] = self.sessions[info["session_id"]] + 1
            results.append(StepResult(
                observation={"role": "environment", "content": "1"},
                metadata=info,
                answer=sys.prefix,
                rewards={"even": float(len(log[-1]["content"]) % 2 == 0)},
                terminated=turn == 2,
            ))
        return environment_return(results)

class Steps:
    '''Not an environment.'''
"""
AGENT = """
import sys
from openai import OpenAI

async def solve(base_url, api_key, model, messages, metadata, config):
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    said = client.chat.completions.create(model=model, messages=messages).choices[0].message.content
    if "prefix" not in sys.prefix:
        raise RuntimeError(config["agent"])
    return {"even": float(len(said) % 2 == 0)}

def needs_more(base_url, another):
    pass
"""


def interpreter(folder, **versions):
    """An interpreter with our packages, some of them in another version according to their metadata."""
    make_environment(folder)
    for name, version in versions.items():
        metadata = site_packages(folder) / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    return see_our_packages(folder)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """An interpreter with modules that this one does not have, and an old version of a library."""
    folder = tmp_path_factory.mktemp("envs") / "prefix"
    python = interpreter(folder, gymnasium="0.1", rl_envs="0.0.9")
    (site_packages(folder) / "only_there.py").write_text(textwrap.dedent(GAME))
    (site_packages(folder) / "agent_there.py").write_text(textwrap.dedent(AGENT))
    assert importlib.util.find_spec("only_there") is None
    return python


def changed(env, **others):
    return {**STEPS, **others, "env": {"arithmetic": env}}


def records(tmp_path):
    [folder] = (tmp_path / "runs").glob("*")
    return read_jsonl(folder / "rollouts" / "step_000003.jsonl")


@pytest.mark.slow
def test_an_environment_of_another_interpreter_trains_three_steps_and_scores_them_again(train_here, rlcore, other, tmp_path):
    section = {"env_cls": "only_there.Game", "python": str(other), "max_rollout_turns": 2, "num_workers": 2}
    code, output = train_here(changed(section, policy={"max_total_sequence_length": 32}))
    assert code == 0, output
    rows = records(tmp_path)
    assert len(rows) == 16
    assert {row["answer"] for row in rows} == {str(other.parent.parent)}
    assert all(row["turns"] == 2 for row in rows)
    [folder] = (tmp_path / "runs").glob("*")
    code, output = rlcore("env", "rescore", folder, "--steps", "3", folder=tmp_path)
    assert code == 0, output
    assert "16 rollouts scored again; 0 differ" in output, output


@pytest.mark.slow
def test_an_agent_of_another_interpreter_trains_three_steps(train_here, other, tmp_path):
    code, output = train_here(changed({"agent": "agent_there:solve", "python": str(other)}))
    assert code == 0, output
    rows = records(tmp_path)
    assert [row["failure"] for row in rows] == [None] * 16
    assert {row["reward"] for row in rows} <= {0.0, 1.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"env_cls": "only_there.Steps"}, "The environment only_there.Steps .*has no method step"),
        ({"env_cls": "only_there.Gone"}, "only_there:Gone does not exist: only_there has no 'Gone'"),
        ({"env_cls": "only_there.Game", "max_rollout_turns": 1}, "needs 2 to give a reward"),
        ({"agent": "agent_there:needs_more"}, "requires the argument 'another'"),
        ({"agent": "agent_there:gone"}, "agent_there has no 'gone'"),
        (
            {"name": "gymnasium", "id": "FrozenLake-v1"},
            r"it has rl-envs 0.0.9, but the driver 0.1.0.*/bin/python -m pip install rl-envs==0.1.0 'rl-envs\[gymnasium\]'",
        ),
    ],
)
def test_what_another_interpreter_lacks_is_an_error_before_the_start(rlcore, other, tmp_path, env, message):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(merged(TINY, changed({**env, "python": str(other)}))))
    code, output = rlcore("validate", "--deep", str(path), folder=tmp_path)
    assert code == 2
    assert re.search(message, " ".join(output.split())), output
    assert "has 1 error:" in output, output  # although rules and preparation both ask the interpreter


@pytest.mark.slow
@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({"rl_backends_hf": "0.0.9"}, "it has rl-backends-hf 0.0.9, but the driver 0.1.0"),
        ({"transformers": "4.0"}, r"rl-backends-hf: transformers.* is required, 4.0 is installed"),
    ],
)
def test_an_interpreter_without_what_a_backend_requires_is_an_error_before_the_start(rlcore, tmp_path, versions, message):
    python = interpreter(tmp_path / "prefix", **versions)
    path = tmp_path / "run.yaml"
    path.write_text(
        json.dumps(merged(TINY, {**STEPS, "policy": {"python": str(python), "generation": {"python": str(python)}}}))
    )
    code, output = rlcore("validate", "--deep", str(path), folder=tmp_path)
    assert code == 2
    found = " ".join(output.split())
    for key in ("policy.python", "policy.generation.python"):
        remedy = rf"Install what is missing: {python} -m pip install rl-backends-hf==0\.1\.0"
        assert re.search(rf"{re.escape(key)}: the backend 'hf' cannot run with {python}: {message}\. {remedy}", found), output


@pytest.mark.full("one interpreter of a worker is tested above; this one installs another version of Transformers")
def test_policy_engine_and_environment_train_in_three_interpreters(train_here, tmp_path):
    """Two of them have different versions of Transformers."""
    folders = {name: make_environment(tmp_path / name) for name in ("policy", "engine", "game")}
    pythons = {name: see_our_packages(folder) for name, folder in folders.items()}
    for name, folder in folders.items():
        started = f"import os, sys; open({str(tmp_path / name)!r} + f'-{{os.getpid()}}.log', 'w').write(repr(sys.orig_argv))"
        (site_packages(folder) / "started.pth").write_text(started + "\n")
    other = next(version for version in ("5.17.0", "5.18.0") if version != importlib.metadata.version("transformers"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site_packages(folders["engine"])]
    subprocess.run([*pip, f"transformers=={other}", "huggingface-hub>=1.5,<2"], check=True)
    (site_packages(folders["game"]) / "only_there.py").write_text(GAME)
    section = {"env_cls": "only_there.Game", "python": str(pythons["game"]), "max_rollout_turns": 2}
    changes = {
        "python": str(pythons["policy"]),
        "max_total_sequence_length": 32,
        "generation": {"python": str(pythons["engine"])},
    }
    code, output = train_here(changed(section, policy=changes))
    assert code == 0, output
    assert len(records(tmp_path)) == 16
    for name in folders:
        starts = [path.read_text() for path in tmp_path.glob(f"{name}-*.log")]
        assert any("default_worker.py" in start for start in starts), (name, starts)
    show = "import transformers; print(transformers.__version__)"
    versions = {
        name: subprocess.run([pythons[name], "-c", show], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("policy", "engine")
    }
    assert versions == {"policy": importlib.metadata.version("transformers"), "engine": other}
