"""The documented Python calls, in the form of the reference examples."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import pytest
import ray
import torch

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_core.cluster import RayVirtualCluster, RayWorkerGroup
from rl_core.config.schema import GenerationConfig
from rl_core.data import BatchedDataDict
from rl_core.errors import ConfigError, DataError, NotSupportedError, ResourceInsufficientError
from rl_core.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    GenerationDatumSpec,
    GenerationInterface,
    GenerationOutputSpec,
    LogprobOutputSpec,
    PolicyInterface,
    ReferenceLogprobOutputSpec,
)
from rl_core.rendezvous.interfaces import free_port
from rl_envs import ArithmeticEnvironment, MathEnvironment
from rl_envs.arithmetic import ArithmeticDataset
from rl_train import diagnostics
from rl_train.algorithms import DPOLossFn, DPOTrainer, GRPOLossFn, GRPOTrainer, NLLLossFn
from rl_train.data import BatchedDataLoader
from rl_train.logprob_agreement import compare_log_probabilities, validate_log_probability_consistency
from rl_train.pools.pool import InProcessPool
from rl_train.rollouts.environment_pool import EnvironmentPool

pytestmark = pytest.mark.slow
MODEL = Path(__file__).parents[2] / "examples" / "addition" / "model"


@pytest.fixture(scope="module")
def cluster(local_ray):
    with RayVirtualCluster([2], max_colocated_worker_groups=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def policy():
    policy = HuggingFacePolicy(model_name=str(MODEL), torch_dtype="float32", device_map="cpu")
    yield policy
    policy.shutdown()


def batch_of_prompts():
    return BatchedDataDict({"input_ids": torch.tensor([[4, 5, 13, 6, 7, 15]] * 4), "attention_mask": torch.ones(4, 6)})


def training_rows(generations):
    lengths, sampled = generations["unpadded_sequence_lengths"], generations["generation_lengths"]
    position = torch.arange(generations["output_ids"].shape[1])
    mask = (position >= (lengths - sampled)[:, None]) & (position < lengths[:, None])
    return BatchedDataDict(
        {
            "input_ids": generations["output_ids"],
            "input_lengths": lengths,
            "token_mask": mask.float(),
            "sample_mask": torch.ones(len(lengths)),
            "advantages": torch.tensor([[1.0], [-1.0], [0.5], [-0.5]]) * mask,
            "generation_logprobs": generations["logprobs"],
            "prev_logprobs": generations["logprobs"],
        }
    )


def test_a_policy_without_a_cluster_generates_scores_and_trains(policy):
    generations = policy.generate(batch_of_prompts(), greedy=False)
    rows = training_rows(generations)
    logprobs = policy.get_logprobs(rows)["logprobs"]
    assert logprobs.shape == generations["output_ids"].shape
    assert torch.allclose(logprobs * rows["token_mask"], generations["logprobs"], atol=1e-4)
    rows["reference_policy_logprobs"] = policy.get_reference_logprobs(rows)["reference_logprobs"]
    before = policy.weight_version
    result = policy.train(rows, GRPOLossFn())
    assert policy.weight_version == before + 1
    assert result["grad_norm"] > 0
    assert policy.train(rows, NLLLossFn())["loss"] > 0


@pytest.mark.full("test_trainers.py trains a policy over two ranks as over one; backends_hf/test_policy_ranks.py")
def test_the_same_policy_over_a_cluster_of_two_ranks_computes_the_same(policy, cluster):
    rows = training_rows(policy.generate(batch_of_prompts(), greedy=True))
    fresh = HuggingFacePolicy(str(MODEL))
    over_two = HuggingFacePolicy(str(MODEL), cluster=cluster)
    try:
        assert over_two.data_ranks == 2
        assert torch.allclose(over_two.get_logprobs(rows)["logprobs"], fresh.get_logprobs(rows)["logprobs"], atol=1e-5)
        one, two = fresh.train(rows, NLLLossFn()), over_two.train(rows, NLLLossFn())
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        # An odd number of rows on two ranks: the padding row has no weight.
        three = rows.slice(0, 3)
        assert over_two.get_logprobs(three)["logprobs"].shape == fresh.get_logprobs(three)["logprobs"].shape
        one, two = fresh.train(three, NLLLossFn()), over_two.train(three, NLLLossFn())
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    finally:
        fresh.shutdown()
        over_two.shutdown()


def test_a_policy_and_an_engine_take_text_and_return_text():
    from transformers import AutoTokenizer

    policy = HuggingFacePolicy(str(MODEL), generation={"backend": "hf", "max_new_tokens": 5})
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompts = ["38+72=", [{"role": "user", "content": "45+13="}]]
    texts = policy.generate_text(prompts, greedy=True)
    assert len(texts) == 2
    for prompt, text in zip(("38+72=", "45+13="), texts, strict=True):
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        ids = torch.tensor([tokenizer(rendered, add_special_tokens=False)["input_ids"]])
        output = policy.generate(BatchedDataDict({"input_ids": ids, "attention_mask": torch.ones_like(ids)}), greedy=True)
        assert text == tokenizer.decode(output["output_ids"][0, ids.shape[1] :], skip_special_tokens=True)
    engine = HuggingFaceGeneration(str(MODEL), max_new_tokens=5)
    try:
        assert engine.generate_text(prompts, greedy=True) == texts
        assert engine.generate_text("38+72=", greedy=True) == texts[:1]
        for who in (policy, engine):
            with pytest.raises(DataError, match=r"found str\. For text, call generate_text"):
                who.generate("38+72=")
    finally:
        policy.shutdown()
        engine.shutdown()


def test_the_pipeline_of_the_overview_samples_and_scores():
    generator = HuggingFaceGeneration(str(MODEL), max_new_tokens=5)
    environment = ArithmeticEnvironment()
    dataloader = BatchedDataLoader(ArithmeticDataset({"num_samples": 3, "min_digits": 2}), batch_size=2, shuffle=False)
    try:
        for batch in dataloader:
            generations = generator.generate(batch, greedy=True)
            rewards = environment.step(generations)
            prompts = [[message["content"] for message in messages] for messages in batch["messages"]]
            texts = generator.generate_text([prompt for (prompt,) in prompts], greedy=True)
            assert [[m["content"] for m in log] for log in generations["messages"]] == [
                [*prompt, text] for prompt, text in zip(prompts, texts, strict=True)
            ]
            conversations = [[{"role": "assistant", "content": text}] for text in texts]
            assert rewards.rewards.tolist() == environment.step(conversations, batch["extra_env_info"]).rewards.tolist()
    finally:
        generator.shutdown()
        environment.shutdown()


@pytest.mark.parametrize("tokenized", [False, True])
@pytest.mark.parametrize("column", ["question", "prompt", "messages"])
def test_columns_of_a_batch_pass_through_generate_to_the_environment(column, tokenized):
    questions = ["12+34=", "55+22="]
    rows = [
        {
            column: [{"role": "user", "content": text}] if column == "messages" else text,
            "expected_answer": answer,
            "sampling": {"top_logprobs": 1},
        }
        for text, answer in zip(questions, ["46", "77"], strict=True)
    ]
    if tokenized:
        rows = [{**row, "input_ids": batch_of_prompts()["input_ids"][0]} for row in rows]
    generator = HuggingFaceGeneration(str(MODEL), max_new_tokens=5)
    environment = MathEnvironment()
    try:
        [batch] = BatchedDataLoader(rows, batch_size=2, shuffle=False)
        generations = generator.generate(batch, greedy=True)
        rewards = environment.step(generations)
        assert [log[0]["content"] for log in generations["messages"]] == questions
        conversations = [[{"role": "assistant", "content": log[-1]["content"]}] for log in generations["messages"]]
        expected = environment.step(conversations, [{"expected_answer": answer} for answer in ("46", "77")])
        assert rewards.rewards.tolist() == expected.rewards.tolist()
        assert [row["expected_answer"] for row in rewards.metadata] == ["46", "77"]
        assert not {"top_logprobs", "failures", "messages"} & rewards.metadata[0].keys()
    finally:
        generator.shutdown()
        environment.shutdown()


def test_an_environment_called_with_generations_of_token_ids_explains_the_arguments_of_step(policy):
    with pytest.raises(
        DataError, match=r"MathEnvironment\.step takes B conversations .* found BatchedDataDict.* `messages`, `prompt` or"
    ):
        MathEnvironment().step(policy.generate(batch_of_prompts()))


class CustomPolicy(PolicyInterface):
    def generate(self, batch):
        # Custom generation logic
        pass

    def train(self, batch, loss_fn):
        # Custom training logic
        pass


def test_collectives_return_pending_calls(policy):
    calls = policy.init_collective("127.0.0.1", free_port(), 1)
    assert [call.result(60) for call in calls] == [[None]]
    assert all(isinstance(call.result(60), list) for call in policy.broadcast_weights_for_collective())
    policy.finish_refit()


def test_the_generation_configuration_of_the_reference_samples():
    shared = {"max_new_tokens": 5, "temperature": 0.7, "do_sample": True, "pad_token_id": 0, "eos_token_id": 1}
    gen_config = {**shared, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1}
    engine = HuggingFaceGeneration(str(MODEL), **gen_config)
    policy = HuggingFacePolicy(str(MODEL), generation=shared)
    try:
        assert engine.generate(batch_of_prompts(), greedy=False)["generation_lengths"].max() <= 5
        with pytest.raises(ConfigError, match=r"hf_cfg\.repetition_penalty"):
            GRPOTrainer(policy, generation=engine, environments=ArithmeticEnvironment())
    finally:
        policy.shutdown()
        engine.shutdown()


def test_a_loss_lists_the_columns_that_the_batch_lacks(policy):
    with pytest.raises(DataError, match="The batch has no `token_mask`, `sample_mask`, `reference_policy_logprobs`"):
        policy.train(batch_of_prompts(), DPOLossFn())


def test_the_diagnostics_of_the_reference_take_the_name_of_a_model():
    assert diagnostics.test_max_model_len_respected(str(MODEL)).status == "ok"
    assert {diagnosis.status for diagnosis in diagnostics.test_generation_consistency(str(MODEL))} == {"ok"}


def test_a_custom_policy_with_generate_and_train_only_says_which_method_is_missing():
    assert PolicyInterface.__abstractmethods__ == {"train"}
    assert inspect.signature(PolicyInterface.generate).parameters["greedy"].default is False
    policy = CustomPolicy()
    assert policy.generate({}) is policy.train({}, None) is None
    with pytest.raises(NotSupportedError, match=r"CustomPolicy does not implement `get_logprobs`\. Algorithms that train on"):
        policy.get_logprobs({})
    with pytest.raises(NotSupportedError, match=r"CustomPolicy does not implement `get_reference_policy_logprobs`"):
        policy.get_reference_logprobs({})


def test_a_generation_config_reads_as_a_dictionary():
    config = GenerationConfig(backend="hf", max_new_tokens=512, temperature=0.7, top_p=0.9, top_k=50, model_name="some/model")
    expected = {
        "backend": "hf",
        "max_new_tokens": 512,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 50,
        "model_name": "some/model",
    }
    assert {key: config[key] for key in expected} == expected
    assert "backend" in config
    assert "num_beams" not in config
    with pytest.raises(KeyError, match=r"GenerationConfig has no key 'temprature'\. Did you mean 'temperature'"):
        config["temprature"]


def test_the_specifications_have_the_documented_keys():
    assert {"input_ids", "attention_mask"} <= GenerationDatumSpec.__annotations__.keys()
    assert "__extra__" not in GenerationDatumSpec.__annotations__
    documented = {"output_ids", "generation_lengths", "unpadded_sequence_lengths", "logprobs"}
    assert documented <= GenerationOutputSpec.__annotations__.keys()
    assert LogprobOutputSpec.__annotations__.keys() == {"logprobs"}
    assert ReferenceLogprobOutputSpec.__annotations__.keys() == {"reference_logprobs"}


def test_a_dpo_trainer_trains_on_fewer_records_than_the_default_batch(policy, own_messages):
    pairs = [{"prompt": f"{n}+{n}=", "chosen": str(2 * n), "rejected": str(n)} for n in range(10, 13)]
    trainer = DPOTrainer(policy, config={"max_num_steps": 2})
    assert [step["step"] for step in trainer.train(pairs)] == [1, 2]
    assert "each step uses all 3 records of dataset: the default global_batch_size is 32" in "\n".join(own_messages())
    with pytest.raises(DataError, match=r"has 3 records, but a step uses 4"):
        DPOTrainer(policy, config={"max_num_steps": 2, "global_batch_size": 4}).train(pairs)


@pytest.mark.full("conformance/test_generation.py makes these calls in one process; test_runs.py samples on a cluster")
def test_a_generation_backend_prepares_generates_and_finishes(cluster):
    generator = HuggingFaceGeneration(model_name=str(MODEL), cluster=cluster, max_new_tokens=5)
    try:
        generator.prepare_for_generation()
        output = generator.generate(batch_of_prompts(), greedy=False)
        generator.finish_generation()
        assert set(output) >= {"output_ids", "generation_lengths", "unpadded_sequence_lengths", "logprobs"}
        assert output["output_ids"][:, :6].tolist() == batch_of_prompts()["input_ids"].tolist()
    finally:
        generator.shutdown()


def test_training_and_inference_backends_agree_on_probabilities():
    trainer = HuggingFacePolicy(str(MODEL), generation={"backend": "hf", "temperature": 0.7})
    sampler = HuggingFaceGeneration(str(MODEL), temperature=0.7, max_new_tokens=5)
    other = HuggingFaceGeneration(str(MODEL), temperature=1.4, max_new_tokens=5)
    try:
        assert validate_log_probability_consistency(
            training_backend=trainer, inference_backend=sampler, test_data=batch_of_prompts(), threshold=1.001
        )
        assert not validate_log_probability_consistency(trainer, other, batch_of_prompts())
        assert compare_log_probabilities(trainer, other, batch_of_prompts()).kl > 1e-3
    finally:
        trainer.shutdown()
        sampler.shutdown()
        other.shutdown()


def test_engine_output_can_be_scored_unchanged(policy):
    generations = policy.generate(batch_of_prompts(), greedy=False)
    logprobs = policy.get_logprobs(generations)["logprobs"]
    sampled = generations["logprobs"] != 0
    assert sampled.any()
    assert torch.allclose(logprobs[sampled], generations["logprobs"][sampled], atol=1e-4)
    assert torch.equal(policy.get_reference_logprobs(generations)["reference_logprobs"].bool(), logprobs.bool())


def test_rewards_passed_as_a_loss_are_an_error(policy):
    with pytest.raises(DataError, match=r"argument of train must be a loss.* found Tensor"):
        policy.train(policy.generate(batch_of_prompts()), torch.ones(4))


def test_documented_methods_create_a_policy_and_an_engine():
    promised = ("get_logprobs", "get_reference_policy_logprobs", "train", "prepare_for_training", "finish_training")
    policy = type("Policy", (PolicyInterface,), dict.fromkeys((*promised, "save_checkpoint", "shutdown"), lambda self: None))()
    for missing in (lambda: policy.weight_version, lambda: policy.load_checkpoint("weights"), lambda: policy.generate({})):
        with pytest.raises(NotSupportedError, match="Policy"):
            missing()
    promised = ("generate", "prepare_for_generation", "finish_generation")
    engine = type("Engine", (GenerationInterface,), dict.fromkeys(promised, lambda self: None))()
    assert engine.shutdown()


class RanklessPolicy(PolicyInterface):
    """A custom policy written by a user, without any cluster code."""

    def generate(self, data: Any, greedy: bool = False) -> Any:
        return data

    def get_logprobs(self, data: Any) -> Any:
        return BatchedDataDict({"logprobs": torch.zeros(data["input_ids"].shape)})

    def get_reference_policy_logprobs(self, data: Any) -> Any:
        return BatchedDataDict({"reference_logprobs": torch.zeros(data["input_ids"].shape)})

    def train(self, data: Any, loss_fn: Any, **_: Any) -> dict[str, Any]:
        return {"loss": 0.0}

    def prepare_for_training(self) -> None: ...

    def finish_training(self) -> None: ...

    def save_checkpoint(self, *_: Any, **__: Any) -> None: ...

    def load_checkpoint(self, *_: Any, **__: Any) -> None: ...

    def shutdown(self) -> bool:
        return True

    @property
    def weight_version(self) -> int:
        return 0


@pytest.mark.full("core/cluster/test_ray_worker_group.py constructs a class without a context argument on workers")
def test_a_worker_group_takes_a_policy_class(cluster):
    with RayWorkerGroup(cluster, RanklessPolicy) as group:
        answers = group.run_all("get_logprobs", batch_of_prompts())
        assert [tuple(answer["logprobs"].shape) for answer in answers] == [(4, 6), (4, 6)]


def test_a_cluster_that_is_too_large_is_an_error_with_available_resources():
    with pytest.raises(ResourceInsufficientError, match=r"\[8, 8\]"):
        RayVirtualCluster([8, 8])


def test_an_unknown_argument_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match="max_grad_norm"):
        HuggingFacePolicy(str(MODEL), max_gradnorm=1.0)


def test_a_loader_batches_a_dataset():
    rows = [{"input_ids": torch.arange(n + 1), "idx": n} for n in range(5)]
    batches = list(BatchedDataLoader(rows, batch_size=2, shuffle=False))
    assert [batch["idx"].tolist() for batch in batches] == [[0, 1], [2, 3], [4]]
    assert len(list(BatchedDataLoader(rows))) == 5


def test_the_math_environment_answers_from_python():
    environment = MathEnvironment()
    try:
        answer = environment.step(
            [[{"role": "user", "content": "1/2?"}, {"role": "assistant", "content": "\\boxed{0.5}"}]],
            [{"expected_answer": "\\frac{1}{2}"}],
        )
        assert answer.rewards.tolist() == [1.0]
    finally:
        environment.shutdown()


class MyEnvConfig(TypedDict):
    num_workers: int


@ray.remote(max_restarts=-1, max_task_retries=-1)
class MyEnvironment(EnvironmentInterface):
    """In the form of the reference: wrapped in ray.remote, configured by a dict."""

    def __init__(self, cfg: MyEnvConfig):
        self.cfg = cfg

    def shutdown(self) -> None:
        pass

    def step(self, message_log_batch: list[list[dict[str, str]]], metadata: list[Mapping[str, Any]]) -> EnvironmentReturn:
        responses = ["".join(m["content"] for m in log if m["role"] == "assistant") for log in message_log_batch]
        rewards = [float(text == m["expected_answer"]) for text, m in zip(responses, metadata, strict=True)]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "feedback"} for _ in responses],
            metadata=list(metadata),
            next_stop_strings=[None] * len(responses),
            rewards=torch.tensor(rewards),
            terminateds=torch.ones(len(rewards)),
            answers=responses,
        )


def test_an_environment_that_arrives_wrapped_in_ray_works_in_a_process_and_in_an_actor():
    logs = [[{"role": "assistant", "content": "4"}], [{"role": "assistant", "content": "5"}]]
    truth = [{"expected_answer": "4"}] * 2
    pool = EnvironmentPool(InProcessPool(MyEnvironment, {"cfg": {"num_workers": 8}}), task_name="mine")
    assert pool.step(logs, truth).rewards.tolist() == [1.0, 0.0]
    pool.shutdown()
