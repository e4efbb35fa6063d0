import asyncio
import platform
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest
import torch
import transformers
from readable_model import batch_of

from rl_backends_hf.config import HFConfig, HFGenerationConfig, HFPolicyConfig, HFSamplerConfig
from rl_backends_hf.generation import HuggingFaceGeneration
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import ConfigError, DataError, WorkerError


@pytest.fixture
def engine(model_folder):
    engine = HuggingFaceGeneration(model_folder("qwen3"), max_new_tokens=6, temperature=0.7)
    yield engine
    engine.shutdown()
    engine.shutdown()


def test_bad_rows_are_data_errors_that_name_the_caller_s_row(engine):
    with pytest.raises(DataError, match=r"^Row 2 "):
        engine.generate(batch_of([5], [6], [160]))


def test_unknown_and_impossible_arguments_are_config_errors(model_folder):
    with pytest.raises(ConfigError, match="temperature"):
        HuggingFaceGeneration(model_folder("llama"), temprature=1.0)
    with pytest.raises(ConfigError, match="top_p"):
        HuggingFaceGeneration(model_folder("llama"), top_p=1.5)
    with pytest.raises(ConfigError, match="model"):
        HuggingFaceGeneration()
    with pytest.raises(ConfigError, match="additional fields"):
        HuggingFaceGeneration(model_folder("llama"), config=HFGenerationConfig(model_name="x"))


def test_a_section_takes_what_it_leaves_open_from_the_policy():
    policy = HFPolicyConfig(
        model_name="m", precision="bfloat16", max_total_sequence_length=77, hf_cfg=HFConfig(config_overrides={"a": 1})
    )
    filled = HFGenerationConfig().for_policy(policy)
    assert (filled.model_name, filled.hf_cfg.precision, filled.hf_cfg.max_model_len) == ("m", "bfloat16", 77)
    assert filled.hf_cfg.config_overrides == {"a": 1}
    own = HFGenerationConfig(model_name="n", hf_cfg={"precision": "float32", "max_model_len": 500}).for_policy(policy)
    assert (own.model_name, own.hf_cfg.precision, own.hf_cfg.max_model_len) == ("n", "float32", 77)
    assert own.hf_cfg.config_overrides == {}


def test_the_argument_torch_dtype_sets_the_precision_of_the_engine(model_folder):
    engine = HuggingFaceGeneration(model_folder("llama"), torch_dtype=torch.bfloat16, max_new_tokens=2)
    assert engine.group.worker.named_weights()["lm_head.weight"].dtype == torch.bfloat16
    assert engine.generate(batch_of([4, 5]))["generation_lengths"].tolist() in ([1], [2])
    engine.shutdown()


def test_after_a_refit_by_reference_the_engine_samples_from_the_policy_s_weights(model_folder, tmp_path):
    from rl_backends_hf.policy import HuggingFacePolicy
    from rl_train.algorithms.losses import NLLLossFn
    from rl_train.weight_sync.sender import WeightSender
    from rl_train.weight_sync.synchronizer import WeightSynchronizer
    from rl_train.weight_sync.transports import ByReferenceTransport

    other = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(model_folder("llama-tied")), dtype=torch.float32
    )
    other.save_pretrained(tmp_path)
    policy = HuggingFacePolicy(model_folder("llama-tied"), generation={"temperature": 0.7, "backend": "hf"})
    engine = HuggingFaceGeneration(str(tmp_path), max_new_tokens=20, temperature=0.7)
    batch = batch_of([5, 6, 7], [9], [5, 6, 7])
    synchronizer = WeightSynchronizer(policy, engine, WeightSender(policy, ByReferenceTransport))
    synchronizer.sync()
    output = engine.generate(batch)
    assert output["weight_version"].tolist() == [0, 0, 0]
    scored = policy.get_logprobs(
        BatchedDataDict(input_ids=output["output_ids"], input_lengths=output["unpadded_sequence_lengths"])
    )["logprobs"]
    sampled = output["logprobs"] != 0
    torch.testing.assert_close(output["logprobs"][sampled], scored[sampled], atol=1e-4, rtol=0)
    own = policy.generate(batch_of([5, 6, 7]), greedy=True)
    theirs = engine.generate(batch_of([5, 6, 7]), greedy=True)
    assert own["output_ids"][0, :23].tolist() == theirs["output_ids"][0].tolist()

    rows = {**output, "token_mask": sampled.float(), "sample_mask": torch.ones(3)}
    rows |= {"input_ids": output["output_ids"], "input_lengths": output["unpadded_sequence_lengths"]}
    policy.prepare_for_training()
    policy.train(BatchedDataDict(rows), NLLLossFn())
    with pytest.raises(WorkerError, match=r"has changed \d+ weights since the last weight sync"):
        engine.generate(batch)
    synchronizer.sync()
    assert engine.generate(batch)["weight_version"].tolist() == [1, 1, 1]


