"""Tiny configs of the families of causal language models that Transformers has."""

import torch
import transformers
from transformers import AutoModelForCausalLM

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
SINKS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}
STRONG = {"sliding_window": 4, "attention_window_size": 4, "attn_logit_softcapping": 1.0, "use_sliding_window": True}
"""Values that change the attention of a short row by whole nats."""
SMALL = {
    **SIZES,
    **STRONG,
    **dict.fromkeys(("n_embd", "d_model", "embed_dim", "word_embed_proj_dim", "embedding_size", "lru_width"), 32),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("n_positions", "n_ctx"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "laurel_rank", "linear_conv_kernel_dim"), 4),
    **dict.fromkeys(("num_experts_per_tok", "linear_num_key_heads"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "query_pre_attn_scalar", "d_kv"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "hidden_size_per_layer_input", "mamba_d_state"), 8),
    **{"linear_num_value_heads": 4, "vocab_size_per_layer_input": 96, "num_kv_shared_layers": 0, "rotary_dim": 4},
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_chunk_size": 8, "state_size": 8, "dropout": 0.0, "attn_pdrop": 0.0},
    **{"attn_layer_period": 2, "attn_layer_offset": 1, "attn_layer_indices": [1], "expert_layer_period": 2},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def has_field(config, name):
    """Whether a config has a field that can be set, of all layers or of each."""
    own = getattr(type(config), name, None)
    is_settable = not isinstance(own, property) or own.fset is not None
    return is_settable and (name in config.to_dict() or hasattr(type(config), name))


def tiny_config(family):
    """A config of the family with small sizes and strong windows and caps, and each type of layer; None if it is not small."""
    text = transformers.CONFIG_MAPPING[family]().get_text_config(decoder=True)
    fields = {key: value for key, value in SMALL.items() if has_field(text, key)}
    if has_field(text, "layer_types") and text.layer_types:
        kinds = list(dict.fromkeys(text.layer_types))
        if kinds == ["linear_attention"]:  # published models of the family have both
            kinds.append("full_attention")
        fields["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
        fields["num_hidden_layers"] = len(fields["layer_types"])
    if hasattr(text, "kv_lora_rank"):  # each head has its own keys and values
        fields["num_key_value_heads"] = SIZES["num_attention_heads"]
    config = type(text)(**fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return config if sum(each.numel() for each in model.parameters()) < 3e6 else None


def hybrid_config(family):
    """A config of a family whose layers keep more than keys and values, with each type of layer."""
    if family == "falcon_h1":
        return transformers.FalconH1Config(
            vocab_size=96, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            initializer_range=0.3, intermediate_size=16, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8, mamba_d_state=8,
            mamba_n_groups=1,
        )  # fmt: skip
    config = tiny_config(family)
    if family == "lfm2":
        config.layer_types = ["conv", "full_attention"]
    return config
