"""Builds this rank's share of a model in Megatron-Core from a Hugging Face config.

It is Megatron's GPT with a separate head: the last stage returns hidden states, and only selected positions get logits. Prompts
and padding are not trained on, and their logits would be the largest tensors of a step.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rl_backends_megatron.config import MegatronPolicyConfig
from rl_backends_megatron.families import Family, Sizes
from rl_backends_megatron.layers import RMSNorm, attention_class
from rl_backends_megatron.scalar_head import ScalarHead
from rl_core.errors import NotSupportedError

_log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class HeadlessGPT(GPTModel):
    """A `GPTModel` whose forward pass ends before the output layer. Takes the same arguments and these.

    Args:
        scalar: end in a scalar head instead of logits.
        embedding_scale: factor of token embeddings; not applied to an output layer that shares their matrix.
    """

    scalar: bool

    def __init__(self, *args: Any, scalar: bool = False, embedding_scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scalar = scalar
        if self.pre_process and embedding_scale != 1.0:
            # Rounded to the weights' dtype first, as in Transformers.
            scale = torch.tensor(embedding_scale, dtype=self.config.params_dtype).item()
            self.embedding.register_forward_hook(lambda module, given, embedded: embedded * scale)
        self._sequence_parallel = bool(self.config.sequence_parallel)
        if scalar and self.post_process:
            self.output_layer: Any = ScalarHead(self.config)
        elif self.post_process:
            # The sequence is gathered in `apply_head`, before positions are selected, instead of in the layer.
            self.output_layer.sequence_parallel = False

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states

    def apply_head(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [M, V' / R] of the model's dtype, this rank's columns; for a scalar head, values [M] float32.

        Args:
            hidden: [L, b, H] of the last stage, or this rank's shard along L with sequence parallelism.
            positions: [M] int64, flat indices into [b, L].
        """
        if self._sequence_parallel:
            # The output layer returns full gradients, so each rank takes its shard of them.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        length, rows, _ = hidden.shape
        index = positions % length * rows + positions // length
        selected = hidden.reshape(length * rows, -1).index_select(0, index)
        if self.scalar:
            values: torch.Tensor = self.output_layer(selected)
            return values
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits: torch.Tensor = self.output_layer(selected.unsqueeze(1), weight=weight)[0]
        return logits.squeeze(1)


def unwrap(model: Any) -> HeadlessGPT:
    """The model inside its wrappers."""
    while not isinstance(model, HeadlessGPT):
        model = model.module
    return model


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """This rank's share of a model.

    Attributes:
        modules: one HeadlessGPT, or several with an interleaved pipeline; their weights are not initialized.
        config: Megatron's config, which also contains the hooks of schedules; not shared between models.
    """

    modules: list[HeadlessGPT]
    config: TransformerConfig

    def tensors(self) -> Iterator[torch.Tensor]:
        """All weights and buffers."""
        for module in self.modules:
            yield from module.parameters()
            yield from module.buffers()

    def master_weights(self) -> Iterator[torch.Tensor]:
        """The float32 copies that this rank's optimizer updates; none of weights that are float32 themselves."""
        masters = (getattr(each, "main_param", None) for module in self.modules for each in module.parameters())
        return (master for master in masters if master is not None)


def head_dim(hf: Any) -> int:
    """Size of one attention head."""
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)


def sizes_of(hf: Any) -> Sizes:
    """The sizes in a Transformers config that the weight layouts need."""
    return Sizes(
        num_heads=hf.num_attention_heads,
        num_groups=hf.num_key_value_heads,
        head_dim=head_dim(hf),
        vocab_size=hf.vocab_size,
    )


def is_tied(hf: Any, config: MegatronPolicyConfig) -> bool:
    """Whether the output layer shares the embedding's weights."""
    return bool(hf.tie_word_embeddings) and config.head == "tokens"


def padded_vocab_size(vocab_size: int, config: MegatronPolicyConfig) -> int:
    """V, rounded up so that all tensor-parallel ranks have equally many rows."""
    multiple = config.megatron_cfg.make_vocab_size_divisible_by * config.megatron_cfg.tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple


