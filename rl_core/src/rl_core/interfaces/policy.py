"""What trains: scores tokens, takes optimizer steps, and hands its weights on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

import torch

from rl_core.errors import NotSupportedError
from rl_core.interfaces.generation import GenerationDatumSpec, GenerationOutputSpec
from rl_core.interfaces.trainable import TrainableInterface

if TYPE_CHECKING:
    from rl_core.data.batched_data_dict import BatchedDataDict


class LogprobOutputSpec(TypedDict):
    """Scores of the current policy."""

    logprobs: torch.Tensor
    """[B, T] float32, in nats; position t scores token t given the tokens before it; 0.0 at position 0 and on
    padding."""


class ReferenceLogprobOutputSpec(TypedDict):
    """Scores of the reference policy."""

    reference_logprobs: torch.Tensor
    """[B, T] float32, as `LogprobOutputSpec.logprobs`."""


class TopkLogprobOutputSpec(TypedDict):
    """The likeliest tokens under the current policy, whichever token the row has there; the likeliest first."""

    topk_token_ids: torch.Tensor
    """[B, T, K] int64; position t is of the distribution over token t given the tokens before it; 0 at position 0 and on
    padding."""
    topk_logprobs: torch.Tensor
    """[B, T, K] float32, in nats, under the whole distribution; 0.0 at position 0 and on padding."""


class PolicyInterface(TrainableInterface):
    """A language model that is trained."""

    checkpoint_conversions: ClassVar[Mapping[str, str]] = {}
    """Format that a checkpoint's weights can be converted to, to the "module:function" that does it; see
    `rl_core.interfaces.conversion`."""

    @abstractmethod
    def get_logprobs(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[LogprobOutputSpec]:
        """Score every token of `data` under the current weights, at the sampling temperature.

        Args:
            data: `input_ids` [B, T] and `input_lengths` [B]; other keys are ignored.
        """

    @abstractmethod
    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[GenerationDatumSpec]
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Score every token of `data` under the frozen reference policy, at the sampling temperature.

        Raises:
            NotSupportedError: the policy was built without a reference.
        """

    def get_reference_logprobs(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """The same as `get_reference_policy_logprobs`, under its other promised name."""
        return self.get_reference_policy_logprobs(data)

    def get_topk_logprobs(self, data: BatchedDataDict[GenerationDatumSpec], k: int) -> BatchedDataDict[TopkLogprobOutputSpec]:
        """The `k` likeliest tokens at every position under the current weights, at the sampling temperature.

        Args:
            data: `input_ids` [B, T] and `input_lengths` [B]; other keys are ignored.
            k: how many.

        Raises:
            DataError: the vocabulary has fewer tokens than `k`.
        """
        raise NotSupportedError(
            f"{type(self).__name__} tells no likeliest tokens, only log-probabilities of given ones. Use a policy backend with "
            "the capability `topk_logprobs`, or a loss that reads the sampled tokens alone."
        )

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Sample from the policy itself, where it has a sampler; a generation backend is the normal path."""
        raise NotSupportedError(
            f"{type(self).__name__} has no sampler of its own. Name a generation backend under `policy.generation`."
        )


class ColocatablePolicyInterface(PolicyInterface):
    """A policy that can hand its weights to a generation backend."""

    @abstractmethod
    def init_collective(self, ip: str, port: int, world_size: int) -> list[Any]:
        """Start to join the weight collective as rank 0 of `world_size`. Returns pending calls."""

    @abstractmethod
    def offload_before_refit(self) -> None:
        """Make room for the generation backend's weights: optimizer state and gradients leave the device."""

    @abstractmethod
    def offload_after_refit(self) -> None:
        """Make room for sampling: the weights leave the device as well."""

    @abstractmethod
    def prepare_refit_info(self) -> dict[str, Any] | None:
        """The manifest: name to (shape, dtype) of all that is sent, under Hugging Face names, in sending order."""

    @abstractmethod
    def prepare_weights_for_ipc(self, *args: Any, **kwargs: Any) -> list[list[str]]:
        """Split the manifest into buckets of names, each within the byte budget; starts one refit.

        With `kept`, name to the receiver's dtype, weights that are wider travel rounded to it.
        """

    @abstractmethod
    def get_weights_ipc_handles(
        self, keys: list[str], *, by_reference: bool = False, file: str | None = None
    ) -> dict[str, Any]:
        """Put one bucket where other processes of the node can map it.

        Args:
            keys: names of one bucket of `prepare_weights_for_ipc`.
            by_reference: hand over the tensors themselves; for a generation backend in this process.
            file: write them there instead, in safetensors' format.

        Returns:
            What `GenerationInterface.update_weights` takes; valid until the call after the next one (so that one bucket
            is written while the one before is read) or the end of the refit.
        """

    @abstractmethod
    def broadcast_weights_for_collective(self) -> list[Any]:
        """Start to send every tensor of the manifest, in its order, from rank 0. Returns pending calls."""

    def weight_fingerprint(self, *, dtypes: Mapping[str, str] | None = None, kind: str | None = None) -> str:
        """Digest of the policy's present weights, to be compared with the generation backend's.

        Args:
            dtypes: name to the dtype that the receiver keeps, such as "bfloat16"; tensors are cast to it first.
            kind: how to digest (`rl_core.weights.fingerprint`); the receiver's kind, so that both compute the same.
        """
        raise NotSupportedError(f"{type(self).__name__} does not fingerprint its weights, so a refit cannot be proven.")

    def weight_digests(self, *, dtypes: Mapping[str, str] | None = None, kind: str | None = None) -> dict[str, str]:
        """Name to digest of each tensor: what `weight_fingerprint` combines, asked for when two fingerprints differ."""
        raise NotSupportedError(f"{type(self).__name__} does not fingerprint its weights, so a refit cannot be proven.")

    def finish_refit(self) -> None:
        """Free what the refit held (shared memory, staging buffers); calling it twice is fine."""


RefitManifest = Mapping[str, tuple[tuple[int, ...], str]]
"""Name to (shape, dtype name such as "float32")."""
