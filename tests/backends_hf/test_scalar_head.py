import logging
from pathlib import Path

import peft
import pytest
import torch
import transformers
from rank_processes import RankProgram
from safetensors.torch import load_file

from rl_backends_hf import HuggingFacePolicy
from rl_backends_hf.convert import to_folder
from rl_backends_hf.model import load_model
from rl_backends_hf.model_options import HFModelConfig
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.config.schema import OptimizerConfig
from rl_core.errors import CheckpointError, NotSupportedError, UserError, WorkerError
from rl_core.interfaces.conversion import Conversion
from rl_core.rendezvous.interfaces import free_port

KINDS = ("llama", "llama-tied", "qwen2", "qwen3", "gemma2")
BATCHING = ({}, {"dynamic_batching": {"enabled": True, "train_mb_tokens": 256}}, {"sequence_packing": {"enabled": True}})
SMALL_STEPS = {"name": "torch.optim.SGD", "kwargs": {"lr": 0.002}}
"""For adapters, which diverge at the learning rate of the other tests."""


@pytest.fixture(scope="session")
def classifier_folder(model_folder, tmp_path_factory):
    """Folder of a tiny sequence classifier with one label, created by Transformers."""
    made = {}

    def folder(kind):
        if kind not in made:
            with torch.random.fork_rng():
                torch.manual_seed(3)
                model = transformers.AutoModelForSequenceClassification.from_pretrained(model_folder(kind), num_labels=1)
                torch.nn.init.normal_(model.score.weight)
            made[kind] = str(tmp_path_factory.mktemp(f"{kind}-classifier"))
            model.save_pretrained(made[kind])
        return made[kind]

    return folder


@pytest.fixture
def start(parts):
    """A separate worker with the model of the folder."""

    def started(folder, **fields):
        worker = HFPolicyWorker(parts.make_context(), parts.make_config(folder, **{**parts.VALUE_FIELDS, **fields}))
        worker.setup()
        return worker

    return started


def plain(folder):
    return transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()


def plain_values(model, rows):
    """The reference: each row alone through Transformers' backbone and head, [B, T]."""
    columns = []
    for ids, length in zip(rows["input_ids"], rows["input_lengths"].tolist(), strict=True):
        values = model.score(model.model(ids[None, :length]).last_hidden_state)[0, :, 0]
        columns.append(torch.nn.functional.pad(values, (0, len(ids) - length)))
    return torch.stack(columns)


def plain_loss(model, rows):
    mask = rows["token_mask"] * rows["sample_mask"].unsqueeze(1)
    distance = (plain_values(model, rows) - rows["weights"].unsqueeze(1)).square()
    return (distance * mask).sum() / 2 / mask.sum()


def snapshot(worker):
    return {name: tensor.clone() for name, tensor in worker.iter_weights()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batching", BATCHING, ids=["by_count", "token_budget", "packed"])
def test_values_are_those_of_transformers_own_classifier(parts, classifier_folder, kind, batching):
    rows = parts.make_rows(num_rows=6)
    model = plain(classifier_folder(kind))
    policy = HuggingFacePolicy(
        config=parts.make_config(classifier_folder(kind), head="scalar", logprob_batch_size=4, **batching)
    )
    with torch.no_grad():
        expected = plain_values(model, rows)
        pooled = [
            model(ids[None, :length]).logits[0, 0]
            for ids, length in zip(rows["input_ids"], rows["input_lengths"].tolist(), strict=True)
        ]
    values = policy.get_values(rows)["values"]
    assert values.dtype == torch.float32
    # Sums of 32 products of about 1, in another order.
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)
    last = values[torch.arange(6), rows["input_lengths"] - 1]
    torch.testing.assert_close(last, torch.stack(pooled), rtol=0, atol=1e-5)
    assert torch.all(values[:, 0] != 0.0)
    assert torch.all(values[torch.arange(values.shape[1]) >= rows["input_lengths"].unsqueeze(1)] == 0.0)


