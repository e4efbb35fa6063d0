"""Predicts the memory of a policy rank and of an engine replica from the model's config, without weights.

Activations, logits and temporary tensors are not estimated: the worker's own scoring code runs, forward and backward, on
tensors without data, and the bytes of those that exist are counted. What a layer adds is measured with two small depths and
multiplied by the depth, because tracing a deep model takes minutes. What the pictures of a prompt add is multiplied by
the number of prompts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import PreTrainedModel

from rl_backends_base import FullyShard, padded_input
from rl_backends_base.optimizer import parameters_by_group
from rl_backends_hf.cpu_attention import use_cpu_sdpa
from rl_backends_hf.cpu_products import CpuProducts
from rl_backends_hf.lora_targets import freeze_modules
from rl_backends_hf.matrix_sizes import matrix_sizes
from rl_backends_hf.memory_trace import LiveBytes, features_bytes, lone_shard, picture_arguments, weighted_depths
from rl_backends_hf.model import DTYPES, checkpoint_activations, decoder_layers, model_without_weights
from rl_backends_hf.model_options import HFModelConfig
from rl_backends_hf.quantized import layers_to_quantize, quantized_bytes
from rl_backends_hf.sampling.cache_budget import SHARE_OF_FREE_MEMORY, CacheBudget, RowBytes
from rl_backends_hf.sampling.packed_linears import packed_bytes
from rl_backends_hf.sampling.sampler import SlotRows
from rl_backends_hf.scoring.scoring_model import ScoringModel, ValueScoring
from rl_backends_hf.scoring.token_scoring import TokenScoring
from rl_backends_hf.torch_internals import without_data
from rl_backends_hf.training.lora import LoraAdapters
from rl_backends_hf.training.prefix_support import why_disabled, why_not_full_attention
from rl_backends_hf.transformers_internals import attention_of, cache_layers
from rl_core.backend import WorkerContext
from rl_core.config.policy_sections import REST, OptimizerConfig
from rl_core.data.images import RowImage
from rl_core.errors import NotSupportedError

if TYPE_CHECKING:
    from rl_backends_hf.config import HFGenerationConfig, HFPolicyConfig

_DEPTHS: Final = (2, 4)
"""Numbers of layers that are traced; a model of at most the second number is traced as it is."""
_LIBRARIES: Final = 350 * 2**20
"""Proportional set size of a process after it has imported torch for CPUs, Transformers and rlcore, measured on Linux."""
_CPU: Final = torch.device("cpu")
_UNTRACED: Final[dict[str, Any]] = {
    **dict.fromkeys(("optimizer", "scheduler", "generation", "dynamic_batching", "sequence_packing"), True),
    **dict.fromkeys(("max_total_sequence_length", "train_global_batch_size", "train_micro_batch_size"), True),
    "logprob_batch_size": True,
    "hf_cfg": {"data_parallel", "fsdp_num_shards"},
}
"""Keys of a policy on which a trace does not depend, or only by the number of shards."""
_TEMPORARY: Final = "logits and temporary tensors"
_SHORT: Final = 8
"""Number of tokens of the row with which pictures are traced."""
_TRACES: Final[dict[str, dict[str, int]]] = {}
"""Traces of this process, by the contents of the model's config and by the other keys."""
_ROWS: Final[dict[str, RowBytes]] = {}
"""What a row needs, by the contents of the model's config: a command plans many candidates."""
_TOWER: Final = "vision_config"
_MUON: Final = "torch.optim.Muon"
_STATE_BYTES: Final = {
    _MUON: 4.0,
    "torch.optim.Adam": 8.0,
    "torch.optim.AdamW": 8.0,
    "torch.optim.SGD": 0.0,
    "torchao.optim.Adam8bit": 2 + 8 / 256,
    "torchao.optim.AdamW8bit": 2 + 8 / 256,
}
"""Bytes that an optimizer keeps per trained weight: two float32 moments (https://arxiv.org/abs/1412.6980, algorithm 1), or two
of 8 bits with a float32 scale for each block of 256 (https://arxiv.org/abs/2110.02861), or the momentum of Muon."""
_GPU_LAYER_S: Final = 1 / 25.5 / 32
"""Assumed minimum seconds of a layer in a step of sampling on a GPU, whose operations Python starts one by one: 25.5 tokens per
second with the 32 layers of Llama-2-7B, not compiled (https://pytorch.org/blog/accelerating-generative-ai-2/)."""


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """How one microbatch is traced."""

    training: bool
    """Whether there is a backward pass."""
    float32_products: bool
    """Whether bfloat16 matrices are multiplied with copies in float32."""
    shards: int
    """Number of ranks that share a copy of the model."""
    gloo: bool
    """Whether ranks communicate through gloo, which copies what it gathers and scatters."""
    images: Sequence[RowImage] = ()
    """Pictures of one of its prompts."""


