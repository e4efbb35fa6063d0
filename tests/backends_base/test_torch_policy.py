"""A policy of a few lines on a plain torch module: scores, steps, resumes and references equal those of a loop in torch."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from policy_cases import NLL, counts_of, make_context, make_rows
from ray import cloudpickle
from simulated_gpu import SimulatedGpu
from torch import nn

from rl_backends_base import DistributedPolicy, FullyShard, OptimizerChain, TorchPolicyWorker, join_ranks
from rl_backends_base.shards import copy_weights, fill
from rl_core.cluster import RayVirtualCluster
from rl_core.config.schema import PolicyConfig
from rl_core.errors import CheckpointError, InvalidComponentError, NonFiniteError, NotSupportedError
from rl_core.testing import PolicyConformance, reference
from rl_train.algorithms.losses.policy_gradient import GRPOLossFn
from rl_train.algorithms.losses.supervised import NLLLossFn

cloudpickle.register_pickle_by_value(sys.modules[__name__])

VOCABULARY, FILE = 40, "model.pt"
FACTS = {"num_parameters": 40 * 16 * 2 + 40 + 4 * 3 * 16 * 8 + 16 * 3 * 2, "device": "cpu"}


class Recurrent(nn.Module):
    """A language model without attention."""

    def __init__(self):
        super().__init__()
        self.embed, self.cell = nn.Embedding(VOCABULARY, 16), nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids):
        return self.head(self.cell(self.embed(ids))[0])


class RecurrentWorker(TorchPolicyWorker):
    def build(self):
        model = Recurrent()
        model.load_state_dict(torch.load(Path(self.config.model_name) / FILE))
        return model

    def logits(self, batch):
        return self.model(batch["input_ids"])

    def save_weights(self, folder):
        if self.context.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(dict(self.checkpoint_weights()), folder / FILE)

    def find_tokenizer(self):
        return None


class ByTokens(RecurrentWorker):
    """Gives log-probabilities of the tokens instead of logits."""

    logits = TorchPolicyWorker.logits

    def token_logprobs(self, batch):
        ids = batch["input_ids"]
        logprobs = (self.model(ids) / self.config.scoring_temperature).log_softmax(-1)
        return nn.functional.pad(logprobs[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1), (1, 0), value=7.0)

    def facts(self):
        return {"vocab_size": VOCABULARY}


class Values(RecurrentWorker):
    def values(self, batch):
        return self.model(batch["input_ids"])[..., 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recurrent")
    torch.manual_seed(3)
    torch.save(Recurrent().state_dict(), folder / FILE)
    return folder


def config_of(folder, **fields):
    values = {"precision": "float32", "train_micro_batch_size": 3, "logprob_batch_size": 3, "max_total_sequence_length": 64}
    values |= {"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 0.01}}}
    values |= {"scheduler": {"name": "linear", "kwargs": {"num_training_steps": 9}}, **fields}
    return PolicyConfig(backend="recurrent", model_name=str(folder), **values)


def start(folder, worker=RecurrentWorker, **fields):
    started = worker(make_context(run_in_process=True), config_of(folder, **fields))
    return started, started.setup()


def rows_of(seed=5):
    rows = make_rows(seed=seed, vocab_size=VOCABULARY)
    generator = torch.Generator().manual_seed(seed)
    rows["advantages"] = torch.randn(rows["input_ids"].shape, generator=generator)
    for key in ("generation_logprobs", "prev_logprobs", "reference_policy_logprobs"):
        rows[key] = -torch.rand(rows["input_ids"].shape, generator=generator)
    return rows


def plain_logprobs(model, rows, temperature=1.0):
    logprobs = (model(rows["input_ids"]) / temperature).log_softmax(-1)
    return nn.functional.pad(logprobs[:, :-1].gather(-1, rows["input_ids"][:, 1:, None]).squeeze(-1), (1, 0))


def is_token(rows, first=1):
    column = torch.arange(rows["input_ids"].shape[1])
    return (column >= first) & (column < rows["input_lengths"].unsqueeze(1))


@pytest.mark.parametrize("worker", [RecurrentWorker, ByTokens])
def test_scores_are_the_log_probabilities_at_the_sampling_temperature(folder, worker):
    generation = {"backend": "any", "temperature": 0.7}
    policy, facts = start(folder, worker, generation=generation)
    rows = rows_of()
    expected = plain_logprobs(policy.model, rows, policy.config.scoring_temperature)
    found = policy.get_logprobs(rows)["logprobs"]
    torch.testing.assert_close(found, torch.where(is_token(rows), expected, 0.0))
    assert facts["vocab_size"] == VOCABULARY
    assert facts.items() >= FACTS.items()


def test_unused_rows_of_the_lm_head_have_probability_0(folder):
    used = VOCABULARY - 5
    policy, _ = start(folder, frozen=True, vocab_size=used)
    rows = rows_of()
    rows["input_ids"].clamp_(max=used - 1)
    expected = plain_logprobs(lambda ids: policy.model(ids)[..., :used], rows)
    torch.testing.assert_close(policy.get_logprobs(rows)["logprobs"], torch.where(is_token(rows), expected, 0.0))
    assert int(policy.get_topk_logprobs(rows, k=used)["topk_token_ids"].max()) == used - 1
    with pytest.raises(NotSupportedError, match="ByTokens computes log-probabilities itself") as refused:
        start(folder, ByTokens, frozen=True, vocab_size=used)
    assert refused.value.key == "vocab_size"


def test_the_most_likely_tokens_are_in_descending_order(folder):
    policy, _ = start(folder)
    rows = rows_of()
    found = policy.get_topk_logprobs(rows, k=4)
    top = policy.model(rows["input_ids"]).log_softmax(-1)[:, :-1].topk(4)
    mask = is_token(rows)[:, 1:, None]
    torch.testing.assert_close(found["topk_logprobs"][:, 1:], torch.where(mask, top.values, 0.0))
    assert torch.equal(found["topk_token_ids"][:, 1:], torch.where(mask, top.indices, 0))


def test_without_logits_there_are_no_most_likely_tokens(folder):
    policy, _ = start(folder, ByTokens)
    with pytest.raises(NotSupportedError, match=r"ByTokens does not define `logits`.*top-k log-probabilities"):
        policy.get_topk_logprobs(rows_of(), k=2)


def test_a_scalar_head_scores_every_token(folder):
    policy, _ = start(folder, Values, head="scalar")
    rows = rows_of()
    expected = torch.where(is_token(rows, 0), policy.model(rows["input_ids"])[..., 0], 0.0)
    torch.testing.assert_close(policy.get_values(rows)["values"], expected)


@pytest.mark.parametrize("worker", [RecurrentWorker, ByTokens])
@pytest.mark.parametrize("loss_fn", [NLL(), GRPOLossFn()], ids=["supervised", "grpo"])
def test_a_step_is_that_of_one_backward_pass_over_all_rows(folder, worker, loss_fn):
    fields = {"optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.5}}, "max_grad_norm": 0.05, "scheduler": None}
    policy, _ = start(folder, worker, **fields)
    rows, plain = rows_of(), Recurrent()
    plain.load_state_dict(policy.model.state_dict())
    (counts,) = counts_of(rows)
    normalizers = torch.tensor(counts.valid_seqs), torch.tensor(counts.valid_toks)
    loss, _ = loss_fn(torch.where(is_token(rows), plain_logprobs(plain, rows), 0.0), rows, *normalizers)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    (result,) = policy.train(rows, loss_fn, counts=[counts])
    assert (result.loss, result.grad_norm) == pytest.approx((float(loss), float(norm)), rel=1e-5)
    for name, weight in policy.iter_weights():
        torch.testing.assert_close(weight, plain.state_dict()[name])


def test_the_reference_is_the_initial_policy_also_after_a_resume(folder, tmp_path):
    policy, _ = start(folder)
    rows = rows_of()
    before = policy.get_logprobs(rows)["logprobs"]
    policy.train(rows, NLL(), counts=counts_of(rows, 2))
    policy.save_checkpoint(tmp_path / "w", tmp_path / "o")
    resumed, _ = start(folder)
    resumed.load_checkpoint(tmp_path / "w", tmp_path / "o")
    for each in (policy, resumed):
        assert torch.equal(each.get_logprobs(rows, reference=True)["logprobs"], before)
        assert not torch.equal(each.get_logprobs(rows)["logprobs"], before)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_resumed_policy_continues_bit_for_bit(folder, tmp_path, precision):
    policy, _ = start(folder, precision=precision)
    rows = rows_of()
    policy.train(rows, NLL(), counts=counts_of(rows, 2))
    policy.save_checkpoint(tmp_path / "w", tmp_path / "o")
    resumed, _ = start(folder, precision=precision)
    resumed.load_checkpoint(tmp_path / "w", tmp_path / "o")
    again = [each.train(rows, NLL(), counts=counts_of(rows, 2)) for each in (policy, resumed)]
    assert again[0] == again[1]
    for (name, weight), (_, other) in zip(policy.iter_weights(), resumed.iter_weights(), strict=True):
        assert torch.equal(weight, other), name
    assert resumed.get_weight_version() == 4


def test_master_weights_of_a_bfloat16_model_start_at_the_unrounded_weights(folder):
    policy, _ = start(folder, precision="bfloat16")
    stored = torch.load(folder / FILE)
    for name, master in policy.trained_weights():
        assert torch.equal(master, stored[name])
    assert {weight.dtype for _, weight in policy.iter_weights()} == {torch.bfloat16}
    assert policy.weight_manifest()["head.bias"] == ((VOCABULARY,), "bfloat16")


class TwoOptimizers(RecurrentWorker):
    def make_optimizer(self, parameters):
        return OptimizerChain(*optimizers_of(dict(parameters)))


def optimizers_of(parameters):
    matrices = [each for each in parameters.values() if each.ndim > 1]
    others = [each for each in parameters.values() if each.ndim <= 1]
    return torch.optim.SGD(matrices, lr=0.5, momentum=0.9), torch.optim.AdamW(others, lr=0.01, fused=True)


def test_two_optimizers_step_as_alone_and_resume_bit_for_bit(folder, tmp_path):
    policy, _ = start(folder, TwoOptimizers, max_grad_norm=None, train_micro_batch_size=8)
    rows, plain = rows_of(), Recurrent()
    plain.load_state_dict(policy.model.state_dict())
    (counts,) = counts_of(rows)
    optimizers = optimizers_of(dict(plain.named_parameters()))
    for step in range(2):
        normalizers = torch.tensor(counts.valid_seqs), torch.tensor(counts.valid_toks)
        loss, _ = NLL()(torch.where(is_token(rows), plain_logprobs(plain, rows), 0.0), rows, *normalizers)
        loss.backward()
        for optimizer, lr in zip(optimizers, (0.5, 0.01), strict=True):
            optimizer.param_groups[0]["lr"] = lr * (9 - step) / 9
            optimizer.step()
            optimizer.zero_grad()
    policy.train(rows, NLL(), counts=[counts])
    policy.save_checkpoint(tmp_path / "w", tmp_path / "o")
    resumed, _ = start(folder, TwoOptimizers, max_grad_norm=None, train_micro_batch_size=8)
    resumed.load_checkpoint(tmp_path / "w", tmp_path / "o")
    for each in (policy, resumed):
        each.train(rows, NLL(), counts=[counts])
    for name, weight in policy.iter_weights():
        torch.testing.assert_close(weight, plain.state_dict()[name])
        assert torch.equal(weight, dict(resumed.iter_weights())[name])


def test_on_a_gpu_a_step_waits_once_and_tensors_leave_and_return(folder):
    """Scores and steps equal those of a CPU bit for bit, also of the reference, which is in host memory between its uses."""
    cpu, _ = start(folder, precision="bfloat16")
    rows = rows_of()
    expected = [cpu.train(rows, NLL(), counts=counts_of(rows)) for _ in range(2)]
    with SimulatedGpu().active() as gpu:
        context = replace(make_context(run_in_process=True), device="cuda")
        policy = RecurrentWorker(context, config_of(folder, precision="bfloat16"))
        assert policy.setup()["device"] == "cuda:0"
        with gpu.counting() as waits:
            found = [policy.train(rows, NLL(), counts=counts_of(rows))]
        assert waits.total() == 1, waits
        resident = torch.cuda.memory_allocated()
        policy.offload_before_refit()
        policy.offload_after_refit()
        assert torch.cuda.memory_allocated() == 0
        policy.prepare_for_training()
        assert torch.cuda.memory_allocated() == resident
        reference = policy.get_logprobs(rows, reference=True)["logprobs"]
        assert torch.cuda.memory_allocated() == resident
        found.append(policy.train(rows, NLL(), counts=counts_of(rows)))
    assert found == expected
    assert torch.equal(reference, cpu.get_logprobs(rows, reference=True)["logprobs"])


class Infinite(NLL):
    def __call__(self, logprobs, data, *counts):
        loss, metrics = super().__call__(logprobs, data, *counts)
        return loss * float("inf"), metrics


def test_a_step_that_is_not_finite_changes_nothing(folder):
    policy, _ = start(folder)
    before = {name: weight.clone() for name, weight in policy.iter_weights()}
    with pytest.raises(NonFiniteError, match="The loss of microbatch 1 of 3 on rank 0 is"):
        policy.train(rows_of(), Infinite(), counts=counts_of(rows_of()))
    assert all(torch.equal(weight, before[name]) for name, weight in policy.iter_weights())
    assert policy.get_weight_version() == 0


def test_a_frozen_model_scores_and_does_not_train(folder):
    policy, facts = start(folder, frozen=True)
    assert facts["num_trained_parameters"] == 0
    assert policy.get_logprobs(rows_of())["logprobs"].isfinite().all()
    with pytest.raises(NotSupportedError, match="is frozen"):
        policy.train(rows_of(), NLL(), counts=counts_of(rows_of()))


class Transposed(RecurrentWorker):
    def logits(self, batch):
        return self.model(batch["input_ids"]).transpose(0, 1)


def test_logits_of_another_shape_are_an_error_that_names_the_method(folder):
    policy, _ = start(folder, Transposed)
    with pytest.raises(InvalidComponentError, match=r"`Transposed.logits` returned shape \[\d+, 3, 40\] for `input_ids` of"):
        policy.get_logprobs(rows_of())


class KeepsItsModel(RecurrentWorker):
    def build(self):
        self.net = super().build()
        return self.net


def test_a_worker_that_keeps_what_it_built_is_refused(folder):
    """Its `logits` would use the model of the reference policy after that was built."""
    with pytest.raises(InvalidComponentError, match=r"KeepsItsModel\.build keeps the model as `self\.net`"):
        start(folder, KeepsItsModel)


class WithoutTraining(RecurrentWorker):
    def build(self):
        return super().build().requires_grad_(False)


def test_a_model_without_trained_parameters_is_an_error_with_its_key(folder):
    with pytest.raises(NotSupportedError, match="has `requires_grad`, so nothing can be trained") as raised:
        start(folder, WithoutTraining)
    assert raised.value.key == "frozen"


@pytest.fixture(scope="module")
def cluster(local_ray):
    with RayVirtualCluster([2], use_gpus=False, cpus_per_bundle=1, max_colocated_worker_groups=1) as cluster:
        yield cluster


@pytest.mark.slow
def test_two_ranks_over_ray_train_and_resume_as_one(folder, tmp_path, cluster):
    def policy_of(cluster=None):
        policy = DistributedPolicy(worker_class=RecurrentWorker, config=config_of(folder), cluster=cluster)
        policy.prepare_for_training()
        return policy

    def losses_of(policy, steps):
        rows, found = rows_of(), []
        for _ in range(steps):
            found += [policy.train(rows, loss_fn, gbs=8)["loss"] for loss_fn in (NLLLossFn(), GRPOLossFn())]
        return [float(loss) for loss in found]

    alone = policy_of()
    expected = losses_of(alone, 3)
    first = policy_of()
    losses_of(first, 1)
    first.save_checkpoint(tmp_path / "one" / "w", tmp_path / "one" / "o")
    two = policy_of(cluster)
    two.load_checkpoint(tmp_path / "one" / "w", tmp_path / "one" / "o")
    found = losses_of(two, 1)
    two.save_checkpoint(tmp_path / "two" / "w", tmp_path / "two" / "o")
    two.shutdown()
    last = policy_of()
    last.load_checkpoint(tmp_path / "two" / "w", tmp_path / "two" / "o")
    assert found + losses_of(last, 1) == pytest.approx(expected[2:], rel=1e-5)


class OnTransformers(TorchPolicyWorker):
    """The policy that the conformance tests can compare: their reference has a folder in the format of Transformers."""

    def build(self):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.config.model_name, dtype=torch.float32)

    def logits(self, batch):
        return self.model(input_ids=batch["input_ids"]).logits

    def save_weights(self, folder):
        if self.context.rank == 0:
            self.model.save_pretrained(folder)


class Sharded(OnTransformers):
    """Each rank has a shard of every weight."""

    def join(self):
        join_ranks(self.context)
        return FullyShard(self.context, compute_dtype=self.dtype) if self.context.world_size > 1 else super().join()

    def place(self):
        if not self.parallel.shards:
            return super().place()
        self.parallel.distribute(self.model, self.model.model.layers)
        self.model.to(self.device).eval()

    def save_weights(self, folder):
        weights = dict(self.iter_weights())
        if self.context.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(weights, folder / FILE)

    def load_weights(self, folder):
        stored = torch.load(folder / FILE)
        for name, own in self.checkpoint_weights().items():
            fill(own, stored[name])


def test_a_checkpoint_of_another_model_or_without_files_is_refused_and_changes_nothing(folder, tmp_path):
    worker, _ = start(folder)
    before = {name: each.clone() for name, each in worker.checkpoint_weights().items()}
    with pytest.raises(CheckpointError, match="has no weights of this model"):
        worker.load_checkpoint(tmp_path, None)
    for name, wrong in (("embed.weight", torch.zeros(40, 15)), ("norm.weight", torch.ones(16))):
        torch.save({**before, name: wrong}, tmp_path / FILE)
        with pytest.raises(CheckpointError, match=name):
            worker.load_checkpoint(tmp_path, None)
    assert worker.config.model_name == str(folder)
    assert all(torch.equal(each, before[name]) for name, each in worker.checkpoint_weights().items())


def test_weights_of_other_names_or_shapes_are_named(tmp_path):
    other = Recurrent()
    other.head = nn.Linear(16, VOCABULARY + 1)
    with pytest.raises(CheckpointError, match=r"2 tensors .* head.bias is \(41,\) instead of \(40,\)"):
        copy_weights(Recurrent(), lambda: other, folder=tmp_path)
    whole, without_bias = (nn.ModuleDict({"head": nn.Linear(1, 40, bias=bias)}) for bias in (True, False))
    with pytest.raises(CheckpointError, match=r"head.bias is absent instead of \(40,\)"):
        copy_weights(whole, lambda: without_bias, folder=tmp_path)


def test_full_memory_is_not_an_error_of_the_folder_of_weights(tmp_path):
    def build():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        copy_weights(Recurrent(), build, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_a_sharded_model_trains_and_sends_what_one_rank_does(tmp_path, cluster, precision, tolerance):
    """In bfloat16, one rank rounds the gradient of each microbatch, and two ranks their shards."""
    folder = reference.Llama().save(tmp_path / "model", reference.Llama().make_weights())

    def policy_of(cluster=None):
        config = config_of(folder, precision=precision)
        policy = DistributedPolicy(worker_class=Sharded, config=config, cluster=cluster)
        policy.prepare_for_training()
        return policy

    def loss_of(policy):
        return float(policy.train(rows_of(), NLLLossFn(), gbs=8)["loss"])

    alone, two = policy_of(), policy_of(cluster)
    expected = [loss_of(alone) for _ in range(4)]
    assert dict(two.prepare_refit_info()) == dict(alone.prepare_refit_info())
    found = [loss_of(two) for _ in range(2)]
    two.save_checkpoint(tmp_path / "w", tmp_path / "o")
    weights = torch.load(tmp_path / "w" / FILE)
    assert {(tensor.dtype, type(tensor)) for tensor in weights.values()} == {(getattr(torch, precision), torch.Tensor)}
    two.shutdown()
    resumed = policy_of()
    resumed.load_checkpoint(tmp_path / "w", tmp_path / "o")
    found += [loss_of(resumed) for _ in range(2)]
    assert found == pytest.approx(expected, rel=tolerance)
    assert expected[3] < 0.8 * expected[0]


class TransformersPolicy(DistributedPolicy):
    capabilities = ("in_process", "multiple_ranks", "by_reference", "shared_memory", "disk", "collective", "topk_logprobs")

    def __init__(self, *, config, cluster=None, deadlines=None, name="policy"):
        super().__init__(worker_class=OnTransformers, config=config, cluster=cluster, deadlines=deadlines, name=name)


class TestPolicyOfAFewLines(PolicyConformance):
    component = f"{__name__}.TransformersPolicy"
