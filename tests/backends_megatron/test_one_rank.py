"""One rank in this process: scoring at a temperature, sampling, saving, errors, and the shim for running without CUDA."""

import json
import os
import pickle
import shutil

import megatron_cases as cases
import model_folders
import pytest
import torch
import transformers
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from rl_backends_base.data_only import read_metadata
from rl_backends_megatron.hf_folder import read_generation_config
from rl_backends_megatron.training_state import saved_setting
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import CheckpointError, ConfigError, DataError, NotSupportedError, UserError, WorkerError
from rl_core.interfaces.policy import LossFunction

pytestmark = pytest.mark.megatron


def prompts(**columns):
    given = cases.make_prompts()
    del given["max_new_tokens"]
    return BatchedDataDict({**given, **columns})


def test_scores_are_at_the_temperature_of_sampling(policy, models):
    rows = cases.make_rows()
    found = policy(generation={"temperature": 0.7}).get_logprobs(rows)["logprobs"]
    with torch.no_grad():
        expected = cases.plain_logprobs(cases.plain_model(models / "llama-tied"), rows, temperature=0.7)
    assert float((found - expected).abs().max()) < 5e-6


def test_unused_rows_of_the_lm_head_have_probability_0(policy, models):
    rows, used = cases.make_rows(), 150
    rows["input_ids"].clamp_(max=used - 1)
    found = policy(frozen=True, vocab_size=used)
    with torch.no_grad():
        whole = cases.plain_distributions(cases.plain_model(models / "llama-tied"), rows)
    among = whole - whole[..., :used].logsumexp(-1, keepdim=True)
    column = torch.arange(rows["input_ids"].shape[1])
    there = (column > 0) & (column < rows["input_lengths"].unsqueeze(1))
    expected = among.gather(2, rows["input_ids"].unsqueeze(-1)).squeeze(-1) * there
    assert used < whole.shape[-1]
    assert float((found.get_logprobs(rows)["logprobs"] - expected).abs().max()) < 5e-6
    assert int(found.get_topk_logprobs(rows, k=used)["topk_token_ids"].max()) == used - 1


def test_greedy_completions_are_those_of_transformers(policy, models):
    answer = policy("qwen3").generate(cases.make_prompts(), greedy=True)
    expected = cases.plain_completions(cases.plain_model(models / "qwen3"), cases.make_prompts())
    lengths = answer["unpadded_sequence_lengths"].tolist()
    assert [ids[:length] for ids, length in zip(answer["output_ids"].tolist(), lengths, strict=True)] == expected
    assert answer["truncated"].tolist() == [row[-1] != 2 for row in expected]


def test_end_tokens_of_the_generation_config_end_completions_and_are_saved(policy, models, tmp_path):
    first = cases.plain_completions(cases.plain_model(models / "qwen3"), cases.make_prompts())[0][3]
    shutil.copytree(models / "qwen3", tmp_path / "model")
    written = {"eos_token_id": [2, first], "do_sample": False, "temperature": 0.7}  # Transformers refuses to write this
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(written))
    made = policy(tmp_path / "model")
    answer = made.generate(cases.make_prompts(), greedy=True)
    assert (answer["generation_lengths"][0], answer["truncated"][0]) == (1, False)
    made.save_checkpoint(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "generation_config.json").read_text()) == written
    made.try_save(tmp_path / "tried")
    assert sorted(path.name for path in (tmp_path / "tried").iterdir()) == ["config.json", "generation_config.json"]


def test_a_damaged_generation_config_is_an_error_instead_of_missing_end_tokens(tmp_path):
    assert read_generation_config(tmp_path) is None
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"Cannot read generation_config\.json in"):
        read_generation_config(tmp_path)


def test_the_scores_of_samples_are_those_that_they_were_drawn_with(policy):
    made = policy("llama", generation={"temperature": 1.3, "max_new_tokens": 7})
    answer = made.generate(prompts(sample_seeds=torch.tensor([3, 4, 5])))
    again = made.generate(prompts(sample_seeds=torch.tensor([3, 4, 5])))
    assert torch.equal(answer["output_ids"], again["output_ids"])
    scored = made.get_logprobs(
        BatchedDataDict(input_ids=answer["output_ids"], input_lengths=answer["unpadded_sequence_lengths"])
    )["logprobs"]
    drawn = answer["logprobs"] != 0
    assert drawn.sum() == answer["generation_lengths"].sum()
    assert float((scored - answer["logprobs"])[drawn].abs().max()) < 1e-5
    free = made.generate(prompts())
    assert not torch.equal(made.generate(prompts())["output_ids"], free["output_ids"])