def uses_transformer_engine(config: MegatronPolicyConfig, *, device: str) -> bool:
    """Whether the model uses the layers of Transformer Engine.

    Raises:
        NotSupportedError: they are configured, but not available.
    """
    wanted = config.megatron_cfg.transformer_impl
    installed = importlib.util.find_spec("transformer_engine") is not None
    if wanted == "transformer_engine" and not (installed and device == "cuda"):
        raise NotSupportedError(
            "`policy.megatron_cfg.transformer_impl: transformer_engine` needs a GPU and the package transformer-engine "
            f"(here: {device}, {'installed' if installed else 'not installed'}). Set it to `auto` or `local`.",
            key="policy.megatron_cfg.transformer_impl",
        )
    is_used = wanted != "local" and installed and device == "cuda" and config.megatron_cfg.lora is None
    if wanted == "auto" and device == "cuda" and not installed:
        _log.warning(
            "Transformer Engine is not installed, so the layers are PyTorch's, which are slower and have no ring attention. "
            "Install it with `pip install 'rl-backends-megatron[te]'`, or set `policy.megatron_cfg.transformer_impl: local`."
        )
    if config.megatron_cfg.moe_grouped_gemm and not is_used:
        raise NotSupportedError(
            "`policy.megatron_cfg.moe_grouped_gemm` needs a GPU and the package transformer-engine "
            f"(here: {device}, {'installed' if installed else 'not installed'}). Leave it out.",
            key="policy.megatron_cfg.moe_grouped_gemm",
        )
    return is_used


def build_chunks(hf: Any, family: Family, config: MegatronPolicyConfig, *, device: str) -> Chunks:
    """This rank's layers, without the checkpoint's weights; call it inside `cpu_shim`."""
    engine = uses_transformer_engine(config, device=device)
    transformer = _transformer_config(hf, family, config, on_gpu=device == "cuda", engine=engine)
    virtual = config.megatron_cfg.virtual_pipeline_model_parallel_size
    stages = [None] if virtual is None else list(range(virtual))
    return Chunks(modules=[_build(hf, family, config, transformer, engine, stage) for stage in stages], config=transformer)


def _transformer_config(
    hf: Any, family: Family, config: MegatronPolicyConfig, *, on_gpu: bool, engine: bool
) -> TransformerConfig:
    dtype = DTYPES[config.dtype_name]
    fields: dict[str, Any] = {
        **_shape(hf),
        **_parallelism(config, on_gpu=on_gpu),
        **_recomputation(config),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # With `perform_initialization=False`, weights would not be marked as tensor parallel, and the gradient norm would
        # silently omit all shards except the first. So enable it, with functions that do nothing.
        "perform_initialization": True,
        "init_method": _keep,
        "output_layer_init_method": _keep,
        # The loss is already divided by its global count, so gradients are summed and not averaged.
        "calculate_per_token_loss": True,
        "moe_grouped_gemm": engine if config.megatron_cfg.moe_grouped_gemm is None else config.megatron_cfg.moe_grouped_gemm,
        # Sets environment variables of Transformer Engine, so it is set only if its layers are used.
        "attention_backend": _ATTENTION[config.megatron_cfg.use_flash_attention] if engine else AttnBackend.auto,
        **family.config(hf),
    }
    return TransformerConfig(**fields, **_fusions(fields["activation_func"], on_gpu=on_gpu, engine=engine))


_ATTENTION = {None: AttnBackend.auto, True: AttnBackend.flash, False: AttnBackend.unfused}


