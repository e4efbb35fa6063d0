"""Ranks started by Ray: documented calls, losses of the core, refit, a dying rank, and a whole run of `rlcore train`."""

import os
import signal
import sys
from pathlib import Path

import megatron_cases as cases
import pytest
import torch
from ray import cloudpickle

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import WorkerDiedError
from rl_core.interfaces.loss import LossFunction
from rl_train.algorithms import GRPOLossFn, NLLLossFn

pytestmark = [pytest.mark.megatron, pytest.mark.slow]


@pytest.fixture(scope="module")
def pair(models):
    """The same tiny model by Megatron over two ranks of a separate cluster, and by Transformers in this process."""
    from rl_backends_hf import HuggingFacePolicy
    from rl_backends_megatron import MegatronPolicy

    fields = {"optimizer": {"kwargs": {"lr": 1e-3}}, "train_micro_batch_size": 3, "logprob_batch_size": 4}
    ours = MegatronPolicy(str(models / "llama"), tensor_model_parallel_size=2, sequence_parallel=True, **fields)
    yield ours, HuggingFacePolicy(str(models / "llama"), **fields)
    ours.shutdown()


@pytest.fixture(scope="module")
def rows(pair):
    """Rows with the keys of all losses of the core."""
    made = cases.make_rows(6)
    mask = made["token_mask"]
    generator = torch.Generator().manual_seed(2)
    logprobs = pair[1].get_logprobs(made)["logprobs"]
    made["advantages"] = torch.randn(6, 1, generator=generator) * mask
    made["generation_logprobs"] = logprobs * mask
    made["prev_logprobs"] = (logprobs + 0.1 * torch.randn(mask.shape, generator=generator)) * mask
    made["reference_policy_logprobs"] = (logprobs - 0.2) * mask
    return made


@pytest.mark.timeout(200)
def test_losses_of_the_core_give_the_same_numbers_by_megatron_and_by_transformers(pair, rows):
    ours, theirs = pair
    for loss_fn in (NLLLossFn(), GRPOLossFn()):
        for each in pair:
            each.prepare_for_training()
        found, expected = (each.train(rows, loss_fn, gbs=3) for each in (ours, theirs))
        assert found["num_optimizer_steps"] == expected["num_optimizer_steps"] == 2
        for key in ("loss", "grad_norm", "lr", "global_valid_toks"):
            assert found[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-6), key
        assert found["metrics"].keys() == expected["metrics"].keys()
        for key, value in expected["metrics"].items():
            assert found["metrics"][key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    assert ours.weight_version == theirs.weight_version == 4
    for verb in ("get_logprobs", "get_reference_policy_logprobs"):
        (key, scored), (_, other) = (next(iter(getattr(each, verb)(rows).items())) for each in (ours, theirs))
        assert scored.shape == rows["input_ids"].shape
        assert float((scored - other).abs().max()) < 1e-4, key


def test_greedy_samples_equal_those_of_the_transformers_policy(pair):
    prompts = BatchedDataDict(
        input_ids=torch.tensor([[5, 9, 11], [7, 8, 0]]), attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]])
    )
    prompts["max_new_tokens"] = torch.tensor([5, 5])
    found, expected = (each.generate(prompts, greedy=True) for each in pair)
    for key in ("output_ids", "generation_lengths", "unpadded_sequence_lengths", "truncated", "weight_version"):
        assert torch.equal(found[key], expected[key]), key
    assert float((found["logprobs"] - expected["logprobs"]).abs().max()) < 1e-4


def test_exported_weights_equal_those_of_the_transformers_policy(pair, models):
    from rl_backends_hf import HuggingFacePolicy

    ours = pair[0]
    assert dict(ours.prepare_refit_info()).keys() == dict(pair[1].prepare_refit_info()).keys()
    folder = models / "handed-on"
    ours.save_checkpoint(folder)
    again = HuggingFacePolicy(str(folder))
    assert ours.weight_fingerprint() == again.weight_fingerprint()
    buckets = ours.prepare_weights_for_ipc(budget_bytes=20_000)
    assert len(buckets) > 2
    assert sorted(name for bucket in buckets for name in bucket) == sorted(ours.prepare_refit_info())
    handles = ours.get_weights_ipc_handles(buckets[1])
    assert handles["weight_version"] == ours.weight_version
    ours.finish_refit()


class DeadlyOnRankOne(LossFunction):
    """Kills the process that computes it on rank 1."""

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return next_token_logprobs.sum(), {}


@pytest.mark.timeout(120)
def test_a_rank_that_dies_during_a_step_is_named_in_the_error(pair, rows):
    # Workers cannot import a test's module, so the loss travels by value.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with pytest.raises(WorkerDiedError, match=r"rank 1 .*tensor=1.* of 'policy'"):
        pair[0].train(rows, DeadlyOnRankOne())


@pytest.mark.timeout(240)
def test_a_run_of_grpo_has_the_numbers_of_the_backend_on_transformers(tmp_path):
    sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
    runs = __import__("e2e_runs")
    tiny = runs.merged(runs.TINY, {"grpo": {"max_num_steps": 2}, "checkpointing": {"save_period": 2}})
    changes = {
        "hf": {"cluster": {"backend": "in_process"}},
        "megatron": {
            "policy": {"backend": "megatron", "megatron_cfg": {"tensor_model_parallel_size": 2}},
            "cluster": {"workers_per_node": 2},
        },
    }
    steps = {}
    for name, change in changes.items():
        (tmp_path / name).mkdir()
        run = runs.TrainingProcess(tmp_path / name, runs.merged(tiny, change))
        code, output = run.wait(200)
        assert code == 0, output
        run.assert_gone()
        steps[name] = runs.metrics_of(tmp_path / name)
    assert steps["hf"][2]["grad_norm"] > 1e-3
    skipped = ("refit/", "mismatch/", "step", "staleness")
    for step in (1, 2):
        expected, found = steps["hf"][step], steps["megatron"][step]
        assert found["refit/canary_error"] < 1e-5
        for key, value in expected.items():
            if not key.startswith(skipped):
                assert found[key] == pytest.approx(value, rel=1e-4, abs=1e-4), (step, key)


def test_the_plugin_is_listed_without_importing_torch():
    code = (
        "import sys; from rl_backends_megatron import plugin; from rl_backends_megatron.config import MegatronPolicyConfig; "
        "assert plugin.rlcore_policies()[0].name == 'megatron'; "
        "print(sorted({'torch', 'ray', 'numpy', 'transformers', 'megatron'} & set(sys.modules)))"
    )
    import subprocess

    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