class PolicyMemory:
    """The memory of one rank of a policy. See `ModelMemory` in `rl_train.plan.planner`."""

    libraries, stages, counts_images = _LIBRARIES, 1, True

    def __init__(self, config: HFPolicyConfig) -> None:
        self._config = config

    def matrix_sizes(self) -> dict[str, float]:
        config = self._config
        if config.hf_cfg.quantized_by is not None:
            raise NotSupportedError("the speed of quantized weights is unknown")
        return matrix_sizes(_adapted(config))

    def by_phase(
        self,
        *,
        ranks: int,
        train: tuple[int, int] | None,
        several: bool,
        score: tuple[int, int] | None,
        reference: bool,
        on_gpu: bool,
        images: Sequence[RowImage] = (),
        prompts: Mapping[str, int] | None = None,
    ) -> dict[str, dict[str, int]]:
        config = self._config  # GPUs multiply bfloat16 matrices without copies in float32
        in_float32 = not on_gpu and CpuProducts.of(config.hf_cfg.cpu_products, DTYPES[config.dtype_name], _CPU).in_float32
        shards = _shards_of(config, ranks)
        forward = _Pass(training=False, float32_products=in_float32, shards=shards, gloo=not on_gpu)
        weights, trained = _sizes(config)
        held = _state(config, weights, trained, ranks=ranks)
        saved, largest = _quantization(config)
        held["weights"] -= saved
        gradients = held.pop("gradients", 0)
        if reference and config.hf_cfg.lora is None:
            held["reference weights"] = DTYPES[config.dtype_name].itemsize * weights
        phases: dict[str, dict[str, int]] = {"held": held}
        if score is not None:
            phases["score"] = _with_pictures(config, *score, forward, images, (prompts or {}).get("score", 0)) | largest
        if train is not None and trained:
            how = replace(forward, training=True)
            traced = _with_pictures(config, *train, how, images, (prompts or {}).get("train", 0)) | largest
            # The gradients of the first microbatch exist while the next ones are computed; with FSDP2, all exist when it
            # gathers the most, at the end of the backward pass.
            phases["train"] = traced | ({"gradients": gradients} if several or shards > 1 else {})
            phases["update"] = {"gradients": gradients} | _orthogonalized(config, sharded=shards > 1)
        return phases

    def shares_prefixes(self, *, on_gpu: bool) -> bool:
        """Whether rows of the same prompt compute its common prefix once; the worker also tests its model with an input."""
        if why_disabled(self._config) is not None or (on_gpu and self._config.dtype_name != "bfloat16"):
            return False
        model = model_without_weights(self._config.model_name, options=self._config.hf_cfg, head=self._config.head)
        return attention_of(model) == "sdpa" and why_not_full_attention(model) is None

    @property
    def is_shared(self) -> bool:
        """Whether an engine in the same process can compute with its tensors; merged adapters are in new ones."""
        engine = self._config.generation
        return self._config.hf_cfg.lora is None or (engine is not None and engine.lora == "adapter")

    def not_counted(self) -> list[str]:
        names = dict.fromkeys(optimizer.name for optimizer, _ in _optimizers(self._config))
        left_out = [f"state of the optimizer {name}" for name in names if name not in _STATE_BYTES]
        model = model_without_weights(self._config.model_name, options=self._config.hf_cfg, head=self._config.head)
        if any(hasattr(layer, "recurrent_states") for layer in cache_layers(model.config.get_text_config())):
            left_out.append("kernels for recurrent layers on GPUs, which need less memory than the torch code that is counted")
        return left_out

    def saving_overrides(self) -> list[str]:
        config = self._config
        adapters = ["++policy.hf_cfg.lora.rank=16"] if config.hf_cfg.lora is None and config.head == "tokens" else []
        return adapters + (["++policy.hf_cfg.load_in_4bit=true"] if config.hf_cfg.quantized_by is None else [])


