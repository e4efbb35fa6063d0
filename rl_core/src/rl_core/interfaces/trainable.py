"""Models that take optimizer steps on a loss and save their state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from rl_core.errors import NotSupportedError
from rl_core.interfaces.generation import GenerationDatumSpec
from rl_core.interfaces.loss import LossFunction

if TYPE_CHECKING:
    from rl_core.data.batched_data_dict import BatchedDataDict


class TrainingDatumSpec(TypedDict):
    """Rows to train on; a loss may read further columns (`rl_core.data.schema`)."""

    input_ids: torch.Tensor
    """[B, T] int64, right-padded."""
    input_lengths: torch.Tensor
    """[B] int64, tokens of each row."""
    token_mask: torch.Tensor
    """[B, T] float32, 1.0 on the tokens to train on."""
    sample_mask: torch.Tensor
    """[B] float32, 0.0 for rows that are not trained on."""


@dataclass(frozen=True, kw_only=True)
class WeightSample:
    """Digest of the trained weights that one rank holds, or of a few elements of each."""

    rank: int
    """The rank."""
    shard: str
    """Which shard the rank holds; ranks with the same shard must have the same digest."""
    digest: str
    """The digest."""
    exact: bool
    """Whether the weights are float32, so that an optimizer step is not lost in rounding."""


class TrainableInterface(ABC):
    """A trainable model.

    Only `train` is required. A run also needs `save_checkpoint`, unless `checkpointing.enabled` is false.
    """

    @abstractmethod
    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        *,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Take one optimizer step for every `gbs` rows of `data`.

        Args:
            data: `input_ids`, `input_lengths`, `token_mask`, `sample_mask` and the keys that the loss reads.
            loss_fn: the loss; see `LossFunction` for its normalisation.
            eval_mode: compute the loss and its metrics only; no gradient, no step.
            gbs: rows of one optimizer step over all ranks; all of `data` by default.
            mbs: rows of one forward-backward pass on one rank, without a token budget or packing; the config's value by
                default.

        Returns:
            `loss` (mean over the optimizer steps), `grad_norm`, `lr`, `num_optimizer_steps`, `global_valid_seqs`,
            `global_valid_toks`, `skipped_valid_toks` (those of `global_valid_toks` that were not computed, because their rows
            have no gradient; see `LossFunction.rows_with_gradient`), `metrics`: the loss's own, reduced over microbatches,
            ranks and steps, and optionally `computed_lengths`: the number of tokens of each row that was computed.

        Raises:
            NonFiniteError: a loss or gradient norm is NaN or infinite; the weights are unchanged by that step.
        """

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Move weights, gradients and optimizer state to the training device; calling it twice is fine."""
        return None

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Release memory that only training needs; calling it twice is fine."""
        return None

    def save_checkpoint(self, weights_path: str | Path, optimizer_path: str | Path | None = None, **kwargs: Any) -> None:
        """Write the weights to a folder, and the state to resume from: optimizer, scheduler, RNG of every rank.

        Raises:
            NotSupportedError: the model cannot save checkpoints.
        """
        raise NotSupportedError(
            f"{type(self).__name__} does not implement `save_checkpoint`. Set checkpointing.enabled: false."
        )

    def try_save(self, weights_path: str | Path) -> None:
        """Write the files of `save_checkpoint` that describe the model to a folder; called before the first step."""
        return None

    def find_non_finite(self) -> str | None:
        """The name of a weight or optimizer-state tensor with NaN or infinite values on any rank; None if all are finite.

        A run calls it before each checkpoint and stops if it finds one. A model without this method is not checked.
        """
        return None

    def weight_samples(self, *, whole: bool = False) -> Sequence[WeightSample]:
        """A digest of the trained weights of each rank: of a fixed sample of elements, or with `whole` of all of them.

        A run calls it after each optimizer step, and with `whole` before each checkpoint: it stops if a step changed nothing,
        or if ranks with the same shard differ. A model without this method is not checked.
        """
        return ()

    def checkpoint_bytes(self, *, optimizer: bool) -> int:
        """A lower bound of the bytes that `save_checkpoint` writes, with or without the optimizer; 0 if unknown."""
        return 0

    def load_checkpoint(self, weights_path: str | Path, optimizer_path: str | Path | None = None, **kwargs: Any) -> None:
        """Read what `save_checkpoint` wrote; with both paths, training continues as if it had never stopped.

        Raises:
            CheckpointError: the folder is missing, incomplete, or of another model.
            NotSupportedError: the model cannot load checkpoints, so a run on it cannot be resumed.
        """
        raise NotSupportedError(f"{type(self).__name__} does not implement `load_checkpoint`, so runs cannot be resumed.")

    def shutdown(self) -> bool:
        """Stop the model and its processes; calling it twice is fine. Returns True."""
        return True

    @property
    def weight_version(self) -> int:
        """Number of optimizer steps behind the weights; a run compares it with the engine's after each refit.

        Raises:
            NotSupportedError: the model does not count them.
        """
        raise NotSupportedError(f"{type(self).__name__} does not count its optimizer steps: it has no `weight_version`.")


class ValueOutputSpec(TypedDict):
    """Output of the scalar head."""

    values: torch.Tensor
    """[B, T] float32; position t is the head's output after token t was read, so the value of the state in which token t is
    sampled is at t - 1; 0.0 on padding."""


class ValueInterface(TrainableInterface):
    """A language model with a scalar head (`policy.head: scalar`).

    Its loss functions receive `values` [B, T], laid out as `ValueOutputSpec`, where those of a policy receive
    log-probabilities; possibly 0.0 wherever `token_mask * sample_mask` is 0. They carry the gradient.
    """

    @abstractmethod
    def get_values(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[ValueOutputSpec]:
        """Compute the value at every token of `data` (`input_ids` [B, T] and `input_lengths` [B]) under the current weights.

        Raises:
            NotSupportedError: the model has a language-model head.
        """