@pytest.mark.parametrize("kind", ["llama-tied", "qwen2"])
@pytest.mark.parametrize("batching", BATCHING, ids=["by_count", "token_budget", "packed"])
@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_gradients_are_those_of_plain_autograd_however_rows_are_cut(
    parts, classifier_folder, kind, batching, activation_checkpointing
):
    rows = parts.make_rows()
    model = plain(classifier_folder(kind))
    loss = plain_loss(model, rows)
    loss.backward()
    policy = HuggingFacePolicy(
        config=parts.make_config(
            classifier_folder(kind),
            **{**parts.VALUE_FIELDS, "optimizer": parts.SGD},
            activation_checkpointing=activation_checkpointing,
            **batching,
        )
    )
    worker = policy.group.worker
    before = snapshot(worker)
    result = policy.train(rows, parts.SquaredValues())
    found = parts.gradients_from(before, snapshot(worker))
    assert result["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert parts.largest_relative_error(found, {n: p.grad for n, p in model.named_parameters()}) < 1e-4


def test_the_new_head_of_a_causal_lm_is_not_reported_as_missing(model_folder, caplog):
    transformers_log = logging.getLogger("transformers")  # does not propagate
    transformers_log.addHandler(caplog.handler)
    try:
        load_model(str(model_folder("qwen3")), options=HFModelConfig(), dtype=torch.float32, head="scalar")
    finally:
        transformers_log.removeHandler(caplog.handler)
    assert caplog.messages == []


def test_a_causal_lm_starts_with_a_zero_head_for_any_seed(parts, model_folder, start):
    rows = parts.make_rows()
    for seed in (1, 2):
        torch.manual_seed(seed)
        worker = start(model_folder("qwen3"), sequence_packing={"enabled": True})
        assert not worker.get_values(rows)["values"].any()
    losses = [worker.train(rows, parts.SquaredValues(), counts=parts.counts_of(rows))[0].loss for _ in range(20)]
    assert losses[-1] < losses[0] / 2
    assert worker.get_values(rows)["values"].abs().max() > 0.1


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_resumed_training_equals_uninterrupted_training(parts, classifier_folder, start, tmp_path, precision):
    fields = {"precision": precision, "optimizer": {"kwargs": {"lr": 1e-3}}, "max_grad_norm": 0.5}
    batches = [parts.make_rows(seed=seed) for seed in range(4)]

    def step(worker, rows):
        return worker.train(rows, parts.SquaredValues(), counts=parts.counts_of(rows))[0]

    straight = start(classifier_folder("llama-tied"), **fields)
    for rows in batches[:2]:
        step(straight, rows)
    straight.save_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    values = straight.get_values(rows)["values"]
    expected = [step(straight, rows) for rows in batches[2:]]
    resumed = start(classifier_folder("llama-tied"), **fields)
    resumed.load_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    assert torch.equal(resumed.get_values(rows)["values"], values)
    assert [step(resumed, rows) for rows in batches[2:]] == expected
    assert_same(snapshot(resumed), snapshot(straight))


def test_the_saved_folder_is_a_plain_classifier_with_equal_scores(parts, model_folder, start, tmp_path):
    rows = parts.make_rows()
    worker = start(model_folder("llama-tied"))
    for _ in range(3):
        worker.train(rows, parts.SquaredValues(), counts=parts.counts_of(rows))
    worker.save_checkpoint(tmp_path, None)
    model, report = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert type(model).__name__ == "LlamaForSequenceClassification"
    assert model.config.num_labels == 1
    with torch.no_grad():
        expected = plain_values(model, rows)
    torch.testing.assert_close(worker.get_values(rows)["values"], expected, rtol=0, atol=1e-5)
    assert expected.abs().max() > 0.1
    assert torch.equal(start(str(tmp_path)).get_values(rows)["values"], worker.get_values(rows)["values"])


def test_adapters_and_a_full_head_train_together_and_peft_loads_both(parts, classifier_folder, start, tmp_path):
    rows = parts.make_rows()
    fields = {"hf": {"lora": {"rank": 4}}, "precision": "float32", "optimizer": SMALL_STEPS}
    worker = start(classifier_folder("qwen2"), **fields)
    begun = snapshot(worker)["score.weight"]
    for _ in range(3):
        worker.train(rows, parts.SquaredValues(), counts=parts.counts_of(rows))
    values = worker.get_values(rows)["values"]
    worker.save_checkpoint(tmp_path / "w", tmp_path / "o")
    saved = load_file(tmp_path / "w" / "adapter_model.safetensors")
    assert not torch.equal(saved["base_model.model.score.weight"], begun)
    assert all("lora_" in name for name in saved if name != "base_model.model.score.weight")
    base = transformers.AutoModelForSequenceClassification.from_pretrained(classifier_folder("qwen2"))
    with torch.no_grad():
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "w").base_model.model
        torch.testing.assert_close(plain_values(adapted, rows), values, rtol=0, atol=1e-5)
    resumed = start(classifier_folder("qwen2"), **fields)
    resumed.load_checkpoint(tmp_path / "w", tmp_path / "o")
    assert torch.equal(resumed.get_values(rows)["values"], values)
    results = [w.train(rows, parts.SquaredValues(), counts=parts.counts_of(rows))[0] for w in (worker, resumed)]
    assert results[0] == results[1]


