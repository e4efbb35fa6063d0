"""KTO: raises the likelihood of answers that were labelled desirable, and lowers that of undesirable ones.

Follows https://arxiv.org/abs/2402.01306 with these departures:
  1. the KL to the reference policy is estimated from all rows of a step before its first optimizer step, not from a
     microbatch: neither microbatches nor ranks nor the order of rows change it;
  2. a prompt is never matched with an answer to the same prompt, which the next row of a batch may be;
  3. the loss is a mean over the answers of a global batch, across ranks and microbatches.

As in the paper, the KL is at least 0 and has no gradient.

Notation: B rows; T tokens.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.images import RowImage, prompt_identity
from rl_train.algorithms.losses.means import row_sums
from rl_train.algorithms.losses.supervised import REFERENCE, TIE
from rl_train.algorithms.supervised_configs import KTOConfig
from rl_train.run import Run
from rl_train.step import Batch, add_logprobs, next_rows, optimize, validate

_log = logging.getLogger("rlcore")


def train(config: KTOConfig, run: Run) -> None:
    """Train `run.policy` up to step `config.max_num_steps`, starting after `run.first_step`."""
    validate(run, step=0, score=add_accuracies)
    for step in run.steps():
        batch = next_rows(run)
        with run.timed("score"):
            add_estimates(run, batch)
        optimize(run, batch)
        validate(run, step, score=add_accuracies)


def add_accuracies(run: Run, batch: Batch) -> None:
    """Add what the loss reads in validation: as `add_estimates`, and `accuracies`, if answers of both labels are trained."""
    add_estimates(run, batch, also=("prev_logprobs",))
    rewards = row_sums(batch["prev_logprobs"] - batch[REFERENCE], batch["token_mask"])
    is_trained, is_desirable = batch["sample_mask"] > 0, batch["desirable"] > 0
    desirable, undesirable = rewards[is_trained & is_desirable], rewards[is_trained & ~is_desirable]
    if len(desirable) and len(undesirable):
        batch["accuracies"] = torch.where(is_desirable, _below(rewards, undesirable), 1.0 - _below(rewards, desirable))


def _below(rewards: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """[B] the fraction of `others` [M] below each of `rewards` [B]; equal ones count half."""
    ordered = others.sort().values
    counts = torch.searchsorted(ordered, rewards - TIE) + torch.searchsorted(ordered, rewards + TIE, right=True)
    return counts / (2.0 * len(others))


def add_estimates(run: Run, batch: Batch, also: Collection[str] = ()) -> None:
    """Add what the loss reads: the log-probabilities of the reference policy, and `kl_estimates`.

    The estimate is max(0, mean of log p - log p_ref) over prompts with answers to other prompts; 0 if there is only one prompt.
    `also` are further columns as in `rl_train.step.score`.
    """
    add_logprobs(run, batch, also)
    rows, kl = mismatched_rows(batch, max_length=run.config.policy.max_total_sequence_length), 0.0
    if rows is None:
        _log.warning(
            "a batch of %d rows has fewer than two prompts, so no KL is estimated from it, and it counts as 0", batch.size
        )
    else:
        add_logprobs(run, rows, also=("prev_logprobs",))
        kl = float(row_sums(rows["prev_logprobs"] - rows[REFERENCE], rows["token_mask"]).double().mean().clamp(min=0.0))
    batch["kl_estimates"] = torch.full((batch.size,), kl)


def mismatched_rows(batch: Batch, *, max_length: int) -> Batch | None:
    """Each prompt with the answer to another prompt, as rows to score; None if all trained rows have the same prompt.

    Rows are ordered by hashes of their prompts and answers, and each prompt gets the answer of the row that is as many rows
    further on as the most frequent prompt has rows. So the result does not depend on the order of the rows, each answer is used
    at most once, and a prompt whose next answer is still its own, because more than half of the rows have this prompt, is left
    out. Prompts with equal tokens and other images are other prompts.

    Args:
        batch: `input_ids` [B, T], `input_lengths` [B], `token_mask` [B, T] and `sample_mask` [B], and `images` of the prompts,
            if there are any.
        max_length: Longer rows lose their last tokens.
    """
    columns = [batch[key] for key in ("input_ids", "token_mask")]
    columns += [batch[key].tolist() for key in ("input_lengths", "sample_mask")]
    rows = []
    for ids, mask, length, kept, images in zip(*columns, batch.get("images", [None] * batch.size), strict=True):
        if kept:
            start = int(mask.argmax())  # the first token of the answer
            prompt, answer = ids[:start], ids[start:length]
            identity = (_digest(prompt), prompt_identity(images))
            rows.append(_Row(identity, _digest(answer), prompt, images, answer, mask[start:length]))
    rows.sort(key=lambda row: (row.identity, row.answer_digest))
    shift = max(Counter(row.identity for row in rows).values(), default=0)
    others = rows[shift:] + rows[:shift]
    pairs = [(row, other) for row, other in zip(rows, others, strict=True) if row.identity != other.identity]
    if not pairs:
        return None
    ids = [torch.cat([row.prompt, other.answer])[:max_length] for row, other in pairs]
    masks = [torch.cat([torch.zeros(len(row.prompt)), other.answer_mask])[:max_length] for row, other in pairs]
    images = {"images": [row.images for row, _ in pairs]} if any(row.images for row, _ in pairs) else {}
    return BatchedDataDict(
        input_ids=pad_sequence(ids, batch_first=True),
        input_lengths=torch.tensor([len(row) for row in ids]),
        token_mask=pad_sequence(masks, batch_first=True),
        sample_mask=torch.ones(len(ids)),
        **images,
    )


class _Row(NamedTuple):
    identity: tuple[bytes, tuple[tuple[int, str], ...]]
    """Equal for rows with the same prompt."""
    answer_digest: bytes
    prompt: torch.Tensor
    images: Sequence[RowImage] | None
    """In the prompt."""
    answer: torch.Tensor
    answer_mask: torch.Tensor


def _digest(tokens: torch.Tensor) -> bytes:
    return blake2b(tokens.numpy().tobytes(), digest_size=16).digest()
