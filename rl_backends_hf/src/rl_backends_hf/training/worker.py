"""One rank of the Transformers policy: scoring, optimizer steps, checkpoints, and weights for engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rl_backends_base import OptimizerSettings, PolicyWorkerBase
from rl_backends_hf.config import HFPolicyConfig, policy_advice
from rl_backends_hf.cpu_attention import use_cpu_sdpa
from rl_backends_hf.cpu_products import CpuProducts
from rl_backends_hf.matrix_sizes import matrix_sizes
from rl_backends_hf.model import (
    DTYPES,
    checkpoint_activations,
    decoder_layers,
    is_quantized,
    length_dependent_rope,
    load_model,
    load_model_with_exact_weights,
)
from rl_backends_hf.parallel import Parallel, compile_layers, explaining_compilation, load_sharded, make_parallel
from rl_backends_hf.scoring.probe import probe_scoring
from rl_backends_hf.scoring.scoring_model import ScoringInput, ScoringModel, ValueScoring
from rl_backends_hf.scoring.token_scoring import TokenScoring
from rl_backends_hf.shards import local
from rl_backends_hf.static_checks import check_combinations
from rl_backends_hf.training.lora import LoraAdapters
from rl_backends_hf.training.optimizer import HostMemory, MasterWeights, build_optimizer
from rl_backends_hf.training.prefix_support import SUPPORTED, use_varlen_if_plain, why_not_shared
from rl_backends_hf.training.step import FrozenBase, Microbatcher, Reference, ReferencePolicy, optimizer_step
from rl_backends_hf.training.training_state import TrainingState
from rl_backends_hf.transformers_internals import attention_of
from rl_backends_hf.varlen_attention import VARLEN
from rl_backends_hf.weights_folder import ExportedWeights, WholeModel
from rl_core.backend import (
    BatchedDataDict,
    CheckpointNames,
    GlobalCounts,
    PolicyFacts,
    RefitManifest,
    StepResult,
    WorkerContext,
    find_tokenizer,
    first_non_finite,
    return_freed_memory,
)
from rl_core.errors import ConfigError, NotSupportedError
from rl_core.interfaces.policy import LossFunction
from rl_core.interfaces.worker_context import explaining_memory

_CPU = torch.device("cpu")


class HFPolicyWorker(PolicyWorkerBase[HFPolicyConfig]):
    """One rank of a policy on Transformers.

    Args:
        context: rank, rendezvous address and device.
        config: the section `policy`.
    """

    def __init__(self, context: WorkerContext, config: HFPolicyConfig) -> None:
        super().__init__(context, config)
        self._dtype = DTYPES[config.dtype_name]
        self._reference: Reference | None = None
        self._adapters: LoraAdapters | None = None
        self._state: TrainingState | None = None
        self._sampler: Any = None
        self._exact_weights: dict[str, torch.Tensor] = {}
        self._host_memory = HostMemory()

    def load(self) -> PolicyFacts:
        hf, head = self.config.hf_cfg, self.config.head
        check_combinations(hf, dtype_name=self.config.dtype_name, head=head, ranks=self.context.world_size)
        self._parallel: Parallel = make_parallel(self.context, hf, dtype=self._dtype)
        self._scoring = self._load_scoring()
        model = self._scoring.model
        use_cpu_sdpa(model)
        if (problem := length_dependent_rope(model, self.config.max_total_sequence_length)) is not None:
            raise ConfigError(f"`policy.max_total_sequence_length`: {problem}", key="policy.max_total_sequence_length")
        if hf.device_map is not None:
            # Tokens go to the device on which the map has placed the embeddings.
            self._parallel.device = model.get_input_embeddings().weight.device
        device = self._parallel.device
        self._products = CpuProducts.of(hf.cpu_products, self._dtype, device, model=None if hf.compile_layers else model)
        self._microbatcher = Microbatcher(self.config, device=device)
        self._quantized = is_quantized(model)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        if hf.lora is not None:
            self._adapters = LoraAdapters(model, hf.lora, base=self.config.model_name, head=head)
            self._scoring.autocast = self._dtype if hf.lora.autocast else None
        self._exported: ExportedWeights = self._adapters or WholeModel(
            model, dtype=self._dtype, head=head, name=self.config.model_name
        )
        self._names = CheckpointNames(model, {name: shape for name, (shape, _) in self._exported.manifest().items()})
        num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        if use_varlen_if_plain(self._scoring, packing=self._microbatcher.packing, computed_in=self._dtype):
            self._microbatcher.variable_length_kernel = VARLEN
        if hf.compile_layers:
            compile_layers(model, float32_products=self._products.in_float32)
        elif device.type == "cpu":
            _return_memory_after_layers(model)
        unshared = self._probe_scoring()
        self._microbatcher.shares_prefixes = unshared is None
        if self.config.activation_checkpointing:
            checkpoint_activations(model)
        if not (self._quantized or self.config.frozen):
            self._state = self._make_state()
        return {
            "num_parameters": num_parameters,
            "num_trained_parameters": num_trained if self._state is not None else 0,
            "device": str(device),
            "vocab_size": self._scoring.vocab_size,
            "shared_prefix": unshared is None,
            "shared_prefix_reason": unshared or SUPPORTED,
            "matrix_sizes": matrix_sizes(model),
            "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        }

    def _load_scoring(self) -> ScoringModel:
        """The model, distributed over the ranks; sets `_exact_weights` if master weights will be more precise than it is."""
        hf, name = self.config.hf_cfg, self.config.model_name
        source: dict[str, Any] = {"options": hf, "head": self.config.head}
        trains_all_weights = hf.lora is None and not self.config.frozen
        if self._parallel.shards:
            # Shards are float32 master weights themselves, and are rounded when they are gathered.
            dtype = torch.float32 if trains_all_weights else self._dtype
            return load_sharded(name, self._make_scoring, parallel=self._parallel, dtype=dtype, **source)
        source |= {"dtype": self._dtype, "device": self._parallel.device}
        if trains_all_weights and self._dtype != torch.float32 and not (hf.load_in_8bit or hf.load_in_4bit):
            model, self._exact_weights = load_model_with_exact_weights(name, **source)
        else:
            model = load_model(name, **source)
        scoring = self._make_scoring(model)
        self._parallel.distribute(scoring)
        return scoring

    def _probe_scoring(self) -> str | None:
        """Check the model on a test input; why rows cannot share a prefix, or None if they can."""
        device, microbatcher = self._parallel.device, self._microbatcher
        with explaining_compilation(self._scoring.model):
            probe_scoring(
                self._scoring,
                device=device,
                packing=microbatcher.packing,
                variable_length_kernel=microbatcher.variable_length_kernel,
                computed_in=self._dtype,
            )
            return why_not_shared(self._scoring, self.config, device=device, computed_in=self._dtype)

    def score_microbatches(
        self, microbatches: Iterator[BatchedDataDict[Any]], *, topk: int | None = None, reference: bool = False
    ) -> Sequence[Mapping[str, torch.Tensor]]:
        with self._scoring_model(reference=reference) as scoring, self._products():
            inputs = (self._microbatcher.form(each, training=False) for each in microbatches)
            if topk is None:
                return [{scoring.column: scoring.score(each)} for each in inputs]
            assert isinstance(scoring, TokenScoring)
            found = [scoring.score_topk(each, topk) for each in inputs]
            if self._parallel.device.type == "cuda":
                torch.cuda.synchronize(self._parallel.device)
            return found

    @contextmanager
    def _scoring_model(self, *, reference: bool) -> Iterator[ScoringModel]:
        """The policy or the reference, on the device and ready to score without gradients."""
        if reference:
            reference_policy = self._reference_policy()
            if self._adapters is not None:
                self._move(weights=self._parallel.device)
            with reference_policy.on_device() as scoring:
                yield scoring
            return
        self._move(weights=self._parallel.device)
        try:
            with torch.no_grad():
                yield self._scoring.eval()
        finally:
            self._parallel.after_forward(self._scoring)

    def train_step(
        self,
        microbatches: Iterator[BatchedDataDict[Any]],
        loss_fn: LossFunction,
        counts: GlobalCounts,
        *,
        eval_mode: bool,
    ) -> StepResult:
        with self._products():
            return optimizer_step(
                self._scoring,
                (self._training_input(microbatch, loss_fn) for microbatch in microbatches),
                loss_fn,
                counts,
                state=None if eval_mode else self._trainable_state(),
                parallel=self._parallel,
                max_grad_norm=self.config.max_grad_norm,
                stepping=explaining_memory(self, "the optimizer step"),
            )

    def tensors_by_kind(self) -> Mapping[str, Iterable[torch.Tensor]]:
        kinds: dict[str, Iterable[torch.Tensor]] = {}
        if hasattr(self, "_scoring"):
            kinds["weights"] = self._scoring.parameters()
        if self._state is not None:
            kinds["float32 master weights"] = self._state.masters.parameters.values()
            kinds["gradients"] = self._state.masters.gradients().values()
            kinds["optimizer state"] = self._state.tensors()
        return {kind: map(local, tensors) for kind, tensors in kinds.items()}

    def memory_advice(self, doing: str) -> str:
        return policy_advice(self.config, doing)

    def _training_input(
        self, microbatch: BatchedDataDict[Any], loss_fn: LossFunction
    ) -> tuple[ScoringInput, BatchedDataDict[Any]]:
        """The input of the model, and the microbatch for the loss."""
        inputs = self._microbatcher.form(microbatch, training=True, candidates_key=loss_fn.candidates_key)
        return inputs, microbatch.to(self._parallel.device)

    def sample(self, data: BatchedDataDict[Any], *, greedy: bool) -> BatchedDataDict[Any]:
        from rl_backends_hf.sampling.sampler import Sampler, SamplerSettings

        if self._parallel.shards:
            raise NotSupportedError(
                "With `data_parallel: fsdp2` on several ranks, each rank has only shards of the weights and cannot sample. "
                "Set a generation backend in `policy.generation`, or use `data_parallel: replicate`.",
                key="data_parallel",
            )
        self._move(weights=self._parallel.device)
        if self._sampler is None:
            section = self.config.own_sampler
            settings = SamplerSettings.from_config(section, max_model_len=self.config.max_total_sequence_length)
            self._sampler = Sampler(
                self._scoring.model,
                settings=settings,
                tokenizer=self.find_tokenizer(),
                seed=section.hf_cfg.seed,
                rank=self.context.rank,
            )
        # Keys and values grow with each token, for which compiled layers would be compiled again.
        with torch.compiler.set_stance("force_eager"):
            completions: BatchedDataDict[Any] = self._sampler.generate(data, greedy, weight_version=self.get_weight_version())
        return completions

    def prepare_for_training(self) -> None:
        self._move(weights=self._parallel.device, state=self._parallel.device)

    def finish_training(self) -> None:
        self._drop_gradients()

    def offload_before_refit(self) -> None:
        self._drop_gradients()
        self._move(weights=self._parallel.device, state=_CPU)

    def offload_after_refit(self) -> None:
        self._move(weights=_CPU, state=_CPU)

    def save_weights(self, folder: Path) -> None:
        self._exportable().save(folder, rank=self.context.rank)

    def try_save(self, weights_path: Path) -> None:
        if self.context.rank == 0:
            self._exportable().save_config(Path(weights_path))

    def _exportable(self) -> ExportedWeights:
        if self._quantized:
            raise NotSupportedError(
                f"The weights of {self.config.model_name} are quantized: they cannot be trained, so there is nothing to save. "
                "Remove load_in_8bit or load_in_4bit from `hf_cfg` to save them.",
                key="hf_cfg",
            )
        return self._exported

    def load_weights(self, folder: Path) -> None:
        state = self._trainable_state()
        self._exported.load(folder)
        state.masters.copy_from_model()

    def save_training_state(self, folder: Path) -> None:
        self._trainable_state().save(folder, rank=self.context.rank, world_size=self.context.world_size)

    def load_training_state(self, folder: Path) -> None:
        self._trainable_state().load(folder, rank=self.context.rank, world_size=self.context.world_size)

    def find_tokenizer(self) -> Any:
        trust_remote_code = self.config.hf_cfg.trust_remote_code
        return find_tokenizer(self.config.model_name, self.config.tokenizer, trust_remote_code=trust_remote_code)

    def find_non_finite(self) -> str | None:
        trained = ((name, each) for name, each in self._scoring.model.named_parameters() if each.requires_grad)
        in_weights = first_non_finite(trained, published=self._dtype if self._adapters is None else None)
        return in_weights if in_weights or self._state is None else self._state.find_non_finite()

    def trained_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        masters = self._state.masters.parameters if self._state is not None else {}
        return ((name, local(parameter)) for name, parameter in masters.items())

    def weight_shard(self) -> str:
        return f"shard {self.context.rank % self._parallel.num_shards}" if self._parallel.shards else ""

    def get_weight_version(self) -> int:
        return self._state.weight_version if self._state is not None else 0

    def weight_manifest(self) -> RefitManifest:
        return self._names.manifest(self._exported.manifest())

    def iter_weights(self, names: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        holders = None if names is None else self._names.containers(names)
        return self._names.split(self._exported.iter_weights(holders), names)

    def _make_scoring(self, model: PreTrainedModel) -> ScoringModel:
        if self.config.head == "scalar":
            return ValueScoring(model)
        return TokenScoring(
            model, chunk_tokens=self.config.hf_cfg.logprob_chunk_tokens, temperature=self.config.scoring_temperature
        )

    def _make_state(self) -> TrainingState:
        # Adapters are float32 with a base of any dtype, and are saved unrounded.
        model_dtype = self._dtype if self._adapters is None else torch.float32
        masters = MasterWeights(self._scoring.model, model_dtype=model_dtype)
        if self._adapters is None and masters.are_copies:
            masters.load_exact(self._exact_weights)
        self._exact_weights = {}
        optimizer = build_optimizer(masters.parameters, self.config.optimizer)
        settings = OptimizerSettings(optimizer, self.config.optimizer, self.config.scheduler)
        shards = self._parallel.num_shards
        return TrainingState(masters=masters, settings=settings, shard=(self.context.rank % shards, shards))

    def _trainable_state(self) -> TrainingState:
        self.require_trainable()
        if self._state is None:
            raise NotSupportedError(
                f"{self.config.model_name} was loaded with quantized weights (load_in_8bit or load_in_4bit), and this policy "
                "trains all weights, but quantized weights have no gradients. Load it without quantization, with "
                "`precision: bfloat16` to save memory. Scoring and sampling work with quantized weights.",
                key="precision",
            )
        return self._state

    def _reference_policy(self) -> Reference:
        if self._reference is None:
            self.require_reference(self.config.hf_cfg.reference, key="policy.hf_cfg.reference")
            if self._adapters is not None:
                self._reference = FrozenBase(self._scoring, self._adapters)
            else:
                attention, temperature = attention_of(self._scoring.model), self.config.scoring_temperature
                self._reference = ReferencePolicy(self.config, self._parallel, temperature=temperature, attention=attention)
        return self._reference

    def _move(self, *, weights: torch.device, state: torch.device | None = None) -> None:
        """Move the weights, and the optimizer state if `state` is given, between the device and CPU memory."""
        # Quantised weights and those of a device map are placed when they are loaded, and stay there.
        if self._parallel.device == _CPU or self.config.hf_cfg.device_map is not None or self._quantized:
            return
        if next(self._scoring.parameters()).device != weights:
            self._host_memory.move_module(self._scoring, weights)
        if state is not None and self._state is not None:
            self._state.move(state, self._host_memory)
        if _CPU in (weights, state):
            torch.cuda.current_stream().synchronize()
            # Memory in torch's cache is not available to an engine on the same GPU.
            torch.cuda.empty_cache()

    def _drop_gradients(self) -> None:
        if self._state is not None:
            self._state.masters.clear_gradients()


def _return_memory_after_layers(model: PreTrainedModel) -> None:
    """Let each decoder layer, when it ends in a training pass, return what it has freed.

    That lies between what is kept for the backward pass, and the next layers' tensors rarely fit there.
    """

    def after_layer(*_: object) -> None:
        if torch.is_grad_enabled():
            return_freed_memory()

    for layer in decoder_layers(model):
        layer.register_forward_hook(after_layer)
