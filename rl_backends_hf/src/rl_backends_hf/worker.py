"""One rank of the Transformers policy: scores, steps, saves and hands on its weights; knows no other rank's rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from rl_backends_hf.config import HFGenerationConfig, HFPolicyConfig
from rl_backends_hf.lora import LoraAdapters
from rl_backends_hf.master_weights import MasterWeights
from rl_backends_hf.microbatches import Microbatcher
from rl_backends_hf.model import DTYPES, checkpoint_activations, is_quantized, load_model, load_model_with_exact_weights
from rl_backends_hf.optimizer import build_optimizer
from rl_backends_hf.parallel import Parallel, make_parallel
from rl_backends_hf.probe import probe_scoring
from rl_backends_hf.reference import FrozenBase, Reference, ReferencePolicy
from rl_backends_hf.scalar_head import ValueScoring
from rl_backends_hf.scoring import ScoringInput, ScoringModel
from rl_backends_hf.step import optimizer_step
from rl_backends_hf.token_scoring import TokenScoring
from rl_backends_hf.training_state import TrainingState
from rl_backends_hf.weights_folder import ExportedWeights, WholeModel, find_tokenizer, save_tokenizer
from rl_core.config.schema import GenerationConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import CheckpointError, NotSupportedError, UserError
from rl_core.interfaces.loss import LossFunction
from rl_core.interfaces.policy import RefitManifest
from rl_core.interfaces.worker import GlobalCounts, PolicyWorker, StepResult
from rl_core.interfaces.worker_context import WorkerContext
from rl_core.training.finite import first_non_finite
from rl_core.training.optimizer_settings import OptimizerSettings
from rl_core.weights.checkpoint_names import CheckpointNames
from rl_core.weights.source import WeightSource

_CPU = torch.device("cpu")
_Told = Callable[[ScoringInput], Mapping[str, torch.Tensor]]
_log = logging.getLogger(__name__)


class HFPolicyWorker(WeightSource, PolicyWorker):
    """One rank of a policy on Transformers.

    Args:
        context: rank, meeting point and device.
        config: the section `policy`.
    """

    def __init__(self, context: WorkerContext, config: HFPolicyConfig) -> None:
        self.context = context
        self._config = config
        self._dtype = DTYPES[config.precision]
        self._temperature = config.scoring_temperature
        self._reference: Reference | None = None
        self._adapters: LoraAdapters | None = None
        self._state: TrainingState | None = None
        self._sampler: Any = None
        self._exact_weights: dict[str, torch.Tensor] = {}

    def setup(self) -> Mapping[str, Any]:
        self._check_config()
        if not self.context.run_in_process:
            torch.set_num_threads(self.context.num_threads)
        hf = self._config.hf_cfg
        self._parallel: Parallel = make_parallel(self.context, hf.data_parallel, dtype=self._dtype)
        head = self._config.head
        # Shards are float32 masters themselves, and rounded as they are gathered.
        keeps_masters = self._parallel.shards and hf.lora is None and not self._config.frozen
        loaded_as = torch.float32 if keeps_masters else self._dtype
        rounds_masters = hf.lora is None and not self._config.frozen and loaded_as != torch.float32
        source: dict[str, Any] = {"options": hf, "dtype": loaded_as, "device": self._parallel.device, "head": head}
        if rounds_masters and not (hf.load_in_8bit or hf.load_in_4bit):
            model, self._exact_weights = load_model_with_exact_weights(self._config.model_name, **source)
        else:
            model = load_model(self._config.model_name, **source)
        if hf.device_map is not None:
            # Tokens go to where the map has put their embeddings.
            self._parallel.device = model.get_input_embeddings().weight.device
        device = self._parallel.device
        _warn_of_slow_type(self._dtype, device)
        self._microbatcher = Microbatcher(self._config, device=device)
        self._quantised = is_quantized(model)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        if hf.lora is not None:
            self._adapters = LoraAdapters(model, hf.lora, base=self._config.model_name, head=head)
        self._exported: ExportedWeights = self._adapters or WholeModel(model, dtype=self._dtype, head=head)
        self._names = CheckpointNames(model, {name: shape for name, (shape, _) in self._exported.manifest().items()})
        self._scoring = self._make_scoring(model)
        num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        # Flash attention takes no float32; masters that will be shards are rounded for it only once they are gathered.
        rounded = self._dtype if self._microbatcher.variable_length_kernel else model.dtype
        with torch.autocast(device.type, dtype=rounded, enabled=rounded != model.dtype):
            probe_scoring(
                self._scoring,
                device=device,
                packing=self._microbatcher.packing,
                variable_length_kernel=self._microbatcher.variable_length_kernel,
                computed_in=rounded,
            )
        if self._config.activation_checkpointing:
            checkpoint_activations(model)
        self._parallel.distribute(self._scoring)
        self._is_trained = not (self._quantised or self._config.frozen)
        if self._is_trained:
            self._state = self._make_state()
        return {
            "num_parameters": num_parameters,
            "num_trained_parameters": num_trained if self._is_trained else 0,
            "device": str(device),
            "vocab_size": self._scoring.vocab_size,
        }

    def get_logprobs(self, data: BatchedDataDict[Any], *, reference: bool = False) -> BatchedDataDict[Any]:
        if reference:
            reference_policy = self._reference_policy()
            if self._adapters is not None:
                self._bring(weights=self._parallel.device)
            with reference_policy.on_device() as scoring:
                return self._score(scoring, data)
        return self._score_now(data)

    def get_topk_logprobs(self, data: BatchedDataDict[Any], *, k: int) -> BatchedDataDict[Any]:
        scoring = self._scoring
        assert isinstance(scoring, TokenScoring)
        return self._score_now(data, lambda microbatch: scoring.score_topk(microbatch, k))

    def get_values(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        return self._score_now(data)

    def _score_now(self, data: BatchedDataDict[Any], told: _Told | None = None) -> BatchedDataDict[Any]:
        """What the present weights say."""
        self._bring(weights=self._parallel.device)
        try:
            with torch.no_grad():
                return self._score(self._scoring.eval(), data, told)
        finally:
            self._parallel.after_forward(self._scoring)

    def _score(self, scoring: ScoringModel, data: BatchedDataDict[Any], told: _Told | None = None) -> BatchedDataDict[Any]:
        """What is told of each microbatch, put together; the model's own numbers by default."""
        told = told or (lambda microbatch: {scoring.column: scoring.score(microbatch)})
        columns: BatchedDataDict[Any] = BatchedDataDict({key: data[key] for key in ("input_ids", "input_lengths")})
        columns.micro_batch_indices, columns.micro_batch_lengths = data.micro_batch_indices, data.micro_batch_lengths
        parts = [
            told(self._microbatcher.form(microbatch, training=False))
            for microbatch in self._microbatcher.split(columns, rows=self._config.logprob_batch_size)
        ]
        width = data["input_ids"].shape[1]
        return BatchedDataDict({name: _rows_on_cpu([part[name] for part in parts], width=width) for name in parts[0]})

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        *,
        counts: Sequence[GlobalCounts],
        eval_mode: bool = False,
        mbs: int | None = None,
    ) -> list[StepResult]:
        self._bring(weights=self._parallel.device, state=self._parallel.device)
        rows = max(1, data.size // len(counts))
        results = []
        for number, count in enumerate(counts):
            batch = data.get_batch(number, rows)
            microbatches = self._microbatcher.split(batch, rows=mbs or self._config.train_micro_batch_size)
            result = optimizer_step(
                self._scoring,
                (self._to_train(microbatch, loss_fn) for microbatch in microbatches),
                loss_fn,
                count,
                state=None if eval_mode else self._trainable(),
                parallel=self._parallel,
                max_grad_norm=self._config.max_grad_norm,
            )
            results.append(result)
        return results

    def _to_train(self, microbatch: BatchedDataDict[Any], loss_fn: LossFunction) -> tuple[ScoringInput, BatchedDataDict[Any]]:
        """A microbatch as the model reads it and as the loss sees it."""
        formed = self._microbatcher.form(microbatch, training=True, candidates_key=loss_fn.candidates_key)
        return formed, microbatch.to(self._parallel.device)

    def generate(self, data: BatchedDataDict[Any], *, greedy: bool = False) -> BatchedDataDict[Any]:
        from rl_backends_hf.sampler import Sampler, SamplerSettings

        self._refuse_scalar_head("samples nothing")
        if self._parallel.shards:
            raise NotSupportedError(
                "A policy with `data_parallel: fsdp2` on several ranks has its weights in shards and does not sample. "
                "Name a generation backend under `policy.generation`, or use `data_parallel: replicate`."
            )
        self._bring(weights=self._parallel.device)
        if self._sampler is None:
            given = self._config.generation
            section = given if isinstance(given, HFGenerationConfig) else _as_hf(given)
            settings = SamplerSettings.from_config(section, max_model_len=self._config.max_total_sequence_length)
            self._sampler = Sampler(self._scoring.model, settings=settings, tokenizer=find_tokenizer(self._config))
        answer: BatchedDataDict[Any] = self._sampler.generate(data, greedy, weight_version=self.get_weight_version())
        return answer

    def prepare_for_training(self) -> None:
        self._bring(weights=self._parallel.device, state=self._parallel.device)

    def finish_training(self) -> None:
        self._drop_gradients()

    def offload_before_refit(self) -> None:
        """Gradients are freed, and optimizer state leaves the device; the weights stay, to be sent."""
        self._drop_gradients()
        self._bring(weights=self._parallel.device, state=_CPU)

    def offload_after_refit(self) -> None:
        """The weights leave the device as well."""
        self._bring(weights=_CPU, state=_CPU)

    def save_checkpoint(self, weights_path: Path, optimizer_path: Path | None) -> None:
        if self._quantised:
            raise NotSupportedError(f"The quantised weights of {self._config.model_name} never change and are not saved.")
        self._exported.save(Path(weights_path), rank=self.context.rank)
        if optimizer_path is not None:
            self._trainable().save(Path(optimizer_path), rank=self.context.rank, world_size=self.context.world_size)
        if self.context.rank == 0:
            save_tokenizer(self._config, Path(weights_path))
        self._parallel.barrier()

    def find_non_finite(self) -> str | None:
        trained = ((name, each) for name, each in self._scoring.model.named_parameters() if each.requires_grad)
        rounded = self._dtype if self._adapters is None else None
        in_weights = first_non_finite(trained, published=rounded)
        return in_weights if in_weights or self._state is None else self._state.find_non_finite()

    def load_checkpoint(self, weights_path: Path, optimizer_path: Path | None) -> None:
        state = self._trainable()
        if optimizer_path is not None and not Path(optimizer_path).is_dir():
            raise CheckpointError(f"{optimizer_path} does not exist, so there is no training state to go on from.")
        self._exported.load(Path(weights_path))
        state.masters.copy_from_model()
        if optimizer_path is not None:
            state.load(Path(optimizer_path), rank=self.context.rank, world_size=self.context.world_size)

    def get_weight_version(self) -> int:
        return self._state.weight_version if self._state is not None else 0

    def prepare_refit_info(self) -> dict[str, Any]:
        self._refuse_scalar_head("has no weights for an engine")
        return super().prepare_refit_info()

    def weight_manifest(self) -> RefitManifest:
        return self._names.manifest(self._exported.manifest())

    def iter_weights(self, names: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        holders = None if names is None else self._names.holders(names)
        return self._names.apart(self._exported.iter_weights(holders), names)

    def shutdown(self) -> None:
        self.leave_refit()
        if self.context.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _check_config(self) -> None:
        """Refuse what cannot go together, before anything is loaded."""
        hf, ranks = self._config.hf_cfg, self.context.world_size
        if ranks > 1 and hf.device_map is not None:
            raise UserError(
                f"`device_map: {hf.device_map}` spreads one model over devices, and {ranks} ranks have one device each. "
                "Leave device_map out; `data_parallel: fsdp2` shards a model that is too large for one device."
            )
        if ranks > 1 and hf.data_parallel == "fsdp2" and (hf.load_in_8bit or hf.load_in_4bit):
            raise UserError(
                "Quantised weights cannot be sharded by FSDP2: leave load_in_8bit and load_in_4bit out, or use "
                "`data_parallel: replicate`."
            )

        if hf.attn_implementation == "flash_attention_2" and self._dtype == torch.float32:
            raise UserError(
                "`attn_implementation: flash_attention_2` computes in bfloat16, and `policy.precision` is float32. Set it to "
                "bfloat16, or leave attn_implementation out: `sdpa` takes both."
            )
        if self._config.head == "scalar" and (hf.load_in_8bit or hf.load_in_4bit):
            raise UserError(
                "A model with a scalar head is there to be trained, and quantised weights cannot be: leave load_in_8bit and "
                "load_in_4bit out; `precision: bfloat16` halves the memory of float32."
            )

    def _refuse_scalar_head(self, why: str) -> None:
        if self._config.head == "scalar":
            raise NotSupportedError(
                f"{self._config.model_name} ends in a scalar head (`head: scalar`), so it {why}: it gives values alone. Set "
                "`head: tokens` in its section for a policy."
            )

    def _make_scoring(self, model: PreTrainedModel) -> ScoringModel:
        if self._config.head == "scalar":
            return ValueScoring(model)
        return TokenScoring(model, chunk_tokens=self._config.hf_cfg.logprob_chunk_tokens, temperature=self._temperature)

    def _make_state(self) -> TrainingState:
        # Adapters are float32 beside a base of any type, and saved as they are: nothing of them is rounded.
        published = self._dtype if self._adapters is None else torch.float32
        masters = MasterWeights(self._scoring.model, model_dtype=published)
        if self._adapters is None and masters.are_copies:
            masters.load_exact(self._exact_weights)
        self._exact_weights = {}
        optimizer = build_optimizer(masters.parameters, self._config.optimizer)
        settings = OptimizerSettings(optimizer, self._config.optimizer, self._config.scheduler)
        return TrainingState(masters=masters, settings=settings)

    def _trainable(self) -> TrainingState:
        if self._config.frozen:
            raise NotSupportedError(
                f"{self._config.model_name} is frozen (`frozen: true` in its section): it scores, and takes no step. Leave "
                "`frozen` out to train it."
            )
        if self._state is None:
            raise NotSupportedError(
                f"{self._config.model_name} was loaded with quantised weights (load_in_8bit or load_in_4bit), and this "
                "policy trains all weights: rounded integers cannot take a gradient step. Load it without quantisation, with "
                "`precision: bfloat16` to save memory; scoring and sampling work as it is."
            )
        return self._state

    def _reference_policy(self) -> Reference:
        if not self._config.hf_cfg.reference:
            raise NotSupportedError(
                "This policy has no reference: `policy.hf_cfg.reference` is false. Set it to true, or use a loss without a "
                "KL term against the reference policy."
            )
        if self._reference is None and self._adapters is not None:
            self._reference = FrozenBase(self._scoring, self._adapters)
        if self._reference is None:
            self._reference = ReferencePolicy(self._config, self._parallel, temperature=self._temperature)
        return self._reference

    def _bring(self, *, weights: torch.device, state: torch.device | None = None) -> None:
        """Move weights, and optimizer state where it is named, between the device and CPU memory."""
        # Quantised weights are placed when they are loaded, as a device map's are, and stay there.
        if self._parallel.device == _CPU or self._config.hf_cfg.device_map is not None or self._quantised:
            return
        if next(self._scoring.parameters()).device != weights:
            self._scoring.to(weights)
        if state is not None and self._state is not None:
            self._state.move(state)
        if _CPU in (weights, state):
            # What torch keeps for itself the engine on the same GPU cannot have.
            torch.cuda.empty_cache()

    def _drop_gradients(self) -> None:
        if self._state is not None:
            self._state.masters.clear_gradients()


def _warn_of_slow_type(dtype: torch.dtype, device: torch.device) -> None:
    # Without instructions of its own, bfloat16 falls back to a plain loop: a hundred times slower, not twice as fast.
    if dtype == torch.bfloat16 and device == _CPU and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        _log.warning(
            "This CPU (%s) has no bfloat16 instructions, so `precision: bfloat16` will be many times slower than float32. "
            "Set `policy.precision: float32`, unless memory forbids it.",
            torch.backends.cpu.get_cpu_capability(),
        )


def _rows_on_cpu(parts: Sequence[torch.Tensor], *, width: int) -> torch.Tensor:
    """The rows of all microbatches [b, T', ...], right-padded with 0 to `width`."""
    shape = (sum(len(part) for part in parts), width, *parts[0].shape[2:])
    rows = torch.zeros(shape, dtype=parts[0].dtype)
    start = 0
    for part in parts:
        rows[start : start + len(part), : part.shape[1]] = part.to("cpu")
        start += len(part)
    return rows


def _as_hf(section: GenerationConfig | None) -> HFGenerationConfig:
    """How this policy samples by itself where `policy.generation` names another backend, or nothing."""
    shared = set(GenerationConfig.model_fields) - {"backend"}
    values = {key: getattr(section, key) for key in shared} if section is not None else {}
    return HFGenerationConfig(**values)