async def one_by_one(engine, batch):
    """The rows, one call for each; the later ones join while the first ones run."""

    async def ask(row):
        await asyncio.sleep(0.02 * row)
        [(_, output)] = [item async for item in engine.generate_async(batch.slice(row, row + 1))]
        return row, output

    return await asyncio.gather(*(ask(row) for row in range(batch.size)))


def test_progress_is_read_in_another_thread_while_a_batch_is_sampled_and_changes_no_output(engine):
    batch, seen = batch_of([5, 6, 7], [9], [5, 6, 7], [11, 12], sample_seeds=torch.arange(4)), []
    expected = engine.generate(batch)
    engine.finish_generation()
    with ThreadPoolExecutor(1) as reader:
        hook = engine.group.worker.model.register_forward_pre_hook(
            lambda *_: seen.append(reader.submit(engine.batch_progress).result())
        )
        output = engine.generate(batch)
        hook.remove()
    ended, tokens = zip(*seen, strict=True)
    assert (ended[0], tokens[0]) == (0, 0)
    assert list(ended) == sorted(ended)
    assert list(tokens) == sorted(set(tokens))
    assert engine.batch_progress() == (batch.size, int(output["generation_lengths"].sum()))
    for key in expected:
        assert torch.equal(output[key], expected[key]), key


@pytest.mark.full("backends_base/dispatch/test_streaming.py has replicas on a cluster; e2e/test_runs.py samples on one")
def test_two_replicas_on_a_cluster_give_the_rows_of_one(model_folder, local_ray):
    from rl_core.cluster.virtual_cluster import RayVirtualCluster

    prompts = [[5, 6, 7], [9], [5, 6, 7], [11, 12], [9]]
    batch = batch_of(*prompts, sample_seeds=torch.arange(5) * 31, stop_strings=[None] * 5)
    alone = HuggingFaceGeneration(model_folder("llama"), max_new_tokens=8)
    expected = alone.generate(batch)
    cluster = RayVirtualCluster([2], use_gpus=False)
    try:
        engine = HuggingFaceGeneration(model_folder("llama"), max_new_tokens=8, cluster=cluster)
        output = engine.generate(batch)
        assert engine.num_workers == 2
        assert output["output_ids"].tolist() == expected["output_ids"].tolist()
        torch.testing.assert_close(output["logprobs"], expected["logprobs"], atol=1e-5, rtol=0)
        with pytest.raises(DataError, match=r"^Row 4 "):
            engine.generate(batch_of(*prompts[:4], [160]))
        for row, found in asyncio.run(one_by_one(engine, batch)):
            length = int(found["unpadded_sequence_lengths"][0])
            assert found["output_ids"][0].tolist() == expected["output_ids"][row, :length].tolist()
        engine.shutdown()
    finally:
        cluster.shutdown()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries return freed memory by themselves")