class EngineMemory:
    """The memory of one replica of the engine. See `EngineMemory` in `rl_train.plan.planner`."""

    libraries, processes, counts_images = _LIBRARIES, 1, True

    def __init__(self, config: HFGenerationConfig) -> None:
        self._config = config

    def by_phase(
        self,
        *,
        rows: int,
        prompt: int,
        on_gpu: bool,
        limit: int | None,
        shares_weights: bool,
        images: Sequence[RowImage] = (),
        prompts: int = 0,
    ) -> dict[str, dict[str, int]]:
        config, options = self._config, self._config.hf_cfg
        model, weights = self._model()
        longest = min(options.max_model_len or prompt + config.max_new_tokens, prompt + config.max_new_tokens)
        row = _row_bytes(model)
        together = min(rows, CacheBudget(model, options, row).rows(longest=longest))
        vocabulary = model.get_output_embeddings().weight.shape[0]
        kept = {"keys and values": together * (row.of(longest) - row.state), "recurrent states": together * row.state}
        rollout = {**{part: size for part, size in kept.items() if size}, "logits": together * vocabulary * 4}
        if not on_gpu:
            rollout["packed weights"] = packed_bytes(model, steps=config.max_new_tokens)
        if images and prompts:
            together = min(prompts, max(1, SlotRows.prefill_tokens // prompt))
            rollout["features of pictures"] = together * features_bytes(model, images)
        return {"held": {} if shares_weights else {"weights": weights}, "rollout": rollout}

    def decoding(self, *, rows: int, length: int, limit: int) -> dict[str, float]:
        model, weights = self._model()
        row, free = _row_bytes(model), SHARE_OF_FREE_MEMORY * max(0, limit - weights)
        allowed = CacheBudget(model, self._config.hf_cfg, row).rows(longest=length)
        together, token = min(rows, allowed, int(free / row.of(length))), row.growth(length)
        state = row.of(length) - length * token + row.state  # recurrent states are read and written
        step_s = _depth_of(model) * _GPU_LAYER_S
        return {"rows": max(1, together), "weights": weights, "token": token, "state": state, "step_s": step_s}

    def _model(self) -> tuple[PreTrainedModel, int]:
        """The model without weights, and the bytes of its weights."""
        options = self._config.hf_cfg
        assert self._config.model_name is not None
        model = model_without_weights(self._config.model_name, options=options).to(DTYPES[options.precision or "float32"])
        return model, sum(parameter.numel() for parameter in model.parameters()) * model.dtype.itemsize

    def not_counted(self) -> list[str]:
        return [] if self._config.hf_cfg.session_cache_mb == 0 else ["keys and values kept between the turns of a conversation"]

    def saving_overrides(self) -> list[str]:
        rows = self._config.hf_cfg.max_batch_rows
        return [f"policy.generation.hf_cfg.max_batch_rows={size}" for size in (rows // 2, rows // 4, rows // 16) if size]


def _row_bytes(model: PreTrainedModel) -> RowBytes:
    """What a row of the engine needs, measured on tensors without data."""
    key = f"{model.config.to_json_string()} {model.dtype}"
    if key not in _ROWS:
        traced = deepcopy(model)
        with without_data():
            traced.to_empty(device="cpu")
            _ROWS[key] = RowBytes.of_model(traced.eval())
    return _ROWS[key]


def _sizes(config: HFPolicyConfig) -> tuple[int, int]:
    """Numbers of weights, and of those that are trained."""
    parameters = [*_adapted(config).parameters()]
    trained = 0 if config.frozen else sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return sum(parameter.numel() for parameter in parameters), trained


def _quantization(config: HFPolicyConfig) -> tuple[int, dict[str, int]]:
    """The bytes that quantization saves, and those of the dequantized weight of the largest layer."""
    if config.hf_cfg.quantized_by is None:
        return 0, {}
    model = model_without_weights(config.model_name, options=config.hf_cfg, head=config.head)
    width = DTYPES[config.dtype_name].itemsize
    sizes = {layer: width * layer.weight.numel() for layer in layers_to_quantize(model, config.hf_cfg)}
    saved = sum(size - quantized_bytes(layer, config.hf_cfg) for layer, size in sizes.items())
    return saved, {"dequantized layer": max(sizes.values())}


def _adapted(config: HFPolicyConfig) -> PreTrainedModel:
    """The model with its adapters, without weights."""
    model = model_without_weights(config.model_name, options=config.hf_cfg, head=config.head)
    _adapt(model, config)
    return model


def _adapt(model: PreTrainedModel, config: HFPolicyConfig) -> None:
    """Freeze modules of a model and add its adapters, as its section says."""
    freeze_modules(model, config.hf_cfg.freeze)
    if config.hf_cfg.lora is not None:
        LoraAdapters(model, config.hf_cfg.lora, base=config.model_name, head=config.head)


def _state(config: HFPolicyConfig, weights: int, trained: int, *, ranks: int) -> dict[str, int]:
    """Bytes of weights, gradients, masters and optimizer state on one rank.

    Trained weights have float32 masters, gradients and moments (https://arxiv.org/abs/1910.02054, section 3.1, with float32
    gradients). A float32 weight, and an adapter, is its own master. FSDP2 shards all of them; with adapters, only the frozen
    weights.
    """
    hf = config.hf_cfg
    width = DTYPES[config.dtype_name].itemsize
    shards = _shards_of(config, ranks)
    state = sum(
        _state_bytes(optimizer) * sum(math.prod(shape) for shape in shapes) for optimizer, shapes in _optimizers(config)
    )
    state_shards = shards if hf.lora is None else 1
    held = {"gradients": 4 * trained // state_shards, "optimizer state": int(state) // state_shards}
    if hf.lora is not None:
        held["weights"] = width * (weights - trained) // shards + 4 * trained
    elif shards > 1:
        held["weights"] = (4 if trained else width) * weights // shards
    else:
        held["weights"] = width * weights
        held["float32 master weights"] = 4 * trained if width < 4 else 0
    return {part: size for part, size in held.items() if size}


def _optimizers(config: HFPolicyConfig) -> list[tuple[OptimizerConfig, list[torch.Size]]]:
    """Each optimizer of a policy, and the shapes of the weights that it updates."""
    if config.frozen:
        return []
    trained = {name: each for name, each in _adapted(config).named_parameters() if each.requires_grad}
    if not config.optimizer.groups:
        return [(config.optimizer, [each.shape for each in trained.values()])]
    groups = parameters_by_group(trained, config.optimizer).items()
    of = {name: config.optimizer if name == REST else config.optimizer.of_group(name) for name, _ in groups}
    return [(of[name], [each.shape for each in members.values()]) for name, members in groups]


def _state_bytes(optimizer: OptimizerConfig) -> float:
    if optimizer.name == "torch.optim.SGD" and optimizer.kwargs.get("momentum"):
        return 4.0
    return _STATE_BYTES.get(optimizer.name, 0.0)


def _orthogonalized(config: HFPolicyConfig, *, sharded: bool) -> dict[str, int]:
    """Temporary bytes of Muon for its largest matrix; none without Muon.

    They are the float32 update, and in bfloat16 two matrices of its shape and two Gram matrices. The whole weight,
    gradient and momentum of a sharded matrix are gathered in float32.
    """
    shapes = [shape for optimizer, shapes in _optimizers(config) if optimizer.name == _MUON for shape in shapes]
    gathered = 12 if sharded and config.hf_cfg.lora is None else 0
    sizes = [(8 + gathered) * math.prod(shape) + 4 * min(shape) ** 2 for shape in shapes]
    return {"orthogonalized matrix": max(sizes)} if sizes else {}


def _shards_of(config: HFPolicyConfig, ranks: int) -> int:
    """Number of ranks that share a copy of the model."""
    return (config.hf_cfg.fsdp_num_shards or ranks) if config.hf_cfg.data_parallel == "fsdp2" else 1


def _with_pictures(
    config: HFPolicyConfig, rows: int, length: int, how: _Pass, images: Sequence[RowImage], prompts: int
) -> dict[str, int]:
    """The result of `_traced` if this many prompts of the microbatch have pictures such as `images`.

    Pictures are traced with one short row, once for all microbatches. Temporary tensors of tower and LM head exist one after
    the other.
    """
    without = _traced(config, rows, length, how)
    if not images or not prompts:
        return without
    short, shown = (_traced(config, 1, _SHORT, replace(how, images=each)) for each in ((), images))
    kept = without["activations"] + prompts * (shown["activations"] - short["activations"])
    return {"activations": kept, _TEMPORARY: max(without[_TEMPORARY], prompts * shown[_TEMPORARY])}


def _traced(config: HFPolicyConfig, rows: int, length: int, how: _Pass) -> dict[str, int]:
    """Peak bytes of activations and of temporary tensors of one microbatch; see the module.

    What a layer of the decoder adds is that of more layers at equal depth of the vision tower, and the other way around.
    """
    hf = config.hf_cfg
    full = model_without_weights(config.model_name, options=hf, head=config.head)
    depths = _depths_of(full)
    if not how.images:  # the tower computes nothing
        depths = {name: depth for name, depth in depths.items() if name != _TOWER}
    deep = [name for name, depth in depths.items() if depth > _DEPTHS[1]]
    if not deep:
        return _trace(config, rows, length, hf, how)
    least = dict.fromkeys(deep, _DEPTHS[0])
    few = _trace(config, rows, length, _fewer_layers(full, hf, least), how)
    sizes: dict[str, float] = {**few}
    for name in deep:
        kinds = _kinds_of(full, depths[name]) if name != _TOWER else [None] * depths[name]
        first, *others = weighted_depths(kinds, least=_DEPTHS[0], step=_DEPTHS[1] - _DEPTHS[0])
        more = [_trace(config, rows, length, _fewer_layers(full, hf, {**least, name: depth}), how) for depth, _ in others]
        weighted = [(few, first[1] - 1), *zip(more, (weight for _, weight in others), strict=True)]
        sizes = {part: size + sum(weight * each[part] for each, weight in weighted) for part, size in sizes.items()}
        if len({*kinds}) > 1:  # the largest of any layer, so more layers of other kinds do not add to it
            sizes[_TEMPORARY] = max(each[_TEMPORARY] for each, _ in weighted)
    return {part: int(size) for part, size in sizes.items()}


def _kinds_of(model: PreTrainedModel, depth: int) -> list[Hashable]:
    """The kind of each layer of the decoder: layers with equal parameters are alike."""
    shapes = [tuple((name, each.shape) for name, each in layer.named_parameters()) for layer in decoder_layers(model)]
    return list(shapes) if len(shapes) == depth else [None] * depth


def _depth_of(model: PreTrainedModel) -> int:
    """Number of layers of the decoder, or 0 if the model cannot be built with fewer."""
    return next((depth for name, depth in _depths_of(model).items() if name != _TOWER), 0)


def _depths_of(model: PreTrainedModel) -> dict[str, int]:
    """Number of layers by the key of their section in the config, which is empty for a model of text."""
    text, tower = model.config.get_text_config(decoder=True), getattr(model.config, _TOWER, None)
    name = next((key for key in model.config.sub_configs if getattr(model.config, key) is text), "")
    layers = {name: getattr(text, "num_hidden_layers", 0), _TOWER: tower and getattr(tower, _depth_key(tower), 0)}
    return {key: depth for key, depth in layers.items() if isinstance(depth, int) and depth}


def _depth_key(section: Any) -> str:
    return "depth" if hasattr(section, "depth") else "num_hidden_layers"


def _fewer_layers(model: PreTrainedModel, options: HFModelConfig, layers: Mapping[str, int]) -> HFModelConfig:
    """The options to build a model with fewer layers, by section of its config."""
    overrides = dict(options.config_overrides)
    for name, count in layers.items():
        section = deepcopy(getattr(model.config, name) if name else model.config)
        key = _depth_key(section) if name == _TOWER else "num_hidden_layers"
        depth = getattr(section, key)
        lists = {
            field: value[:count]
            for field, value in section.to_dict().items()
            if isinstance(value, list) and len(value) == depth
        }
        if not name:
            overrides |= {key: count, **lists}
            continue
        for field, value in {key: count, **lists}.items():
            setattr(section, field, value)
        overrides[name] = section
    return options.model_copy(update={"config_overrides": overrides, "device_map": None})


def _trace(config: HFPolicyConfig, rows: int, length: int, options: HFModelConfig, how: _Pass) -> dict[str, int]:
    """Peak bytes by kind while one microbatch is scored or trained, without its weights and gradients.

    A command plans many candidates, most of which differ in what a trace does not depend on, so traces are kept.
    """
    model = model_without_weights(config.model_name, options=options, head=config.head).to(DTYPES[config.dtype_name])
    described = config.model_dump(mode="json", exclude=_UNTRACED)
    if not how.training:
        del described["activation_checkpointing"]
    sizes = [{name: (each.shape, each.dtype) for name, each in image.inputs.items()} for image in how.images]
    key = f"{model.config.to_json_string()} {described} {config.scoring_temperature} {rows} {length} {how} {sizes}"
    if key not in _TRACES:
        with lone_shard(how.shards):
            _TRACES[key] = _measured(config, model, rows, length, how)
    if config.generation is None or not config.generation.sampling_filters():
        return _TRACES[key]
    outside = min(rows * length, config.hf_cfg.logprob_chunk_tokens) * model.config.get_text_config(decoder=True).vocab_size
    return {name: size + outside * (name == _TEMPORARY) for name, size in _TRACES[key].items()}


def _measured(config: HFPolicyConfig, model: PreTrainedModel, rows: int, length: int, how: _Pass) -> dict[str, int]:
    """The result of `_trace` for a model without weights."""
    ids, lengths = torch.zeros(rows, length, dtype=torch.int64), torch.full((rows,), length)
    shift = (ValueScoring if config.head == "scalar" else TokenScoring).shift
    given = padded_input(ids, lengths, device=_CPU, shift=shift)
    scoring = _scoring_of(config, model)
    if how.shards > 1:
        prefetched = config.hf_cfg.fsdp_prefetched_layers
        rank = WorkerContext(rank=0, world_size=how.shards, local_rank=0, node_rank=0, master_address="", master_port=0)
        parallel = FullyShard(rank, compute_dtype=DTYPES[config.dtype_name], prefetched_layers=prefetched)
        parallel.distribute(
            scoring,
            decoder_layers(scoring.model),
            trainable=not config.frozen and config.hf_cfg.lora is None,
            forward_methods=scoring.extra_forward_methods,
        )
    _adapt(model, config)
    if config.activation_checkpointing and how.training:
        checkpoint_activations(model)
    scoring.train(how.training)
    with without_data() as fake:
        model.to_empty(device="cpu")
        use_cpu_sdpa(model)
        tokens = [fake.from_tensor(each) for each in (given.input_ids, given.hidden_index, given.targets)]
        live = LiveBytes(model, gloo=how.gloo, resizes=how.shards > 1)
        with live, CpuProducts(in_float32=how.float32_products)(), torch.set_grad_enabled(how.training):
            pictures = picture_arguments(model, fake, how.images, rows, length)
            scores = scoring(*tokens, {**given.attention, **pictures})
            if how.training:
                live.end_forward()
                scores.sum().backward()
    return {"activations": live.saved, _TEMPORARY: live.peak - live.saved}


def _scoring_of(config: HFPolicyConfig, model: PreTrainedModel) -> ScoringModel:
    """The model as the worker of a section scores with it."""
    if config.head == "scalar":
        return ValueScoring(model)
    return TokenScoring(model, chunk_tokens=config.hf_cfg.logprob_chunk_tokens, temperature=config.scoring_temperature)
