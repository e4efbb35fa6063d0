"""The error of a step in which log-probabilities differ by more than their limits."""

from __future__ import annotations

import math
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import BrokenPromiseError
from rl_train.logprob_agreement import TokenDifferences
from rl_train.training_checks.agreement import Numbers, rule_of
from rl_train.training_checks.checked_loss import WITH_ENGINE, Limits
from rl_train.weight_versions import trained_tokens


def disagreement(
    *,
    rows: BatchedDataDict[Any],
    engine: Numbers,
    scores: Numbers | None,
    limits: Limits,
    step: int,
    version: int,
    labels: tuple[str, str],
    ending: str,
) -> BrokenPromiseError:
    """Find out which component computes other log-probabilities than the other two, and describe it.

    The same tokens have up to three values: the engine's, those of the policy's scoring pass and those of its training pass.

    Args:
        rows: the rows of the first optimizer step with the columns of `CheckedLoss`.
        engine: training pass against engine.
        scores: training pass against the scoring pass, if there was one.
        limits: the limits.
        step: the step.
        version: the policy's weight version.
        labels: names of the policy and of the engine.
        ending: the last sentence.
    """
    policy_label, engine_label = labels
    if engine.refused or engine.doubtful:
        numbers, what = engine, f"{engine_label} and {policy_label}"
        sides = "the log-probability that the engine returned for a sampled token, and that of the policy's training pass"
    else:
        assert scores is not None
        numbers, what = scores, f"scoring and training pass of {policy_label}"
        sides = "the log-probability of `get_logprobs`, and that of the training pass for the same token and weights"
    values = f"{numbers.invalid} values are not finite" if numbers.invalid else f"{numbers.mean:.3g} nats on average"
    return BrokenPromiseError(
        f"Step {step}: {what} disagree at weight version {version}. Over {numbers.tokens} tokens, the difference between "
        f"{sides}, is {values} ({rule_of(limits)}) and {numbers.worst_row:.3g} in the worst row"
        + (f" (row {numbers.row - 1} of the step). " if numbers.row else ". ")
        + f"{_cause(rows, engine, scores, limits, labels)} {ending}"
    )


def _cause(rows: BatchedDataDict[Any], engine: Numbers, scores: Numbers | None, limits: Limits, labels: tuple[str, str]) -> str:
    """Which of the three is wrong: the one that is not in the pair with the smallest difference."""
    policy, engine_label = labels
    if engine.tokens == 0:
        return (
            f"`train` of {policy} must pass to the loss, at position t of a row, the log-probability of token t of that row, "
            "as `get_logprobs` returns it."
        )
    # By the third: how far the other two differ, as mean and as multiple of the limit.
    pairs = {"scoring": (engine.mean, _excess(engine.mean, engine.worst_row, engine.invalid, limits))}
    if "prev_logprobs" in rows:
        by_scores = _engine_against_scores(rows)
        judged = by_scores.compared.sum(dim=-1) >= limits.row_tokens
        worst = float(torch.where(judged, _means_of_rows(by_scores), 0.0).max())
        pairs["training"] = (by_scores.mean, _excess(by_scores.mean, worst, 0, limits))
    if scores is not None:
        pairs["engine"] = (scores.mean, _excess(scores.mean, scores.worst_row, scores.invalid, limits))
    wrong = min(pairs, key=lambda name: pairs[name][1])
    mean, excess = pairs[wrong]
    if excess > 1.0:
        return (
            "No two of the log-probabilities of the engine, of `get_logprobs` and of the training pass are known to agree, so "
            f"{policy} or {engine_label} is wrong, or both. `rlcore check logprobs` compares them without training."
        )
    if wrong == "training":
        return (
            f"The policy's own `get_logprobs` agrees with the engine ({mean:.3g} nats), so the training pass of {policy} is "
            "wrong: `train` must pass to the loss, at position t of a row, the log-probability of token t of that row."
        )
    if wrong == "scoring":
        return (
            f"The training pass agrees with the engine ({mean:.3g} nats), so `get_logprobs` of {policy} is wrong: it must "
            "return the scores in the order of the rows, under the current weights and at the sampling temperature."
        )
    return (
        f"`get_logprobs` of the policy agrees with its training pass ({mean:.3g} nats), and differs from the engine as well: "
        f"{_worst_row(_engine_against_scores(rows))}. `generate` of {engine_label} must return for each sampled token its "
        "log-probability under the weights of its version, in the row and at the position of the token; and the policy must "
        "send the weights that it trains. Either the engine samples with other weights or from another distribution, or mixes "
        "up rows or positions, or the policy sent other weights, or scores at another temperature. `rlcore check logprobs` "
        "compares the two without training."
    )


def _engine_against_scores(rows: BatchedDataDict[Any]) -> TokenDifferences:
    """Differences of the tokens that are compared with the engine."""
    compared = (rows["comparison"] >= WITH_ENGINE) & trained_tokens(rows)
    return TokenDifferences(rows["input_ids"], rows["prev_logprobs"], rows["generation_logprobs"], compared=compared)


def _excess(mean: float, worst_row: float, invalid: int, limits: Limits) -> float:
    """How many times its limit a difference is."""
    if invalid or not math.isfinite(mean):
        return math.inf
    return max(mean / min(limits.mean, limits.doubtful or limits.mean), worst_row / limits.row)


def _means_of_rows(differences: TokenDifferences) -> torch.Tensor:
    """[B] mean difference of each row; infinite if a value is NaN."""
    return differences.sizes.nan_to_num(nan=torch.inf).sum(dim=-1) / differences.compared.sum(dim=-1).clamp(min=1)


def _worst_row(differences: TokenDifferences) -> str:
    """The largest difference in the worst row."""
    sizes, of_rows = differences.sizes.nan_to_num(nan=torch.inf), _means_of_rows(differences)
    row = int(of_rows.argmax())
    position = int(sizes[row].argmax())
    return (
        f"in row {row}, which is the worst with {float(of_rows[row]):.3g} nats on average, token "
        f"{int(differences.token_ids[row, position])} at position {position} has {differences.values_at((row, position))}"
    )
