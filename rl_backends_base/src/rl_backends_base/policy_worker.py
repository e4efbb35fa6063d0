"""Base class of policy workers: the parts of one rank of a policy that are the same for every model library."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from rl_backends_base.microbatches import MicrobatchSplitter
from rl_core.backend import (
    BatchedDataDict,
    GlobalCounts,
    PolicyFacts,
    PolicyWorker,
    StepResult,
    WeightSource,
    WorkerContext,
    digest_of,
    return_freed_memory,
)
from rl_core.config.schema import PolicyConfig
from rl_core.data.batched_data_dict import to_device
from rl_core.data.generation_io import SETS
from rl_core.data.tokenizer import save_tokenizer
from rl_core.errors import CheckpointError, NotSupportedError
from rl_core.interfaces.policy import LossFunction, WeightSample

ConfigT = TypeVar("ConfigT", bound=PolicyConfig)


class PolicyWorkerBase(WeightSource, PolicyWorker, Generic[ConfigT]):
    """One rank of a policy.

    The base class splits batches into microbatches, assembles scores, loops over the optimizer steps of a batch, orders the
    steps of saving and loading a checkpoint, sends weights to an engine (`WeightSource`), and raises the errors for requests
    that the config rules out. A subclass provides:

    - `load`: joins the other ranks, and loads the model and the optimizer.
    - `score_microbatches` and `train_step`: run the model.
    - `prepare_for_training`, `finish_training`, `offload_before_refit` and `offload_after_refit`: move tensors between the
      device and CPU memory.
    - `save_weights`, `load_weights`, `save_training_state`, `load_training_state` and `find_tokenizer`: checkpoints.
    - `get_weight_version`, `weight_manifest` and `iter_weights`: the present weights, for engines.

    A subclass may also override `trained_weights` and `weight_shard` (which let a run check its optimizer steps), `sample`
    (if it has a sampler), `collect_scores` (if not all ranks of a model copy compute the scores), `find_non_finite`, and
    `shutdown` (if it joins more than torch's default process group).

    Args:
        context: rank, rendezvous address and device.
        config: the section `policy`.
    """

    def __init__(self, context: WorkerContext, config: ConfigT) -> None:
        self.context = context
        self.config = config
        self._splitter = MicrobatchSplitter(config)

    @abstractmethod
    def load(self) -> PolicyFacts:
        """Join the other ranks, and load the model and the optimizer."""

    @abstractmethod
    def score_microbatches(
        self, microbatches: Iterator[BatchedDataDict[Any]], *, topk: int | None = None, reference: bool = False
    ) -> Sequence[Mapping[str, torch.Tensor]]:
        """Score rows without gradients.

        Args:
            microbatches: `input_ids` [b, T] and `input_lengths` [b] of each, `prompt_id` [b] if the worker shares prefixes, and
                `images` and `sampled_sets` if rows have some.
            topk: return the `topk` most likely tokens, as in `get_topk_logprobs`.
            reference: score with the reference policy.

        Returns:
            The scores of each microbatch: `logprobs` or, with a scalar head, `values` [b, T]; with `topk`, `topk_token_ids` and
            `topk_logprobs` [b, T, topk]. T may be smaller than in `input_ids`. Empty on a rank that computes no scores; see
            `collect_scores`.
        """

    @abstractmethod
    def train_step(
        self, microbatches: Iterator[BatchedDataDict[Any]], loss_fn: LossFunction, counts: GlobalCounts, *, eval_mode: bool
    ) -> StepResult:
        """Take one optimizer step on the microbatches of one global batch; in eval mode, compute loss and metrics only."""

    @abstractmethod
    def offload_before_refit(self) -> None:
        """Free gradients and move the optimizer state to CPU memory; the weights stay on the device, to be sent."""

    @abstractmethod
    def offload_after_refit(self) -> None:
        """Move everything that can be moved to CPU memory, including the weights."""

    @abstractmethod
    def save_weights(self, folder: Path) -> None:
        """Write the weights and the model's config, on all ranks together."""

    @abstractmethod
    def load_weights(self, folder: Path) -> None:
        """Load what `save_weights` wrote.

        Raises:
            CheckpointError: the folder is missing, damaged, or of another model.
        """

    def weights_loaded(self) -> None:
        """Called after `load_weights`, for what is derived from the weights. By default, nothing."""

    @abstractmethod
    def save_training_state(self, folder: Path) -> None:
        """Write the optimizer state, the schedule and the weight version, on all ranks together."""

    @abstractmethod
    def load_training_state(self, folder: Path) -> None:
        """Load what `save_training_state` wrote, with any number of ranks.

        Raises:
            CheckpointError: the folder is incomplete, damaged, or of another model or optimizer.
        """

    @abstractmethod
    def find_tokenizer(self) -> Any:
        """The policy's tokenizer, or None if there is none; it is saved next to the weights."""

    def sample(self, data: BatchedDataDict[Any], *, greedy: bool) -> BatchedDataDict[Any]:
        """Complete this rank's rows; see `GenerationInterface.generate`. By default, not implemented."""
        raise NotImplementedError

    def collect_scores(self, column: torch.Tensor) -> torch.Tensor:
        """One column of scores on the CPU, from the rank that computed it; all ranks call this. Unchanged by default."""
        return column

    def trained_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's copies or shards of the weights that the optimizer changes, under any names. By default, none."""
        return iter(())

    def weight_shard(self) -> str:
        """Which shard of the weights this rank holds, for `WeightSample.shard`. By default, all ranks hold the same weights."""
        return ""

    def weight_sample(self, *, whole: bool = False) -> WeightSample | None:
        if (digest := digest_of(self.trained_weights(), whole=whole)) is None:
            return None
        text, exact = digest
        return WeightSample(rank=self.context.rank, shard=self.weight_shard(), digest=text, exact=exact)

    def setup(self) -> PolicyFacts:
        if not self.context.run_in_process:
            torch.set_num_threads(self.context.num_threads)
        return self.load()

    def get_logprobs(self, data: BatchedDataDict[Any], *, reference: bool = False) -> BatchedDataDict[Any]:
        return self._score(data, {"logprobs": torch.zeros(data["input_ids"].shape)}, reference=reference)

    def get_topk_logprobs(self, data: BatchedDataDict[Any], *, k: int) -> BatchedDataDict[Any]:
        shape = (*data["input_ids"].shape, k)
        columns = {"topk_token_ids": torch.zeros(shape, dtype=torch.int64), "topk_logprobs": torch.zeros(shape)}
        return self._score(data, columns, topk=k)

    def get_values(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        return self._score(data, {"values": torch.zeros(data["input_ids"].shape)})

    def _score(
        self, data: BatchedDataDict[Any], columns: dict[str, torch.Tensor], *, topk: int | None = None, reference: bool = False
    ) -> BatchedDataDict[Any]:
        """Fill `columns`, zeros [B, T, ...] on the CPU, with the scores of all microbatches."""
        keys = [key for key in ("input_ids", "input_lengths", "prompt_id", "images", SETS) if key in data]
        rows: BatchedDataDict[Any] = BatchedDataDict({key: data[key] for key in keys})
        rows.micro_batch_indices, rows.micro_batch_lengths = data.micro_batch_indices, data.micro_batch_lengths
        microbatches = self._splitter.split(rows, rows=self.config.logprob_batch_size)
        scores = self.score_microbatches(microbatches, topk=topk, reference=reference)
        for name, column in columns.items():
            # Filled on the device of the scores: the host waits for it once, not for each microbatch.
            filled, start = to_device(column, scores[0][name].device) if scores else column, 0
            for scored in scores:
                part = scored[name]
                filled[start : start + len(part), : part.shape[1]] = part
                start += len(part)
            columns[name] = self.collect_scores(filled.cpu())
        return BatchedDataDict(columns)

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        *,
        counts: Sequence[GlobalCounts],
        eval_mode: bool = False,
        mbs: int | None = None,
    ) -> list[StepResult]:
        self.prepare_for_training()
        rows_per_step = max(1, data.size // len(counts))
        results = []
        for step, count in enumerate(counts):
            batch = data.get_batch(step, rows_per_step)
            microbatches = self._splitter.split(batch, rows=mbs or self.config.train_micro_batch_size)
            results.append(self.train_step(microbatches, loss_fn, count, eval_mode=eval_mode))
            return_freed_memory()
        return results

    def generate(self, data: BatchedDataDict[Any], *, greedy: bool = False) -> BatchedDataDict[Any]:
        self._reject_scalar_head("cannot generate text")
        return self.sample(data, greedy=greedy)

    def save_checkpoint(self, weights_path: Path, optimizer_path: Path | None) -> None:
        self.save_weights(Path(weights_path))
        if optimizer_path is not None:
            self.save_training_state(Path(optimizer_path))
        if self.context.rank == 0 and (tokenizer := self.find_tokenizer()) is not None:
            save_tokenizer(tokenizer, Path(weights_path))
        if self.context.world_size > 1:
            dist.barrier()

    def load_checkpoint(self, weights_path: Path, optimizer_path: Path | None) -> None:
        if optimizer_path is not None and not Path(optimizer_path).is_dir():
            raise CheckpointError(f"{optimizer_path} does not exist: there is no training state to resume from.")
        self.load_weights(Path(weights_path))
        self.weights_loaded()
        if optimizer_path is not None:
            self.load_training_state(Path(optimizer_path))

    def prepare_refit_info(self) -> dict[str, Any]:
        self._reject_scalar_head("has no weights for a generation engine")
        return super().prepare_refit_info()

    def shutdown(self) -> None:
        self.leave_refit()
        if self.context.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def require_trainable(self) -> None:
        """Raise `NotSupportedError` if the model is frozen; call it before using the optimizer."""
        if self.config.frozen:
            raise NotSupportedError(
                f"{self.config.model_name} is frozen (`frozen: true` in its section), so it has no optimizer and cannot be "
                "trained. Remove `frozen` to train it.",
                key="frozen",
            )

    def require_reference(self, enabled: bool, *, key: str) -> None:
        """Raise `NotSupportedError` if the setting `key` does not enable the reference policy; call it before loading one."""
        if not enabled:
            raise NotSupportedError(
                f"This policy has no reference: `{key}` is false. Set it to true, or use a loss without a KL term against "
                "the reference policy.",
                key=key,
            )

    def _reject_scalar_head(self, why: str) -> None:
        if self.config.head == "scalar":
            raise NotSupportedError(
                f"{self.config.model_name} has a scalar head (`head: scalar`), which only computes values, so it {why}. Set "
                "`head: tokens` in its section for a policy.",
                key="head",
            )
