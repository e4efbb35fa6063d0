"""Policies and other trainable models, the losses that they train on, and the transports that move their weights to engines.

A loss receives log-probabilities and a batch, never logits, and returns one scalar and its metrics. A transport moves every
tensor of a policy to a generation backend, once per refit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict

import torch

from rl_core.errors import NotSupportedError
from rl_core.interfaces.generation import GenerationDatumSpec, GenerationInterface, GenerationOutputSpec

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
            ranks and steps, and optionally `computed_lengths`: the number of tokens of each row that was computed, and
            `group_lrs`: the learning rates of optimizer groups by name, with `lr` the highest.

        Raises:
            NonFiniteError: a loss or gradient norm is NaN or infinite; the weights are unchanged by that step.
        """

    def set_lr_factor(self, factor: float) -> None:
        """Multiply the learning rate of the config and its schedule by a factor, until the next call; also in a resumed run.

        Raises:
            NotSupportedError: the model cannot change its learning rate.
        """
        raise NotSupportedError(f"{type(self).__name__} does not implement `set_lr_factor`.")

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

        With `receiver_dtypes`, name to the receiver's dtype, only these weights are sent, and wider ones are rounded first.
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
            dtypes: name of each tensor to digest to the dtype that the receiver stores, such as "bfloat16"; tensors are cast to
                it first. All tensors by default.
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


Reduction = Literal["sum", "token_mean", "min", "max"]
"""How shares of a metric are combined. `sum` and `token_mean` both add them up; a `token_mean` is a mean over trained tokens,
and covers only the computed ones if `LossFunction.rows_with_gradient` excludes rows."""


class LossType(Enum):
    """Unit that the loss is averaged over, across all ranks and microbatches of a global batch."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossFunction(ABC):
    """A scalar function of log-probabilities, normalised by counts that the backend passes in.

    The gradient of a global batch is the sum of the gradients of its microbatches over all ranks, because every call
    divides by the *global* count: microbatching, packing and data parallelism do not change it.

    Attributes:
        loss_type: whether the loss is a mean over tokens or over sequences.
        metric_reductions: how each metric is reduced over microbatches and ranks; the default is `sum`, so a metric that
            is a mean must already be divided by its global count. Metrics of a loss with `rows_with_gradient` that are not 0
            on the excluded rows must be `token_mean`, `min` or `max`.
        rows_per_unit: number k of consecutive rows that belong together, such as the two of a preference pair: rows k·n to
            k·n + k - 1 of the batch stay adjacent, in order, on one rank and in one microbatch.
        candidates_key: the batch key [B, T, K] int64 of further tokens to score at each position. The backend computes their
            log-probabilities in the same pass, with gradient, and adds them to the data as `candidate_logprobs` [B, T, K]
            float32, in nats, 0.0 where `token_mask * sample_mask` is 0. Requires the capability `topk_logprobs`.
        on_policy: set if a step updates the same weights that scored the batch (`rl_train.step.score`), so that log p before
            the update need not be in it.
        allows_dropout: whether the model's dropout may be on in training. It must be off if log-probabilities are compared
            with those of another pass (a ratio to the sampling policy, a reference policy, an old value), since dropout
            makes them differ for equal weights.
    """

    loss_type: LossType = LossType.TOKEN_LEVEL
    metric_reductions: ClassVar[Mapping[str, Reduction]] = {}
    rows_per_unit: int = 1
    candidates_key: str | None = None
    on_policy: bool = False
    allows_dropout: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """Name of the loss in messages."""
        return type(self).__name__

    @property
    def required_keys(self) -> frozenset[str]:
        """Batch keys that the loss reads in addition to `token_mask` and `sample_mask`."""
        return frozenset()

    @property
    def optional_keys(self) -> frozenset[str]:
        """Batch keys that the loss reads if the batch has them."""
        return frozenset()

    def reported_metrics(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """The metrics that are logged, from those of an optimizer step, a step or a validation set; by default all of them.

        Override it for numbers that cannot be added up, such as a mean over some of the rows: the loss returns its sum and the
        number of these rows, both divided by the global count.
        """
        return metrics

    def rows_with_gradient(self, data: BatchedDataDict[Any]) -> torch.Tensor | None:
        """Rows [B] bool that may contribute to the loss or its gradient; None, the default, if all may.

        The other rows are not computed in training. They still count in `global_valid_seqs` and `global_valid_toks`, so loss,
        gradient and optimizer step are the same as if they had been computed.

        Args:
            data: `token_mask` [B, T], `sample_mask` [B] and `required_keys`.
        """
        return None

    def batch_columns(self, data: BatchedDataDict[Any]) -> Mapping[str, torch.Tensor]:
        """Columns of `required_keys` that the loss computes from `data`, all rows of a step; none by default.

        `rl_train.step.optimize` calls it once per step, in the driver. So a loss may depend on statistics of the batch, and
        microbatches and ranks do not change the result.
        """
        return {}

    @abstractmethod
    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss of one microbatch.

        Args:
            next_token_logprobs: [B, T] float32, in nats; position t scores token t given the tokens before it; 0.0 at
                position 0, on padding, and possibly wherever `token_mask * sample_mask` is 0. Carries the gradient.
            data: the rows of the microbatch: `token_mask` [B, T], `sample_mask` [B] and `required_keys`.
            global_valid_seqs: scalar float32, number of rows with `sample_mask` in the global batch over all ranks.
            global_valid_toks: scalar float32, number of tokens with `token_mask * sample_mask` in it.

        Returns:
            The loss of this microbatch's share of the global batch, and detached scalar metrics (shares as well).
        """


