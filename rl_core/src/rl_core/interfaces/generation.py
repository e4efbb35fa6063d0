"""Generation backends: token ids in; sampled token ids and their log-probabilities out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import torch

from rl_core.errors import NotSupportedError
from rl_core.interfaces.records import Message

if TYPE_CHECKING:
    from rl_core.data.batched_data_dict import BatchedDataDict
    from rl_core.data.generation_io import SampledSets
    from rl_core.data.images import RowImage


class GenerationDatumSpec(TypedDict):
    """Input of a generation backend: `input_ids` with `input_lengths` or `attention_mask`, or `messages` alone."""

    input_ids: torch.Tensor
    """[B, T] int64, right-padded."""
    input_lengths: NotRequired[torch.Tensor]
    """[B] int64, tokens of each prompt."""
    attention_mask: NotRequired[torch.Tensor]
    """[B, T], 1 on the tokens of each prompt; accepted instead of `input_lengths` and converted on entry."""
    stop_strings: NotRequired[list[list[str] | None]]
    """Strings that end each row, one list per row; they are included in the output."""
    sample_seeds: NotRequired[torch.Tensor]
    """[B] int64; a row's tokens depend on its seed, not on the other rows. If absent, seeds derive from the backend's seed."""
    max_new_tokens: NotRequired[torch.Tensor]
    """[B] int64, limit of new tokens per row; the config's limit applies as well."""
    sampling: NotRequired[list[dict[str, Any] | None]]
    """Options of single rows; None or an absent key for none. `temperature`, `top_p` and `top_k` replace the engine's, if its
    facts have `reads_sampling`. The facts name further options in `row_options`, see `docs/batch_keys.md`, such as
    `top_logprobs`, the number of alternatives to report at each position, `prompt_logprobs`, the same for the prompt's tokens,
    `sampled_sets`, true to return them, and `json_schema`, which every completion that ends by itself fits. Engines raise
    NotSupportedError for other options."""
    session_ids: NotRequired[list[str | None]]
    """Name of the conversation that each row continues. `generate_async` samples all turns of a session on one replica, which
    may keep its keys and values between turns until `close_sessions`; the output does not depend on it."""
    stream_tokens: NotRequired[torch.Tensor]
    """[B] bool; `generate_async` also yields the row while it is sampled. Engines without `streams_tokens` ignore it."""
    prompt_id: NotRequired[torch.Tensor]
    """[B] int64; rows with equal ids are samples of one prompt and run on one replica. If absent, rows with equal tokens do."""
    images: NotRequired[list[list[RowImage] | None]]
    """Images of each row; engines whose facts do not have `images` refuse them."""
    messages: NotRequired[list[list[Message]]]
    """The conversation of each row. Engines with `reads_messages` read it; all others read `input_ids`. Without `input_ids`,
    those with `TextGeneration` render it with their tokenizer, and return it with the completion as a new message."""


