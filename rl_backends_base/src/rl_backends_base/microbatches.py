"""Splits a rank's rows into microbatches, selects what a model reads of each, and reduces reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import torch

from rl_core.backend import BatchedDataDict, return_freed_memory
from rl_core.config.schema import PolicyConfig
from rl_core.data.batched_data_dict import to_device
from rl_core.data.generation_io import SETS, SampledSets, joined_sets, kept_tokens, select_sets
from rl_core.errors import DataError, NonFiniteError
from rl_core.interfaces.policy import Reduction

if TYPE_CHECKING:
    from rl_core.data.images import RowImage


@dataclass(frozen=True, kw_only=True)
class MicrobatchRows:
    """The model's inputs of one microbatch.

    Attributes:
        input_ids: [b, T] int64.
        lengths: [b] int64, tokens of each row; on the CPU.
        mask: [b, T]; above 0 where a token counts; None if all do.
        prompt_ids: [b] int64, on the CPU; None unless rows with equal ids should be computed as one sequence.
        images: of each row; None if no row has any.
        sets: The tokens that each token of each row was sampled from; None if all may be.
    """

    input_ids: torch.Tensor
    lengths: torch.Tensor
    mask: torch.Tensor | None
    prompt_ids: torch.Tensor | None = None
    images: Sequence[Sequence[RowImage] | None] | None = None
    sets: Sequence[SampledSets | None] | None = None


class MicrobatchSplitter:
    """Splits batches into microbatches as configured: by number of rows, by token budget, or packed into one sequence."""

    def __init__(self, config: PolicyConfig) -> None:
        self._limit = config.max_total_sequence_length
        self.packing = config.sequence_packing.enabled

    def split(self, batch: BatchedDataDict[Any], *, rows: int) -> Iterator[BatchedDataDict[Any]]:
        """Microbatches of one global batch, in the order of its rows; freed memory is returned after each.

        Args:
            batch: has a microbatch plan, made by `shard_by_batch_size`, if dynamic batching or packing is enabled.
            rows: rows of a microbatch if there is no plan.
        """
        if batch.micro_batch_indices is None:
            microbatches = batch.make_microbatch_iterator(rows)
        elif self.packing:
            microbatches = batch.make_microbatch_iterator_for_packable_sequences()
        else:
            microbatches = batch.make_microbatch_iterator_with_dynamic_shapes()
        for microbatch in microbatches:
            yield microbatch
            return_freed_memory()

    def read(self, microbatch: BatchedDataDict[Any], *, training: bool) -> MicrobatchRows:
        """The columns that the model reads.

        Args:
            microbatch: `input_ids`, `input_lengths`, for training `token_mask` and `sample_mask`, `prompt_id` if rows of a
                prompt should be computed as one sequence, `images` if rows have some, and `sampled_sets` if the engine sampled
                from some tokens only.
            training: count only tokens with `token_mask * sample_mask`; otherwise all.

        Raises:
            DataError: a row is longer than `max_total_sequence_length`, or longer than the width of the batch.
        """
        ids, lengths = microbatch["input_ids"], microbatch["input_lengths"].to("cpu", torch.int64)
        longest = int(lengths.max())
        if longest > ids.shape[1]:
            raise DataError(f"`input_lengths` has a row of {longest} tokens, but `input_ids` has only {ids.shape[1]} columns.")
        if longest > self._limit:
            raise DataError(
                f"A row has {longest} tokens, but `policy.max_total_sequence_length` is {self._limit}. Raise it, or shorten "
                "the row.",
                key="policy.max_total_sequence_length",
            )
        mask = microbatch["token_mask"] * microbatch["sample_mask"].unsqueeze(1) if training else None
        prompt_ids = microbatch["prompt_id"].to("cpu", torch.int64) if "prompt_id" in microbatch else None
        images = microbatch["images"] if "images" in microbatch and any(microbatch["images"]) else None
        sets = microbatch[SETS] if any(each is not None for each in microbatch.get(SETS, ())) else None
        return MicrobatchRows(input_ids=ids, lengths=lengths, mask=mask, prompt_ids=prompt_ids, images=images, sets=sets)


def scored_tokens(
    input_ids: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor | None, *, shift: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column [M] of each token to be scored.

    Args:
        input_ids: [B, T] int64, right-padded.
        lengths: [B] int64, tokens of each row.
        mask: [B, T]; above 0 where a token is scored; None to score all.
        shift: offset from a token to the hidden state that scores it: 1 for next-token logits, so the first token of a row is
            not scored; 0 for a value head.
    """
    column = torch.arange(input_ids.shape[1])
    scored = (column < lengths.unsqueeze(1)) & (column >= shift)
    if mask is not None:
        scored &= mask > 0
    rows, columns = scored.nonzero(as_tuple=True)
    return rows, columns