def test_ranks_of_a_policy_draw_different_rows_from_the_seed_of_the_engine_section(parts, model_folder):
    from rl_backends_hf.training.worker import HFPolicyWorker

    def sampled(rank, seed):
        section = HFGenerationConfig(max_new_tokens=12, hf_cfg=HFSamplerConfig(seed=seed))
        worker = HFPolicyWorker(parts.make_context(rank), parts.make_config(model_folder("llama"), generation=section))
        worker.setup()
        return worker.generate(batch_of([5, 6, 7], [5, 6, 7]))["output_ids"].tolist()

    first = sampled(0, seed=3)
    assert sampled(0, seed=3) == first
    assert not any(row in first for row in sampled(1, seed=3))
    assert not any(row in first for row in sampled(0, seed=4))


def test_memory_that_was_freed_is_returned_when_generation_finishes(engine):
    engine.generate(batch_of([5, 6]))
    blocks = [torch.ones(2**14) for _ in range(2000)]  # 64 KiB each: small enough for the heap
    kept = blocks[::100]
    del blocks
    before = psutil.Process().memory_info().rss
    engine.finish_generation()
    assert before - psutil.Process().memory_info().rss > 64 * 2**20
    assert all(bool((block == 1.0).all()) for block in kept)


def test_the_weights_of_an_engine_on_a_gpu_leave_it_until_they_are_needed(engine, monkeypatch):
    worker, moves = engine.group.worker, []
    monkeypatch.setattr(worker, "context", replace(worker.context, device="cuda"))
    monkeypatch.setattr(worker.model, "to", moves.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    engine.finish_generation()
    assert moves == ["cpu"]
    engine.prepare_for_generation()
    assert moves == ["cpu", "cuda"]
    worker._shared = {"weight": (torch.zeros(1), 0)}
    engine.finish_generation()
    assert moves == ["cpu", "cuda"]


def test_rows_with_own_penalties_and_alternatives_are_sampled_next_to_others(engine, model_folder):
    prompts = torch.tensor([[5, 9, 5, 30]] * 3)
    own = {"presence_penalty": 1.2, "frequency_penalty": 0.6, "repetition_penalty": 1.4, "temperature": 0.7, "top_logprobs": 4}
    rows = {"input_ids": prompts, "input_lengths": torch.tensor([4] * 3), "sample_seeds": torch.tensor([1, 2, 3])}
    plain = engine.generate(BatchedDataDict(rows))
    mixed = engine.generate(BatchedDataDict({**rows, "sampling": [None, own, None]}))
    for row in (0, 2):
        assert torch.equal(mixed["output_ids"][row], plain["output_ids"][row])
    assert [tops is None for tops in mixed["top_logprobs"]] == [True, False, True]
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder("qwen3"), dtype=torch.float32)
    tokens = mixed["output_ids"][1, : mixed["unpadded_sequence_lengths"][1]].tolist()
    assert len(tokens) > 6
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].double()
    for end, likely in enumerate(mixed["top_logprobs"][1], start=4):
        scores = logits[end - 1].clone()
        for token in set(tokens[:end]):
            scores[token] = scores[token] / 1.4 if scores[token] > 0 else scores[token] * 1.4
        for token in set(tokens[4:end]):
            scores[token] -= 1.2 + tokens[4:end].count(token) * 0.6
        expected = (scores / 0.7).log_softmax(-1)
        assert mixed["logprobs"][1, end].item() == pytest.approx(expected[tokens[end]].item(), abs=1e-4)  # float32 arithmetic
        assert [token for token, _ in likely] == expected.topk(4).indices.tolist()
        assert [logprob for _, logprob in likely] == pytest.approx(expected.topk(4).values.tolist(), abs=1e-4)


def test_a_penalty_that_is_not_allowed_is_a_data_error(engine):
    rows = {"input_ids": torch.tensor([[5, 9]]), "input_lengths": torch.tensor([2])}
    with pytest.raises(WorkerError, match=r"DataError: .* repetition_penalty must be above 0"):
        engine.generate(BatchedDataDict({**rows, "sampling": [{"repetition_penalty": 0.0}]}))
