"""One rank of the Megatron policy: scoring, optimizer steps, checkpoints, and weights for engines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl_backends_base import LossOfMicrobatch, MicrobatchRows, Parallel, TorchPolicyWorker, TrainingStateBase
from rl_backends_base.adapter_folder import ADAPTER_CONFIG
from rl_backends_base.optimizer_step import LossAndMetrics
from rl_backends_megatron.config import MegatronPolicyConfig
from rl_backends_megatron.cpu_shim import cpu_shim
from rl_backends_megatron.hf_folder import copy_generation_config, read_config, read_generation_config, write_folder
from rl_backends_megatron.loading import LoadedModel, build_model, load_model
from rl_backends_megatron.lora_targets import LORA
from rl_backends_megatron.model import is_tied, matrix_sizes
from rl_backends_megatron.model_inputs import Layout, ModelInput, filler_microbatch
from rl_backends_megatron.optimizer import Offloader
from rl_backends_megatron.parallel import Ranks, join, leave
from rl_backends_megatron.scoring import OutputHead, forward, forward_backward
from rl_backends_megatron.training_state import SHARDS_OPTIMIZER, MegatronState, saved_setting
from rl_core.backend import (
    BatchedDataDict,
    GlobalCounts,
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
from rl_core.errors import CheckpointError
from rl_core.interfaces.policy import LossFunction


class MegatronPolicyWorker(TorchPolicyWorker[MegatronPolicyConfig]):
    """One rank of a policy on Megatron-Core. `model` has the chunks that schedules run, wrapped if they are trained.

    Args:
        context: rank, rendezvous address and device.
        config: the section `policy`.
    """

    model: nn.ModuleList
    state: MegatronState | None

    def __init__(self, context: WorkerContext, config: MegatronPolicyConfig) -> None:
        super().__init__(context, config)
        self._takes_saved_sharding = config.megatron_cfg.use_distributed_optimizer is None
        self._sampler: Any = None

    def join(self) -> Parallel:
        self._ranks: Ranks = join(self.context, self.config.megatron_cfg)
        parallel = Parallel(self.context)
        parallel.device = self._ranks.device
        return parallel

    def build(self) -> nn.ModuleList:
        self._build(shards_optimizer=self.config.shards_optimizer(on_gpu=self.device.type == "cuda"))
        self._model.load_initial_weights(self._set_weight)
        self._layout = Layout(self.config, self._ranks)
        self._head = OutputHead(self.config, self._ranks, vocab_size=self._model.vocab_size)
        return self.model

    def _build(self, *, shards_optimizer: bool) -> None:
        """Build the model and its optimizer, without initialized weights; collective."""
        megatron = self.config.megatron_cfg.model_copy(update={"use_distributed_optimizer": shards_optimizer})
        self.config = self.config.model_copy(update={"megatron_cfg": megatron})
        self._model: LoadedModel = build_model(self.config, self._ranks)
        chunks = self._model.chunks
        with cpu_shim():
            self.state = None if self.config.frozen else MegatronState(chunks, self.config, self._ranks)
        self.model = nn.ModuleList(chunks.modules if self.state is None else self.state.models)
        if self.state is None:
            self.model.requires_grad_(False)
        self._weights = Offloader(chunks.tensors)
        self._masters = Offloader(chunks.master_weights)

    def _set_weight(self, parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
        if self.state is None:
            parameter.copy_(values)
        else:
            self.state.set_weight(parameter, values)

    def place(self) -> None:
        """Do nothing: `build` has placed the model."""

    def make_state(self) -> TrainingStateBase | None:
        return self.state  # Megatron's optimizer is part of the model that `build` made

    def facts(self) -> Mapping[str, Any]:
        shapes, hf = self._model.bridge.manifest, self._model.hf
        adapters = None if self._model.adapters is None else self._model.adapters.shapes
        trained = {} if self.config.frozen else shapes if adapters is None else adapters
        trained_matrices = None if adapters is None else list(trained.values())
        return {
            "num_parameters": _num_values(shapes),
            "num_trained_parameters": _num_values(trained),
            "vocab_size": self._model.vocab_size,
            "matrix_sizes": matrix_sizes(shapes, hf, tied=is_tied(hf, self.config), adapters=trained_matrices),
        }

    @property
    def trained_dtype(self) -> torch.dtype:
        # Adapters are float32 with a base of any dtype, and are saved unrounded.
        return super().trained_dtype if self._model.adapters is None else torch.float32

    def score_microbatches(
        self, microbatches: Iterator[BatchedDataDict[Any]], *, topk: int | None = None, reference: bool = False
    ) -> Sequence[Mapping[str, torch.Tensor]]:
        batches = list(microbatches)
        with self.scoring(reference=reference), cpu_shim():
            inputs = self._inputs(batches, training=False)
            scores = forward(
                list(self.model), inputs, lambda output, index: self._read_scores(output, inputs[index], topk=topk)
            )
        return scores[: len(batches)]

    def _read_scores(self, output: torch.Tensor, inputs: ModelInput, *, topk: int | None) -> Mapping[str, torch.Tensor]:
        """The scores of one microbatch, from the output of the last pipeline stage."""
        head = self._head
        return {head.column: head(output, inputs)} if topk is None else head.topk(output, inputs, k=topk)

    def collect_scores(self, column: torch.Tensor) -> torch.Tensor:
        return self._ranks.tensor_from_last_stage(column)

    @contextmanager
    def reference_model(self) -> Iterator[nn.Module]:
        self.require_reference(self.config.megatron_cfg.reference, key="policy.megatron_cfg.reference")
        if self._model.adapters is None:
            with super().reference_model() as model:
                yield model
        else:  # the policy's own model, without its adapters
            self.move(weights=self.device)
            with self._model.adapters.disabled():
                yield self.model

    def build_reference(self) -> nn.ModuleList:
        return nn.ModuleList(load_model(self.config, self._ranks).chunks.modules).requires_grad_(False).cpu()

    def train_step(
        self, microbatches: Iterator[BatchedDataDict[Any]], loss_fn: LossFunction, counts: GlobalCounts, *, eval_mode: bool
    ) -> StepResult:
        with cpu_shim():
            return super().train_step(microbatches, loss_fn, counts, eval_mode=eval_mode)

    def forward_backward(
        self,
        microbatches: Iterable[BatchedDataDict[Any]],
        loss_of: LossOfMicrobatch,
        *,
        candidates_key: str | None,
        learn: bool,
    ) -> list[LossAndMetrics]:
        batches = list(microbatches)
        inputs = self._inputs(batches, training=True, candidates_key=candidates_key)

        def read(output: torch.Tensor, number: int) -> tuple[torch.Tensor, LossAndMetrics | None]:
            scored = self._head(output, inputs[number])
            if number >= len(batches):
                return scored.sum() * 0.0, None
            loss, metrics = loss_of(scored, batches[number])
            return loss, (loss.detach().double(), metrics)

        if learn:
            results = forward_backward(list(self.model), inputs, read)
        else:
            results = forward(list(self.model), inputs, lambda output, number: read(output, number)[1])
        return [each for each in results if each is not None]

    def collect_results(self, loss: float, metrics: dict[str, float]) -> tuple[float, dict[str, float]]:
        results: tuple[float, dict[str, float]] = self._ranks.from_last_stage((loss, metrics))
        return results

    def phase_keys(self, doing: str) -> list[str]:
        recomputes = self.config.activation_checkpointing or self.config.megatron_cfg.recompute_granularity == "full"
        return ["set `activation_checkpointing: true`"] if doing == "training" and not recomputes else []

    def size_keys(self, doing: str) -> list[str]:
        megatron, keys = self.config.megatron_cfg, []
        if megatron.lora is None and not self.config.frozen:
            keys.append("train adapters (`megatron_cfg.lora: {}`)")
        if not (self.config.frozen or megatron.use_distributed_optimizer):
            keys.append("shard the optimizer state (`megatron_cfg.use_distributed_optimizer: true`)")
        ranks = megatron.tensor_model_parallel_size
        keys.append(f"raise `megatron_cfg.tensor_model_parallel_size` from {ranks} to {2 * ranks}")
        return keys + super().size_keys(doing)

    def sample(self, data: BatchedDataDict[Any], *, greedy: bool) -> BatchedDataDict[Any]:
        self.move(weights=self.device)
        if self._sampler is None:
            self._sampler = self._make_sampler()
        with cpu_shim():
            completions: BatchedDataDict[Any] = self._sampler.rows.generate(
                data, greedy=greedy, weight_version=self.get_weight_version()
            )
        return completions

    def move(self, *, weights: torch.device, state: torch.device | None = None) -> None:
        leaves = self.device.type == "cuda"
        if leaves and state not in (None, self.device):
            if self.state is not None:
                self.state.move(state)
                self.state.free_gradients()
            self._masters.offload()
        if weights == self.device:
            self._weights.restore()
        elif leaves:
            self._weights.offload()
        if state == self.device:
            self._masters.restore()
            if self.state is not None:
                self.state.restore_gradients()
                self.state.move(self.device)
        elif leaves and state is not None:
            # Memory in torch's cache is not available to an engine on the same GPU.
            torch.cuda.empty_cache()

    def finish_training(self) -> None:
        with cpu_shim():
            super().finish_training()

    def offload_before_refit(self) -> None:
        self.move(weights=self.device, state=torch.device("cpu"))

    def save_weights(self, folder: Path) -> None:
        if self._model.adapters is not None:
            self.move(weights=self.device)
            self._complete_weights()
            self._model.adapters.save(folder)
            return
        weights = self.iter_weights()
        if self.context.rank == 0:
            copy_generation_config(self._model.folder, folder)
            write_folder(folder, weights, self._model.config_to_save(self.config))
        else:
            for _ in weights:
                pass

    def try_save(self, weights_path: Path) -> None:
        if self.context.rank == 0 and self._model.adapters is not None:
            self._model.adapters.save_config(Path(weights_path))
        elif self.context.rank == 0:
            copy_generation_config(self._model.folder, Path(weights_path))
            self._model.config_to_save(self.config).save_pretrained(weights_path)

    def load_weights(self, folder: Path) -> None:
        if self._model.adapters is not None:
            self._restore()
            self._complete_weights()
            self._model.adapters.load(folder, self._set_weight)
            return
        if not (folder / "config.json").is_file():
            adapter = (folder / ADAPTER_CONFIG).is_file()
            advice = f"it has an adapter; resume with the `{LORA}` that wrote it" if adapter else "use another checkpoint"
            raise CheckpointError(f"{folder} has no config.json, so it contains no weights: {advice}.")
        hf = read_config(folder)
        if hf.model_type != self._model.hf.model_type:
            raise CheckpointError(f"{folder} is of another model: a {hf.model_type}, not a {self._model.hf.model_type}.")
        refuse_other_head(hf, self.config.head, name=str(folder))
        self._restore()
        self._complete_weights()
        self._model.load_weights(folder, self._set_weight)

    def load_checkpoint(self, weights_path: Path, optimizer_path: Path | None) -> None:
        if self._takes_saved_sharding and optimizer_path is not None and Path(optimizer_path).is_dir():
            saved = saved_setting(Path(optimizer_path), SHARDS_OPTIMIZER)
            if saved not in (None, self.config.megatron_cfg.use_distributed_optimizer):
                del self.model, self.state, self._model, self._weights, self._masters
                self._sampler = None
                self._build(shards_optimizer=saved)
                if self._model.adapters is not None:  # the base is not in the checkpoint
                    self._model.load_initial_weights(self._set_weight)
        super().load_checkpoint(weights_path, optimizer_path)

    def save_training_state(self, folder: Path) -> None:
        self._restore()
        super().save_training_state(folder)

    def load_training_state(self, folder: Path) -> None:
        self._restore()
        super().load_training_state(folder)

    def _restore(self) -> None:
        """Move weights, float32 weights and optimizer state to the device; gradients stay freed."""
        self.move(weights=self.device)
        self._masters.restore()
        if self.state is not None:
            self.state.move(self.device)

    def _complete_weights(self) -> None:
        if self.state is not None:
            with cpu_shim():
                self.state.complete_weights()

    def find_tokenizer(self) -> Any:
        trust_remote_code = self.config.megatron_cfg.trust_remote_code
        return find_tokenizer(self.config.model_name, self.config.tokenizer, trust_remote_code=trust_remote_code)

    def find_non_finite(self) -> str | None:
        self._restore()
        weights = (named for module in self._model.chunks.modules for named in module.named_parameters())
        in_weights = first_non_finite(weights, published=self.dtype)
        return in_weights if in_weights or self.state is None else self.state.find_non_finite()

    def trained_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.state is None:
            return
        self.move(weights=self.device)
        self._complete_weights()
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

    def weight_manifest(self) -> RefitManifest:
        base = {name: (tuple(shape), dtype_name(self.dtype)) for name, shape in self._model.bridge.manifest.items()}
        adapters = self._model.adapters
        return base if adapters is None or not self._sends_adapters else {**base, **adapters.manifest}

    def iter_weights(self, names: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        self.move(weights=self.device)
        self._complete_weights()
        bridge, adapters = self._model.bridge, self._model.adapters
        if adapters is None:
            return bridge.export(names)
        if self._sends_adapters:
            return itertools.chain(bridge.export(names), adapters.export(names))
        return bridge.export(names, value=adapters.merged)

    @property
    def _sends_adapters(self) -> bool:
        """Whether an engine gets adapters and the frozen weights separately."""
        return self.config.generation is not None and self.config.generation.lora == "adapter"

    def shutdown(self) -> None:
        self.leave_refit()
        leave()

    def _inputs(
        self, batches: Sequence[BatchedDataDict[Any]], *, training: bool, candidates_key: str | None = None
    ) -> list[Any]:
        """The model's input for each microbatch; the interleaved schedule gets a multiple of the number of stages."""
        inputs = [self.to_input(each, training=training, candidates_key=candidates_key) for each in batches]
        missing = -len(batches) % self._ranks.pipeline.size() if len(self.model) > 1 else 0
        return inputs + [self.to_input(filler_microbatch(batches[0]), training=training) for _ in range(missing)]

    def form(self, rows: MicrobatchRows) -> ModelInput:
        return self._layout.form(rows)

    def _make_sampler(self) -> Any:
        from rl_backends_megatron.sampler import Sampler

        section = self.config.generation or GenerationConfig(backend="megatron")
        tokenizer = self.find_tokenizer()
        return Sampler(
            list(self.model),
            section,
            self._ranks,
            vocab_size=self._model.vocab_size,
            end_ids=end_token_ids(
                *(read_generation_config(self._model.folder), self._model.hf, tokenizer),
                further=section.stop_token_ids,
                repeated=section.eos_token_id,
            ),
            max_model_len=min(self.config.max_total_sequence_length, self._model.hf.max_position_embeddings),
            seed=self.config.megatron_cfg.seed,
            tokenizer=tokenizer,
        )


def _num_values(shapes: Mapping[str, Sequence[int]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