class GenerationOutputSpec(TypedDict):
    """Output of a generation backend, in the order of the input rows."""

    output_ids: torch.Tensor
    """[B, T'] int64, prompt and completion, right-padded."""
    generation_lengths: torch.Tensor
    """[B] int64, tokens of the completion, including its end-of-sequence token."""
    unpadded_sequence_lengths: torch.Tensor
    """[B] int64, prompt and completion."""
    logprobs: torch.Tensor
    """[B, T'] float32, in nats, of each sampled token under the distribution it was sampled from; 0.0 on the prompt and on
    padding."""
    truncated: torch.Tensor
    """[B] bool; ended by a length limit, not by a stop."""
    weight_version: torch.Tensor
    """[B] int64, oldest weight version (number of optimizer steps) that sampled a token of the row."""
    token_versions: NotRequired[torch.Tensor]
    """[B, T'] int64, weight version of each sampled token, -1 elsewhere; absent if each row has one version. A token's
    log-probability is that under the weights of its version, given all tokens before it."""
    failures: NotRequired[list[str | None]]
    """Why a row could not be sampled, such as a server that did not respond; None for the others. A failed row has no
    completion. Absent if no row failed."""
    top_logprobs: NotRequired[list[list[list[tuple[int, float]]] | None]]
    """The most likely tokens at each position of the completion, as (id, log-probability) in descending order; None for rows
    that did not request them (`sampling`). Probabilities are those of the distribution that the token was sampled from, and
    tokens of probability 0 are left out. Absent if no row requested them."""
    prompt_logprobs: NotRequired[list[list[list[tuple[int, float]]] | None]]
    """For each token of the prompt, (id, log-probability) of the token and then of the most likely ones in descending order;
    nothing for the first token; None for rows that did not request them (`sampling`). Probabilities are those of the model
    itself: at temperature 1, without penalties and filters. Absent if no row requested them."""
    sampled_sets: NotRequired[list[SampledSets | None]]
    """The tokens that each token was sampled from, the sampled one included; None for rows that did not request them."""
    messages: NotRequired[list[list[Message]]]
    """The conversation of each row with its completion, if the input had `messages`, `prompt` or `question` as text. Columns
    that no engine reads pass through, so the output can be passed to `EnvironmentInterface.step`."""
    unfinished: NotRequired[torch.Tensor]
    """[B] bool, true for a row that is still sampled (`stream_tokens`): it has its tokens so far, and `truncated` has no
    meaning. Absent in all other outputs."""


class WeightOwner(ABC):
    """The one owner of weight synchronization: it alone starts refits and decides which version an engine gets."""

    @abstractmethod
    def provide_weights(self) -> None:
        """Refit the engine's restarted replicas and verify them; an engine calls it and waits, in any thread.

        Rows in progress on other replicas are not interrupted, unless the policy has changed since the last refit.

        Raises:
            WeightSyncError: the weights could not be verified, or a refit is running in the calling thread.
            WorkerDiedError: a policy worker died, or a generation worker that may not be restarted.
            DeadlineExceededError: the refit took too long.
        """