@pytest.mark.parametrize(
    ("columns", "error", "says"),
    [
        ({"input_lengths": torch.tensor([3, 0, 5])}, DataError, "Row 1 has input length 0"),
        ({"stop_strings": [["a"], None, None]}, DataError, "require a tokenizer"),
    ],
)
def test_prompts_that_cannot_be_completed_are_refused(policy, columns, error, says):
    with pytest.raises(Exception, match=says) as found:
        policy().generate(BatchedDataDict({**prompts(), **columns}))
    assert isinstance(found.value.__cause__, error)


def test_filtered_sampling_is_refused_since_scores_would_be_of_another_distribution(policy):
    with pytest.raises(Exception, match="top_p") as error:
        policy(generation={"top_p": 0.9}).generate(prompts())
    assert isinstance(error.value.__cause__, NotSupportedError)


def test_without_a_reference_it_says_which_key_to_set(policy):
    with pytest.raises(Exception, match=r"megatron_cfg\.reference"):
        policy(reference=False).get_reference_policy_logprobs(cases.make_rows())


def test_a_second_policy_in_the_same_process_is_refused(policy):
    policy()
    with pytest.raises(Exception, match="shut down the other policy first"):
        policy().wait_ready()


def test_weights_under_the_wrong_name_or_shape_are_refused(policy, models, tmp_path):
    made = policy()
    made.save_checkpoint(tmp_path / "w", tmp_path / "o")
    other = tmp_path / "other"
    shutil.copytree(models / "qwen3", other)
    for folder, says in (
        (tmp_path / "absent", "has no config.json"),
        (other, "of another model: a qwen3, not a llama"),
    ):
        with pytest.raises(CheckpointError, match=says):
            made.load_checkpoint(folder)
    weights = tmp_path / "w" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(Exception, match="is incomplete or corrupt"):
        made.load_checkpoint(tmp_path / "w")


def test_incomplete_or_incompatible_optimizer_state_is_rejected(policy, tmp_path):
    policy().save_checkpoint(tmp_path / "w", tmp_path / "o")
    made = policy_after(policy, use_distributed_optimizer=True)
    with pytest.raises(Exception, match="use_distributed_optimizer = False, and this policy has True"):
        made.load_checkpoint(tmp_path / "w", tmp_path / "o")
    made.shutdown()
    next((tmp_path / "o" / "tensors").glob("*.distcp")).unlink()
    made = policy()
    with pytest.raises(CheckpointError, match="is damaged"):
        made.load_checkpoint(tmp_path / "w", tmp_path / "o")
    with pytest.raises(Exception, match="does not exist"):
        made.load_checkpoint(tmp_path / "w", tmp_path / "absent")


@pytest.mark.parametrize("saved", [False, True])
def test_a_resume_without_an_explicit_key_shards_the_optimizer_as_its_checkpoint_does(policy, tmp_path, saved):
    made = policy_after(policy, use_distributed_optimizer=saved)
    made.save_checkpoint(tmp_path / "w", tmp_path / "o")
    expected = made.train(cases.make_rows(seed=2), cases.NLL())
    weights = dict(made.group.worker.iter_weights())
    made.shutdown()
    # As resolved on CPUs; on GPUs the default is the opposite.
    made = policy_after(policy)
    made.load_checkpoint(tmp_path / "w", tmp_path / "o")
    assert made.train(cases.make_rows(seed=2), cases.NLL())["grad_norm"] == expected["grad_norm"]
    assert all(torch.equal(tensor, weights[name]) for name, tensor in made.group.worker.iter_weights())
    made.save_checkpoint(tmp_path / "w2", tmp_path / "o2")
    assert saved_setting(tmp_path / "o2", "policy.megatron_cfg.use_distributed_optimizer") is saved


def test_a_factor_on_the_learning_rate_scales_the_steps_and_the_schedule_continues(policy):
    made = policy(optimizer={"kwargs": {"lr": 1e-3}}, scheduler={"name": "linear", "kwargs": {"num_training_steps": 4}})
    made.set_lr_factor(0.5)
    assert made.train(cases.make_rows(), cases.NLL())["lr"] == 5e-4
    assert {group["lr"] for group in made.group.worker.state.optimizer.param_groups} == {5e-4}
    before = {name: tensor.clone() for name, tensor in made.group.worker.iter_weights()}
    made.set_lr_factor(0.0)
    assert made.train(cases.make_rows(), cases.NLL())["lr"] == 0.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.group.worker.iter_weights())
    made.set_lr_factor(1.0)
    assert made.train(cases.make_rows(), cases.NLL())["lr"] == pytest.approx(1e-3 * 2 / 4)


