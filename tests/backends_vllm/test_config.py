"""The section `backend: vllm`: fast to read, precise errors, and every key reaches the engine."""

import json
import re
import subprocess
import sys
from pathlib import Path

import model_folders
import pytest
import torch
from pydantic import ValidationError
from readable_model import LENGTH, batch_of
from tiny_models import make_model
from transformers import LlamaConfig, Qwen2VLConfig

from rl_backends_hf import HuggingFacePolicy
from rl_backends_hf.config import HFPolicyConfig
from rl_backends_vllm import VllmConfig, VllmGeneration, VllmGenerationWorker
from rl_backends_vllm.config import OWNED, VllmEngineConfig
from rl_backends_vllm.model_folder import ModelFiles
from rl_backends_vllm.sources import known_engine_arguments
from rl_backends_vllm.worker import as_batch
from rl_core.config.policy_sections import PolicyTokenizerConfig
from rl_core.config.schema import TokenizerConfig
from rl_core.data import BatchedDataDict
from rl_core.errors import ConfigError, DataError, UserError, WeightSyncError, WorkerError
from rl_core.interfaces.worker_context import WorkerContext
from rl_train.algorithms import NLLLossFn

pytestmark = pytest.mark.vllm

EXAMPLES = Path(__file__).parents[2] / "examples"
HEAVY = {"torch", "ray", "numpy", "transformers", "vllm", "megatron"}
RUN = f"""defaults: {EXAMPLES / "grpo_addition.yaml"}
policy:
  generation:
    backend: vllm
"""


def rlcore_process(*arguments, python=()):
    return subprocess.run(
        [sys.executable, *python, "-m", "rlcore_cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def mistakes(tmp_path, rlcore):
    """The errors that `rlcore validate` prints, from the fifth line on, for a run with additional lines in its section."""

    def lines(*more):
        path = tmp_path / "run.yaml"
        path.write_text(RUN + "".join(f"    {line}\n" for line in more))
        code, output = rlcore("validate", path)
        assert code == 2
        errors = [line for line in output.splitlines()[1:] if "could not run; --json" not in line]
        return [line.removeprefix(f"{path}:") for line in errors]

    return lines


def test_validating_a_run_on_vllm_imports_neither_torch_nor_vllm(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RUN + "    vllm_cfg: {kv_cache_gib: 0.5}\n    vllm_kwargs: {block_size: 32}\n")
    result = rlcore_process("validate", path, "--json", python=("-X", "importtime"))
    assert result.returncode == 0
    lines = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert "rl_backends_hf" in imported  # modules that `importlib.import_module` loads, such as the configs, are not listed
    assert not imported & HEAVY
    assert json.loads(result.stdout)["config"]["policy"]["generation"]["vllm_kwargs"] == {"block_size": 32}


def test_every_error_has_its_line_and_a_suggestion(mistakes):
    assert mistakes(
        "vllm_cfg:",
        "  gpu_memory_utilisation: 0.5",
        "vllm_kwargs:",
        "  enable_lorra: true",
        "  tokenizer: other",
        "  worker_extension_cls: mine",
    ) == [
        "6:7: policy.generation.vllm_cfg.gpu_memory_utilisation: policy.generation.vllm_cfg has no key "
        "'gpu_memory_utilisation'. Did you mean 'gpu_memory_utilization'?",
        "8:7: policy.generation.vllm_kwargs.enable_lorra: vLLM's EngineArgs has no 'enable_lorra'. Did you mean 'enable_lora'?",
        "9:7: policy.generation.vllm_kwargs.tokenizer: vllm_kwargs cannot set tokenizer: set "
        "policy.generation.vllm_cfg.tokenizer instead.",
        "10:7: policy.generation.vllm_kwargs.worker_extension_cls: vllm_kwargs cannot set worker_extension_cls: refits use it.",
    ]


def test_values_that_vllm_would_silently_change_or_reject_are_errors(mistakes):
    assert mistakes("temperature: 0.001", "val_temperature: 0.001") == [
        "3:3: policy.generation: temperature 0.001 is too small: vLLM would sample at 0.01, but training would score the "
        "tokens at 0.001. Set it to at least 0.01."
    ]
    assert mistakes("vllm_cfg: {max_num_seqs: 64, max_num_batched_tokens: 32}") == [
        "5:5: policy.generation.vllm_cfg: max_num_batched_tokens 32 is less than max_num_seqs 64: each row needs a token per "
        "engine step."
    ]


def test_speculation_that_vllm_would_report_at_another_temperature_or_without_proposals_is_an_error(mistakes):
    assert mistakes(
        "temperature: 0.7", "val_temperature: 0.0", "vllm_cfg: {ngram_speculation: {num_speculative_tokens: 3}}"
    ) == [
        "3:3: policy.generation: vllm_cfg.ngram_speculation requires temperature 1, not 0.7: with speculation, vLLM reports "
        "log-probabilities of greedy rows at temperature 1 only. Set temperature: 1.0, or leave speculation out."
    ]
    assert mistakes("vllm_cfg:", "  ngram_speculation: {num_speculative_tokens: 3, prompt_lookup_max: 1}") == [
        "6:7: policy.generation.vllm_cfg.ngram_speculation: prompt_lookup_min 2 exceeds prompt_lookup_max 1."
    ]


def test_the_canary_cannot_be_off_since_vllm_transforms_weights_after_they_have_arrived(mistakes):
    [mistake] = mistakes("refit_canary: false")
    assert mistake.startswith("5:19: policy.generation.refit_canary: the engine 'vllm' requires the canary")


def test_every_forbidden_argument_exists_and_is_rejected_with_the_key_that_replaces_it():
    assert OWNED.keys() <= known_engine_arguments()
    for name, reason in OWNED.items():
        with pytest.raises(ValidationError, match=re.escape(f"vllm_kwargs cannot set {name}: {reason}")):
            VllmConfig(vllm_kwargs={name: 1})
        for key in re.findall(r"policy\.generation\.vllm_cfg\.(\w+)", reason):
            assert key in VllmEngineConfig.model_fields


def test_the_arguments_that_are_read_from_the_source_are_those_of_the_class():
    import dataclasses

    from vllm import EngineArgs

    assert known_engine_arguments() == {f.name for f in dataclasses.fields(EngineArgs) if f.name[0] != "_"}


EVERY_KEY = {
    "tensor_parallel_size": (2, {"tensor_parallel_size": 2, "distributed_executor_backend": "MultiProcessExecutor"}),
    "pipeline_parallel_size": (3, {"pipeline_parallel_size": 3, "distributed_executor_backend": "MultiProcessExecutor"}),
    "gpu_memory_utilization": (0.5, {"gpu_memory_utilization": 0.5}),
    "kv_cache_gib": (0.25, {"kv_cache_memory_bytes": 2**28}),
    "max_model_len": (77, {"max_model_len": 77}),
    "max_num_seqs": (5, {"max_num_seqs": 5}),
    "max_num_batched_tokens": (999, {"max_num_batched_tokens": 999}),
    "enforce_eager": (True, {"enforce_eager": True}),
    "enable_prefix_caching": (False, {"enable_prefix_caching": False}),
    "precision": ("float16", {"dtype": "float16"}),
    "ngram_speculation": (
        {"num_speculative_tokens": 3, "prompt_lookup_max": 4},
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 4,
                "prompt_lookup_min": 2,
            }
        },
    ),
    "kv_cache_dtype": ("fp8", {"kv_cache_dtype": "fp8"}),
    "trust_remote_code": (True, {"trust_remote_code": True}),
    "seed": (11, {"seed": 11}),
    "sleep_level": (2, {"enable_sleep_mode": True}),
}
ELSEWHERE = {
    "tokenizer": "a folder of files, below",
    "load_format": "below",
    "async_engine": "which engine starts: test_generation_async",
    "max_lora_rank": "test_adapters",
}


