"""Runs with `rollout.max_staleness: 2`, two policy ranks and two replicas: environments that fail, and validation scores."""

import json
import textwrap

import pytest
from e2e_runs import checkpoint_of, metrics_of

pytestmark = [
    pytest.mark.ray,
    pytest.mark.full("test_asynchronous_runs.py has a run of several turns, test_failures.py failing environments"),
]

SLOW_TURNS = textwrap.dedent(
    """
    import random, time
    import torch
    from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn

    class SlowTurns(EnvironmentInterface):
        '''Two turns with rewards that depend on the text only; the response to each takes up to 0.2 s.'''

        def __init__(self, cfg):
            self.fails = cfg.get("fails", False)
            self.hangs = cfg.get("hangs", False)

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


@pytest.fixture
def config(tmp_path):
    (tmp_path / "slow_turns.py").write_text(SLOW_TURNS)

    def make(steps, **environment):
        section = {"env_cls": "slow_turns.SlowTurns", "num_workers": 2, **environment}
        return {
            "grpo": {"max_num_steps": steps, "max_rollout_turns": 2, "val_period": 1, "val_at_start": False},
            "policy": {
                "max_total_sequence_length": 40,
                "scheduler": {"kwargs": {"num_training_steps": None}},
                "generation": {"max_restarts": 100},
            },
            "cluster": {"workers_per_node": 2},
            "loss_fn": {"ratio_to": "sampler"},
            "rollout": {"max_staleness": 2, "ahead": 2, "retries": 4},
            "data": {
                "train": {"num_samples": 400},
                "validation": {"dataset_name": "arithmetic", "num_samples": 8, "split": "validation"},
            },
            "env": {"arithmetic": section},
            "checkpointing": {"save_period": 1},
        }

    return make


def test_an_environment_that_never_responds_costs_only_its_rows(train, config, tmp_path):
    changes = config(4, hangs=True, step_timeout_s=3.0)
    run = train({**changes, "rollout": {**changes["rollout"], "retries": 0, "max_failed_share": 1.0}})
    code, output = run.wait(900)
    run.assert_gone()
    assert code == 0, output
    assert any(row.get("rollout/failed_rows", 0) > 0 for row in metrics_of(tmp_path).values())


def test_a_task_in_which_every_rollout_fails_ends_with_its_error(train, config, tmp_path):
    run = train(config(4, fails=True))
    code, output = run.wait()
    run.assert_gone()
    assert code == 1
    assert "could not be scored" in output or "could be scored" in output
    assert "ConnectionError: the service does not respond" in output


def test_validation_scores_are_those_of_an_evaluation_of_the_checkpoint(train, config, tmp_path, rlcore):
    code, output = train(config(3)).wait()
    assert code == 0, output
    for step in (1, 3):
        result = tmp_path / f"eval_{step}.json"
        options = ("--checkpoint", str(checkpoint_of(step, tmp_path)), "--json", str(result))
        code, output = rlcore("eval", str(tmp_path / "run.yaml"), *options, folder=tmp_path)
        assert code == 0, output
        [mode] = json.loads(result.read_text())["modes"]
        assert metrics_of(tmp_path)[step]["validation/reward"] == pytest.approx(
            mode["all"]["metrics"]["reward"]["value"], abs=1e-6
        )
