"""One rank of the Transformers policy: scoring, optimizer steps, checkpoints, and weights for engines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from rl_backends_base import (
    CheckpointNames,
    FullyShard,
    MicrobatchRows,
    Parallel,
    ScoringInput,
    TorchPolicyWorker,
    TrainingStateBase,
    join_ranks,
    padded_input,
)
from rl_backends_base.optimizer import compile_error
from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.cpu_attention import use_cpu_sdpa
from rl_backends_hf.cpu_products import CpuProducts, sum_gradients_in_float32
from rl_backends_hf.lora_targets import freeze_modules
from rl_backends_hf.matrix_sizes import matrix_sizes
from rl_backends_hf.model import (
    checkpoint_activations,
    decoder_layers,
    is_gguf,
    length_dependent_rope,
    load_model,
    load_model_shards,
    load_model_with_exact_weights,
    model_without_weights,
    why_read_whole,
)
from rl_backends_hf.model_options import HFModelConfig
from rl_backends_hf.pictures import Pictures, reads_images, rope_positions, tower_modules, with_pictures
from rl_backends_hf.quantized import is_quantized, num_weights
from rl_backends_hf.scoring.model_inputs import packed_input, shared_input
from rl_backends_hf.scoring.probe import probe_scoring
from rl_backends_hf.scoring.scoring_model import ScoringModel, ValueScoring, scalar_head
from rl_backends_hf.scoring.token_scoring import TokenScoring
from rl_backends_hf.static_checks import check_combinations
from rl_backends_hf.training.lora import LoraAdapters
from rl_backends_hf.training.prefix_support import SUPPORTED, use_varlen_if_plain, why_not_shared
from rl_backends_hf.transformers_internals import attention_of
from rl_backends_hf.varlen_attention import VARLEN
from rl_backends_hf.weights_folder import ExportedWeights, WholeModel
from rl_core.backend import (
    BatchedDataDict,
    GlobalCounts,
    Head,
    RefitManifest,
    StepResult,
    WorkerContext,
    find_tokenizer,
    return_freed_memory,
)
from rl_core.errors import ConfigError, NotSupportedError, UserError, with_key
from rl_core.interfaces.policy import LossFunction
from rl_core.interfaces.worker_context import halved

_log = logging.getLogger(__name__)
_KEY: Final = "policy.hf_cfg.compile_layers"


class HFPolicyWorker(TorchPolicyWorker[HFPolicyConfig]):
    """One rank of a policy on Transformers.

    Args:
        context: rank, rendezvous address and device.
        config: the section `policy`.
    """

    model: ScoringModel

    def __init__(self, context: WorkerContext, config: HFPolicyConfig) -> None:
        super().__init__(context, config)
        self._adapters: LoraAdapters | None = None
        self._sampler: Any = None

    def join(self) -> Parallel:
        hf = self.config.hf_cfg
        check_combinations(hf, dtype_name=self.config.dtype_name, head=self.config.head, ranks=self.context.world_size)
        join_ranks(self.context, timeout_s=hf.distributed_timeout_s)
        if self.context.world_size == 1 or hf.data_parallel == "replicate":
            return Parallel(self.context)
        shards, prefetched = hf.fsdp_num_shards, hf.fsdp_prefetched_layers
        with with_key("fsdp_num_shards"):
            return FullyShard(self.context, compute_dtype=self.dtype, num_shards=shards, prefetched_layers=prefetched)

    def build(self) -> ScoringModel:
        hf, head = self.config.hf_cfg, self.config.head
        scoring = self._load_scoring()
        model = scoring.model
        freeze_modules(model, hf.freeze)
        use_cpu_sdpa(model)
        if (problem := length_dependent_rope(model, self.config.max_total_sequence_length)) is not None:
            raise ConfigError(f"`policy.max_total_sequence_length`: {problem}", key="policy.max_total_sequence_length")
        if hf.device_map is not None:
            # Tokens go to the device on which the map has placed the embeddings.
            self.parallel.device = model.get_input_embeddings().weight.device
        self._products = CpuProducts.of(hf.cpu_products, self.dtype, self.device, model=None if hf.compile_layers else model)
        self._quantized = is_quantized(model)
        self._num_parameters = num_weights(model)
        if hf.lora is not None:
            engine = self.config.generation
            merged = engine is None or engine.lora != "adapter"
            if not merged and (reason := self.config.adapter_problem) is not None:
                raise NotSupportedError(
                    f"`policy.generation.lora: adapter` cannot be used: {reason}. Set it to merged.",
                    key="policy.generation.lora",
                )
            self._adapters = LoraAdapters(model, hf.lora, base=self.config.model_name, head=head, exports_merged=merged)
            if hf.lora.adapter_path is not None:
                self._adapters.start_from(hf.lora)
            scoring.autocast = self.dtype if hf.lora.autocast else None
        self._exported: ExportedWeights = self._adapters or WholeModel(
            model, dtype=self.dtype, head=head, name=self.config.model_name
        )
        self._names = CheckpointNames(model, {name: shape for name, (shape, _) in self._exported.manifest().items()})
        flash = hf.attn_implementation == "flash_attention_2" and self.device.type == "cuda"
        self._varlen_kernel = "flash_attention_2" if flash else None
        if use_varlen_if_plain(scoring, packing=self.config.sequence_packing.enabled, computed_in=self.dtype):
            self._varlen_kernel = VARLEN
        if hf.compile_layers:
            compile_layers(model, float32_products=self._products.in_float32)
        elif self.device.type == "cpu":
            _return_memory_after_layers(model)
        self._unshared = self._probe_scoring(scoring)
        if self.config.activation_checkpointing:
            checkpoint_activations(model)
        return scoring

    def place(self) -> None:
        """Do nothing: `build` has placed the model."""

    def facts(self) -> Mapping[str, Any]:
        return {
            "num_parameters": self._num_parameters,
            "vocab_size": self.model.vocab_size,
            "images": reads_images(self.model.model),
            "shared_prefix": self._unshared is None,
            "shared_prefix_reason": self._unshared or SUPPORTED,
            "matrix_sizes": matrix_sizes(self.model.model),
        }

    def _load_scoring(self) -> ScoringModel:
        """The model, distributed over the ranks; sets `exact_weights` if master weights will be more precise than it is."""
        hf, name = self.config.hf_cfg, self.config.model_name
        source: dict[str, Any] = {"options": hf, "head": self.config.head}
        trains_all_weights = hf.lora is None and not self.config.frozen
        if isinstance(self.parallel, FullyShard):
            # Shards are float32 master weights themselves, and are rounded when they are gathered.
            dtype = torch.float32 if trains_all_weights else self.dtype
            source |= {"dtype": dtype, "trainable": hf.lora is None, "offloads": False}
            return load_sharded(name, self._make_scoring, parallel=self.parallel, **source)
        source |= {"dtype": self.dtype, "device": self.device}
        if trains_all_weights and self.dtype != torch.float32 and hf.quantized_by is None:
            model, self.exact_weights = load_model_with_exact_weights(name, **source)
            return self._make_scoring(model)
        return self._make_scoring(load_model(name, **source))

    def _make_scoring(self, model: PreTrainedModel) -> ScoringModel:
        if self.device.type == "cpu" and self.dtype == torch.bfloat16:
            # Compiled layers sum in float32.
            kinds = nn.Embedding if self.config.hf_cfg.compile_layers else (nn.Embedding, nn.LayerNorm)
            sum_gradients_in_float32(module for module in model.modules() if isinstance(module, kinds))
        if self.config.head == "scalar":
            return ValueScoring(model)
        return TokenScoring(
            model,
            chunk_tokens=self.config.hf_cfg.logprob_chunk_tokens,
            temperature=self.config.scoring_temperature,
            vocab_size=self.config.vocab_size,
        )

    def _probe_scoring(self, scoring: ScoringModel) -> str | None:
        """Check the model on a test input; why rows cannot share a prefix, or None if they can."""
        with explaining_compilation(scoring.model):
            probe_scoring(
                scoring,
                device=self.device,
                packing=self.config.sequence_packing.enabled,
                variable_length_kernel=self._varlen_kernel,
                computed_in=self.dtype,
            )
            return why_not_shared(scoring, self.config, device=self.device, computed_in=self.dtype)

    @property
    def trained_module(self) -> nn.Module:
        module: nn.Module = self.model.model
        return module

    @property
    def trained_dtype(self) -> torch.dtype:
        # Adapters are float32 with a base of any dtype, and are saved unrounded.
        return self.dtype if self._adapters is None else torch.float32

    def weight_shard(self) -> str:
        return super().weight_shard() if self._adapters is None else ""

    def make_state(self) -> TrainingStateBase | None:
        return None if self._quantized and self._adapters is None else super().make_state()

    def trainable_state(self) -> TrainingStateBase:
        if self.state is None and not self.config.frozen:
            raise NotSupportedError(
                f"{self.config.model_name} was loaded with quantized weights (load_in_8bit or load_in_4bit), and this policy "
                "trains all weights, but quantized weights have no gradients. Train adapters (`hf_cfg.lora: {}`), or load it "
                "without quantization, with `precision: bfloat16` to save memory.",
                key="hf_cfg",
            )
        return super().trainable_state()

    def form(self, rows: MicrobatchRows) -> ScoringInput:
        if rows.images is not None:
            model, images = self.model.model, [image for each in rows.images for image in each or ()]
            pictures = Pictures.of(images)
            ids = pictures.mark(rows.input_ids, rows.images)
            positions = rope_positions(model, ids, rows.lengths, rows.images)
            inputs = self._lay_out(replace(rows, input_ids=ids), positions=positions)
            return with_pictures(inputs, pictures, placeholder_id=images[0].placeholder_id)
        return self._lay_out(rows)

    def _lay_out(self, rows: MicrobatchRows, **how: Any) -> ScoringInput:
        ids, lengths = rows.input_ids, rows.lengths
        how |= {"device": self.device, "shift": int(self.config.head == "tokens"), "mask": rows.mask}
        if self._unshared is None and rows.prompt_ids is not None:
            return shared_input(ids, lengths, rows.prompt_ids, **how)
        if not self.config.sequence_packing.enabled:
            return padded_input(ids, lengths, **how)
        multiple = self.config.sequence_packing.sequence_length_pad_multiple
        return packed_input(ids, lengths, pad_multiple=multiple, variable_length_kernel=self._varlen_kernel, **how)

    def score(self, inputs: ScoringInput) -> torch.Tensor:
        return self.model.score(inputs)

    def score_topk(self, inputs: ScoringInput, k: int) -> Mapping[str, torch.Tensor]:
        assert isinstance(self.model, TokenScoring)
        return self.model.score_topk(inputs, k)

    def score_microbatches(
        self, microbatches: Iterator[BatchedDataDict[Any]], *, topk: int | None = None, reference: bool = False
    ) -> Sequence[Mapping[str, torch.Tensor]]:
        with self._products():
            return super().score_microbatches(microbatches, topk=topk, reference=reference)

    def train_step(
        self, microbatches: Iterator[BatchedDataDict[Any]], loss_fn: LossFunction, counts: GlobalCounts, *, eval_mode: bool
    ) -> StepResult:
        with self._products():
            return super().train_step(microbatches, loss_fn, counts, eval_mode=eval_mode)

    @contextmanager
    def reference_model(self) -> Iterator[nn.Module]:
        self.require_reference(self.config.hf_cfg.reference, key="policy.hf_cfg.reference")
        if self._adapters is None:
            with super().reference_model() as model:
                yield model
        else:  # the policy's own model, without its adapters
            self.move(weights=self.device)
            with self._adapters.disabled():
                yield self.model

    def build_reference(self) -> ScoringModel:
        hf, name = self.config.hf_cfg, self.config.model_name
        source: dict[str, Any] = {"options": hf, "dtype": self.dtype}
        if isinstance(self.parallel, FullyShard):
            scoring = load_sharded(name, self._make_scoring, parallel=self.parallel, trainable=False, **source)
        else:
            scoring = self._make_scoring(load_model(name, device="cpu", **source)).requires_grad_(False)
        if self.device.type == "cpu":
            use_cpu_sdpa(scoring.model)
        else:
            # The rows are laid out for the policy's attention.
            scoring.model.set_attn_implementation(attention_of(self.model.model))
        if hf.compile_layers:
            compile_layers(scoring.model, float32_products=False)
        return scoring

    def move(self, *, weights: torch.device, state: torch.device | None = None) -> None:
        # Quantized weights and those of a device map are placed when they are loaded, and stay there.
        if self.config.hf_cfg.device_map is None and not self._quantized:
            super().move(weights=weights, state=state)

    def phase_keys(self, doing: str) -> list[str]:
        hf, keys = self.config.hf_cfg, []
        if doing == "training" and not self.config.activation_checkpointing:
            keys.append("set `activation_checkpointing: true`")
        if doing in ("training", "scoring"):
            keys += halved("hf_cfg.logprob_chunk_tokens", hf.logprob_chunk_tokens, 64)
        elif doing == "sampling":
            keys += halved("generation.hf_cfg.max_batch_rows", self.config.own_sampler.hf_cfg.max_batch_rows)
        return keys

    def size_keys(self, doing: str) -> list[str]:
        hf, keys = self.config.hf_cfg, []
        if hf.lora is None and not self.config.frozen:
            keys.append("train adapters (`hf_cfg.lora: {}`)")
        if hf.data_parallel != "fsdp2":
            keys.append("shard the model over several ranks (`hf_cfg.data_parallel: fsdp2`)")
        return keys + (super().size_keys(doing) if doing == "loading" else [])

    def sample(self, data: BatchedDataDict[Any], *, greedy: bool) -> BatchedDataDict[Any]:
        from rl_backends_hf.sampling.sampler import Sampler

        if self.parallel.shards:
            raise NotSupportedError(
                "With `data_parallel: fsdp2` on several ranks, each rank has only shards of the weights and cannot sample. "
                "Set a generation backend in `policy.generation`, or use `data_parallel: replicate`.",
                key="data_parallel",
            )
        self.move(weights=self.device)
        if self._sampler is None:
            section = self.config.own_sampler.for_policy(self.config)
            self._sampler = Sampler(
                self.model.model,
                section,
                tokenizer=self.find_tokenizer(),
                seed=section.hf_cfg.seed,
                rank=self.context.rank,
            )
        # Keys and values grow with each token, for which compiled layers would be compiled again.
        with torch.compiler.set_stance("force_eager"):
            completions: BatchedDataDict[Any] = self._sampler.generate(data, greedy, weight_version=self.get_weight_version())
        return completions

    def save_weights(self, folder: Path) -> None:
        self._exportable().save(folder, rank=self.context.rank)

    def try_save(self, weights_path: Path) -> None:
        if self.context.rank == 0:
            self._exportable().save_config(Path(weights_path))

    def _exportable(self) -> ExportedWeights:
        if self._quantized and self._adapters is None:
            raise NotSupportedError(
                f"The weights of {self.config.model_name} are quantized: they cannot be trained, so there is nothing to save. "
                "Remove load_in_8bit or load_in_4bit from `hf_cfg` to save them.",
                key="hf_cfg",
            )
        return self._exported

    def load_weights(self, folder: Path) -> None:
        self.trainable_state()
        self._exported.load(folder)

    def find_tokenizer(self) -> Any:
        trust_remote_code = self.config.hf_cfg.trust_remote_code
        return find_tokenizer(self.config.model_name, self.config.tokenizer, trust_remote_code=trust_remote_code)

    def weight_manifest(self) -> RefitManifest:
        return self._names.manifest(self._exported.manifest())

    def iter_weights(self, names: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        holders = None if names is None else self._names.containers(names)
        return self._names.split(self._exported.iter_weights(holders), names)


def _return_memory_after_layers(model: PreTrainedModel) -> None:
    """Let each decoder layer, when it ends in a training pass, return what it has freed.

    That lies between what is kept for the backward pass, and the next layers' tensors rarely fit there.
    """

    def after_layer(*_: object) -> None:
        if torch.is_grad_enabled():
            return_freed_memory()

    for layer in decoder_layers(model):
        layer.register_forward_hook(after_layer)


def load_sharded(
    name: str,
    make_scoring: Callable[[PreTrainedModel], ScoringModel],
    *,
    parallel: FullyShard,
    options: HFModelConfig,
    dtype: torch.dtype,
    head: Head = "tokens",
    trainable: bool = True,
    offloads: bool = True,
) -> ScoringModel:
    """A model of which each rank has its shards, and has read no other weights.

    A warning is logged if each rank must read the whole model into CPU memory; see `why_read_whole`.

    Args:
        name: as in `load_model`.
        make_scoring: adds the head to a model.
        parallel: the ranks.
        options: how to load it.
        dtype: of the shards.
        head: head type.
        trainable: as in `FullyShard.distribute`. The scalar head of a frozen model is not sharded, because it is trained.
        offloads: as in `FullyShard.distribute`.

    Raises:
        UserError: as `load_model_shards`.
    """
    made: list[ScoringModel] = []

    def shard(model: PreTrainedModel) -> None:
        made.append(make_scoring(model))
        scoring = made[0]
        scoring.tower = tower_modules(model) if trainable else ()
        parallel.distribute(
            scoring,
            decoder_layers(model),
            trainable=trainable,
            offloads=offloads,
            unsharded=[*scalar_head(model).parameters()] if head == "scalar" and not trainable else [],
            forward_methods=scoring.extra_forward_methods,
        )

    empty = model_without_weights(name, options=options, head=head)
    why = "it is a GGUF file" if is_gguf(name) else why_read_whole(empty, parallel.num_shards)
    if why is None:
        load_model_shards(name, type(empty), options=options, dtype=dtype, head=head, shard=shard)
    else:
        _log.warning("Each rank reads all weights of %s into CPU memory before it keeps its shards: %s.", name, why)
        shard(load_model(name, options=options, dtype=dtype, head=head))
    (scoring,) = made
    if trainable or not offloads:
        return scoring.to(parallel.device)
    for buffer in scoring.buffers():
        buffer.data = buffer.to(parallel.device)
    return scoring


def compile_layers(model: PreTrainedModel, *, float32_products: bool) -> None:
    """Compile each decoder layer when it is first called, once for all lengths.

    Args:
        model: the model.
        float32_products: whether products of bfloat16 matrices are replaced.

    Raises:
        NotSupportedError: the model's class does not name its layers.
        UserError: products are replaced.
    """
    if float32_products:
        raise UserError(
            "`compile_layers` has no effect on a CPU that multiplies bfloat16 matrices in float32 (`cpu_products`): torch does "
            "not compile replaced products. Remove it, or set `policy.precision: float32`.",
            key=_KEY,
        )
    layers = decoder_layers(model)
    if not layers:
        raise NotSupportedError(
            f"{type(model).__name__} does not name its decoder layers in Transformers, so they cannot be compiled. Set "
            f"`{_KEY}: false`.",
            key=_KEY,
        )
    for layer in layers:
        layer.compile(dynamic=True)


@contextmanager
def explaining_compilation(model: PreTrainedModel) -> Iterator[None]:
    """Raise a `UserError` if the layers of `model` cannot be compiled while the block calls them."""
    try:
        yield
    except compile_error() as error:
        raise UserError(
            f"The layers of {type(model).__name__} cannot be compiled on {model.device}: {str(error).strip().splitlines()[0]} "
            f"Compiling requires a C++ compiler on a CPU and Triton on a GPU. Install it, or set `{_KEY}: false`.",
            key=_KEY,
        ) from error
