"""Workers, which backend authors write: one rank of a policy or of a generation engine; torch, no Ray.

`DistributedPolicy` and `DistributedGeneration` turn a group of workers into a policy or an engine: they shard over the data
axis, dispatch, restore the row order, enforce deadlines and name workers that failed. A worker takes
(`context`: `rl_core.interfaces.worker_context.WorkerContext`, `config`: its section's model) and loads nothing before
`setup`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

import torch

from rl_core.errors import NotSupportedError, RLCoreError
from rl_core.interfaces.policy import LossFunction, WeightSample

if TYPE_CHECKING:
    from rl_core.data.batched_data_dict import BatchedDataDict


@dataclass(frozen=True, kw_only=True)
class GlobalCounts:
    """Normalising counts of one global batch, over all ranks and microbatches."""

    valid_seqs: float
    """Number of rows with `sample_mask`."""
    valid_toks: float
    """Number of tokens with `token_mask * sample_mask`."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One rank's share of one optimizer step."""

    loss: float
    """This rank's share: the sum over ranks is the loss of the global batch."""
    grad_norm: float
    """Global gradient norm before clipping, the same on every rank; 0.0 in eval mode."""
    lr: float
    """Learning rate of the step; the highest if there are several."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """This rank's shares of the loss's metrics, already reduced over its microbatches."""
    group_lrs: Mapping[str, float] = field(default_factory=dict)
    """Learning rates by optimizer group, if there are groups."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One row for a streaming engine."""

    name: str
    """Name of the request, unique among the rows in flight."""
    row: BatchedDataDict[Any]
    """A batch of one row; see `GenerationDatumSpec`."""
    greedy: bool = False
    """Take the most likely token at each position."""


class PolicyFacts(TypedDict):
    """What a policy worker reports when it has loaded."""

    device: str
    """Where it computes, such as "cpu" or "cuda:0"."""
    vocab_size: int
    """Number of token ids that it scores."""
    num_parameters: int
    """Number of parameters of the whole model."""
    num_trained_parameters: NotRequired[int]
    """Number of those that the optimizer changes; all by default."""
    shared_prefix: NotRequired[bool]
    """Whether this model computes rows with the same `prompt_id` as one sequence; false by default. Batches have the column
    `prompt_id` only if this is true and saves work."""
    images: NotRequired[bool]
    """Whether the model reads images; false by default. Rows with images are refused otherwise."""
    shared_prefix_reason: NotRequired[str]
    """Why, or why not; by default, that the backend does not support it."""
    device_name: NotRequired[str | None]
    """Name of the GPU, which decides the peak that `mfu` is relative to; unknown by default."""
    gradient_scale: NotRequired[float | Literal["dynamic"]]
    """Factor that `train` multiplies the loss with and divides out before the step; 1 by default. "dynamic" if it changes."""
    matrix_sizes: NotRequired[Mapping[str, float]]
    """Numbers of weights that a token is multiplied with, by kind: see `rl_train.metrics.measured`. By default, there is no
    `mfu`."""


class GenerationFacts(TypedDict):
    """What a replica of a generation engine reports when it has loaded."""

    device: str
    """Where it computes, such as "cpu" or "cuda:0"."""
    vocab_size: int
    """Number of token ids that a prompt may have."""
    max_model_len: int
    """Maximum number of tokens of prompt and completion."""
    precision: NotRequired[str]
    """The dtype that it computes in, such as "bfloat16"; that of the policy by default."""
    num_parameters: NotRequired[int]
    """Number of parameters of the whole model; unknown by default."""
    images: NotRequired[bool]
    """Whether the model reads images; false by default. Rows with images are refused otherwise."""
    reads_text: NotRequired[bool]
    """Whether it has a tokenizer, which stop strings need; true by default."""
    reads_sampling: NotRequired[bool]
    """Whether rows may have their own temperature, `top_p` and `top_k` (column `sampling`); false by default."""
    row_options: NotRequired[Sequence[str]]
    """Further options of the column `sampling` that it reads; none by default."""
    streams_tokens: NotRequired[bool]
    """Whether `poll` also returns unfinished rows with `stream_tokens`; false by default."""


class MeasuredWorker:
    """A worker that reports the memory of its process."""

    def tensors_by_kind(self) -> Mapping[str, Iterable[torch.Tensor]]:
        """This rank's tensors, such as its weights, for the error of full memory; by default, none."""
        return {}

    def memory_advice(self, doing: str) -> str:
        """Keys that lower the memory of `doing`, such as "scoring", with values, for that error; by default, none."""
        return ""

    def take_peak_memory(self) -> int | None:
        """The most memory in use since the last call, in bytes; None if it is unknown.

        With GPUs, the tensors of this process on its GPU, as counted by torch; otherwise the resident memory of the process.
        """
        if torch.cuda.is_available():
            if peak := torch.cuda.max_memory_allocated():
                torch.cuda.reset_peak_memory_stats()
            return peak or None
        try:
            status = Path("/proc/self/status").read_text()
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        except OSError:  # not Linux, or a kernel without it
            return None
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024