def test_every_documented_key_reaches_the_engine():
    assert EVERY_KEY.keys() | ELSEWHERE.keys() == VllmEngineConfig.model_fields.keys()
    plain = arguments_on_a_gpu(VllmConfig(model_name="m"))
    for key, (value, expected) in EVERY_KEY.items():
        found = arguments_on_a_gpu(VllmConfig(model_name="m", vllm_cfg={key: value}))
        assert {name for name in found if found[name] != plain[name]} == expected.keys()
        assert {name: found[name] for name in expected} == expected
    found = arguments_on_a_gpu(VllmConfig(model_name="m", vllm_kwargs={"block_size": 32, "max_logprobs": 3}))
    assert {name: found[name] for name in found.keys() - plain.keys()} == {"block_size": 32, "max_logprobs": 3}


def test_a_vision_language_model_is_computed_by_transformers_unless_the_config_says_otherwise():
    def difference(**kwargs):
        config = VllmConfig(model_name="m", vllm_kwargs=kwargs)
        text, vision = arguments_on_a_gpu(config), arguments_on_a_gpu(config, Qwen2VLConfig())
        return {name: vision[name] for name in vision if vision[name] != text.get(name)}

    assert difference() == {"model_impl": "transformers", "skip_mm_profiling": True, "mm_processor_cache_gb": 0}
    assert difference(model_impl="vllm") == {}


