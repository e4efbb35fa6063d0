"""What samples: token ids in, token ids and the log-probabilities that they were sampled with out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import torch

from rl_core.errors import NotSupportedError

if TYPE_CHECKING:
    from rl_core.data.batched_data_dict import BatchedDataDict


class GenerationDatumSpec(TypedDict):
    """What a generation backend is asked.

    `attention_mask` [B, T] is accepted in place of `input_lengths` and converted at the door.
    """

    input_ids: torch.Tensor
    """[B, T] int64, right-padded."""
    input_lengths: torch.Tensor
    """[B] int64, tokens of each prompt."""
    stop_strings: NotRequired[list[list[str] | None]]
    """Strings that end a row, a list a row; they stay in the output."""
    sample_seeds: NotRequired[torch.Tensor]
    """[B] int64; a row's tokens depend on its seed, not on its neighbours. Absent: drawn from the backend's seed."""
    max_new_tokens: NotRequired[torch.Tensor]
    """[B] int64, a row's own limit; never above the config's."""


class GenerationOutputSpec(TypedDict):
    """What a generation backend answers, in the order of the input rows."""

    output_ids: torch.Tensor
    """[B, T'] int64, prompt and completion, right-padded."""
    generation_lengths: torch.Tensor
    """[B] int64, tokens of the completion alone, its end-of-sequence token included."""
    unpadded_sequence_lengths: torch.Tensor
    """[B] int64, prompt and completion."""
    logprobs: torch.Tensor
    """[B, T'] float32, in nats, of each sampled token under the distribution that it was sampled from; 0.0 on the
    prompt and on padding."""
    truncated: torch.Tensor
    """[B] bool; ended by a limit, not by a stop."""
    weight_version: torch.Tensor
    """[B] int64, optimizer steps of the weights that sampled the row."""


class GenerationInterface(ABC):
    """An engine that samples from a copy of the policy's weights.

    Verbs beyond the first three have defaults, most of which say "not supported", so an engine offers what it has.
    """

    @abstractmethod
    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete every row of `data`.

        Args:
            data: prompts, see `GenerationDatumSpec`.
            greedy: take the most likely token at each position; log-probabilities are then still those of the
                temperature-scaled distribution.

        Raises:
            DataError: a prompt is empty, holds an id outside the vocabulary, or leaves no room within `max_model_len`.
        """

    @abstractmethod
    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Bring the engine to where it can sample; calling it twice is fine."""

    @abstractmethod
    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Release what only sampling needs; calling it twice is fine."""

    def shutdown(self) -> bool:
        """End the engine and its processes, where it has any; calling it twice is fine."""
        return True

    @property
    def num_workers(self) -> int:
        """Workers that load weights at a refit."""
        return 1

    @property
    def weight_version(self) -> int:
        """How many optimizer steps the engine's weights have seen; -1 before the first refit."""
        return -1

    @property
    def restarts(self) -> int:
        """Workers that have died and been replaced so far."""
        return 0

    def restart_dead(self, cause: Exception | None = None) -> bool:
        """Replace the workers that have died, for whoever runs a refit; the new ones are without the policy's weights.

        `generate` and the verbs around it do so by themselves.

        Args:
            cause: what made the caller ask.

        Returns:
            Whether a worker was replaced, so that a refit that failed may begin again.

        Raises:
            WorkerDiedError: a worker is dead and may not be replaced any more.
        """
        return False

    def refit_with(self, refit: Callable[[], object]) -> None:
        """Take what brings the policy's weights and proves them (`WeightSynchronizer.sync`).

        An engine that replaces a worker in the middle of `generate` calls it before it goes on; any other has no use for it.
        """
        return None

    def generate_async(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> AsyncIterator[tuple[int, BatchedDataDict[GenerationOutputSpec]]]:
        """Yield (row, its output) as each row finishes."""
        raise self._not_supported("generate_async")

    def init_collective(self, ip: str, port: int, world_size: int) -> list[Any]:
        """Start to join the weight collective of `world_size` ranks; rank 0 is the policy's. Returns pending calls."""
        raise self._not_supported("init_collective")

    def prepare_refit_info(self, info: Mapping[str, Any]) -> Mapping[str, str] | None:
        """Take the manifest of the weights to come (name to shape and dtype) and check it against the engine's own.

        Begins a refit: whatever an earlier, unfinished one brought no longer counts.

        Returns:
            Name to the dtype that the engine keeps each tensor in; None where it keeps the manifest's.

        Raises:
            WeightSyncError: a name or a shape does not fit, before anything is loaded.
        """
        raise self._not_supported("prepare_refit_info")

    def update_weights(self, ipc_handles: Mapping[str, Any]) -> None:
        """Load one bucket of weights from shared memory or by reference.

        The weight version becomes the policy's once every tensor of the manifest has arrived.
        """
        raise self._not_supported("update_weights")

    def update_weights_from_collective(self) -> list[Any]:
        """Start to receive all weights from the collective. Returns pending calls."""
        raise self._not_supported("update_weights_from_collective")

    def weight_fingerprint(self) -> str:
        """Digest of the engine's weights, the same on every replica; equal to the policy's.

        An engine that digests the tensors that it computes with has the capability `held_weight_digests`. One that transforms
        weights after they have arrived digests those that arrived, and every refit then asks the canary.

        Raises:
            WeightSyncError: tensors of the refit under way are missing (it names them), or replicas differ.
        """
        raise self._not_supported("weight_fingerprint")

    def weight_digests(self) -> dict[str, str]:
        """Name to digest of each tensor: what `weight_fingerprint` combines, asked for when two fingerprints differ."""
        raise self._not_supported("weight_digests")

    def invalidate_kv_cache(self) -> bool:
        """Forget every cached prefix; True once nothing computed under older weights is left."""
        raise self._not_supported("invalidate_kv_cache")

    def _not_supported(self, verb: str) -> NotSupportedError:
        return NotSupportedError(
            f"{type(self).__name__} does not support `{verb}`. "
            "Choose a weight transport or an option that this generation backend lists among its capabilities."
        )
