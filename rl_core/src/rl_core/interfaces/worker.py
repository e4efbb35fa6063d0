"""What a backend author writes: one rank of a policy or of a generation engine; torch, and no Ray.

The facades in `rl_core.dispatch` turn a group of workers into a `PolicyInterface` or a `GenerationInterface`: they
shard over the data axis, dispatch, put results back in order, hold deadlines and name who failed. A worker takes
(`context`: `rl_core.interfaces.worker_context.WorkerContext`, `config`: its section's model) and loads nothing before
`setup`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import RLCoreError
from rl_core.interfaces.loss import LossFunction

if TYPE_CHECKING:
    from rl_core.data.batched_data_dict import BatchedDataDict


@dataclass(frozen=True, kw_only=True)
class GlobalCounts:
    """What one global batch is normalised by, over all ranks and microbatches."""

    valid_seqs: float
    """Rows with `sample_mask`."""
    valid_toks: float
    """Tokens with `token_mask * sample_mask`."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One rank's share of one optimizer step."""

    loss: float
    """This rank's share: the sum over ranks is the loss of the global batch."""
    grad_norm: float
    """Global gradient norm before clipping, the same on every rank; 0.0 in eval mode."""
    lr: float
    """Learning rate of the step."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """This rank's shares of the loss's metrics, already reduced over its microbatches."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One row for an engine that streams."""

    name: str
    """What its answer is called; unique among the rows under way."""
    row: BatchedDataDict[Any]
    """A batch of one row; see `GenerationDatumSpec`."""
    greedy: bool = False
    """Take the most likely token at each position."""


class PolicyWorker(ABC):
    """One rank of a policy."""

    @abstractmethod
    def setup(self) -> Mapping[str, Any]:
        """Load model and optimizer, join the process group. Returns facts: `num_parameters`, `device`, `vocab_size`."""

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
        """The likeliest tokens of this rank's rows, where the backend can tell them (capability `topk_logprobs`).

        A backend with that capability also puts `candidate_logprobs` before a loss that has a `candidates_key`.

        Returns:
            `topk_token_ids` [B, T, k] int64 and `topk_logprobs` [B, T, k] float32 on the CPU, in the order of `data`; see
            `TopkLogprobOutputSpec`.
        """
        raise NotImplementedError

    def get_values(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        """Value this rank's rows, where the backend has a scalar head (capability `scalar_head`) and the config asks for it.

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
            data: this rank's rows of `len(counts)` global batches one after the other, of equal row counts; every
                rank has as many rows, and with a microbatch plan as many microbatches of each global batch.
            loss_fn: the loss; with a scalar head it is called with values in place of log-probabilities.
            counts: what each global batch is normalised by.
            eval_mode: loss and metrics only.
            mbs: rows of a microbatch, where `data` carries no plan.
        """

    def generate(self, data: BatchedDataDict[Any], *, greedy: bool = False) -> BatchedDataDict[Any]:
        """Sample from this rank's rows, where the backend has a sampler."""
        raise NotImplementedError

    @abstractmethod
    def prepare_for_training(self) -> None: ...

    @abstractmethod
    def finish_training(self) -> None: ...

    @abstractmethod
    def save_checkpoint(self, weights_path: Path, optimizer_path: Path | None) -> None:
        """Write this rank's part; every rank is called with the same paths, on a file system that all see."""

    def find_non_finite(self) -> str | None:
        """The name of the first of this rank's tensors that a checkpoint must not hold, because it has NaN or infinities.

        Weights, float32 copies of weights, and optimizer state. None if all are finite; the default, which checks nothing.
        """
        return None

    @abstractmethod
    def load_checkpoint(self, weights_path: Path, optimizer_path: Path | None) -> None: ...

    @abstractmethod
    def get_weight_version(self) -> int: ...

    def shutdown(self) -> None:
        """Leave the process group; calling it twice is fine."""
        return None


class GenerationWorker(ABC):
    """One replica of a generation engine (or rank 0 of a replica that spans several processes)."""

    @abstractmethod
    def setup(self) -> Mapping[str, Any]:
        """Load the engine. Returns facts: `max_model_len`, `device`, `vocab_size`."""

    @abstractmethod
    def generate(self, data: BatchedDataDict[Any], *, greedy: bool = False) -> BatchedDataDict[Any]:
        """Complete this replica's rows; see `GenerationInterface.generate`."""

    def poll(
        self, arrivals: Sequence[GenerationRequest], *, cancelled: Sequence[str] = (), wait_s: float = 0.1
    ) -> dict[str, BatchedDataDict[Any] | RLCoreError]:
        """Take rows in and give finished ones out, for an engine that streams (`GenerationInterface.generate_async`).

        Args:
            arrivals: rows to begin.
            cancelled: names of rows that nobody waits for any more; unknown ones are skipped.
            wait_s: how long to work before it returns with nothing; it returns as soon as a row has ended.

        Returns:
            Name to `GenerationOutputSpec` of one row, of the rows that have ended and were not handed out yet; to the error
            of a row that cannot be completed.
        """
        raise NotImplementedError

    def prepare_for_generation(self) -> None:
        return None

    def finish_generation(self) -> None:
        return None

    @abstractmethod
    def get_weight_version(self) -> int: ...

    @abstractmethod
    def invalidate_kv_cache(self) -> bool: ...

    def shutdown(self) -> None:
        return None