def test_a_checkpoint_of_adapters_and_head_becomes_a_whole_classifier(parts, classifier_folder, start, tmp_path):
    rows = parts.make_rows()
    worker = start(classifier_folder("llama-tied"), hf={"lora": {"rank": 4}}, optimizer=SMALL_STEPS)
    for _ in range(3):
        worker.train(rows, parts.SquaredValues(), counts=parts.counts_of(rows))
    worker.save_checkpoint(tmp_path / "w", None)
    policy = worker.config.model_dump(mode="json")
    to_folder(Conversion(source=tmp_path / "w", output=tmp_path / "whole", policy=policy, merge=True))
    with torch.no_grad():
        merged = plain_values(plain(tmp_path / "whole"), rows)
    # W + s B A is summed once here and applied in two steps there.
    torch.testing.assert_close(worker.get_values(rows)["values"], merged, rtol=1e-4, atol=1e-4)


def test_a_full_head_with_adapters_has_the_gradient_of_plain_autograd(parts, classifier_folder, start):
    rows = parts.make_rows()
    model = plain(classifier_folder("llama"))
    plain_loss(model, rows).backward()
    # Everything but head and adapters is frozen, and B = 0 leaves the model unchanged.
    worker = start(classifier_folder("llama"), hf={"lora": {"rank": 2}}, optimizer=parts.SGD)
    before = snapshot(worker)
    worker.train(rows, parts.SquaredValues(), counts=parts.counts_of(rows))
    after = snapshot(worker)
    found = parts.gradients_from(before, after)["score.weight"]
    torch.testing.assert_close(found, model.score.weight.grad, rtol=1e-4, atol=1e-5)
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])


def test_a_bfloat16_base_has_a_float32_head_and_adapters(parts, model_folder, start, tmp_path):
    rows = parts.make_rows()
    worker = start(model_folder("llama"), precision="bfloat16", hf={"lora": {"rank": 2}})
    worker.train(rows, parts.SquaredValues(), counts=parts.counts_of(rows))
    worker.save_checkpoint(tmp_path / "w", None)
    assert {tensor.dtype for tensor in load_file(tmp_path / "w" / "adapter_model.safetensors").values()} == {torch.float32}
    assert worker.get_values(rows)["values"].abs().max() > 0


@pytest.fixture(scope="module")
def two_ranks(classifier_folder, tmp_path_factory):
    """The results of two ranks, by sharding and rank."""
    out = tmp_path_factory.mktemp("value-ranks")
    program = Path(__file__).with_name("value_ranks.py")
    RankProgram(program, classifier_folder("llama-tied"), out, *(free_port() for _ in range(2))).wait()
    return {(mode, rank): torch.load(out / f"{mode}-{rank}.pt") for mode in ("replicate", "fsdp2") for rank in range(2)}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["replicate", "fsdp2"])
