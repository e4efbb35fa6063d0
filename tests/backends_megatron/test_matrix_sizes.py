"""The sizes of matrices that the worker reports are those of the Transformers backend, which torch confirms."""

import megatron_cases as cases
import pytest

from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.matrix_sizes import matrix_sizes as sizes_of_model
from rl_backends_megatron.config import MegatronPolicyConfig
from rl_backends_megatron.model import matrix_sizes

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen3", "qwen3-moe", "mixtral"])
def test_matrices_of_a_checkpoint_have_the_sizes_of_the_same_model_in_transformers(models, kind):
    model = cases.plain_model(models / kind)
    shapes = {name: tuple(tensor.shape) for name, tensor in cases.checkpoint_weights(model).items()}
    assert matrix_sizes(shapes, model.config, tied=model.config.tie_word_embeddings) == sizes_of_model(model)


@pytest.mark.parametrize("kind", ["llama-tied", "qwen3-moe"])
def test_a_worker_with_adapters_and_the_plan_report_the_sizes_of_the_backend_hf(models, policy, kind):
    from rl_backends_hf.training.worker import HFPolicyWorker
    from rl_backends_megatron.planned_memory import PolicyMemory

    section = {"rank": 3, "target_modules": ["q_proj", "o_proj"]}
    peer = HFPolicyWorker(cases.make_context(), HFPolicyConfig(model_name=str(models / kind), hf_cfg={"lora": section}))
    expected = peer.setup()
    config = MegatronPolicyConfig(model_name=str(models / kind), megatron_cfg={"lora": section})
    assert PolicyMemory(config).matrix_sizes() == expected["matrix_sizes"]
    made = policy(kind, lora=section)
    made.wait_ready()
    facts = made.group.worker.facts()
    assert facts["matrix_sizes"] == expected["matrix_sizes"]
    assert facts["num_trained_parameters"] == expected["num_trained_parameters"]
    assert facts["num_parameters"] == expected["num_parameters"]