def _keep(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _shape(hf: Any) -> dict[str, Any]:
    return {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": head_dim(hf),
        "ffn_hidden_size": hf.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
    }


def _fusions(activation: Any, *, on_gpu: bool, engine: bool) -> dict[str, bool]:
    """Fused kernels: on GPUs, all that the layers and installed libraries have. On CPUs, compiling costs more than they save.

    Args:
        activation: activation function; Megatron fuses SwiGLU, and only an approximation of the GELU that Gemma uses.
        on_gpu: whether the ranks have GPUs.
        engine: whether the layers are Transformer Engine's.
    """
    has_extension = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    return {
        "bias_activation_fusion": on_gpu and activation is F.silu,
        "bias_dropout_fusion": on_gpu,
        "apply_rope_fusion": engine,
        "gradient_accumulation_fusion": on_gpu and (engine or has_extension),
        # Not used by our attention and norms.
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }


def _parallelism(config: MegatronPolicyConfig, *, on_gpu: bool) -> dict[str, Any]:
    megatron = config.megatron_cfg
    interleaved = megatron.virtual_pipeline_model_parallel_size is not None
    return {
        "tensor_model_parallel_size": megatron.tensor_model_parallel_size,
        "sequence_parallel": megatron.sequence_parallel,
        "pipeline_model_parallel_size": megatron.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": megatron.virtual_pipeline_model_parallel_size,
        "num_layers_in_first_pipeline_stage": megatron.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": megatron.num_layers_in_last_pipeline_stage,
        "context_parallel_size": megatron.context_parallel_size,
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "expert_tensor_parallel_size": megatron.expert_tensor_ranks,
        # Microbatches differ in width, which only this dispatcher allows; Megatron checks it for dense models too.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "batch_p2p_sync": on_gpu,
        # Variable lengths deadlock in an interleaved pipeline of two stages with batched sends.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def _recomputation(config: MegatronPolicyConfig) -> dict[str, Any]:
    megatron = config.megatron_cfg
    granularity = "full" if config.activation_checkpointing else megatron.recompute_granularity
    if granularity != "full":
        return {"recompute_granularity": granularity}
    return {
        "recompute_granularity": "full",
        "recompute_method": megatron.recompute_method,
        "recompute_num_layers": megatron.recompute_num_layers,
    }


def _build(
    hf: Any,
    family: Family,
    config: MegatronPolicyConfig,
    transformer: TransformerConfig,
    engine: bool,
    stage: int | None,
) -> HeadlessGPT:
    rope = hf.rope_parameters
    model = HeadlessGPT(
        transformer,
        _engine_spec(transformer) if engine else _local_spec(transformer, config, stage),
        vocab_size=padded_vocab_size(hf.vocab_size, config),
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage),
        parallel_output=True,
        share_embeddings_and_output_weights=is_tied(hf, config),
        position_embedding_type="rope",
        rotary_base=rope["rope_theta"],
        vp_stage=stage,
        scalar=config.head == "scalar",
        embedding_scale=family.embedding_scale(hf),
    )
    model.rotary_pos_emb.inv_freq = _inverse_frequencies(hf, model.rotary_pos_emb.inv_freq)
    return model


def _local_spec(transformer: TransformerConfig, config: MegatronPolicyConfig, stage: int | None) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(
        num_experts=transformer.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=transformer.qk_layernorm,
        normalization="RMSNorm",
    )
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = attention_class(config.megatron_cfg.use_flash_attention)
    if transformer.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    # The final norm is not part of the layer's spec, so specify the whole block.
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(transformer, vp_stage=stage), layer_norm=RMSNorm
    )


def _engine_spec(transformer: TransformerConfig) -> Any:
    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=transformer.num_moe_experts,
        moe_grouped_gemm=transformer.moe_grouped_gemm,
        qk_layernorm=transformer.qk_layernorm,
    )


def _inverse_frequencies(hf: Any, own: torch.Tensor) -> torch.Tensor:
    """Transformers' frequencies, because Megatron-Core supports only Llama 3's scaling, with hard-coded constants."""
    kind = hf.rope_parameters["rope_type"]
    if kind == "default":
        return own
    frequencies: torch.Tensor = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))[0]
    return frequencies.to(own)


_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


def matrix_sizes(
    shapes: Mapping[str, Sequence[int]], hf: Any, *, tied: bool, adapters: Iterable[Sequence[int]] | None = None
) -> dict[str, float]:
    """The fact `matrix_sizes` of `PolicyWorker.setup`. Of experts, those chosen for a token count.

    Args:
        shapes: of the whole weights, by their names in a Transformers checkpoint.
        hf: the Transformers config.
        tied: whether the head is the embedding.
        adapters: shapes of what is trained if `shapes` are frozen.
    """
    head, kind = _EMBEDDING if tied else _HEAD, "trained" if adapters is None else "frozen"
    sizes: Counter[str] = Counter()
    for name, shape in shapes.items():
        if name.endswith(head):
            sizes[f"{kind}_head"] += math.prod(shape)
        elif len(shape) > 1 and not name.endswith(_EMBEDDING):
            sizes["experts" if ".experts." in name else kind] += math.prod(shape)
    if experts := sizes.pop("experts", 0):
        count = getattr(hf, "num_local_experts", None) or hf.num_experts
        sizes[kind] += experts * hf.num_experts_per_tok // count
    if adapters is not None:
        sizes["trained"] = sum(math.prod(shape) for shape in adapters)
    return {**sizes, "attention": hf.num_hidden_layers * hf.num_attention_heads * head_dim(hf)}