class PolicyWorker(MeasuredWorker, ABC):
    """One rank of a policy."""

    @abstractmethod
    def setup(self) -> PolicyFacts:
        """Load model and optimizer, join the process group."""

    @abstractmethod
    def get_logprobs(self, data: BatchedDataDict[Any], *, reference: bool = False) -> BatchedDataDict[Any]:
        """Score this rank's rows.

        Args:
            data: `input_ids` [B, T], `input_lengths` [B]; may carry a microbatch plan made by `shard_by_batch_size`.
            reference: score under the reference policy.

        Returns:
            `logprobs` [B, T] float32 on the CPU, in the order of `data`.
        """

    def get_topk_logprobs(self, data: BatchedDataDict[Any], *, k: int) -> BatchedDataDict[Any]:
        """The most likely tokens of this rank's rows, if the backend supports it (capability `topk_logprobs`).

        A backend with that capability also passes `candidate_logprobs` to a loss that has a `candidates_key`.

        Returns:
            `topk_token_ids` [B, T, k] int64 and `topk_logprobs` [B, T, k] float32 on the CPU, in the order of `data`; see
            `TopkLogprobOutputSpec`.
        """
        raise NotImplementedError

    def get_values(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        """Values of this rank's rows, if the backend has a scalar head (capability `scalar_head`) and the config selects it.

        Returns:
            `values` [B, T] float32 on the CPU, in the order of `data`; see `ValueOutputSpec`.
        """
        raise NotImplementedError

    @abstractmethod
    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        *,
        counts: Sequence[GlobalCounts],
        eval_mode: bool = False,
        mbs: int | None = None,
    ) -> list[StepResult]:
        """Take one optimizer step for each global batch.

        Args:
            data: this rank's rows of `len(counts)` consecutive global batches of equal size; every rank has the same number
                of rows, and with a microbatch plan the same number of microbatches of each global batch.
            loss_fn: the loss; with a scalar head it receives values instead of log-probabilities.
            counts: the normalising counts of each global batch.
            eval_mode: loss and metrics only.
            mbs: rows of a microbatch, if `data` carries no plan.
        """

    def generate(self, data: BatchedDataDict[Any], *, greedy: bool = False) -> BatchedDataDict[Any]:
        """Sample from this rank's rows, if the backend has a sampler."""
        raise NotImplementedError

    def set_lr_factor(self, factor: float) -> None:
        """See `TrainableInterface.set_lr_factor`; called on all ranks."""
        raise NotSupportedError(f"{type(self).__name__} does not implement `set_lr_factor`.")

    @abstractmethod
    def prepare_for_training(self) -> None:
        """Move weights, gradients and optimizer state to the device; calling it twice is fine."""

    @abstractmethod
    def finish_training(self) -> None:
        """Release memory that only training needs; calling it twice is fine."""

    def try_save(self, weights_path: Path) -> None:
        """See `TrainableInterface.try_save`. By default, nothing is written."""

    @abstractmethod
    def save_checkpoint(self, weights_path: Path, optimizer_path: Path | None) -> None:
        """Write this rank's shard; every rank is called with the same paths, on a file system that all ranks see."""

    def find_non_finite(self) -> str | None:
        """The name of the first tensor of this rank with NaN or infinite values, which must not be saved.

        Weights, float32 copies of weights, and optimizer state. None if all are finite; the default checks nothing.
        """
        return None

    def weight_sample(self, *, whole: bool = False) -> WeightSample | None:
        """Digest of this rank's trained weights, see `TrainableInterface.weight_samples`; None, the default, if unknown."""
        return None

    @abstractmethod
    def load_checkpoint(self, weights_path: Path, optimizer_path: Path | None) -> None:
        """Read what `save_checkpoint` wrote."""

    @abstractmethod
    def get_weight_version(self) -> int:
        """Number of optimizer steps behind the weights."""

    def shutdown(self) -> None:
        """Leave the process group; calling it twice is fine."""
        return None


class GenerationWorker(MeasuredWorker, ABC):
    """One replica of a generation engine (or rank 0 of a multi-process replica)."""

    @abstractmethod
    def setup(self) -> GenerationFacts:
        """Load the engine."""

    @abstractmethod
    def generate(self, data: BatchedDataDict[Any], *, greedy: bool = False) -> BatchedDataDict[Any]:
        """Complete this replica's rows; see `GenerationInterface.generate`."""

    def batch_progress(self) -> tuple[int, int] | None:
        """Number of ended rows and of sampled tokens of the latest `generate` call; read in other threads. None if unknown."""
        return None

    def poll(
        self, arrivals: Sequence[GenerationRequest], *, cancelled: Sequence[str] = (), wait_s: float = 0.1
    ) -> dict[str, BatchedDataDict[Any] | RLCoreError]:
        """Accept new rows and return finished ones, for a streaming engine (`GenerationInterface.generate_async`).

        Args:
            arrivals: rows to start.
            cancelled: names of rows to abort; unknown names are ignored.
            wait_s: maximum seconds to work before returning; returns as soon as a row has ended. With 0, which an engine in the
                driver's process gets, every row in progress advances by at least one token.

        Returns:
            Name of each row that has ended since the last call, to its `GenerationOutputSpec` or to the error that prevents its
            completion. A worker whose facts have `streams_tokens` also returns rows with `stream_tokens` that have new tokens,
            with all their tokens so far and `unfinished`.
        """
        raise NotImplementedError

    def close_sessions(self, sessions: Sequence[str]) -> None:
        """Discard what this replica keeps for these conversations (`session_ids` of the rows); unknown names are ignored."""
        return None

    def check_processes(self) -> None:
        """Return at once; raise EngineDiedError if another process of this replica has exited. Health checks call it."""
        return None

    def prepare_for_generation(self) -> None:
        """Move what sampling needs to the device; calling it twice is fine."""

    def finish_generation(self) -> None:
        """Release memory that only sampling needs; calling it twice is fine."""

    @abstractmethod
    def get_weight_version(self) -> int:
        """Number of optimizer steps behind the weights; -1 before the first refit and during a refit."""

    @abstractmethod
    def invalidate_kv_cache(self) -> bool:
        """Drop all cached prefixes; True once nothing computed under older weights is left."""

    def shutdown(self) -> None:
        """Leave process groups and free memory; calling it twice is fine."""
