"""The settings of Megatron-Core on GPUs, decided without one, and packed attention that never reads the device."""

import itertools
import types

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.enums import AttnMaskType

from rl_backends_megatron import layers, model
from rl_backends_megatron.config import MegatronPolicyConfig
from rl_backends_megatron.families import family_of
from rl_backends_megatron.hf_folder import read_config

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize(
    ("on_gpu", "engine", "expected"),
    [
        (False, False, set()),
        (True, False, {"bias_activation_fusion", "bias_dropout_fusion"}),
        (True, True, {"bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion", "gradient_accumulation_fusion"}),
    ],
)
def test_kernels_are_fused_on_gpus_as_far_as_libraries_are_installed(on_gpu, engine, expected):
    found = model._fusions(F.silu, on_gpu=on_gpu, engine=engine)
    assert {name for name, fused in found.items() if fused} == expected
    assert not model._fusions(F.gelu, on_gpu=on_gpu, engine=engine)["bias_activation_fusion"]


def test_experts_are_computed_in_one_kernel_if_and_only_if_transformer_engine_is_used(models, monkeypatch):
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", object())  # Transformer Engine's
    hf = read_config(models / "qwen3-moe")
    config = MegatronPolicyConfig(model_name=str(models / "qwen3-moe"))
    for engine in (True, False):
        built = model._transformer_config(hf, family_of(hf, model_name="m"), config, on_gpu=True, engine=engine)
        assert built.moe_grouped_gemm is engine
        assert built.bias_activation_fusion


def test_a_gpu_without_transformer_engine_is_warned_about(caplog):
    assert not model.uses_transformer_engine(MegatronPolicyConfig(model_name="m"), device="cuda")
    assert "rl-backends-megatron[te]" in caplog.text
    caplog.clear()
    assert not model.uses_transformer_engine(MegatronPolicyConfig(model_name="m"), device="cpu")
    assert not caplog.text


def packed_attention(query, key, value, packing):
    """The result of the core attention for packed rows."""
    config = types.SimpleNamespace(context_parallel_size=1, kv_channels=8, num_attention_heads=4)
    attention = layers.SdpaCoreAttention.__new__(layers.SdpaCoreAttention)
    torch.nn.Module.__init__(attention)
    attention.config, attention.cp, attention.scale, attention.hidden_per_partition = config, None, None, 32
    return attention(query, key, value, attn_mask_type=AttnMaskType.causal, packed_seq_params=packing)


def test_packed_attention_reads_no_tensor_from_the_device_for_its_borders(monkeypatch):
    borders = (0, 3, 4, 10)
    query, key, value = (torch.randn(10, heads, 8, generator=torch.Generator().manual_seed(3)) for heads in (4, 2, 2))
    packing = layers.PackedRows(qkv_format="thd", row_borders=borders, max_seqlen_q=6)  # without tensors
    found = packed_attention(query, key, value, packing)
    calls = []

    def by_kernel(q, k, v, starts, ends, longest, longest_k, *, scale, window_size, enable_gqa):
        calls.append((longest, longest_k, window_size, enable_gqa))
        rows = [
            F.scaled_dot_product_attention(*(x[a:b].transpose(0, 1) for x in (q, k, v)), is_causal=True, enable_gqa=True)
            for a, b in itertools.pairwise(borders)
        ]
        return torch.cat(rows, dim=1).transpose(0, 1)

    monkeypatch.setattr(layers, "varlen_attn", by_kernel)
    assert not layers.has_varlen_kernel(query)
    monkeypatch.setattr(layers, "has_varlen_kernel", lambda query: True)
    torch.testing.assert_close(packed_attention(query, key, value, packing), found, rtol=0, atol=1e-6)
    assert calls == [(6, 6, (-1, 0), True)]
