"""A checkpoint with non-finite numbers or too large for the disk is not written, and the last good one remains."""

import shutil

import pytest
import torch

from rl_backends_hf import HuggingFacePolicy
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.errors import NonFiniteError
from rl_core.weights.disk import first_non_finite
from rl_train.checkpoints.inputs import ComparedConfig
from rl_train.checkpoints.manifest import verify_checkpoint
from rl_train.checkpoints.state import Checkpoints
from rl_train.checkpoints.store import CheckpointStore, Retention
from rl_train.errors import DiskFullError


class NoTokenizer:
    def save_pretrained(self, folder):
        """Nothing to write."""


def checkpoints_of(policy, folder):
    return Checkpoints(
        store=CheckpointStore(folder, Retention(keep_latest_k=1)),
        models={"policy": policy},
        parts={},
        config=ComparedConfig(values={}, algorithm="sft"),
        save_optimizer=True,
        tokenizer=NoTokenizer(),
    )


def test_a_learning_rate_of_1e38_ends_the_run_before_its_weights_are_saved(model_folder, parts, tmp_path):
    policy = HuggingFacePolicy(model_folder("llama"), optimizer={"kwargs": {"lr": 1e38}})
    checkpoints = checkpoints_of(policy, tmp_path)
    kept = checkpoints.save(1, {})
    policy.train(parts.make_rows(), parts.NLL())
    with pytest.raises(NonFiniteError) as stopped:
        checkpoints.save(2, {})
    text = str(stopped.value)
    assert text.startswith("After step 2 the tensor model.embed_tokens.weight (rank 0) of `policy` has NaN or infinite values")
    assert f"--resume {kept}" in text
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_000001"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_first_non_finite_tensor_is_named(model_folder, parts, precision):
    worker = HFPolicyWorker(parts.make_context(), parts.make_config(model_folder("llama"), precision=precision))
    worker.setup()
    rows = parts.make_rows()
    worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
    assert worker.find_non_finite() is None
    masters, optimizer = worker.state.masters.parameters, worker.state.optimizer
    optimizer.state[masters["model.norm.weight"]]["exp_avg_sq"][3] = float("nan")
    assert worker.find_non_finite() == "optimizer.model.norm.weight.exp_avg_sq"
    optimizer.state[masters["model.norm.weight"]]["exp_avg_sq"][3] = 0.0
    with torch.no_grad():
        masters["lm_head.weight"][0, 0] = -float("inf")
    assert worker.find_non_finite() == ("lm_head.weight" if precision == "float32" else "master.lm_head.weight")


def test_finite_numbers_that_round_to_infinity_are_found():
    nearly = torch.tensor([3.4e38])
    assert first_non_finite([("w", nearly)]) is None
    assert first_non_finite([("w", nearly)], published=torch.bfloat16) == "w"
    assert first_non_finite([("empty", torch.zeros(0)), ("count", torch.tensor(3))]) is None


@pytest.fixture
def small_disk(make_small_disk):
    """A file system with space for one and a half checkpoints."""
    return make_small_disk("700k")


def test_a_policy_on_a_full_disk_leaves_its_last_checkpoint_and_nothing_else(model_folder, parts, small_disk):
    policy = HuggingFacePolicy(model_folder("llama"))
    checkpoints = checkpoints_of(policy, small_disk)
    policy.train(parts.make_rows(), parts.NLL())
    checkpoints.check_disk_space(num_saves=1)
    first = checkpoints.save(1, {})
    written = sum(path.stat().st_size for path in first.rglob("*") if path.is_file())
    # Files have headers, which are a third of a model this small.
    assert 0.6 * written < policy.checkpoint_bytes(optimizer=True) <= written
    # Wherever in the checkpoint the disk becomes full: in the weights, in the optimizer, in the small files after it.
    free = shutil.disk_usage(small_disk).free
    for left in (written // 8, written // 2, written - 8192):
        filler = small_disk / "filler"
        filler.write_bytes(bytes(max(0, free - left)))
        with pytest.raises(DiskFullError, match=f"The last complete checkpoint is {first}"):
            checkpoints.save(2, {})
        filler.unlink()
        assert [entry.name for entry in small_disk.iterdir()] == ["step_000001"]
    verify_checkpoint(first)