class GenerationInterface(ABC):
    """An engine that samples from a copy of the policy's weights.

    Only the first three methods are required; most others raise `NotSupportedError` by default.
    """

    weight_owner: WeightOwner | None = None
    """The one owner of weight synchronization, which starts all refits. A replica that was restarted waits for its weights
    (`WeightOwner.provide_weights`) and does not sample before."""
    refit_thread: int | None = None
    """The thread that starts all refits (`threading.get_ident`); other threads wait for it in `await_weights`."""

    @abstractmethod
    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete every row of `data`.

        Args:
            data: prompts, see `GenerationDatumSpec`.
            greedy: take the most likely token at each position; log-probabilities are still those of the temperature-scaled
                distribution.

        Raises:
            DataError: a prompt is empty, has an id outside the vocabulary, or leaves no space within `max_model_len`.
        """

    def batch_progress(self) -> tuple[int, int] | None:
        """Number of ended rows and of sampled tokens of the latest `generate` call; read in other threads. None if unknown."""
        return None

    @abstractmethod
    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Make the engine ready to sample; calling it twice is fine. Returns True."""

    @abstractmethod
    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Release memory that only sampling needs; calling it twice is fine. Returns True."""

    def shutdown(self) -> bool:
        """Stop the engine and its processes; calling it twice is fine. Returns True."""
        return True

    @property
    def num_workers(self) -> int:
        """Number of workers that load weights in a refit."""
        return 1

    @property
    def weight_version(self) -> int:
        """Number of optimizer steps behind the engine's weights; -1 before the first refit."""
        return -1

    @property
    def has_own_weights(self) -> bool:
        """Whether the engine has its own weights (a remote server, a judge, a teacher) and never receives the policy's.

        It can sample for evaluations and data, but not for training that samples from the policy, and it needs no refit
        methods. `GenerationConfig.has_own_weights` declares it for the backends of plugins, before the engine is imported; a
        class given by its path may set the class attribute `has_own_weights = True`.
        """
        return False

    @property
    def streams_rows(self) -> bool:
        """Whether `generate_async` is available; an engine without it samples complete batches only."""
        return type(self).generate_async is not GenerationInterface.generate_async

    @property
    def streams_tokens(self) -> bool:
        """Whether `generate_async` yields unfinished rows on request (`stream_tokens`)."""
        return False

    @property
    def reads_messages(self) -> bool:
        """Whether the engine reads `messages` instead of `input_ids`, so that its server renders the prompt."""
        return False

    @property
    def restarts(self) -> int:
        """Number of workers restarted so far."""
        return 0

    def restart_dead(self, cause: Exception | None = None) -> bool:
        """Restart dead workers before a refit; new workers do not have the policy's weights yet.

        `generate` and `generate_async` restart workers, and sample their rows again, by themselves.

        Args:
            cause: the error that led to this call.

        Returns:
            Whether a worker was restarted, so that a failed refit may be retried.

        Raises:
            WorkerDiedError: a worker is dead and its restarts are used up.
        """
        return False

    def restarted_replicas(self) -> GenerationInterface | None:
        """The replicas that were restarted and have no weights yet, as an engine for a refit; None if there are none."""
        return None

    def await_weights(self) -> None:
        """Wait until restarted replicas have the policy's weights; in the thread that starts refits, provide them."""
        return None

    def generate_async(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> AsyncIterator[tuple[int, BatchedDataDict[GenerationOutputSpec]]]:
        """Yield (row, its output) as each row finishes; closing the iterator cancels the others.

        Rows with `stream_tokens` are also yielded whenever they have new tokens. The rows of concurrent calls, in one event
        loop, are sampled together and join while others run. A row's error is raised only to its caller. A row in progress at a
        refit keeps its tokens and continues with the new weights; without the capability `refit_in_flight`, there must be none.
        """
        raise self._not_supported("generate_async")

    def close_sessions(self, sessions: Sequence[str]) -> None:
        """Discard what the engine keeps for these conversations (`session_ids`); unknown names are ignored."""
        return None

    def init_collective(self, ip: str, port: int, world_size: int) -> list[Any]:
        """Start joining the weight collective of `world_size` ranks; rank 0 is the policy's. Returns pending calls."""
        raise self._not_supported("init_collective")

    def prepare_refit_info(self, info: Mapping[str, Any]) -> Mapping[str, str] | None:
        """Begin a refit: check the manifest of its weights (name to shape and dtype) against the engine's own.

        An unfinished earlier refit is discarded.

        Returns:
            Name to the dtype that the engine stores each tensor in; None if it keeps the manifest's.

        Raises:
            WeightSyncError: a name or a shape does not match; raised before anything is loaded.
        """
        raise self._not_supported("prepare_refit_info")

    def update_weights(self, ipc_handles: Mapping[str, Any]) -> None:
        """Load one bucket of weights from shared memory or by reference.

        The weight version becomes the policy's once every tensor of the manifest has arrived.
        """
        raise self._not_supported("update_weights")

    def update_weights_from_collective(self) -> list[Any]:
        """Start receiving all weights from the collective. Returns pending calls."""
        raise self._not_supported("update_weights_from_collective")

    def weight_fingerprint(self) -> str:
        """Digest of the engine's weights, the same on every replica; equal to the policy's after a refit.

        An engine that digests the tensors it computes with has the capability `held_weight_digests`. One that transforms
        weights after receiving them digests what it received, and every refit then also runs the canary.

        Raises:
            WeightSyncError: tensors of the current refit are missing (the error names them), or replicas differ.
        """
        raise self._not_supported("weight_fingerprint")

    def weight_digests(self) -> dict[str, str]:
        """Name to digest of each tensor that `weight_fingerprint` combines; called when two fingerprints differ."""
        raise self._not_supported("weight_digests")

    def invalidate_kv_cache(self) -> bool:
        """Drop all cached prefixes; True once nothing computed under older weights is left."""
        raise self._not_supported("invalidate_kv_cache")

    def _not_supported(self, verb: str) -> NotSupportedError:
        return NotSupportedError(
            f"{type(self).__name__} does not support `{verb}`. "
            "Choose a weight transport or an option that this generation backend lists among its capabilities."
        )