@pytest.mark.parametrize("tensor", ["lm_head.weight", "model.layers.1.mlp.down_proj.weight"])
def test_an_engine_that_reads_an_incomplete_folder_names_the_tensor_that_vllm_would_leave_random(tmp_path, tensor):
    folder = model_folders.make(tmp_path / "model")
    model_folders.edit_weights(folder, lambda tensors: tensors.pop(tensor))
    with pytest.raises(UserError, match=rf"{tensor}: missing") as error:
        VllmGenerationWorker(str(folder), max_new_tokens=4).setup()
    assert error.value.key == "policy.generation.model_name"


def arguments_on_a_gpu(config, hf_config=None):
    """The arguments of the engine on a GPU; no GPU is needed."""
    context = WorkerContext(rank=0, world_size=1, local_rank=0, node_rank=0, master_address="", master_port=0, device="cuda")
    files = ModelFiles(
        path="m",
        revision=None,
        hf_config=hf_config or LlamaConfig(),
        generation_config=None,
        tokenizer=None,
        tokenizer_path="m",
        has_weights=True,
    )
    arguments = VllmGenerationWorker(context, config)._arguments(files, "auto")
    return arguments | {"distributed_executor_backend": arguments["distributed_executor_backend"].__name__}


@pytest.mark.slow
def test_the_running_engine_has_them(engines, readable, tmp_path):
    engine = engines(
        max_new_tokens=4,
        max_model_len=300,
        max_num_seqs=7,
        max_num_batched_tokens=512,
        kv_cache_gib=0.01,
        enable_prefix_caching=False,
        precision="bfloat16",
        seed=23,
        vllm_kwargs={"block_size": 32},
    )
    assert engine.facts == {
        "max_model_len": 300,
        "vocab_size": 512,
        "device": "cpu",
        "precision": "bfloat16",
        "reads_text": True,
        "row_options": ["top_logprobs", "prompt_logprobs", "stop_token_ids", "json_schema"],
        "streams_tokens": True,
        "images": False,
    }
    config = engine.group.worker._running.config
    assert (config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens) == (7, 512)
    assert (config.cache_config.block_size, config.cache_config.enable_prefix_caching) == (32, False)
    assert config.cache_config.kv_cache_memory_bytes == int(0.01 * 2**30)
    assert (config.model_config.seed, config.model_config.enforce_eager) == (23, True)
    assert config.model_config.tokenizer == readable


def test_errors_of_vllm_are_user_errors(engines):
    with pytest.raises(WorkerError, match=r"vllm_cfg and vllm_kwargs(.|\n)*max_model_len") as refused:
        engines(max_model_len=100 * LENGTH).wait_ready()
    assert isinstance(refused.value.__cause__, ConfigError)
    assert refused.value.exit_code == 2


def test_a_section_takes_what_it_leaves_open_from_the_policy():
    policy = HFPolicyConfig(
        model_name="m", precision="bfloat16", max_total_sequence_length=77, tokenizer={"name": "t"},
        hf_cfg={"trust_remote_code": True},
    )  # fmt: skip
    filled = VllmConfig().for_policy(policy)
    own = filled.vllm_cfg
    assert (filled.model_name, own.precision, own.max_model_len, own.load_format) == ("m", "bfloat16", 77, "dummy")
    assert (own.tokenizer, own.trust_remote_code) == (PolicyTokenizerConfig(name="t"), True)
    written = VllmConfig(
        model_name="n",
        vllm_cfg={"precision": "float32", "max_model_len": 500, "load_format": "auto", "tokenizer": {"name": "u"}},
    ).for_policy(policy)
    own = written.vllm_cfg
    assert (written.model_name, own.precision, own.max_model_len, own.load_format) == ("n", "float32", 77, "auto")
    assert own.tokenizer == TokenizerConfig(name="u")


def test_an_engine_without_weights_raises_instead_of_sampling(engines):
    engine = engines(max_new_tokens=4, load_format="dummy")
    with pytest.raises(WorkerError, match="does not have complete weights"):
        engine.generate(batch_of([5]))


def test_an_invalid_plain_mapping_is_an_error():
    with pytest.raises(ConfigError, match=r"'max_modl_len'. Did you mean 'max_model_len'"):
        VllmGeneration(config={"model_name": "m", "max_modl_len": 5})
    with pytest.raises(ConfigError, match=r"temperature: must be a number, more than 0"):
        VllmGeneration(config={"model_name": "m", "temperature": -1})
    with pytest.raises(ConfigError, match="needs a model"):
        VllmGeneration()
    with pytest.raises(ConfigError, match="needs a model"):
        VllmGeneration(config={"max_new_tokens": 4})


