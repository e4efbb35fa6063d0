"""Policies: score tokens, take optimizer steps and export weights."""

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
    """Log-probabilities under the current policy."""

    logprobs: torch.Tensor
    """[B, T] float32, in nats; position t scores token t given the tokens before it; 0.0 at position 0 and on
    padding."""


LogprobsSpec = LogprobOutputSpec
"""Another name of `LogprobOutputSpec`."""


class ReferenceLogprobOutputSpec(TypedDict):
    """Log-probabilities under the reference policy."""

    reference_logprobs: torch.Tensor
    """[B, T] float32, as `LogprobOutputSpec.logprobs`."""


class TopkLogprobOutputSpec(TypedDict):
    """The most likely tokens under the current policy at each position, in descending order."""

    topk_token_ids: torch.Tensor
    """[B, T, K] int64; position t belongs to the distribution over token t given the tokens before it; 0 at position 0 and on
    padding."""
    topk_logprobs: torch.Tensor
    """[B, T, K] float32, in nats, under the whole distribution; 0.0 at position 0 and on padding."""


class PolicyInterface(TrainableInterface):
    """A trainable language model. Only `train` is required; a missing method that is called raises an error that names it."""

    checkpoint_conversions: ClassVar[Mapping[str, str]] = {}
    """Target format of a checkpoint conversion to its "module:function"; see `rl_core.interfaces.conversion`."""

    def get_logprobs(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[LogprobOutputSpec]:
        """Score every token of `data` under the current weights, at the sampling temperature.

        Args:
            data: `input_ids` [B, T] and `input_lengths` [B]; other keys are ignored.

        Raises:
            NotSupportedError: the policy cannot score tokens.
        """
        raise NotSupportedError(
            f"{type(self).__name__} does not implement `get_logprobs`. Algorithms that train on samples need it, and so does "
            "the comparison of log-probabilities after a weight sync."
        )

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[GenerationDatumSpec]
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Score every token of `data` under the frozen reference policy, at the sampling temperature.

        Raises:
            NotSupportedError: the policy has no reference.
        """
        if type(self).get_reference_logprobs is not PolicyInterface.get_reference_logprobs:
            return self.get_reference_logprobs(data)
        raise NotSupportedError(
            f"{type(self).__name__} does not implement `get_reference_policy_logprobs`, so it has no reference policy. Set the "
            "KL penalty to 0, or use another policy backend."
        )

    def get_reference_logprobs(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Alias of `get_reference_policy_logprobs`; a policy implements one of the two."""
        return self.get_reference_policy_logprobs(data)

    def get_topk_logprobs(self, data: BatchedDataDict[GenerationDatumSpec], k: int) -> BatchedDataDict[TopkLogprobOutputSpec]:
        """The `k` most likely tokens at every position under the current weights, at the sampling temperature.

        Raises:
            DataError: the vocabulary has fewer tokens than `k`.
        """
        raise NotSupportedError(
            f"{type(self).__name__} does not support top-k log-probabilities. Use a policy backend with the capability "
            "`topk_logprobs`, or a loss that reads only the sampled tokens."
        )

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Sample completions with the policy's own sampler, if it has one; runs use a generation backend instead."""
        raise NotSupportedError(f"{type(self).__name__} cannot sample. Choose a generation backend under `policy.generation`.")


class ColocatablePolicyInterface(PolicyInterface):
    """A policy that can send its weights to a generation backend."""

    @abstractmethod
    def init_collective(self, ip: str, port: int, world_size: int) -> list[Any]:
        """Start joining the weight collective as rank 0 of `world_size`. Returns pending calls."""

    @abstractmethod
    def offload_before_refit(self) -> None:
        """Move optimizer state and gradients off the device, to free memory for the generation backend's weights."""

    @abstractmethod
    def offload_after_refit(self) -> None:
        """Move the weights off the device as well, to free memory for sampling."""

    @abstractmethod
    def prepare_refit_info(self) -> dict[str, Any] | None:
        """The manifest: name to (shape, dtype) of all tensors sent, under Hugging Face names, in sending order."""

    @abstractmethod
    def prepare_weights_for_ipc(self, *args: Any, **kwargs: Any) -> list[list[str]]:
        """Start a refit: split the manifest into buckets of names, each within the byte budget.

        With `receiver_dtypes`, name to the receiver's dtype, wider weights are rounded to it before they are sent.
        """

    @abstractmethod
    def get_weights_ipc_handles(
        self, keys: list[str], *, by_reference: bool = False, file: str | None = None
    ) -> dict[str, Any]:
        """Make one bucket available to other processes of the node.

        Args:
            keys: names of one bucket of `prepare_weights_for_ipc`.
            by_reference: pass the tensors themselves; for a generation backend in this process.
            file: write the bucket to this file instead, in safetensors format.

        Returns:
            The argument of `GenerationInterface.update_weights`; valid until the call after the next one (so that one bucket
            is written while the previous one is read) or the end of the refit.
        """

    @abstractmethod
    def broadcast_weights_for_collective(self) -> list[Any]:
        """Start sending every tensor of the manifest, in order, from rank 0. Returns pending calls."""

    def weight_fingerprint(self, *, dtypes: Mapping[str, str] | None = None, kind: str | None = None) -> str:
        """Digest of the policy's current weights, for comparison with the generation backend's.

        Args:
            dtypes: name to the dtype that the receiver stores, such as "bfloat16"; tensors are cast to it first.
            kind: digest algorithm of the receiver (`rl_core.weights.fingerprint`).
        """
        raise NotSupportedError(f"{type(self).__name__} does not fingerprint its weights, so a refit cannot be verified.")

    def weight_digests(self, *, dtypes: Mapping[str, str] | None = None, kind: str | None = None) -> dict[str, str]:
        """Name to digest of each tensor that `weight_fingerprint` combines; called when two fingerprints differ."""
        raise NotSupportedError(f"{type(self).__name__} does not fingerprint its weights, so a refit cannot be verified.")

    def finish_refit(self) -> None:
        """End the refit and free its memory; shared memory may be kept for the next one. Calling it twice is fine."""


RefitManifest = Mapping[str, tuple[tuple[int, ...], str]]
"""Name to (shape, dtype name such as "float32")."""