def test_a_resume_steps_with_the_settings_of_the_present_config(policy, tmp_path):
    linear = {"name": "linear", "kwargs": {"num_training_steps": 4}}
    first = {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.99]}
    made = policy(optimizer={"kwargs": first}, scheduler=linear)
    assert made.train(cases.make_rows(), cases.NLL())["lr"] == 1e-3
    made.save_checkpoint(tmp_path / "w", tmp_path / "o")
    made.shutdown()
    second = {"lr": 4e-3, "weight_decay": 0.2, "betas": [0.8, 0.9], "eps": 1e-6}
    made = policy_after(policy, optimizer={"kwargs": second}, scheduler={"name": "linear", "kwargs": {"num_training_steps": 8}})
    made.load_checkpoint(tmp_path / "w", tmp_path / "o")
    assert made.train(cases.make_rows(), cases.NLL())["lr"] == pytest.approx(4e-3 * 7 / 8)
    for group in made.group.worker.state.optimizer.param_groups:
        assert (group["lr"], group["weight_decay"], *group["betas"], group["eps"]) == pytest.approx(
            (4e-3 * 7 / 8, 0.2, 0.8, 0.9, 1e-6)
        )
    made.shutdown()
    made = policy_after(policy, optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": 1e-3}})
    with pytest.raises(Exception, match=r"policy\.optimizer\.name = 'torch.optim.AdamW', and this policy has"):
        made.load_checkpoint(tmp_path / "w", tmp_path / "o")


def policy_after(policy, **fields):
    """A new policy after the previous one was shut down."""
    from rl_backends_megatron.parallel import leave

    leave()
    return policy(**fields)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
HALF_TURNED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"model_type": "gpt2"}, NotSupportedError, "'gpt2', but the Megatron backend supports llama, mistral"),
        ({"attention_bias": True}, NotSupportedError, "`attention_bias: True` in its config.json"),
        ({"num_hidden_layers": 4, "hidden_act": "gelu"}, NotSupportedError, "`hidden_act: 'gelu'`"),
        ({"intermediate_size": 49}, ConfigError, "2 does not divide the MLP's width 49"),
        ({"rope_parameters": YARN}, NotSupportedError, "rotary positions of type 'yarn'"),
        ({"rope_parameters": HALF_TURNED}, NotSupportedError, "partial rotary embeddings"),
    ],
)
def test_an_unsupported_model_is_rejected_before_anything_starts(models, tmp_path, change, error, says):
    from rl_backends_megatron.policy import MegatronPolicy

    folder = tmp_path / "model"
    shutil.copytree(models / "llama", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(error, match=says):
        MegatronPolicy(str(folder), tensor_model_parallel_size=2)


def test_missing_weights_and_invalid_optimizers_are_rejected_before_anything_starts(models, tmp_path):
    from rl_backends_megatron.policy import MegatronPolicy

    folder = tmp_path / "model"
    shutil.copytree(models / "llama", folder)
    with pytest.raises(UserError, match=r"AdamW rejects .*Invalid learning rate: -1"):
        MegatronPolicy(str(folder), tensor_model_parallel_size=2, optimizer={"kwargs": {"lr": -1}})
    with pytest.raises(UserError, match=r"policy\.scheduler\.name"):
        MegatronPolicy(str(folder), tensor_model_parallel_size=2, scheduler={"name": "cosin"})
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        MegatronPolicy(str(folder), tensor_model_parallel_size=2)


def test_a_tensor_with_further_rows_is_not_cut(policy, models, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(models / "llama", folder)
    model_folders.edit_weights(folder, lambda tensors: tensors.update({"lm_head.weight": torch.ones(200, 32)}))
    with pytest.raises(WorkerError, match=r"lm_head\.weight: has shape \(200, 32\), but the model needs"):
        policy(str(folder)).wait_ready()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"model_name": "no/such/folder/here"}, "does not exist"),
        ({"model_name": "model.gguf"}, "reads only safetensors"),
        ({"model_name": "m", "tensor_model_parallel": 2}, "Did you mean 'tensor_model_parallel_size'"),
        ({"model_name": "m", "sequence_parallel": True}, "increase tensor_model_parallel_size"),
        ({}, "needs a model"),
    ],
)
def test_wrong_arguments_are_explained(arguments, says):
    from rl_backends_megatron.policy import MegatronPolicy

    with pytest.raises(UserError, match=says):
        MegatronPolicy(**arguments)


