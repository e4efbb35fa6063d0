"""One rank of the Megatron policy: scores, steps, saves and hands on its weights; knows no other replica's rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl_backends_megatron import training_state
from rl_backends_megatron.config import MegatronPolicyConfig
from rl_backends_megatron.cpu_shim import cpu_shim
from rl_backends_megatron.hf_folder import read_config, write_folder
from rl_backends_megatron.loading import LoadedModel, build_model
from rl_backends_megatron.microbatches import Microbatcher, ModelInput, filler_microbatch
from rl_backends_megatron.model import DTYPES
from rl_backends_megatron.optimizer import FrozenModel, TrainableModel
from rl_backends_megatron.parallel import Ranks, join, leave
from rl_backends_megatron.reference import ReferencePolicy
from rl_backends_megatron.scalar_head import describe_classifier
from rl_backends_megatron.scoring import Head, LogprobHead, ValueHead, forward
from rl_backends_megatron.step import optimizer_step
from rl_backends_megatron.tokenizer_files import find_tokenizer
from rl_core.config.schema import GenerationConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import CheckpointError, NotSupportedError
from rl_core.interfaces.loss import LossFunction
from rl_core.interfaces.policy import RefitManifest
from rl_core.interfaces.worker import GlobalCounts, PolicyWorker, StepResult
from rl_core.interfaces.worker_context import WorkerContext
from rl_core.training.finite import first_non_finite
from rl_core.training.heads import refuse_other_head
from rl_core.weights.manifest import dtype_name
from rl_core.weights.source import WeightSource

_Told = Callable[[torch.Tensor, ModelInput], Mapping[str, torch.Tensor]]
"""What is told of a microbatch, from what the model ends in."""


class MegatronPolicyWorker(WeightSource, PolicyWorker):
    """One rank of a policy on Megatron-Core.

    Args:
        context: rank, meeting point and device.
        config: the section `policy`.
    """

    def __init__(self, context: WorkerContext, config: MegatronPolicyConfig) -> None:
        self.context = context
        self._config = config
        self._temperature = config.scoring_temperature
        self._reference: ReferencePolicy | None = None
        self._sampler: Any = None

    def setup(self) -> Mapping[str, Any]:
        if not self.context.run_in_process:
            torch.set_num_threads(self.context.num_threads)
        self._ranks: Ranks = join(self.context, self._config.megatron_cfg)
        self._model: LoadedModel = build_model(self._config, self._ranks)
        with cpu_shim():
            frozen = self._config.frozen
            self._trainable = FrozenModel(self._model.chunks) if frozen else TrainableModel(self._model.chunks, self._config)
        self._model.load_initial_weights(self._trainable.set_weight)
        self._microbatcher = Microbatcher(self._config, self._ranks)
        self._head = self._make_head()
        numbers = [torch.Size(shape).numel() for shape in self._model.bridge.manifest.values()]
        return {
            "num_parameters": sum(numbers),
            "device": str(self._ranks.device),
            "vocab_size": self._model.vocab_size,
        }

    def get_logprobs(self, data: BatchedDataDict[Any], *, reference: bool = False) -> BatchedDataDict[Any]:
        scene = self._reference_policy().on_device() if reference else nullcontext(self._trainable.models)
        return self._score(data, scene, self._named("logprobs"), {"logprobs": torch.zeros(data["input_ids"].shape)})

    def get_topk_logprobs(self, data: BatchedDataDict[Any], *, k: int) -> BatchedDataDict[Any]:
        head, shape = self._head, (*data["input_ids"].shape, k)
        assert isinstance(head, LogprobHead)
        into = {"topk_token_ids": torch.zeros(shape, dtype=torch.int64), "topk_logprobs": torch.zeros(shape)}
        return self._score(data, nullcontext(self._trainable.models), partial(head.topk, k=k), into)

    def get_values(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        scene = nullcontext(self._trainable.models)
        return self._score(data, scene, self._named("values"), {"values": torch.zeros(data["input_ids"].shape)})

    def _named(self, name: str) -> _Told:
        return lambda found, inputs: {name: self._head(found, inputs)}

    def _score(
        self,
        data: BatchedDataDict[Any],
        scene: AbstractContextManager[Sequence[Any]],
        told: _Told,
        into: Mapping[str, torch.Tensor],
    ) -> BatchedDataDict[Any]:
        """What is told of each microbatch, put together in `into`: zeros [B, T, ...] on the CPU."""
        columns: BatchedDataDict[Any] = BatchedDataDict({key: data[key] for key in ("input_ids", "input_lengths")})
        columns.micro_batch_indices, columns.micro_batch_lengths = data.micro_batch_indices, data.micro_batch_lengths
        batches = list(self._microbatcher.split(columns, rows=self._config.logprob_batch_size))
        with scene as models, cpu_shim():
            inputs = self._inputs(batches, training=False)
            parts = forward(models, inputs, lambda found, number: told(found, inputs[number]))
        for name, whole in into.items():
            start = 0
            for part in (told_of_one[name] for told_of_one in parts[: len(batches)]):
                whole[start : start + len(part), : part.shape[1]] = part
                start += len(part)
        return BatchedDataDict({name: self._ranks.tensor_from_last_stage(whole) for name, whole in into.items()})

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        *,
        counts: Sequence[GlobalCounts],
        eval_mode: bool = False,
        mbs: int | None = None,
    ) -> list[StepResult]:
        key = loss_fn.candidates_key
        self._take_memory_for_a_step()
        rows = max(1, data.size // len(counts))
        results = []
        for number, count in enumerate(counts):
            batch = data.get_batch(number, rows)
            batches = list(self._microbatcher.split(batch, rows=mbs or self._config.train_micro_batch_size))
            with cpu_shim():
                result = optimizer_step(
                    self._trainable.models,
                    self._inputs(batches, training=True, candidates_key=key),
                    [each.to(self._ranks.device) for each in batches],
                    loss_fn,
                    count,
                    trainable=None if eval_mode else self._stepping(),
                    head=self._head,
                    ranks=self._ranks,
                    max_grad_norm=self._config.max_grad_norm,
                )
            results.append(result)
        return results

    def generate(self, data: BatchedDataDict[Any], *, greedy: bool = False) -> BatchedDataDict[Any]:
        self._refuse_scalar_head("samples nothing")
        if self._sampler is None:
            self._sampler = self._make_sampler()
        with cpu_shim():
            answer: BatchedDataDict[Any] = self._sampler.generate(
                self._trainable.models, data, greedy=greedy, weight_version=self.get_weight_version()
            )
        return answer

    def prepare_for_training(self) -> None:
        self._take_memory_for_a_step()

    def finish_training(self) -> None:
        with cpu_shim():
            self._trainable.clear_gradients()

    def offload_before_refit(self) -> None:
        """Gradients are freed, and optimizer state leaves the device; the weights stay, to be sent."""
        self._give_memory_of_a_step()

    def offload_after_refit(self) -> None:
        """Weights live in the gradient wrapper's buffers and stay on the device; see the README."""
        self._give_memory_of_a_step()

    def _take_memory_for_a_step(self) -> None:
        self._trainable.restore_gradients()
        self._trainable.move_state(self._ranks.device)

    def _give_memory_of_a_step(self) -> None:
        if self._ranks.device.type == "cuda":
            self._trainable.move_state("cpu")
            self._trainable.free_gradients()
            # What torch keeps for itself the engine on the same GPU cannot have.
            torch.cuda.empty_cache()

    def save_checkpoint(self, weights_path: Path, optimizer_path: Path | None) -> None:
        weights = self.iter_weights()
        if self._ranks.rank == 0:
            write_folder(Path(weights_path), weights, self._config_to_save())
            tokenizer = find_tokenizer(self._config)
            if tokenizer is not None:
                tokenizer.save_pretrained(weights_path)
        else:
            for _ in weights:
                pass
        if optimizer_path is not None:
            self._trainable.move_state(self._ranks.device)
            training_state.save(self._stepping(), Path(optimizer_path), self._ranks, self._facts())
        dist.barrier()

    def find_non_finite(self) -> str | None:
        dtype = DTYPES[self._config.precision]
        weights = (named for module in self._model.chunks.modules for named in module.named_parameters())
        in_weights = first_non_finite(weights, published=dtype)
        return in_weights or first_non_finite(self._trainable.named_state())

    def load_checkpoint(self, weights_path: Path, optimizer_path: Path | None) -> None:
        weights_path = Path(weights_path)
        if not (weights_path / "config.json").is_file():
            raise CheckpointError(f"{weights_path} holds no config.json, so no weights were saved there.")
        if optimizer_path is not None and not Path(optimizer_path).is_dir():
            raise CheckpointError(f"{optimizer_path} does not exist, so there is no training state to go on from.")
        hf = read_config(weights_path)
        if hf.model_type != self._model.hf.model_type:
            raise CheckpointError(f"{weights_path} is of another model: a {hf.model_type}, not a {self._model.hf.model_type}.")
        refuse_other_head(hf, self._config.head, name=str(weights_path))
        self._trainable.complete_weights()
        self._model.load_weights(weights_path, self._trainable.set_weight)
        if optimizer_path is not None:
            self._trainable.move_state(self._ranks.device)
            training_state.load(self._stepping(), Path(optimizer_path), self._facts())

    def get_weight_version(self) -> int:
        return self._trainable.weight_version

    def prepare_refit_info(self) -> dict[str, Any]:
        self._refuse_scalar_head("has no weights for an engine")
        return super().prepare_refit_info()

    def weight_manifest(self) -> RefitManifest:
        dtype = dtype_name(DTYPES[self._config.precision])
        return {name: (tuple(shape), dtype) for name, shape in self._model.bridge.manifest.items()}

    def iter_weights(self, names: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        with cpu_shim():
            self._trainable.complete_weights()
        return self._model.bridge.export(names)

    def shutdown(self) -> None:
        self.leave_refit()
        leave()

    def _inputs(
        self, batches: Sequence[BatchedDataDict[Any]], *, training: bool, candidates_key: str | None = None
    ) -> list[ModelInput]:
        """Each microbatch as the model reads it, filled up to a multiple of the stages where they take turns."""
        inputs = [self._microbatcher.form(each, training=training, candidates_key=candidates_key) for each in batches]
        missing = -len(batches) % self._ranks.pipeline.size() if len(self._trainable.models) > 1 else 0
        return inputs + [self._microbatcher.form(filler_microbatch(batches[0]), training=training) for _ in range(missing)]

    def _stepping(self) -> TrainableModel:
        if isinstance(self._trainable, FrozenModel):
            raise NotSupportedError(
                f"{self._config.model_name} is frozen (`frozen: true`): it scores, and has nothing that could step. Leave "
                "`frozen` out to train it."
            )
        return self._trainable

    def _make_head(self) -> Head:
        if self._config.head == "scalar":
            return ValueHead(self._ranks)
        return LogprobHead(
            self._ranks,
            vocab_size=self._model.vocab_size,
            temperature=self._temperature,
            chunk_tokens=self._config.megatron_cfg.logprob_chunk_tokens,
        )

    def _refuse_scalar_head(self, why: str) -> None:
        if self._config.head == "scalar":
            raise NotSupportedError(f"{self._config.model_name} ends in a scalar head (`head: scalar`), and so {why}.")

    def _reference_policy(self) -> ReferencePolicy:
        if not self._config.megatron_cfg.reference:
            raise NotSupportedError(
                "This policy has no reference: `policy.megatron_cfg.reference` is false. Set it to true, or use a loss without "
                "a KL term against the reference policy."
            )
        if self._reference is None:
            self._reference = ReferencePolicy(self._config, self._ranks)
        return self._reference

    def _make_sampler(self) -> Any:
        from rl_backends_megatron.sampler import Sampler

        given = self._config.generation or GenerationConfig(backend="megatron")
        tokenizer = find_tokenizer(self._config)
        end = self._model.hf.eos_token_id
        ends = end if isinstance(end, list) else [end]
        return Sampler(
            given,
            self._ranks,
            vocab_size=self._model.vocab_size,
            end_ids=frozenset(token for token in ends if token is not None),
            max_model_len=min(self._config.max_total_sequence_length, self._model.hf.max_position_embeddings),
            seed=self._config.megatron_cfg.seed,
            multiple=self._ranks.tensor.size(),
            decode=None if tokenizer is None else tokenizer.decode,
        )

    def _config_to_save(self) -> Any:
        config = copy.deepcopy(self._model.hf)
        config.dtype = DTYPES[self._config.precision]
        if self._config.head == "scalar":
            describe_classifier(config)
        return config

    def _facts(self) -> dict[str, Any]:
        """What a resume must share, since optimizer state is kept in another form otherwise."""
        return {
            "policy.precision": self._config.precision,
            "policy.optimizer.name": self._config.optimizer.name,
            # Absent from checkpoints of before there were heads, which had tokens.
            **({"policy.head": "scalar"} if self._config.head == "scalar" else {}),
            "policy.optimizer.kwargs.decay_matrices_only": bool(
                self._config.optimizer.kwargs.get("decay_matrices_only", False)
            ),
            "policy.megatron_cfg.use_distributed_optimizer": self._config.megatron_cfg.use_distributed_optimizer,
        }
