"""One rank of the Megatron policy: scoring, optimizer steps, checkpoints, and weights for engines."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from rl_backends_base import PolicyWorkerBase
from rl_backends_megatron import training_state
from rl_backends_megatron.config import MegatronPolicyConfig, memory_advice
from rl_backends_megatron.cpu_shim import cpu_shim
from rl_backends_megatron.hf_folder import copy_generation_config, read_config, read_generation_config, write_folder
from rl_backends_megatron.loading import LoadedModel, ReferencePolicy, build_model
from rl_backends_megatron.model import DTYPES, is_tied, matrix_sizes
from rl_backends_megatron.model_inputs import Microbatcher, ModelInput, filler_microbatch
from rl_backends_megatron.optimizer import FrozenModel, Offloader, TrainableModel
from rl_backends_megatron.parallel import Ranks, join, leave
from rl_backends_megatron.scalar_head import describe_classifier
from rl_backends_megatron.scoring import LogprobHead, ValueHead, forward, make_head
from rl_backends_megatron.step import optimizer_step
from rl_core.backend import (
    BatchedDataDict,
    GlobalCounts,
    PolicyFacts,
    RefitManifest,
    StepResult,
    WorkerContext,
    dtype_name,
    end_token_ids,
    find_tokenizer,
    first_non_finite,
    refuse_other_head,
)
from rl_core.config.schema import GenerationConfig
from rl_core.data.tokenizer import decode
from rl_core.errors import CheckpointError
from rl_core.interfaces.policy import LossFunction
from rl_core.interfaces.worker_context import explaining_memory

_SHARDS_OPTIMIZER: Final = "use_distributed_optimizer"


class MegatronPolicyWorker(PolicyWorkerBase[MegatronPolicyConfig]):
    """One rank of a policy on Megatron-Core.

    Args:
        context: rank, rendezvous address and device.
        config: the section `policy`.
    """

    def __init__(self, context: WorkerContext, config: MegatronPolicyConfig) -> None:
        super().__init__(context, config)
        self._reference: ReferencePolicy | None = None
        self._sampler: Any = None

    def load(self) -> PolicyFacts:
        self._ranks: Ranks = join(self.context, self.config.megatron_cfg)
        self._takes_saved_sharding = self.config.megatron_cfg.use_distributed_optimizer is None
        self._build(shards_optimizer=self.config.shards_optimizer(on_gpu=self._ranks.device.type == "cuda"))
        self._model.load_initial_weights(self._trainable.set_weight)
        self._microbatcher = Microbatcher(self.config, self._ranks)
        self._head = make_head(self.config, self._ranks, vocab_size=self._model.vocab_size)
        shapes, device = self._model.bridge.manifest, self._ranks.device
        return {
            "num_parameters": sum(torch.Size(shape).numel() for shape in shapes.values()),
            "device": str(device),
            "vocab_size": self._model.vocab_size,
            "matrix_sizes": matrix_sizes(shapes, self._model.hf, tied=is_tied(self._model.hf, self.config)),
            "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        }

    def _build(self, *, shards_optimizer: bool) -> None:
        """Build the model and its optimizer, without initialized weights; collective."""
        megatron = self.config.megatron_cfg.model_copy(update={_SHARDS_OPTIMIZER: shards_optimizer})
        self.config = self.config.model_copy(update={"megatron_cfg": megatron})
        self._model: LoadedModel = build_model(self.config, self._ranks)
        with cpu_shim():
            frozen = self.config.frozen
            self._trainable = FrozenModel(self._model.chunks) if frozen else TrainableModel(self._model.chunks, self.config)
        self._weights = Offloader(self._model.chunks.tensors)
        self._masters = Offloader(self._model.chunks.master_weights)

    def score_microbatches(
        self, microbatches: Iterator[BatchedDataDict[Any]], *, topk: int | None = None, reference: bool = False
    ) -> Sequence[Mapping[str, torch.Tensor]]:
        batches = list(microbatches)
        with self._models_to_score(reference=reference) as models, cpu_shim():
            inputs = self._inputs(batches, training=False)
            scores = forward(models, inputs, lambda output, index: self._read_scores(output, inputs[index], topk=topk))
        return scores[: len(batches)]

    def _models_to_score(self, *, reference: bool) -> AbstractContextManager[Sequence[Any]]:
        if reference:
            return self._reference_policy().on_device()
        self._weights.restore()
        return nullcontext(self._trainable.models)

    def _read_scores(self, output: torch.Tensor, inputs: ModelInput, *, topk: int | None) -> Mapping[str, torch.Tensor]:
        """The scores of one microbatch, from the output of the last pipeline stage."""
        head = self._head
        if topk is None:
            return {"values" if isinstance(head, ValueHead) else "logprobs": head(output, inputs)}
        assert isinstance(head, LogprobHead)
        return head.topk(output, inputs, k=topk)

    def collect_scores(self, column: torch.Tensor) -> torch.Tensor:
        return self._ranks.tensor_from_last_stage(column)

    def train_step(
        self,
        microbatches: Iterator[BatchedDataDict[Any]],
        loss_fn: LossFunction,
        counts: GlobalCounts,
        *,
        eval_mode: bool,
    ) -> StepResult:
        batches = list(microbatches)
        with cpu_shim():
            return optimizer_step(
                self._trainable.models,
                self._inputs(batches, training=True, candidates_key=loss_fn.candidates_key),
                [each.to(self._ranks.device) for each in batches],
                loss_fn,
                counts,
                trainable=None if eval_mode else self._trained(),
                head=self._head,
                ranks=self._ranks,
                max_grad_norm=self.config.max_grad_norm,
                stepping=explaining_memory(self, "the optimizer step"),
            )

    def tensors_by_kind(self) -> Mapping[str, Iterable[torch.Tensor]]:
        if not hasattr(self, "_trainable"):
            return {}
        state = [each for name, each in self._trainable.named_state() if not name.startswith("float32 ")]
        return {
            "weights": self._model.chunks.tensors(),
            "float32 master weights": self._model.chunks.master_weights(),
            "gradients": self._trainable.gradients(),
            "optimizer state": state,
        }

    def memory_advice(self, doing: str) -> str:
        return memory_advice(self.config, doing)

    def sample(self, data: BatchedDataDict[Any], *, greedy: bool) -> BatchedDataDict[Any]:
        self._weights.restore()
        if self._sampler is None:
            self._sampler = self._make_sampler()
        with cpu_shim():
            completions: BatchedDataDict[Any] = self._sampler.generate(
                self._trainable.models, data, greedy=greedy, weight_version=self.get_weight_version()
            )
        return completions

    def prepare_for_training(self) -> None:
        self._weights.restore()
        self._masters.restore()
        self._trainable.restore_gradients()
        self._trainable.move_state(self._ranks.device)

    def finish_training(self) -> None:
        with cpu_shim():
            self._trainable.clear_gradients()

    def offload_before_refit(self) -> None:
        if self._ranks.device.type == "cuda":
            self._offload_state()
            self._weights.restore()

    def offload_after_refit(self) -> None:
        if self._ranks.device.type == "cuda":
            self._weights.offload()
            self._offload_state()

    def _offload_state(self) -> None:
        self._trainable.move_state("cpu")
        self._trainable.free_gradients()
        self._masters.offload()
        # Memory in torch's cache is not available to an engine on the same GPU.
        torch.cuda.empty_cache()

    def save_weights(self, folder: Path) -> None:
        weights = self.iter_weights()
        if self.context.rank == 0:
            copy_generation_config(self._model.folder, folder)
            write_folder(folder, weights, self._config_to_save())
        else:
            for _ in weights:
                pass

    def try_save(self, weights_path: Path) -> None:
        if self.context.rank == 0:
            copy_generation_config(self._model.folder, Path(weights_path))
            self._config_to_save().save_pretrained(weights_path)

    def load_weights(self, folder: Path) -> None:
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder} has no config.json, so it contains no weights: use another checkpoint.")
        hf = read_config(folder)
        if hf.model_type != self._model.hf.model_type:
            raise CheckpointError(f"{folder} is of another model: a {hf.model_type}, not a {self._model.hf.model_type}.")
        refuse_other_head(hf, self.config.head, name=str(folder))
        self._weights.restore()
        self._masters.restore()
        self._trainable.complete_weights()
        self._model.load_weights(folder, self._trainable.set_weight)

    def load_checkpoint(self, weights_path: Path, optimizer_path: Path | None) -> None:
        if self._takes_saved_sharding and optimizer_path is not None and Path(optimizer_path).is_dir():
            saved = training_state.saved_setting(Path(optimizer_path), f"policy.megatron_cfg.{_SHARDS_OPTIMIZER}")
            if saved not in (None, self.config.megatron_cfg.use_distributed_optimizer):
                del self._model, self._trainable, self._weights, self._masters
                self._build(shards_optimizer=saved)
        super().load_checkpoint(weights_path, optimizer_path)

    def save_training_state(self, folder: Path) -> None:
        self._weights.restore()
        self._masters.restore()
        self._trainable.move_state(self._ranks.device)
        training_state.save(self._trained(), folder, self._ranks, self._fixed_settings())

    def load_training_state(self, folder: Path) -> None:
        self._weights.restore()
        self._masters.restore()
        self._trainable.move_state(self._ranks.device)
        training_state.load(self._trained(), folder, self._fixed_settings())

    def find_tokenizer(self) -> Any:
        trust_remote_code = self.config.megatron_cfg.trust_remote_code
        return find_tokenizer(self.config.model_name, self.config.tokenizer, trust_remote_code=trust_remote_code)

    def find_non_finite(self) -> str | None:
        self._weights.restore()
        self._masters.restore()
        weights = (named for module in self._model.chunks.modules for named in module.named_parameters())
        in_weights = first_non_finite(weights, published=DTYPES[self.config.dtype_name])
        return in_weights or first_non_finite(self._trainable.named_state())

    def trained_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.config.frozen:
            return
        self._weights.restore()
        with cpu_shim():
            self._trainable.complete_weights()
        for number, module in enumerate(self._model.chunks.modules):
            yield from ((f"{number}.{name}", each) for name, each in module.named_parameters() if each.requires_grad)

    def weight_shard(self) -> str:
        ranks = self._ranks
        groups = {
            "tensor": ranks.tensor,
            "pipeline": ranks.pipeline,
            "expert": ranks.expert,
            "expert tensor": ranks.expert_tensor,
        }
        return ", ".join(f"{name} {group.rank()}" for name, group in groups.items())

    def get_weight_version(self) -> int:
        return self._trainable.weight_version

    def weight_manifest(self) -> RefitManifest:
        dtype = dtype_name(DTYPES[self.config.dtype_name])
        return {name: (tuple(shape), dtype) for name, shape in self._model.bridge.manifest.items()}

    def iter_weights(self, names: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        self._weights.restore()
        with cpu_shim():
            self._trainable.complete_weights()
        return self._model.bridge.export(names)

    def shutdown(self) -> None:
        self.leave_refit()
        leave()

    def _inputs(
        self, batches: Sequence[BatchedDataDict[Any]], *, training: bool, candidates_key: str | None = None
    ) -> list[ModelInput]:
        """The model's input for each microbatch; the interleaved schedule gets a multiple of the number of stages."""
        inputs = [self._microbatcher.form(each, training=training, candidates_key=candidates_key) for each in batches]
        missing = -len(batches) % self._ranks.pipeline.size() if len(self._trainable.models) > 1 else 0
        return inputs + [self._microbatcher.form(filler_microbatch(batches[0]), training=training) for _ in range(missing)]

    def _trained(self) -> TrainableModel:
        self.require_trainable()
        assert isinstance(self._trainable, TrainableModel)
        return self._trainable

    def _reference_policy(self) -> ReferencePolicy:
        if self._reference is None:
            self.require_reference(self.config.megatron_cfg.reference, key="policy.megatron_cfg.reference")
            self._reference = ReferencePolicy(self.config, self._ranks)
        return self._reference

    def _make_sampler(self) -> Any:
        from rl_backends_megatron.sampler import Sampler

        section = self.config.generation or GenerationConfig(backend="megatron")
        tokenizer = self.find_tokenizer()
        return Sampler(
            section,
            self._ranks,
            vocab_size=self._model.vocab_size,
            end_ids=end_token_ids(
                read_generation_config(self._model.folder), self._model.hf, tokenizer, repeated=section.eos_token_id
            ),
            max_model_len=min(self.config.max_total_sequence_length, self._model.hf.max_position_embeddings),
            seed=self.config.megatron_cfg.seed,
            multiple=self._ranks.tensor.size(),
            decode=None if tokenizer is None else partial(decode, tokenizer),
        )

    def _config_to_save(self) -> Any:
        config = copy.deepcopy(self._model.hf)
        config.dtype = DTYPES[self.config.dtype_name]
        if self.config.head == "scalar":
            describe_classifier(config)
        return config

    def _fixed_settings(self) -> dict[str, Any]:
        """Settings that determine the format of the optimizer state, so they cannot change when a run is resumed."""
        return {
            "policy.precision": self.config.dtype_name,
            "policy.optimizer.name": self.config.optimizer.name,
            # Checkpoints from before there was a choice of heads do not have this key.
            **({"policy.head": "scalar"} if self.config.head == "scalar" else {}),
            "policy.optimizer.kwargs.decay_matrices_only": bool(self.config.optimizer.kwargs.get("decay_matrices_only", False)),
            f"policy.megatron_cfg.{_SHARDS_OPTIMIZER}": self.config.megatron_cfg.use_distributed_optimizer,
        }
