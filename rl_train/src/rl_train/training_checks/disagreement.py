"""The error of a step in which log-probabilities differ by more than their limits."""

from __future__ import annotations

from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import BrokenPromiseError
from rl_core.interfaces.policy import PolicyInterface
from rl_train.logprob_agreement import TokenDifferences
from rl_train.training_checks.agreement import Numbers, rule_of
from rl_train.training_checks.checked_loss import WITH_ENGINE, Limits
from rl_train.weight_versions import trained_tokens


def disagreement(
    *,
    policy: PolicyInterface,
    rows: BatchedDataDict[Any],
    engine: Numbers,
    scores: Numbers | None,
    limits: Limits,
    step: int,
    version: int,
    labels: tuple[str, str],
    taken: bool,
) -> BrokenPromiseError:
    """Find out which component computes other log-probabilities than the other two, and describe it.

    The same tokens have up to three values: the engine's, those of the policy's scoring pass and those of its training pass.

    Args:
        policy: scores the rows again.
        rows: the rows of the first optimizer step with the columns of `CheckedLoss`.
        engine: training pass against engine.
        scores: training pass against the scoring pass of the step, if it had one.
        limits: the limits.
        step: the step.
        version: the policy's weight version.
        labels: names of the policy and of the engine.
        taken: whether the policy took the step nevertheless.
    """
    scored = rows["prev_logprobs"] if "prev_logprobs" in rows else policy.get_logprobs(rows)["logprobs"]
    compared = (rows["comparison"] >= WITH_ENGINE) & trained_tokens(rows)
    by_scores = TokenDifferences(rows["input_ids"], scored, rows["generation_logprobs"], compared=compared)
    policy_label, engine_label = labels
    if engine.refused or engine.doubtful:
        numbers, what = engine, f"{engine_label} and {policy_label}"
        sides = "the log-probability that the engine returned for a sampled token, and that of the policy's training pass"
    else:
        assert scores is not None
        numbers, what = scores, f"scoring and training pass of {policy_label}"
        sides = "the log-probability of `get_logprobs`, and that of the training pass for the same token and weights"
    values = f"{numbers.invalid} values are not finite" if numbers.invalid else f"{numbers.mean:.3g} nats on average"
    text = (
        f"Step {step}: {what} disagree at weight version {version}. Over {numbers.tokens} tokens, the difference between "
        f"{sides}, is {values} ({rule_of(limits)}) and {numbers.worst_row:.3g} in the worst row"
        + (f" (row {numbers.row - 1} of the step). " if numbers.row else ". ")
    )
    text += _cause(by_scores, limits, engine, labels) + (
        " The policy took the step although its loss was NaN, so its weights are unusable: it must refuse such a step."
        if taken
        else " The step was not taken, so the weights are unchanged."
    )
    return BrokenPromiseError(text)


def _cause(by_scores: TokenDifferences, limits: Limits, engine: Numbers, labels: tuple[str, str]) -> str:
    policy, engine_label = labels
    scoring_agrees = by_scores.mean <= min(limits.mean, limits.doubtful or limits.mean)
    if engine.tokens == 0:
        return (
            f"`train` of {policy} must pass to the loss, at position t of a row, the log-probability of token t of that row, "
            "as `get_logprobs` returns it."
        )
    if scoring_agrees and (engine.refused or engine.doubtful):
        return (
            f"The policy's own `get_logprobs` agrees with the engine ({by_scores.mean:.3g} nats), so the training pass of "
            f"{policy} is wrong: `train` must pass to the loss, at position t of a row, the log-probability of token t of "
            "that row."
        )
    if not (engine.refused or engine.doubtful):
        return (
            f"The training pass agrees with the engine ({engine.mean:.3g} nats), so `get_logprobs` of {policy} is wrong: it "
            "must return the scores in the order of the rows, under the current weights and at the sampling temperature."
        )
    return (
        f"`get_logprobs` of the policy differs from the engine as well: {_worst_row(by_scores)}. `generate` of {engine_label} "
        "must return for each sampled token its log-probability under the weights of its version, in the row and at the "
        "position of the token; and the policy must send the weights that it trains. Either the engine samples with other "
        "weights or from another distribution, or mixes up rows or positions, or the policy sent other weights, or scores at "
        "another temperature. `rlcore check logprobs` compares the two without training."
    )


def _worst_row(differences: TokenDifferences) -> str:
    """The largest difference in the worst row."""
    sizes = differences.sizes.nan_to_num(nan=torch.inf)
    of_rows = sizes.sum(dim=-1) / differences.compared.sum(dim=-1).clamp(min=1)
    row = int(of_rows.argmax())
    position = int(sizes[row].argmax())
    return (
        f"in row {row}, which is the worst with {float(of_rows[row]):.3g} nats on average, token "
        f"{int(differences.token_ids[row, position])} at position {position} has {differences.values_at((row, position))}"
    )
