"""Whole runs of `rlcore train` in separate processes, on the quickstart model."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

from marked_processes import MARK, assert_gone, marked_processes

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "addition" / "model"

TINY = {
    "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_num_steps": 6, "seed": 3},
    "policy": {
        "backend": "hf",
        "model_name": str(MODEL),
        "max_total_sequence_length": 16,
        "train_global_batch_size": 8,
        "optimizer": {"kwargs": {"lr": 1.0e-4, "weight_decay": 0.01}},
        "scheduler": {"name": "linear", "kwargs": {"num_warmup_steps": 2, "num_training_steps": 40}},
        "generation": {"backend": "hf", "max_new_tokens": 5},
    },
    "data": {"train": {"dataset_name": "arithmetic", "num_samples": 40}},
    "env": {"arithmetic": {"num_workers": 1}},
    "checkpointing": {"save_period": 2, "keep_latest_k": 10},
}

HELD = textwrap.dedent(
    """
    import time
    from pathlib import Path
    from rl_envs import ArithmeticEnvironment

    class HeldEnvironment(ArithmeticEnvironment):
        '''Its n-th answer waits, where the file `hold` says n, until that is taken away; `held` says that it waits.'''

        def __init__(self, cfg):
            super().__init__({})
            self.folder, self.calls = Path(cfg["folder"]), 0

        def step(self, message_log_batch, metadata):
            self.calls += 1
            hold = self.folder / "hold"
            if hold.exists() and int(hold.read_text()) == self.calls:
                (self.folder / "held").touch()
                while hold.exists():
                    time.sleep(0.02)
            return super().step(message_log_batch, metadata)
    """
)

SLOW_TURNS = textwrap.dedent(
    """
    import os, random, time
    from pathlib import Path
    import torch
    from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn

    FOLDER = Path(__file__).parent

    class SlowTurns(EnvironmentInterface):
        '''Two turns with rewards that depend on the text only; the response to each takes up to 0.2 s.'''

        def __init__(self, cfg):
            self.fails = cfg.get("fails", False)
            self.hangs = cfg.get("hangs", False)
            (FOLDER / "environments").mkdir(exist_ok=True)
            (FOLDER / "environments" / str(os.getpid())).touch()

        def step(self, message_log_batch, metadata):
            if self.fails:
                raise ConnectionError("the service does not respond")
            if self.hangs and any(log[0]["content"].startswith("1") for log in message_log_batch):
                time.sleep(3600)
            time.sleep(random.random() * 0.2)
            answers = [[m["content"] for m in log if m["role"] == "assistant"] for log in message_log_batch]
            return EnvironmentReturn(
                observations=[{"role": "environment", "content": "1+2="} for _ in answers],
                metadata=metadata,
                next_stop_strings=[None] * len(answers),
                rewards=torch.tensor([sum(text.count("1") for text in texts) / 4 for texts in answers]),
                terminateds=torch.tensor([len(texts) == 2 for texts in answers]),
            )
    """
)

TRAP_CALLS = textwrap.dedent(
    """
    def trap(owner, name, where, *, after=False):
        '''Call `pass_by(where)`, which the module defines, before or after each call of a method or function.'''
        function = getattr(owner, name)
        def passing(*arguments, **options):
            if not after:
                pass_by(where)
            result = function(*arguments, **options)
            if after:
                pass_by(where)
            return result
        setattr(owner, name, passing)
    """
)

PLANS_OF_PAIRS = {
    "one pair at a time": {"train_micro_batch_size": 2},
    "an odd number of rows at a time": {"train_micro_batch_size": 5},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 32, "logprob_mb_tokens": 32}},
    "under a budget": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 48}},
}
"""Every kind of microbatch, as settings of a policy that trains on pairs of answers."""


def merged(base, changes):
    out = dict(base)
    for key, value in changes.items():
        if value is None:
            out.pop(key, None)
            continue
        out[key] = merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


class TrainingProcess:
    """One `rlcore train` with all its descendant processes."""

    def __init__(self, folder, config, *arguments, environment=None, before=()):
        """`before` is the command that starts it, such as `nsenter` with its options."""
        self.folder = folder
        path = folder / "run.yaml"
        path.write_text(json.dumps(config))
        self.mark = uuid.uuid4().hex
        self.log = (folder / f"log-{self.mark}.txt").open("w+")
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", "rlcore_cli.main", "train", str(path), *arguments],
            cwd=folder,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env={**os.environ, MARK: self.mark, **(environment or {})},
            start_new_session=True,
        )

    def wait(self, timeout=400):
        code = self.process.wait(timeout)
        return code, self.output()

    def output(self):
        self.log.flush()
        return Path(self.log.name).read_text()

    def wait_for(self, condition, timeout=300):
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            if condition():
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"it did not come to it:\n{self.output()[-3000:]}")

    def descendants(self):
        """Live processes of the run, wherever they are in the process tree."""
        return marked_processes(self.mark)

    def assert_gone(self):
        assert_gone(self.mark)

    def kill(self, sig=signal.SIGKILL):
        os.kill(self.process.pid, sig)


MEASURED = ("_s", "_gib", "/idle_frac")
"""Ends of the names of metrics that depend on the speed of the machine."""


def checkpoint_of(step, folder, name="run"):
    """The folder of a checkpoint, which exists once it is complete: the metrics of its step are written earlier."""
    return folder / "runs" / name / "checkpoints" / f"step_{step:06d}"


def metrics_of(folder, name="run"):
    """The metrics of a run by step, without time measurements."""
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    steps = {}
    for line in map(json.loads, lines):
        assert line["step"] not in steps, "a step was written twice"
        steps[line["step"]] = {key: value for key, value in line.items() if not key.endswith(MEASURED)}
    return steps


def reproducible_metrics_of(folder, name="run"):
    """The metrics that a resumed run repeats: without the canary's error, which only the first refit of a process has."""
    return {
        step: {key: value for key, value in found.items() if key != "refit/canary_error"}
        for step, found in metrics_of(folder, name).items()
    }


def without_speed(steps):
    """The metrics of steps without times, refits and speed, which differ between two runs."""
    return [
        {name: value for name, value in step.items() if not (name.startswith("refit/") or name.endswith(MEASURED))}
        for step in steps
    ]
