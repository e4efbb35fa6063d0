"""The metrics lines of a run that contain data statistics."""

from types import SimpleNamespace

import pytest

from rl_backends_base.distributed_policy import DistributedPolicy
from rl_core.cluster.sharding import NamedSharding
from rl_train.metrics.logger import Logger
from rl_train.run import Run


class Lines(Logger):
    def __init__(self):
        self.lines = []

    def log_metrics(self, metrics, step):
        self.lines.append(dict(metrics))


@pytest.mark.parametrize(("first_step", "expected"), [(0, [3.0, None]), (4, [None, None])])
def test_data_statistics_are_in_the_first_line_of_a_run_but_not_of_a_resumed_run(tmp_path, first_step, expected):
    logger = Lines()
    run = Run(config=None, folder=tmp_path, policy=None, loss_fn=None, loggers=[logger], checkpoints=None, tokenizer=None)
    run.initial_metrics = {"data/bad_rows": 3.0}
    run.first_step = first_step  # as a resume sets it, after everything is built
    for step in (first_step + 1, first_step + 2):
        run.metrics.add({"loss": 1.0})
        run.flush(step)
    assert [line.get("data/bad_rows") for line in logger.lines] == expected


def test_a_policy_from_python_has_the_data_ranks_of_its_cluster(tmp_path):
    policy = DistributedPolicy.__new__(DistributedPolicy)  # its section does not know the cluster that it was created on
    policy.group = SimpleNamespace(sharding=NamedSharding.grid(data=2, tensor=2))
    run = Run(config=None, folder=tmp_path, policy=policy, loss_fn=None, loggers=[], checkpoints=None, tokenizer=None)
    assert run.data_ranks == 2


class Unreachable(Logger):
    def log_metrics(self, metrics, step):
        if step == 2:
            raise ConnectionError("the tracking server does not respond")


@pytest.mark.parametrize("saves", [True, False])
def test_a_finished_step_is_saved_if_a_logger_raises(tmp_path, saves):
    saved = []
    store = SimpleNamespace(save=lambda step, numbers: saved.append((step, numbers["loss"])))
    config = SimpleNamespace(
        algorithm=SimpleNamespace(max_num_steps=3, seed=0),
        checkpointing=SimpleNamespace(save_period=10),
        profiling=SimpleNamespace(steps=[]),
    )
    parts = {"policy": None, "loss_fn": None, "tokenizer": None}
    run = Run(config=config, folder=tmp_path, loggers=[Unreachable()], checkpoints=store if saves else None, **parts)

    def train():
        for step in run.steps():
            run.metrics.add({"loss": step / 2})

    with pytest.raises(ConnectionError, match="tracking server"):
        train()
    assert saved == ([(2, 1.0)] if saves else [])