@pytest.mark.parametrize("name", ["flash", "plain", "bfloat16"])
def test_attention_kernels_and_types_give_the_same_scores(policy, models, name):
    fields = {"flash": {"use_flash_attention": True}, "plain": {"use_flash_attention": False}}
    rows = cases.make_rows()
    found = policy("qwen2", **fields.get(name, {"torch_dtype": "bfloat16"})).get_logprobs(rows)["logprobs"]
    with torch.no_grad():
        expected = cases.plain_logprobs(cases.plain_model(models / "qwen2"), rows)
    # bfloat16 has 8 bits: over four layers its rounding shows in the second digit.
    assert float((found - expected).abs().max()) < (0.25 if name == "bfloat16" else 5e-6)


def test_the_cpu_shim_leaves_torch_unchanged():
    from rl_backends_megatron.cpu_shim import cpu_shim

    before = torch.cuda.current_device, torch.cuda.synchronize
    with cpu_shim():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.ones(2).cuda().device.type == "cpu"
    assert (torch.cuda.current_device, torch.cuda.synchronize) == before
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


def test_another_version_of_megatron_is_refused(monkeypatch):
    from rl_backends_megatron import megatron_internals

    megatron_internals.check_megatron()
    monkeypatch.setattr(megatron_internals, "version", lambda name: "0.17.0")
    with pytest.raises(UserError, match=r"0.17.0 is installed, but this backend requires 0.16.1"):
        megatron_internals.check_megatron()


def test_a_megatron_wheel_without_the_patched_names_is_rejected(monkeypatch):
    from rl_backends_megatron import megatron_internals
    from rl_backends_megatron.megatron_internals import Internal

    monkeypatch.setattr(megatron_internals, "GET_RANDOM_STATE", Internal("megatron.core.utils", "Absent.attribute"))
    with pytest.raises(UserError, match=r"megatron\.core\.utils has no Absent\.attribute"):
        megatron_internals.check_megatron()


def test_weights_in_several_files_are_read_and_written(models, tmp_path, monkeypatch):
    from rl_backends_megatron import hf_folder

    source = hf_folder.SafetensorsFolder(models / "llama")
    names = sorted(source._files)
    monkeypatch.setattr(hf_folder, "_SHARD_BYTES", 20_000)
    weights = ((name, source.whole(name)) for name in names)
    hf_folder.write_folder(tmp_path, weights, hf_folder.read_config(models / "llama"))
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    again = hf_folder.SafetensorsFolder(tmp_path)
    assert all(torch.equal(again.whole(name), source.whole(name)) for name in names)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() > 0


def test_a_frozen_policy_scores_and_has_no_optimizer(policy, models, tmp_path):
    rows = cases.make_rows()
    made = policy("qwen3", frozen=True)
    found = made.get_logprobs(rows)["logprobs"]
    with torch.no_grad():
        expected = cases.plain_logprobs(cases.plain_model(models / "qwen3"), rows)
    assert float((found - expected).abs().max()) < 5e-6
    assert made.train(rows, cases.NLL(), eval_mode=True)["metrics"]["nll"] > 0
    worker = made.group.worker
    assert not any(parameter.requires_grad for model in worker.model for parameter in model.parameters())
    for ask in (lambda: made.train(rows, cases.NLL()), lambda: made.save_checkpoint(tmp_path / "w", tmp_path / "o")):
        with pytest.raises(Exception, match="is frozen") as error:
            ask()
        assert isinstance(error.value.__cause__, NotSupportedError)
    made.load_checkpoint(models / "qwen3")
    assert torch.equal(made.get_logprobs(rows)["logprobs"], found)


class Planted:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def declare_bytes(folder, planted):
    """Metadata with allowed classes only, which declares tensors as bytes entries."""
    found = read_metadata(folder)
    found.state_dict_metadata = dict.fromkeys(found.state_dict_metadata, BytesStorageMetadata())
    for info in found.storage_data.values():
        info.offset = 0
        torch.save(planted, folder / info.relative_path)
        info.length = (folder / info.relative_path).stat().st_size
    found.storage_meta = None
    (folder / ".metadata").write_bytes(pickle.dumps(found))


