"""The facades over workers: shards, padding rows, counts and errors, with workers that only count."""

import asyncio
import logging

import pytest
import torch

from rl_backends_base.distributed_generation import DistributedGeneration
from rl_backends_base.distributed_policy import DistributedPolicy, PrefixSharing
from rl_backends_base.replica_rows import prompt_keys, split_by_prompt
from rl_core.cluster import NamedSharding
from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.dispatch.rows import global_counts, pad_rows_to_multiple, select_columns
from rl_core.errors import ConfigError, DataError, NonFiniteError, NotSupportedError, RLCoreError
from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn, LossFunction
from rl_core.interfaces.worker import GenerationWorker, PolicyWorker, StepResult
from rl_train.algorithms.losses import NLLLossFn
from rl_train.pools.pool import InProcessPool
from rl_train.rollouts.environment_pool import EnvironmentPool


def rows(n, length=4):
    return BatchedDataDict(
        {
            "input_ids": torch.arange(n * length).view(n, length),
            "input_lengths": torch.full((n,), length),
            "token_mask": torch.ones(n, length),
            "sample_mask": torch.ones(n),
        }
    )


class CountingWorker(PolicyWorker):
    """Returns its input."""

    def __init__(self, context, config):
        self.version = 0

    def setup(self):
        return {"num_parameters": 0}

    def get_logprobs(self, data, *, reference=False):
        return BatchedDataDict({"logprobs": data["input_ids"].float() * (-1 if reference else 1)})

    def train(self, data, loss_fn, *, counts, eval_mode=False, mbs=None):
        if data["input_ids"].max() > 900:
            raise NonFiniteError("the loss is NaN at row 3")
        self.version += 0 if eval_mode else len(counts)
        return [
            StepResult(loss=c.valid_toks, grad_norm=1.0, lr=0.1, metrics={"m": c.valid_seqs, "low": i})
            for i, c in enumerate(counts)
        ]

    def prepare_for_training(self): ...

    def finish_training(self): ...

    def save_checkpoint(self, weights_path, optimizer_path): ...

    def load_checkpoint(self, weights_path, optimizer_path): ...

    def get_weight_version(self):
        return self.version


class WholeBatchWorker(GenerationWorker):
    """Has no `poll`."""

    def __init__(self, context, config): ...

    def setup(self):
        return {"vocab_size": 10, "max_model_len": 8}

    def generate(self, data, *, greedy=False):
        raise AssertionError("no row of these tests can be completed")

    def get_weight_version(self):
        return 0

    def invalidate_kv_cache(self):
        return True


@pytest.fixture
def whole_batches():
    return DistributedGeneration(worker_class=WholeBatchWorker, config=GenerationConfig(backend="x", model_name="x"))


class PathWorker(CountingWorker):
    """Keeps the paths of its checkpoints."""

    def __init__(self, context, config):
        super().__init__(context, config)
        self.paths = []

    def save_checkpoint(self, weights_path, optimizer_path):
        self.paths.append((weights_path, optimizer_path))

    load_checkpoint = save_checkpoint


def test_a_facade_names_its_worker_class_as_an_attribute():
    class Facade(DistributedPolicy):
        worker_class = PathWorker

    section = PolicyConfig(backend="tiny", model_name="tiny")
    made = Facade(config=section, cluster=None, deadlines=None, name="teacher")
    assert (type(made.group.worker), made.worker_class) == (PathWorker, PathWorker)
    assert type(Facade(worker_class=CountingWorker, config=section).group.worker) is CountingWorker
    with pytest.raises(AttributeError, match="worker_class"):
        DistributedPolicy(config=section)


def test_paths_of_checkpoints_are_absolute_for_workers_with_another_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    made = DistributedPolicy(worker_class=PathWorker, config=PolicyConfig(backend="tiny", model_name="tiny"), cluster=None)
    made.save_checkpoint("step/weights", "step/optimizer")
    made.load_checkpoint(tmp_path / "weights")
    assert made.group.worker.paths == [
        (tmp_path / "step" / "weights", tmp_path / "step" / "optimizer"),
        (tmp_path / "weights", None),
    ]
    made.shutdown()


def test_an_engine_whose_worker_has_no_poll_does_not_stream_rows(whole_batches):
    assert not whole_batches.streams_rows
    with pytest.raises(NotSupportedError, match="generate_async"):
        asyncio.run(anext(whole_batches.generate_async(rows(1))))
    whole_batches.close_sessions(["unknown"])


def test_a_generation_engine_checks_rows_before_dispatch(whole_batches):
    with pytest.raises(DataError, match=r"^Row 2 has token id 10"):
        whole_batches.generate(rows(4))


class LowLoss(LossFunction):
    metric_reductions = {"low": "min"}  # noqa: RUF012

    def __call__(self, *_):
        raise AssertionError("only the worker calls a loss")


@pytest.fixture
def policy():
    return DistributedPolicy(worker_class=CountingWorker, config=PolicyConfig(backend="x", model_name="x"))


def test_each_global_batch_is_one_optimizer_step_and_the_last_one_is_padded(policy):
    result = policy.train(rows(10), LowLoss(), gbs=4)
    assert result["num_optimizer_steps"] == 3
    assert policy.weight_version == 3
    assert result["global_valid_toks"] == 40
    assert result["loss"] == pytest.approx((16 + 16 + 8) / 3)
    assert result["metrics"] == {"m": pytest.approx(10 / 3), "low": 0}


def test_evaluation_takes_no_step(policy):
    policy.train(rows(4), LowLoss(), eval_mode=True)
    assert policy.weight_version == 0


