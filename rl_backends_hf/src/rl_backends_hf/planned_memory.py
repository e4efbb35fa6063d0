"""Predicts the memory of a policy rank and of an engine replica from the model's config, without weights.

Activations, logits and temporary tensors are not estimated: the worker's own scoring code runs, forward and backward, on
tensors without data (`torch._subclasses.FakeTensorMode`), and torch's `MemTracker` records their peak. What every layer adds is
measured with two small depths and multiplied by the depth, because tracing a deep model takes minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import PreTrainedModel

from rl_backends_hf.cpu_attention import use_cpu_sdpa
from rl_backends_hf.model import DTYPES, checkpoint_activations, model_without_weights
from rl_backends_hf.model_options import HFModelConfig
from rl_backends_hf.sampling.cache_budget import token_bytes
from rl_backends_hf.sampling.packed_linears import packed_bytes
from rl_backends_hf.scoring.scalar_head import ValueScoring
from rl_backends_hf.scoring.scoring_model import padded_input
from rl_backends_hf.scoring.token_scoring import TokenScoring
from rl_backends_hf.training.lora import LoraAdapters

if TYPE_CHECKING:
    from rl_backends_hf.config import HFGenerationConfig, HFPolicyConfig

_DEPTHS: Final = (2, 4)
"""Numbers of layers that are traced; a model of at most the second number is traced as it is."""
_CPU: Final = torch.device("cpu")
_MOMENTS: Final = {"torch.optim.Adam": 2, "torch.optim.AdamW": 2, "torch.optim.SGD": 0}
"""Float32 tensors that an optimizer keeps per trained weight (https://arxiv.org/abs/1412.6980, algorithm 1)."""


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Numbers of weights, and of those that are trained."""

    weights: int
    trained: int


def policy_memory(
    config: HFPolicyConfig,
    *,
    ranks: int,
    train: tuple[int, int] | None,
    several: bool,
    score: tuple[int, int] | None,
    reference: bool,
) -> dict[str, dict[str, int]]:
    """`HFPolicyConfig.planned_memory`."""
    sizes = _sizes(config)
    held = _state(config, sizes, ranks=ranks)
    gradients = held.pop("gradients", 0)
    if reference and config.hf_cfg.lora is None:
        held["reference weights"] = DTYPES[config.dtype_name].itemsize * sizes.weights
    phases: dict[str, dict[str, int]] = {"held": held}
    if score is not None:
        phases["score"] = _traced(config, *score, training=False)
    if train is not None and sizes.trained:
        traced = _traced(config, *train, training=True)
        # The gradients of the first microbatch exist while the next ones are computed.
        phases["train"] = traced | ({"gradients": gradients} if several else {})
        phases["update"] = {"gradients": gradients}
    return phases


def engine_memory(
    config: HFGenerationConfig, *, rows: int, prompt: int, on_gpu: bool, shares_weights: bool
) -> dict[str, dict[str, int]]:
    """`HFGenerationConfig.planned_memory`."""
    assert config.model_name is not None
    options = config.hf_cfg
    dtype = DTYPES[options.precision or "float32"]
    model = model_without_weights(config.model_name, options=options).to(dtype)
    weights = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    longest = min(options.max_model_len or prompt + config.max_new_tokens, prompt + config.max_new_tokens)
    per_token = token_bytes(model)
    together = min(rows, options.max_batch_rows)
    if options.kv_cache_gib is not None:
        together = max(1, min(together, int(options.kv_cache_gib * 2**30) // (longest * per_token)))
    vocabulary = model.get_output_embeddings().weight.shape[0]
    rollout = {"keys and values": together * longest * per_token, "logits": together * vocabulary * 4}
    if not on_gpu:
        rollout["packed weights"] = packed_bytes(model, steps=config.max_new_tokens)
    return {"held": {} if shares_weights else {"weights": weights}, "rollout": rollout}


def _sizes(config: HFPolicyConfig) -> _Sizes:
    model = model_without_weights(config.model_name, options=config.hf_cfg, head=config.head)
    _adapt(model, config)
    numbers = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    trained = 0 if config.frozen else sum(size for size, is_trained in numbers if is_trained)
    return _Sizes(weights=sum(size for size, _ in numbers), trained=trained)


def _adapt(model: PreTrainedModel, config: HFPolicyConfig) -> None:
    if config.hf_cfg.lora is not None:
        LoraAdapters(model, config.hf_cfg.lora, base=config.model_name, head=config.head)


def _state(config: HFPolicyConfig, sizes: _Sizes, *, ranks: int) -> dict[str, int]:
    """Bytes of weights, gradients, masters and optimizer state on one rank.

    Trained weights have float32 masters, gradients and moments (https://arxiv.org/abs/1910.02054, section 3.1, with float32
    gradients). A float32 weight, and an adapter, is its own master. FSDP2 shards all of them.
    """
    hf = config.hf_cfg
    width = DTYPES[config.dtype_name].itemsize
    shards = (hf.fsdp_num_shards or ranks) if hf.data_parallel == "fsdp2" else 1
    moments = _MOMENTS.get(config.optimizer.name, 0)
    if config.optimizer.name == "torch.optim.SGD" and config.optimizer.kwargs.get("momentum"):
        moments = 1
    held = {"gradients": 4 * sizes.trained // shards, "optimizer state": 4 * moments * sizes.trained // shards}
    if hf.lora is not None:
        held["weights"] = width * (sizes.weights - sizes.trained) + 4 * sizes.trained
    elif shards > 1:
        held["weights"] = (4 if sizes.trained else width) * sizes.weights // shards
    else:
        held["weights"] = width * sizes.weights
        held["float32 master weights"] = 4 * sizes.trained if width < 4 else 0
    return {part: size for part, size in held.items() if size}


def _traced(config: HFPolicyConfig, rows: int, length: int, *, training: bool) -> dict[str, int]:
    """Peak bytes of activations and of temporary tensors of one microbatch; see the module."""
    depth, replaced = _layers(config)
    if depth <= _DEPTHS[1]:
        return _named(_trace(config, rows, length, {}, training=training))
    few, more = (_trace(config, rows, length, replaced(layers), training=training) for layers in _DEPTHS)
    steps = (depth - _DEPTHS[1]) / (_DEPTHS[1] - _DEPTHS[0])
    return _named({part: int(more[part] + steps * (more[part] - few[part])) for part in more})


def _named(traced: Mapping[str, int]) -> dict[str, int]:
    return {"activations": traced["Activation"], "logits and temporary tensors": traced["Temp"]}


def _layers(config: HFPolicyConfig) -> tuple[int, Any]:
    """Number of layers, or 0 if the model cannot be built with fewer; and the overrides of its config for fewer."""
    text = model_without_weights(config.model_name, options=config.hf_cfg, head=config.head).config
    depth = getattr(text, "num_hidden_layers", None)
    if not isinstance(depth, int):
        return 0, None
    per_layer = {key: value for key, value in text.to_dict().items() if isinstance(value, list) and len(value) == depth}

    def fewer(layers: int) -> dict[str, Any]:
        return {"num_hidden_layers": layers, **{key: value[:layers] for key, value in per_layer.items()}}

    return depth, fewer


def _trace(config: HFPolicyConfig, rows: int, length: int, replaced: Mapping[str, Any], *, training: bool) -> dict[str, int]:
    """Peak bytes by kind while one microbatch is scored or trained, without its weights and gradients."""
    hf = config.hf_cfg
    options = HFModelConfig(
        **{key: getattr(hf, key) for key in HFModelConfig.model_fields if key not in ("config_overrides", "device_map")},
        config_overrides={**hf.config_overrides, **replaced},
    )
    model = model_without_weights(config.model_name, options=options, head=config.head).to(DTYPES[config.dtype_name])
    ids, lengths = torch.zeros(rows, length, dtype=torch.int64), torch.full((rows,), length)
    shift = (ValueScoring if config.head == "scalar" else TokenScoring).shift
    given = padded_input(ids, lengths, device=_CPU, shift=shift)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        model.to_empty(device="cpu")
        use_cpu_sdpa(model)
        _adapt(model, config)
        if config.activation_checkpointing and training:
            checkpoint_activations(model)
        scoring: nn.Module = (
            ValueScoring(model)
            if config.head == "scalar"
            else TokenScoring(model, chunk_tokens=hf.logprob_chunk_tokens, temperature=config.scoring_temperature)
        )
        scoring.train(training)
        tokens = [fake.from_tensor(each) for each in (given.input_ids, given.hidden_index, given.targets)]
        tracker = MemTracker()
        with tracker, torch.set_grad_enabled(training):
            scores = scoring(*tokens, given.attention)
            if training:
                scores.sum().backward()
    peak = tracker.get_tracker_snapshot("peak")[_CPU]
    return {str(getattr(kind, "value", kind)): size for kind, size in peak.items()}
