"""Promises of engines that return the tokens which they sampled from, and of policies that score among them.

They are part of `GenerationConformance` and `PolicyConformance`.
"""

from __future__ import annotations

from typing import Any, Final
from unittest import SkipTest

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import SETS, SampledSets, kept_tokens
from rl_core.interfaces.policy import LossFunction
from rl_core.testing.comparisons import check_logprobs
from rl_core.testing.outputs.models import scored
from rl_core.testing.promises import Found, declares, promise
from rl_core.testing.reference import VOCABULARY, limited

FILTERS: Final = {"top_k": 4, "top_p": 0.8}


@promise(
    "With the option `sampled_sets`, the set of each sampled token is what `top_k` and `top_p` keep.",
    applies=declares("sampled_sets"),
    after="test_top_k_and_top_p_limit_the_tokens",
)
def test_sampled_sets_are_the_kept_tokens(self: Any) -> str:
    """The promise of an engine."""
    settings: dict[str, Any] = {name: FILTERS[name] for name in FILTERS.keys() & self.capabilities()}
    if not settings:
        raise SkipTest("neither `top_k` nor `top_p` is declared")
    with self.created_with(**settings):
        rows, compared = self._rows(seed=24), 0
        output = self._generate(BatchedDataDict({**rows, "sampling": [{SETS: True}] * rows.size}))
        weights, temperature = self.subject().sender.received, self.section().temperature
        columns = (output["output_ids"], output["unpadded_sequence_lengths"].tolist(), rows["input_lengths"].tolist())
        for row, (sets, tokens, end, start) in enumerate(zip(output[SETS], *columns, strict=True)):
            whole = self.model.log_distributions(weights, tokens[: end - 1], temperature=temperature)
            expected, found = limited(whole, **settings)[start - 1 :], _members(sets)[start:]
            wrong = ((found != (expected > -torch.inf)) & ~expected.isnan()).any(dim=-1).nonzero()
            if len(wrong):
                at = int(wrong[0])
                kept = (expected[at] > -torch.inf).nonzero().flatten().tolist()
                raise Found(
                    f"the set of token {at} of the completion of row {row} is {found[at].nonzero().flatten().tolist()} with "
                    f"{settings}. It must be {kept}."
                )
            compared += end - start
    return f"{compared} sets"


def score_among_sets(policy: Any, trainer: Any, rows: BatchedDataDict[Any], loss_fn: LossFunction, tolerance: float) -> str:
    """Compare scores and the loss of rows whose tokens were sampled from random sets with those of the kit's reference.

    Args:
        policy: the policy.
        trainer: the reference, at the same step.
        rows: rows of training.
        loss_fn: the loss.
        tolerance: of a log-probability, in nats.
    """
    generator, sets, expected = torch.Generator().manual_seed(0), [], torch.zeros(rows["input_ids"].shape)
    for row, (tokens, length) in enumerate(zip(rows["input_ids"], rows["input_lengths"].tolist(), strict=True)):
        kept = torch.rand(length, VOCABULARY, generator=generator) < 0.1
        kept[torch.arange(length), tokens[:length]] = True
        kept[:3] = False  # were not sampled
        sets.append(SampledSets(counts=kept.sum(dim=-1, dtype=torch.int32), words=kept.nonzero()[:, 1].to(torch.int32)))
        logits = trainer.model.logits(trainer.weights, tokens[: length - 1]).detach() / trainer.temperature
        outside = ~kept[1:] & kept[1:].any(dim=-1, keepdim=True)
        scores = logits.masked_fill(outside, -torch.inf).log_softmax(dim=-1)
        expected[row, 1:length] = scores.gather(1, tokens[1:length, None])[:, 0]
    rows = BatchedDataDict({**rows, SETS: sets})
    found = scored(policy.get_logprobs, BatchedDataDict({key: rows[key] for key in ("input_ids", "input_lengths", SETS)}))
    seqs, toks = rows["sample_mask"].sum(), (rows["token_mask"] * rows["sample_mask"].unsqueeze(1)).sum()
    loss, trained = float(loss_fn(expected, rows, seqs, toks)[0]), policy.train(rows, loss_fn, eval_mode=True)["loss"]
    if not abs(loss - trained) <= 1e-3 * max(abs(loss), 1e-3):
        raise Found(f"the loss among sampled sets is {trained:g}, and {loss:g} by the reference.")
    return check_logprobs(found["logprobs"], expected, tolerance=tolerance, when="among sampled sets")


def _members(sets: SampledSets) -> torch.Tensor:
    """[T, V] bool, the tokens of each set."""
    members = torch.zeros(len(sets["counts"]), VOCABULARY, dtype=torch.bool)
    members[kept_tokens(sets)] = True
    return members