def test_scores_come_back_in_order_for_policy_and_reference(policy):
    data = rows(3)
    assert torch.equal(policy.get_logprobs(data)["logprobs"], data["input_ids"].float())
    assert torch.equal(policy.get_reference_logprobs(data)["reference_logprobs"], -data["input_ids"].float())


def test_a_loss_that_is_not_finite_keeps_its_kind_through_the_facade(policy):
    with pytest.raises(NonFiniteError, match="NaN at row 3"):
        policy.train(rows(400), LowLoss())


def test_one_process_cannot_have_two_ranks():
    config = PolicyConfig(backend="x", model_name="x")
    with pytest.raises(ConfigError, match=r"RayVirtualCluster"):
        DistributedPolicy(worker_class=CountingWorker, config=config, num_workers=2)
    with pytest.raises(RLCoreError):
        DistributedPolicy(worker_class=CountingWorker, config=config, sharding=NamedSharding.grid(data=2))


def test_an_attention_mask_is_converted_to_lengths():
    data = BatchedDataDict(
        {"input_ids": torch.ones(2, 3), "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]), "other": [1, 2]}
    )
    assert select_columns(data, ("input_ids", "input_lengths"))["input_lengths"].tolist() == [2, 3]
    with pytest.raises(DataError, match="`token_mask`"):
        select_columns(data, ("input_ids", "token_mask"))
    data["input_lengths"] = torch.tensor([3, 3])
    with pytest.raises(DataError, match="attention_mask counts"):
        select_columns(data, ("input_ids", "input_lengths"))


def test_padding_rows_have_no_weight():
    filled = pad_rows_to_multiple(rows(5), 4)
    assert filled.size == 8
    assert filled["sample_mask"].tolist() == [1.0] * 5 + [0.0] * 3
    assert [c.valid_toks for c in global_counts(filled, 4)] == [16.0, 4.0]
    assert [c.valid_seqs for c in global_counts(filled, 4)] == [4.0, 1.0]


def test_rows_of_a_prompt_stay_together_and_shards_are_even():
    ids = torch.tensor([[1, 0], [2, 0], [1, 0], [2, 0], [3, 0], [3, 9]])
    data = BatchedDataDict({"input_ids": ids, "input_lengths": torch.tensor([1, 1, 1, 1, 1, 2])})
    parts = split_by_prompt(prompt_keys(data), 3)
    assert sorted(row for part in parts for row in part) == list(range(6))
    assert sorted(map(len, parts)) == [2, 2, 2]
    for together in ({0, 2}, {1, 3}):
        assert sum(bool(together & set(part)) for part in parts) == 1


def test_validation_at_a_third_temperature_is_refused():
    with pytest.raises(ValueError, match=r"set it to 0 \(greedy\)"):
        GenerationConfig(backend="x", temperature=1.0, val_temperature=0.5)


class Forgetful(EnvironmentInterface):
    def step(self, message_log_batch, metadata):
        return EnvironmentReturn([{"role": "environment", "content": ""}], metadata, [None], torch.ones(1), torch.ones(1))


class Picky(EnvironmentInterface):
    """Returns a named reward only in calls in which a row has it, else a plain reward."""

    def step(self, message_log_batch, metadata):
        n = len(metadata)
        rewards = {"right": torch.ones(n)}
        if "style" in metadata:
            rewards["style"] = torch.tensor([0.5 * (state == "style") for state in metadata])
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * n,
            metadata=metadata,
            next_stop_strings=[None] * n,
            rewards=torch.full((n,), 3.0) if "plain" in metadata else rewards,
            terminateds=torch.ones(n),
        )


class ThreeShares(InProcessPool):
    """One instance that gets a batch in three shards."""

    num_actors = 3


@pytest.mark.parametrize(
    ("states", "rewards"),
    [
        (["", "", "", "", "style", ""], {"right": [1.0] * 6, "style": [0, 0, 0, 0, 0.5, 0]}),
        (["style", "", "", "", "", ""], {"right": [1.0] * 6, "style": [0.5, 0, 0, 0, 0, 0]}),
        (["", "", "plain", "", "style"], {"right": [1, 1, 0, 0, 1], "reward": [0, 0, 3, 3, 0], "style": [0, 0, 0, 0, 0.5]}),
        (["plain"] * 5, [3.0] * 5),
    ],
)
def test_a_named_reward_that_only_some_calls_return_is_kept_and_counts_as_zero_elsewhere(states, rewards):
    pool = EnvironmentPool(ThreeShares(Picky), task_name="chess")
    found = pool.step([[]] * len(states), states).rewards
    assert (found.tolist() if isinstance(found, torch.Tensor) else {k: v.tolist() for k, v in found.items()}) == rewards


def test_an_environment_that_loses_a_row_is_named():
    pool = EnvironmentPool(InProcessPool(Forgetful), task_name="chess")
    with pytest.raises(RLCoreError, match="task 'chess' was called with 2 rows but returned 1 rewards"):
        pool.step([[], []], [None, None])


def test_training_with_a_loss_that_allows_dropout_logs_why_prefixes_are_not_shared(caplog):
    config = PolicyConfig(backend="tiny", model_name="tiny")
    sharing = PrefixSharing(config, {"shared_prefix": True, "shared_prefix_reason": "all layers fit"}, name="policy")
    batch = {"prompt_id": torch.zeros(2)}
    with caplog.at_level(logging.INFO, "rl_backends_base"):
        assert sharing.columns(batch, NLLLossFn()) == ()
    assert "computed separately: NLLLossFn allows dropout" in caplog.text
    assert sharing.columns(batch) == ("prompt_id",)
    assert sharing.columns({}, NLLLossFn()) == ()