def test_two_ranks_train_as_one_does(parts, classifier_folder, start, two_ranks, mode):
    rows = parts.make_rows()
    one = start(classifier_folder("llama-tied"))
    norms = [one.train(rows, parts.SquaredValues(), counts=parts.counts_of(rows))[0].grad_norm for _ in range(3)]
    expected = one.get_values(rows)["values"]
    norms.append(one.train(rows, parts.SquaredValues(), counts=parts.counts_of(rows))[0].grad_norm)
    for rank, shard in enumerate(BatchesOf(rows, expected).shards()):
        found = two_ranks[mode, rank]
        assert found["norms"] == pytest.approx(norms, rel=1e-4)
        # Three steps of 0.05 on sums in another order.
        torch.testing.assert_close(found["values"], shard, rtol=0, atol=1e-4)


class BatchesOf:
    """The values of the rows of each of two ranks."""

    def __init__(self, rows, values):
        self._rows, self._values = rows.slice(0, rows.size), values

    def shards(self):
        self._rows["values"] = self._values
        return [shard["values"] for shard in self._rows.shard_by_batch_size(2)]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hf": {"lora": {"target_modules": ["score"]}}}, "score is the scalar head"),
        ({"hf": {"config_overrides": {"hiden_size": 3}}}, "Did you mean 'hidden_size'"),
    ],
)
def test_invalid_sections_are_errors_with_a_reason(model_folder, start, fields, says):
    with pytest.raises(UserError, match=says):
        start(model_folder("llama"), **fields)


def test_models_of_another_head_or_family_are_refused_with_their_reason(
    parts, model_folder, classifier_folder, start, tmp_path
):
    with pytest.raises(UserError, match="no \\*ForSequenceClassification"):
        start(model_folder("granite"))
    with pytest.raises(UserError, match="does not predict tokens"):
        start(classifier_folder("llama-tied"), head="tokens")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(model_folder("llama"), num_labels=3)
    model.save_pretrained(tmp_path / "three")
    with pytest.raises(UserError, match="with 3 labels"):
        start(str(tmp_path / "three"))
    transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, num_labels=1
        )
    ).save_pretrained(tmp_path / "bert")
    with pytest.raises(NotSupportedError, match="no head `score`"):
        start(str(tmp_path / "bert"))
    tokens = start(model_folder("llama"), head="tokens")
    tokens.save_checkpoint(tmp_path / "tokens", None)
    with pytest.raises(CheckpointError, match=r"score\.weight"):
        start(model_folder("llama")).load_checkpoint(tmp_path / "tokens", None)


def test_language_model_methods_are_errors_with_a_scalar_head(parts, model_folder):
    policy = HuggingFacePolicy(config=parts.make_config(model_folder("llama"), head="scalar"))
    rows = parts.make_rows(2)
    for call in (policy.get_logprobs, policy.get_reference_policy_logprobs):
        with pytest.raises(NotSupportedError, match="head: scalar"):
            call(rows)
    with pytest.raises(WorkerError, match="cannot generate text"):
        policy.generate(rows)
    with pytest.raises(WorkerError, match="no weights for a generation engine"):
        policy.prepare_refit_info()
    tokens = HuggingFacePolicy(config=parts.make_config(model_folder("llama")))
    with pytest.raises(NotSupportedError, match="not a scalar head"):
        tokens.get_values(rows)


def test_a_head_of_two_axes_is_decayed_as_a_matrix(model_folder, start):
    worker = start(model_folder("llama"), optimizer=OptimizerConfig(kwargs={"lr": 0.1, "decay_matrices_only": True}))
    decayed, spared = worker.state.optimizer.param_groups
    head = worker.state.masters.parameters["score.weight"]
    assert any(parameter is head for parameter in decayed["params"])
    assert not any(parameter is head for parameter in spared["params"])
