"""Invalid settings are errors with a reason before anything starts."""

import json
import types

import pytest
from pydantic import ValidationError

from rl_backends_megatron.config import MegatronConfig, MegatronPolicyConfig
from rl_core.config.schema import ClusterConfig
from rl_core.errors import ConfigError
from rl_train.config.loader import load_config

pytestmark = pytest.mark.megatron


def policy(optimizer=None, **megatron):
    fields = {} if optimizer is None else {"optimizer": optimizer}
    return MegatronPolicyConfig(model_name="m", megatron_cfg=MegatronConfig(**megatron), **fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"sequence_parallel": True}, "increase tensor_model_parallel_size"),
        ({"virtual_pipeline_model_parallel_size": 2}, "there is only one stage"),
        ({"num_layers_in_last_pipeline_stage": 3}, "require several stages"),
        ({"overlap_param_gather": True}, "use_distributed_optimizer"),
        ({"moe_grouped_gemm": True, "transformer_impl": "local"}, "Transformer Engine"),
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, "would not sum the gradients"),
        ({"tensor_parallel": 2}, "Extra inputs"),
        (
            {"use_distributed_optimizer": True, "optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 1}}},
            "only the state of Adam",
        ),
        ({"optimizer": {"name": "torch.optim.Adagrad"}}, "has its own optimizers"),
        ({"optimizer": {"name": "torch.optim.Muon"}}, "optimizer.name 'torch.optim.Muon' is not supported"),
        ({"optimizer": {"groups": {"m": {"name": "torch.optim.Muon"}}}}, r"optimizer.groups \(m\) is not supported"),
        ({"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"amsgrad": True}}}, "optimizer.kwargs.amsgrad"),
    ],
)
def test_keys_that_exclude_each_other_are_refused_with_the_reason(fields, says):
    with pytest.raises(ValidationError, match=says):
        policy(**fields)


def test_by_default_only_adam_on_gpus_shards_its_state():
    adam, sgd = policy(), policy({"name": "torch.optim.SGD", "kwargs": {"lr": 1}})
    assert [adam.shards_optimizer(on_gpu=on_gpu) for on_gpu in (True, False)] == [True, False]
    assert not sgd.shards_optimizer(on_gpu=True)
    assert not policy(use_distributed_optimizer=False).shards_optimizer(on_gpu=True)


def test_rows_are_split_over_copies_of_the_model_so_that_schedules_count_as_many_optimizer_steps():
    cluster = ClusterConfig(num_nodes=2, workers_per_node=4)
    assert policy().data_ranks(cluster) == 8
    assert policy(tensor_model_parallel_size=2, pipeline_model_parallel_size=2).data_ranks(cluster) == 2
    assert policy().data_ranks(ClusterConfig(backend="in_process", workers_per_node=4)) == 1


@pytest.mark.parametrize(
    ("cluster", "found"),
    [({"workers_per_node": 2}, None), ({"workers_per_node": 3}, 3), ({"backend": "in_process"}, 1), ({"num_nodes": 2}, None)],
)
def test_a_cluster_too_small_for_one_model_replica_is_rejected_with_the_config(tmp_path, cluster, found):
    config = {
        "sft": {},
        "policy": {"backend": "megatron", "model_name": "m", "megatron_cfg": {"tensor_model_parallel_size": 2}},
        "data": {"train": {"dataset_name": "arithmetic"}},
        "cluster": cluster,
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    if found is None:
        load_config(tmp_path / "run.yaml")
        return
    with pytest.raises(ConfigError, match=rf"2 x 1 x 1 = 2 ranks hold one copy of the model, but the cluster has {found}"):
        load_config(tmp_path / "run.yaml")


def test_a_division_that_a_model_in_a_folder_forbids_is_refused_when_the_config_is_read(tmp_path):
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))
    config = {
        "sft": {},
        "policy": {"backend": "megatron", "model_name": str(tmp_path), "megatron_cfg": {"pipeline_model_parallel_size": 2}},
        "data": {"train": {"dataset_name": "arithmetic"}},
        "cluster": {"workers_per_node": 2},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"pipeline_model_parallel_size: 3 layers do not divide evenly into 2 stages"):
        load_config(tmp_path / "run.yaml")
    # Defaults of the model class are unknown until it is imported.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 3}))
    load_config(tmp_path / "run.yaml")


def hf(**fields):
    llama = {
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
    }
    return types.SimpleNamespace(**{**llama, **fields})


@pytest.mark.parametrize(
    ("model", "fields", "world", "says"),
    [
        ({}, {"tensor_model_parallel_size": 3}, 3, "3 does not divide 8 attention heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, {"tensor_model_parallel_size": 6}, 6, "4 key-value heads"),
        ({"intermediate_size": 49}, {"tensor_model_parallel_size": 2}, 2, "MLP's width 49"),
        ({}, {"pipeline_model_parallel_size": 3}, 3, "4 layers do not divide evenly into 3 stages"),
        ({}, {"pipeline_model_parallel_size": 8}, 8, "4 layers are too few"),
        (
            {},
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 4},
            2,
            "4 layers are too few for 2 stages of 4 chunks",
        ),
        (
            {},
            {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 4},
            2,
            "with the given first and last stage",
        ),
        ({}, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 6, "a multiple of 4 workers"),
        ({}, {"expert_model_parallel_size": 2}, 2, "models have no experts"),
        ({"num_experts": 4}, {"tensor_model_parallel_size": 2}, 2, "sequence_parallel"),
        ({"num_experts": 4}, {"expert_model_parallel_size": 3}, 3, "3 does not divide 4 experts"),
        ({"num_experts": 4}, {"expert_model_parallel_size": 2}, 3, "does not divide the 3 ranks"),
        (
            {"num_experts": 4},
            {
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
                "expert_model_parallel_size": 2,
                "expert_tensor_parallel_size": 2,
            },
            4,
            "gloo does not support",
        ),
        ({}, {"transformer_impl": "transformer_engine"}, 1, "Transformer Engine requires GPUs, but these ranks run on CPUs"),
        ({"num_experts": 4}, {"moe_grouped_gemm": True}, 1, "moe_grouped_gemm.*these ranks run on CPUs; leave it out"),
    ],
)
def test_a_division_that_the_model_does_not_allow_is_refused_with_the_reason(model, fields, world, says):
    from rl_backends_megatron.config import check_compatibility

    with pytest.raises(ConfigError, match=says):
        check_compatibility(hf(**model), policy(**fields).megatron_cfg, world_size=world, on_gpu=False)


@pytest.mark.parametrize(
    ("fields", "world"),
    [
        ({"tensor_model_parallel_size": 8}, 8),
        ({"pipeline_model_parallel_size": 3, "num_layers_in_first_pipeline_stage": 2}, 6),
        ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, 2),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2}, 8),
    ],
)
def test_a_division_that_the_model_allows_is_accepted(fields, world):
    from rl_backends_megatron.config import find_incompatibilities

    assert find_incompatibilities(hf(), policy(**fields).megatron_cfg, world_size=world, on_gpu=False) == []


def test_all_reasons_are_given_at_once():
    from rl_backends_megatron.config import check_compatibility

    with pytest.raises(ConfigError) as error:
        check_compatibility(
            hf(), policy(tensor_model_parallel_size=3, pipeline_model_parallel_size=3).megatron_cfg, world_size=4, on_gpu=False
        )
    assert len(str(error.value).splitlines()) == 4