PLANTS = {
    "a pickle as metadata": lambda folder, planted: (folder / "tensors" / ".metadata").write_bytes(pickle.dumps(planted)),
    "entries of bytes": lambda folder, planted: declare_bytes(folder / "tensors", planted),
    "a pickle as common state": lambda folder, planted: torch.save(planted, folder / "tensors" / "common.pt"),
    "a pickle as tensors": lambda folder, planted: torch.save(planted, folder / "tensors" / "__0_0.distcp"),
    "a pickle as trainer state": lambda folder, planted: torch.save(planted, folder / "trainer.pt"),
}


def test_a_checkpoint_is_written_without_other_processes(policy, tmp_path, monkeypatch):
    """A fork of a process with threads can wait for ever for a lock that one of them held."""

    def fork():
        raise AssertionError("a process was forked")

    made = policy()
    monkeypatch.setattr("os.fork", fork)
    made.save_checkpoint(tmp_path / "w", tmp_path / "o")
    made.load_checkpoint(tmp_path / "w", tmp_path / "o")


def test_a_resume_runs_no_code_of_the_checkpoint(policy, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # the variable by which users make torch load pickles
    made = policy()
    made.save_checkpoint(tmp_path / "w", tmp_path / "o")
    planted = Planted(tmp_path / "code-ran")
    for name, plant in PLANTS.items():
        shutil.copytree(tmp_path / "o", tmp_path / name)
        plant(tmp_path / name, planted)
        with pytest.raises(CheckpointError) as refused:
            made.load_checkpoint(tmp_path / "w", tmp_path / name)
        assert "Traceback" not in str(refused.value), name
        assert not planted.marker.exists(), name
    made.load_checkpoint(tmp_path / "w", tmp_path / "o")
    pickle.loads(pickle.dumps(planted))
    assert planted.marker.is_dir()


def test_damaged_files_of_the_training_state_are_refused(policy, tmp_path):
    made = policy()
    made.save_checkpoint(tmp_path / "w", tmp_path / "o")
    for number, (file, content) in enumerate(
        (file, content)
        for file in ("trainer.pt", "tensors/.metadata", "tensors/common.pt", "tensors/metadata.json", "tensors/__0_0.distcp")
        for content in (None, b"", b"[1, 2]")
    ):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "o", folder)
        if content is None:
            (folder / file).unlink()
        else:
            (folder / file).write_bytes(content)
        with pytest.raises(CheckpointError, match=str(folder)) as refused:
            made.load_checkpoint(tmp_path / "w", folder)
        assert "Traceback" not in str(refused.value), (file, content)


class Compared(LossFunction):
    """The likelihood, and how far log-probabilities are from those of the scoring pass."""

    required_keys = frozenset({"prev_logprobs"})
    metric_reductions = {"apart": "max"}  # noqa: RUF012

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(1)
        apart = ((next_token_logprobs - data["prev_logprobs"]) * mask).abs().max().detach()
        return -(next_token_logprobs * mask).sum() / global_valid_toks, {"apart": apart}


def test_training_log_probabilities_equal_scored_ones_although_the_models_config_has_dropout(policy, models, tmp_path):
    folder = tmp_path / "dropping"
    shutil.copytree(models / "llama-tied", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.4}))
    made, rows = policy(str(folder)), cases.make_rows()
    rows["prev_logprobs"] = made.get_logprobs(rows)["logprobs"]
    assert made.train(rows, Compared())["metrics"]["apart"] < 1e-5


def test_its_own_sampler_refuses_a_repetition_penalty(policy):
    from rl_backends_hf.config import HFGenerationConfig

    section = HFGenerationConfig(hf_cfg={"repetition_penalty": 1.3})
    with pytest.raises(Exception, match=r"hf_cfg\.repetition_penalty: 1\.0") as error:
        policy(generation=section).generate(prompts())
    assert isinstance(error.value.__cause__ or error.value, NotSupportedError)


@pytest.mark.parametrize("distributed", [False, True])
def test_the_first_non_finite_tensor_of_a_checkpoint_is_named(policy, distributed):
    made = policy("llama", precision="bfloat16", megatron_cfg={"use_distributed_optimizer": distributed})
    made.train(cases.make_rows(), cases.NLL())
    assert made.find_non_finite() is None
    trainable = made.group._worker.state
    names = [name for name, _ in trainable.named_state()]
    assert len(names) == len(set(names))
    assert not any("a weight" in name for name in names)
    name, state = next((name, tensor) for name, tensor in trainable.named_state() if name.startswith("exp_avg_sq of"))
    state.view(-1)[0] = float("nan")
    assert made.find_non_finite() == f"{name} (rank 0)"
    assert 0 < made.checkpoint_bytes(optimizer=False) < made.checkpoint_bytes(optimizer=True)
