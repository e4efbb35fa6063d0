"""Tables that map each model family's config and weight names to Megatron-Core's.

A family is an entry in `FAMILIES`: the `model_type` of its config.json, its config fields beyond those of a Llama, config
values that are supported, and its weights. To add a model, add an entry (docs/adding_a_model.md); no other module names models.

A `WeightLayout` defines how tensors of a Hugging Face checkpoint are combined into one Megatron tensor: what a rank reads of
the source tensors (`load`), how the ranks' shards are joined (`join`), and how the result is split into source tensors
(`split`, also used for their shapes). A new model needs a new layout only if it combines tensors in a new way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from rl_core.errors import NotSupportedError
from rl_core.plugins.component import did_you_mean


class Source(Protocol):
    """Reads tensors completely or partially."""

    def whole(self, name: str) -> torch.Tensor:
        """The full tensor with this name."""

    def read_slice(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """Entries from `start` to `stop` along `dim`; fewer if the tensor ends before."""

    def size(self, name: str, dim: int) -> int:
        """The tensor's length along `dim`."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Model sizes for layouts.

    Attributes:
        num_heads: number of query heads.
        num_groups: number of key and value heads.
        head_dim: size of one head.
        vocab_size: V, without padding.
    """

    num_heads: int
    num_groups: int
    head_dim: int
    vocab_size: int


class WeightLayout(ABC):
    """A weight layout; see the module docstring.

    Attributes:
        dim: along which the Megatron tensor is sharded; None if it is replicated.
    """

    dim: int | None = None

    @abstractmethod
    def load(
        self, source: Source, names: Sequence[str], rank: int, ranks: int, shape: torch.Size, sizes: Sizes
    ) -> torch.Tensor:
        """This rank's shard of the Megatron tensor, of `shape`; reads only what it needs."""

    def join(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The full Megatron tensor."""
        return shards[0] if self.dim is None else torch.cat(list(shards), self.dim)

    def split(self, whole: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        """The source tensors, in the order of their names."""
        return [whole]


class Replicated(WeightLayout):
    """One tensor, replicated on every rank."""

    def load(
        self, source: Source, names: Sequence[str], rank: int, ranks: int, shape: torch.Size, sizes: Sizes
    ) -> torch.Tensor:
        return source.whole(names[0])


class Sharded(WeightLayout):
    """One tensor, split into equal shards along one dimension."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def load(
        self, source: Source, names: Sequence[str], rank: int, ranks: int, shape: torch.Size, sizes: Sizes
    ) -> torch.Tensor:
        assert self.dim is not None
        length = shape[self.dim]
        return source.read_slice(names[0], self.dim, rank * length, (rank + 1) * length)