def test_a_worker_can_be_created_with_the_name_of_a_model():
    worker = VllmGenerationWorker("some/model", max_new_tokens=7, max_model_len=64)
    assert (worker._config.model_name, worker._config.max_new_tokens) == ("some/model", 7)
    assert worker._config.vllm_cfg.max_model_len == 64
    assert worker.context.run_in_process
    assert VllmGenerationWorker(model_name="some/model")._config.model_name == "some/model"
    with pytest.raises(ConfigError, match=r"VllmGenerationWorker has no argument 'max_tokens'\. Did you mean 'max_new_tokens'"):
        VllmGenerationWorker("some/model", max_tokens=7)
    with pytest.raises(ConfigError, match="VllmGenerationWorker needs a model"):
        VllmGenerationWorker(max_new_tokens=7)
    with pytest.raises(ConfigError, match=r"two models: 'some/model' and model_name='other'"):
        VllmGenerationWorker("some/model", model_name="other")
    with pytest.raises(ConfigError, match=r"has `config`, so the model 'some/model', max_new_tokens would have no effect"):
        VllmGenerationWorker("some/model", worker._config, max_new_tokens=7)


def test_token_ids_become_a_batch_of_prompts():
    ids = torch.tensor([[1, 2, 3], [4, 5, 0]])
    assert as_batch(ids, {})["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 1]]
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    assert as_batch(ids, {"attention_mask": mask})["attention_mask"] is mask
    with pytest.raises(DataError, match=r"input_ids has shape \[3\]: expected \[B, T\]"):
        as_batch(ids[0], {})
    with pytest.raises(DataError, match="takes a batch or input_ids"):
        as_batch(None, {"attention_mask": mask})
    with pytest.raises(DataError, match="attention_mask must be columns of the batch"):
        as_batch(BatchedDataDict({"input_ids": ids}), {"attention_mask": mask})


@pytest.mark.full("test_generation_contract.py covers the same engine; creating the worker is tested above")
def test_a_worker_with_a_model_starts_at_the_first_call_and_stops(engines, readable):
    engines.shutdown()
    worker = VllmGenerationWorker(str(readable), max_new_tokens=4, precision="float32", max_model_len=LENGTH)
    policy = HuggingFacePolicy(str(readable), optimizer={"kwargs": {"lr": 0.1}})
    input_ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    try:
        output = worker.generate(input_ids, greedy=True)
        assert output["output_ids"].shape[0] == 2
        assert output["generation_lengths"].max() <= 4
        length = output["output_ids"].shape[1]
        rows = {"input_ids": output["output_ids"], "input_lengths": output["unpadded_sequence_lengths"]}
        policy.train(BatchedDataDict({**rows, "token_mask": torch.ones(2, length), "sample_mask": torch.ones(2)}), NLLLossFn())
        for buckets in (policy.prepare_weights_for_ipc(), policy.prepare_weights_for_ipc(20_000)):
            for keys in buckets:
                worker.update_weights(policy.get_weights_ipc_handles(keys))
            output = worker.generate(input_ids=input_ids, greedy=False)
            assert output["weight_version"].tolist() == [1, 1]
            scored = policy.get_logprobs(output)["logprobs"]
            sampled = output["logprobs"] != 0
            assert torch.allclose(scored[sampled], output["logprobs"][sampled], atol=1e-4)
        assert len(buckets) > 1
    finally:
        policy.shutdown()
        worker.shutdown()
    with pytest.raises(WeightSyncError, match="The engine is not running"):
        worker.generate(torch.tensor([[5, 6, 7]]))


def test_an_engine_without_memory_for_one_row_says_which_keys_to_change(engines):
    with pytest.raises(WorkerError, match="Out of memory in loading") as refused:
        engines(kv_cache_gib=1e-6).wait_ready()
    message = str(refused.value.__cause__)
    assert "(MemoryError: No available memory for the cache blocks." in message
    assert "Raise `policy.generation.vllm_cfg.kv_cache_gib` (1e-06)" in message
    assert f"or lower `policy.generation.vllm_cfg.max_model_len` from {LENGTH}." in message


def test_an_engine_that_did_not_start_leaves_no_process_groups_to_the_next(engines, tmp_path):
    with pytest.raises(WorkerError, match="Out of memory in loading"):
        engines(kv_cache_gib=1e-6).wait_ready()
    experts = make_model(tmp_path, "qwen3-moe")  # needs a process group that an engine of a dense model does not create
    engine = engines(model_name=experts, max_model_len=16, max_new_tokens=2)
    assert engine.generate(batch_of([5]))["generation_lengths"].item() == 2


def test_the_advice_on_a_gpu_names_its_keys_with_their_values():
    context = WorkerContext(rank=0, world_size=1, local_rank=0, node_rank=0, master_address="", master_port=0, device="cuda")
    config = VllmConfig(vllm_cfg={"gpu_memory_utilization": 0.4, "tensor_parallel_size": 2})
    advice = VllmGenerationWorker(context, config).memory_advice("loading")
    assert "Raise `policy.generation.vllm_cfg.gpu_memory_utilization` (0.4) if the KV cache is too small" in advice
    assert "`policy.generation.vllm_cfg.tensor_parallel_size: 4`" in advice