@dataclass(frozen=True, kw_only=True)
class TransportContext:
    """Settings of the run that a transport needs."""

    buffer_bytes: int
    """Maximum bytes of weights in transit at a time; a larger tensor is sent alone."""
    deadline_s: float
    """Timeout of one refit in seconds."""
    wait: Callable[[Sequence[Any], float], Any]
    """Waits for pending calls of both ends together, at most a number of seconds; raises the first error (`collective`)."""
    rendezvous: Callable[[], tuple[str, int]]
    """Returns an address and a free port on the node of the policy's rank 0, for a process group rendezvous."""
    folder: Path = Path(gettempdir())
    """Folder for files of weights that both policy and generation backend can access."""
    receiver_dtypes: Callable[[], Mapping[str, str]] = dict
    """Name to the engine's dtype, such as "bfloat16", in the current refit; a tensor not listed is sent as it is."""
    num_receivers: int = 1
    """Number of generation workers that load weights in a refit of the whole engine; `generation.num_workers` in `push`."""
    on_sent: Callable[[], None] = lambda: None
    """Optional: call it once all weights have left the policy, to start its remaining work while the last are loaded."""


class WeightTransport(ABC):
    """A way to move weights from a policy to a generation backend.

    Attributes:
        name: the name under which it is registered.
        requires: capabilities that both backends must have, such as `("disk",)`; literals, for `rlcore validate`.
        shares_memory: the engine computes with the policy's own tensors and checks that in `update_weights`. Only the first
            refit then compares fingerprints: they would be of the same memory.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]] = ()
    shares_memory: ClassVar[bool] = False

    def __init__(self, context: TransportContext) -> None:
        """Store the run's limits; nothing is opened before the first push."""
        self.context = context

    @abstractmethod
    def push(self, policy: ColocatablePolicyInterface, generation: GenerationInterface) -> int:
        """Send all weights; the generation backend has already received the manifest.

        Returns:
            Bytes moved; 0 if nothing was copied.

        Raises:
            WeightSyncError: either side rejected a tensor.
            DeadlineExceededError: the refit took longer than `context.deadline_s`.
        """

    def close(self) -> None:
        """Leave process groups and free buffers; calling it twice is fine."""
        return None