class Vocabulary(WeightLayout):
    """[V, H] with sharded rows, padded with zero rows so that all ranks have equally many."""

    dim = 0

    def load(
        self, source: Source, names: Sequence[str], rank: int, ranks: int, shape: torch.Size, sizes: Sizes
    ) -> torch.Tensor:
        start = min(rank * shape[0], sizes.vocab_size)
        found = source.read_slice(names[0], 0, start, min(start + shape[0], sizes.vocab_size))
        return torch.cat([found, found.new_zeros(shape[0] - len(found), *found.shape[1:])])

    def split(self, whole: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        return [whole[: sizes.vocab_size]]


class QueryKeyValue(WeightLayout):
    """Queries, keys and values (weights or biases) in one, sharded by rows: per key head its queries, the key, the value."""

    dim = 0

    def load(
        self, source: Source, names: Sequence[str], rank: int, ranks: int, shape: torch.Size, sizes: Sizes
    ) -> torch.Tensor:
        if sizes.num_groups % ranks == 0:
            shards = []
            for name in names:
                rows = source.size(name, 0) // ranks
                shards.append(source.read_slice(name, 0, rank * rows, (rank + 1) * rows))
            return _by_group(shards, sizes.num_groups // ranks)
        # Fewer key heads than ranks: groups are split.
        whole = _by_group([source.whole(name) for name in names], sizes.num_groups)
        return whole[rank * shape[0] : (rank + 1) * shape[0]]

    def split(self, whole: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        queries = sizes.num_heads // sizes.num_groups
        grouped = whole.reshape(sizes.num_groups, (queries + 2) * sizes.head_dim, *whole.shape[1:])
        tensors = grouped.split([queries * sizes.head_dim, sizes.head_dim, sizes.head_dim], 1)
        return [tensor.reshape(-1, *whole.shape[1:]) for tensor in tensors]


class GateAndUp(WeightLayout):
    """The two input matrices of a gated MLP, stacked on each rank: [gate_r; up_r]."""

    dim = 0

    def load(
        self, source: Source, names: Sequence[str], rank: int, ranks: int, shape: torch.Size, sizes: Sizes
    ) -> torch.Tensor:
        rows = shape[0] // 2
        return torch.cat([source.read_slice(name, 0, rank * rows, (rank + 1) * rows) for name in names])

    def join(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        halves = [shard.chunk(2, 0) for shard in shards]
        return torch.cat([*(gate for gate, _ in halves), *(up for _, up in halves)])

    def split(self, whole: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        return list(whole.chunk(2, 0))


def _by_group(tensors: Sequence[torch.Tensor], groups: int) -> torch.Tensor:
    rest = tensors[0].shape[1:]
    return torch.cat([tensor.reshape(groups, -1, *rest) for tensor in tensors], 1).reshape(-1, *rest)


@dataclass(frozen=True)
class Weight:
    """One Megatron parameter.

    Attributes:
        megatron: its name; `{layer}` and `{expert}` are indices in the full model. Several if Transformer Engine merges layers
            under a different name.
        hf: the tensors of a Hugging Face checkpoint that it consists of, with the same placeholders.
        layout: how they are combined.
    """

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    layout: WeightLayout

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to one expert of a mixture."""
        return "{expert}" in self.hf[0]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models with one `model_type`.

    Attributes:
        weights: all parameters.
        config: fields of Megatron's TransformerConfig, beyond those of a Llama, from the Hugging Face config.
        embedding_scale: factor of token embeddings, from the Hugging Face config.
        supported: config field to its supported values; models with other values are rejected.
    """

    weights: tuple[Weight, ...]
    config: Callable[[Any], dict[str, Any]] = lambda hf: {}
    embedding_scale: Callable[[Any], float] = lambda hf: 1.0
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


_LAYER = "decoder.layers.{layer}."
_HF_LAYER = "model.layers.{layer}."


def _in_layer(megatron: str | tuple[str, ...], hf: str | tuple[str, ...], layout: WeightLayout) -> Weight:
    megatron_names = (megatron,) if isinstance(megatron, str) else megatron
    hf_names = (hf,) if isinstance(hf, str) else hf
    return Weight(tuple(_LAYER + name for name in megatron_names), tuple(_HF_LAYER + name for name in hf_names), layout)


def _qkv(kind: str) -> Weight:
    names = tuple(f"self_attn.{projection}_proj.{kind}" for projection in "qkv")
    return _in_layer(f"self_attention.linear_qkv.{kind}", names, QueryKeyValue())


_OUTSIDE = (
    Weight(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), Vocabulary()),
    Weight(("decoder.final_layernorm.weight",), ("model.norm.weight",), Replicated()),
    Weight(("output_layer.weight",), ("lm_head.weight",), Vocabulary()),
)
_ATTENTION = (
    _in_layer(
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"), "input_layernorm.weight", Replicated()
    ),
    _qkv("weight"),
    _in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", Sharded(1)),
)
_QKV_BIAS = (_qkv("bias"),)
_QK_NORM = (
    _in_layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", Replicated()),
    _in_layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", Replicated()),
)
_NORM_BEFORE_MLP = _in_layer(
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"), "post_attention_layernorm.weight", Replicated()
)
_MLP = (
    _NORM_BEFORE_MLP,
    _in_layer("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), GateAndUp()),
    _in_layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", Sharded(1)),
)


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Weight, ...]:
    expert = block + ".experts.{expert}."
    return (
        _NORM_BEFORE_MLP,
        _in_layer("mlp.router.weight", f"{block}.gate.weight", Replicated()),
        _in_layer(
            ("mlp.experts.local_experts.{expert}.linear_fc1.weight", "mlp.experts.linear_fc1.weight{expert}"),
            (f"{expert}{gate}.weight", f"{expert}{up}.weight"),
            GateAndUp(),
        ),
        _in_layer(
            ("mlp.experts.local_experts.{expert}.linear_fc2.weight", "mlp.experts.linear_fc2.weight{expert}"),
            f"{expert}{down}.weight",
            Sharded(1),
        ),
    )


def _mixture(hf: Any, *, experts: int, ffn: int, softmax_first: bool) -> dict[str, Any]:
    return {
        "num_moe_experts": experts,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_ffn_hidden_size": ffn,
        "moe_router_pre_softmax": softmax_first,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
    }


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU approximated with the tanh of a cubic (Hendrycks and Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")


_GELU = {"gelu_pytorch_tanh": _gelu_tanh, "gelu": F.gelu}
_PLAIN = {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)}
_NO_WINDOW = {"use_sliding_window": (False,)}

FAMILIES: dict[str, Family] = {
    "llama": Family(weights=(*_OUTSIDE, *_ATTENTION, *_MLP), supported=_PLAIN),
    "mistral": Family(weights=(*_OUTSIDE, *_ATTENTION, *_MLP), supported={**_PLAIN, "sliding_window": (None,)}),
    "gemma": Family(
        weights=(*_OUTSIDE, *_ATTENTION, *_MLP),
        config=lambda hf: {"activation_func": _GELU[hf.hidden_act], "layernorm_zero_centered_gamma": True},
        embedding_scale=lambda hf: hf.hidden_size**0.5,
        supported={
            "hidden_act": tuple(_GELU),
            "attention_bias": (False,),
            "use_bidirectional_attention": (None, False),
        },
    ),
    "qwen2": Family(
        weights=(*_OUTSIDE, *_ATTENTION, *_QKV_BIAS, *_MLP),
        config=lambda hf: {"add_qkv_bias": True},
        supported={"hidden_act": ("silu",), **_NO_WINDOW},
    ),
    "qwen3": Family(
        weights=(*_OUTSIDE, *_ATTENTION, *_QK_NORM, *_MLP),
        config=lambda hf: {"qk_layernorm": True},
        supported={**_PLAIN, **_NO_WINDOW},
    ),
    "qwen3_moe": Family(
        weights=(*_OUTSIDE, *_ATTENTION, *_QK_NORM, *_experts("mlp", "gate_proj", "up_proj", "down_proj")),
        config=lambda hf: {
            "qk_layernorm": True,
            **_mixture(
                hf, experts=hf.num_experts, ffn=hf.moe_intermediate_size, softmax_first=not getattr(hf, "norm_topk_prob", False)
            ),
        },
        supported={**_PLAIN, **_NO_WINDOW, "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    ),
    "mixtral": Family(
        weights=(*_OUTSIDE, *_ATTENTION, *_experts("block_sparse_moe", "w1", "w3", "w2")),
        config=lambda hf: _mixture(hf, experts=hf.num_local_experts, ffn=hf.intermediate_size, softmax_first=False),
        supported={**_PLAIN, "sliding_window": (None,)},
    ),
}


_ROPE_TYPES = ("default", "linear", "llama3")


def family_of(hf: Any, *, model_name: str) -> Family:
    """The family of a Hugging Face config.

    Raises:
        NotSupportedError: there is none, or the model has unsupported config values.
    """
    family = FAMILIES.get(hf.model_type)
    if family is None:
        raise NotSupportedError(
            f"{model_name} has model type {hf.model_type!r}, but the Megatron backend supports {', '.join(FAMILIES)}."
            f"{did_you_mean(hf.model_type, sorted(FAMILIES))} Add one (docs/adding_a_model.md), or use `backend: hf`.",
            key="backend",
        )
    for name, supported in family.supported.items():
        value = getattr(hf, name, supported[0])
        if value not in supported:
            raise NotSupportedError(
                f"{model_name} has `{name}: {value!r}` in its config.json, but the Megatron backend supports "
                f"{hf.model_type} only with {' or '.join(map(repr, supported))}. Use `backend: hf`.",
                key="backend",
            )
    _check_rotary_positions(hf, model_name)
    return family


def _check_rotary_positions(hf: Any, model_name: str) -> None:
    kind = hf.rope_parameters["rope_type"]
    if kind not in _ROPE_TYPES:
        raise NotSupportedError(
            f"{model_name} has rotary positions of type {kind!r}, but the Megatron backend supports only "
            f"{', '.join(_ROPE_TYPES)}. Use `backend: hf`.",
            key="backend",
        )
    if hf.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise NotSupportedError(
            f"{model_name} uses partial rotary embeddings (`partial_rotary_factor`), which the Megatron backend does not "
            "support. Use `backend: hf`.",
            key="backend",
        )