@dataclass(frozen=True, kw_only=True)
class ScoringInput:
    """One microbatch with M scored tokens.

    Attributes:
        input_ids: [b, T'] or [1, N] int64.
        attention: further arguments of the model: positions, and sequence boundaries for variable-length kernels.
        hidden_index: [M] int64; index of the hidden state (of b * T' or N) from which the token is scored.
        targets: [M] int64, the tokens; or [M, 1 + K], each token and K candidates for its position.
        output_index: [M] int64; index of the result in the flattened [b, T].
        shape: (b, T) of the original microbatch.
        repeat: [M'] int64; which of the M results each of the M' entries of `output_index` gets, if rows share tokens; None if
            M' is M and each gets its own.
        sets: The set of each of the M tokens, among which it is scored; None for all tokens.
    """

    input_ids: torch.Tensor
    hidden_index: torch.Tensor
    targets: torch.Tensor
    output_index: torch.Tensor
    shape: tuple[int, int]
    attention: Mapping[str, Any] = field(default_factory=dict)
    repeat: torch.Tensor | None = None
    sets: SampledSets | None = None

    def scatter(self, numbers: torch.Tensor) -> torch.Tensor:
        """[b, T, ...] with the M entries of [M, ...] at their positions and 0 elsewhere; differentiable."""
        if self.repeat is not None:
            numbers = numbers.index_select(0, self.repeat)
        flat = numbers.new_zeros(self.shape[0] * self.shape[1], *numbers.shape[1:])
        return flat.index_put((self.output_index,), numbers).view(*self.shape, *numbers.shape[1:])

    def with_candidates(self, candidates: torch.Tensor) -> Self:
        """The same microbatch, with the tokens `candidates` [b, T, K] int64 scored as well."""
        extra = to_device(candidates, self.output_index.device).flatten(0, 1).index_select(0, self.output_index)
        return replace(self, targets=torch.cat([self.targets.unsqueeze(1), extra], dim=1))

    def among_sets(self, rows: MicrobatchRows, *, shift: int) -> Self:
        """The same microbatch, scored among the tokens of its sets; arguments as `scored_tokens`.

        Tokens of a common prefix are not scored together: those after it may have been sampled from different sets.
        """
        if rows.sets is None:
            return self
        numbers, columns = scored_tokens(rows.input_ids, rows.lengths, rows.mask, shift=shift)
        sizes = torch.tensor([rows.input_ids.shape[1] if each is None else len(each["counts"]) for each in rows.sets])
        joined = joined_sets(size if each is None else each for size, each in zip(sizes.tolist(), rows.sets, strict=True))
        sets = select_sets(joined, (sizes.cumsum(0) - sizes)[numbers] + columns)
        hidden, targets = self.hidden_index, self.targets
        if self.repeat is not None:
            hidden, targets = hidden[self.repeat], targets[self.repeat]
        return replace(self, hidden_index=hidden, targets=targets, repeat=None, sets=sets)


def outside_sets(sets: SampledSets, logits: torch.Tensor) -> torch.Tensor:
    """[n, V] bool, on the device of `logits` [n, V]: true for tokens that are not in the set of a row; false without a set.

    Raises:
        DataError: a set has a token outside the vocabulary.
    """
    (rows, ids), vocabulary = kept_tokens(sets), logits.shape[1]
    if len(ids) and int(ids.max()) >= vocabulary:
        raise DataError(
            f"`{SETS}` has token id {int(ids.max())}, outside the {vocabulary} tokens of the policy. Engine and policy must "
            "have the same vocabulary."
        )
    outside = to_device(sets["counts"] > 0, logits.device).unsqueeze(1).repeat(1, vocabulary)
    inside = torch.zeros((), dtype=torch.bool, device=logits.device)
    return outside.index_put_((to_device(rows, logits.device), to_device(ids, logits.device)), inside)


def padded_input(
    input_ids: torch.Tensor,
    lengths: torch.Tensor,
    *,
    device: torch.device,
    shift: int,
    mask: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> ScoringInput:
    """Padded rows, trimmed to the longest.

    Right padding needs no attention mask, because attention is causal. Without a mask, SDPA's causal kernels apply.

    Args:
        input_ids: [b, T] int64, right-padded.
        lengths: [b] int64, tokens of each row.
        device: device of the model.
        shift: see `scored_tokens`.
        mask: [b, T], tokens to score; all by default.
        positions: [..., b, T] int64, for models that do not number the tokens of a row from 0.
    """
    rows, columns = scored_tokens(input_ids, lengths, mask, shift=shift)
    width = max(int(lengths.max()), 1)
    return ScoringInput(
        input_ids=to_device(input_ids[:, :width], device),
        hidden_index=to_device(rows * width + columns - shift, device),
        targets=to_device(input_ids[rows, columns], device),
        output_index=to_device(rows * input_ids.shape[1] + columns, device),
        shape=(input_ids.shape[0], input_ids.shape[1]),
        attention={} if positions is None else {"position_ids": to_device(positions[..., :width], device)},
    )


_EXTREMES = {"min": torch.amin, "max": torch.amax}


def reduce_metrics(metrics: Sequence[Mapping[str, torch.Tensor]], how: Mapping[str, Reduction]) -> dict[str, torch.Tensor]:
    """Each metric over the microbatches, float32, still on the device; empty if there are no microbatches.

    Args:
        metrics: of each microbatch, all with the same names.
        how: a loss's `metric_reductions`; metrics not listed are summed.
    """
    return {
        name: _EXTREMES.get(how.get(name, "sum"), torch.sum)(torch.stack([one[name].detach().float() for one in metrics]))
        for name in (metrics[0] if metrics else ())
    }


def first_non_finite_loss(losses: Sequence[float | torch.Tensor]) -> int | None:
    """Index of the first microbatch with a loss that is NaN or infinite, from 0; None if there is none."""
    return next((number for number, loss in enumerate(losses) if not torch.isfinite(torch.as_tensor(loss))), None)


def non_finite_step_error(step: int, where: str, *, norm: float) -> NonFiniteError:
    """The error of an optimizer step (the first is 1) that would not have been finite; `norm` is that of the whole gradient.

    `where` is a sentence that names the tensor at fault, or says where to look for it.
    """
    return NonFiniteError(
        f"Optimizer step {step} was not taken: its gradient norm is {norm}. {where} Weights and optimizer are unchanged. "
        "Check the batch's rewards, advantages and log-probabilities; a smaller learning rate or a clipped ratio helps "
        "if they are extreme."
    )
