"""Finds embedding rows that were never trained, and embeddings that are not tied as the model's config says."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch

from rl_train.data.unknown_tokens import WITHOUT_ROWS
from rl_train.diagnostics.diagnosis import Diagnosis, DiagnosisStatus
from rl_train.diagnostics.embedding_weights import EmbeddingWeights

UNTRAINED = "untrained_embeddings"
TIED = "tied_embeddings"
ROWS = "token_rows"
_MOST_LISTED = 12
_FAR = math.log(3.0)
"""A norm is an outlier if it is at least three times the median or at most a third of it, and also beyond `_SPREADS`."""
_SPREADS = 6.0
"""Robust standard deviations (1.4826 times the median absolute deviation) of the logarithm of the norms."""
_CHUNK_ROWS = 16384


def check_untrained_embeddings(weight: torch.Tensor, *, tokenizer: Any, used_ids: Collection[int] = frozenset()) -> Diagnosis:
    """Look for embedding rows that were probably never trained: all zero, constant, equal to another row, or of unusual norm.

    Args:
        weight: [V, H], the row of each token id.
        tokenizer: gives the texts of tokens; rows beyond its last id are padding of the matrix and only counted.
        used_ids: ids in this run's prompts and template; an untrained one among them is a failure, except for an unusual
            norm, which some trained tokens have.
    """
    num_tokens = min(len(tokenizer), len(weight))
    kinds = _suspicious(weight[:num_tokens])
    unused_rows = len(weight) - num_tokens
    details: dict[str, Any] = {
        kind: [{"id": token, "text": tokenizer.convert_ids_to_tokens(token), "used": token in used_ids} for token in ids]
        for kind, ids in kinds.items()
    }
    details["rows_beyond_the_tokenizer"] = unused_rows
    beyond = f" ({unused_rows} further rows are beyond the tokenizer's ids)" if unused_rows else ""
    if not any(kinds.values()):
        found = f"none of {num_tokens} rows is zero, constant, equal to another row, or of unusual norm{beyond}"
        return Diagnosis(name=UNTRAINED, status=DiagnosisStatus.OK, found=found, details=details)
    broken = {token for kind, ids in kinds.items() if kind != "odd_norm" for token in ids} & set(used_ids)
    found = "; ".join(f"{kind.replace('_', ' ')}: {_listed(ids, tokenizer)}" for kind, ids in kinds.items() if ids)
    if broken:
        found = f"this run uses {_listed(sorted(broken), tokenizer)}. {found}"
    return Diagnosis(
        name=UNTRAINED,
        status=DiagnosisStatus.FAILED if broken else DiagnosisStatus.WARNING,
        found=found + beyond,
        why="The model was probably never trained on these tokens: its output for a prompt that contains one, and the "
        "probability of sampling one, are meaningless.",
        remedy="Use a chat template and prompts without them (many base models have the special tokens of their chat "
        "versions), or first train on text that contains them.",
        details=details,
    )


def check_token_rows(weight: torch.Tensor, *, tokenizer: Any, used_ids: Collection[int] = frozenset()) -> Diagnosis:
    """Compare the tokenizer's ids with the rows of the embedding.

    Args:
        weight: [V, H], the row of each token id.
        tokenizer: its ids; more rows than ids are fine.
        used_ids: ids in this run's prompts and template; one without a row is a failure, as are start, end and padding token.
    """
    rows = len(weight)
    missing = sorted(number for number in tokenizer.get_vocab().values() if number >= rows)
    if not missing:
        found = f"all {len(tokenizer)} tokens have one of the {rows} rows of the embedding"
        return Diagnosis(name=ROWS, status=DiagnosisStatus.OK, found=found, details={"rows": rows, "missing": []})
    every_row = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    used = sorted(every_row.union(used_ids).intersection(missing))
    return Diagnosis(
        name=ROWS,
        status=DiagnosisStatus.FAILED if used else DiagnosisStatus.WARNING,
        found=(f"this run uses {_listed(used, tokenizer)}. " if used else "")
        + f"without one of the {rows} rows of the embedding: {_listed(missing, tokenizer)}",
        why="A row of the data that contains such a token cannot be computed.",
        remedy=WITHOUT_ROWS,
        details={"rows": rows, "missing": missing},
    )


def check_tied_embeddings(weights: EmbeddingWeights, *, declared: bool | None) -> Diagnosis:
    """Check that input and output embeddings share one matrix if the model's config says so, and only then.

    Args:
        weights: the policy's embeddings.
        declared: `tie_word_embeddings` of the model's config; None if the config does not set it.
    """
    if weights.output_name is None:
        actual = "the output matrix is the input embedding"
    elif weights.are_equal:
        actual = f"{weights.output_name} is a separate matrix with the same numbers as {weights.input_name}"
    else:
        actual = f"{weights.output_name} is a separate matrix"
    found = f"tie_word_embeddings is {str(declared).lower()} in the model's config, and {actual}"
    details = {
        "declared": declared,
        "tied": weights.are_tied,
        "equal": weights.are_equal,
        "input": weights.input_name,
        "output": weights.output_name,
    }
    status = _tying_status(weights, declared)
    if status is DiagnosisStatus.OK:
        return Diagnosis(name=TIED, status=status, found=found, details=details)
    return Diagnosis(
        name=TIED,
        status=status,
        found=found,
        why="A program that loads the saved model by this config would tie separate matrices, or separate tied ones, and "
        "compute outputs that differ from those of the trained model.",
        remedy="Correct tie_word_embeddings in the model's config.json, or load the model from the folder that it was first "
        "saved to.",
        details=details,
    )


def _tying_status(weights: EmbeddingWeights, declared: bool | None) -> DiagnosisStatus:
    if declared is None or declared == weights.are_tied:
        suspicious = declared is False and weights.are_equal
        return DiagnosisStatus.WARNING if suspicious else DiagnosisStatus.OK
    # Two copies of one matrix compute the same until the first optimizer step.
    return DiagnosisStatus.WARNING if weights.are_equal and not weights.are_tied else DiagnosisStatus.FAILED


def _suspicious(weight: torch.Tensor) -> dict[str, list[int]]:
    """Kind to token ids; a row is listed under the first kind that applies."""
    parts = [(part.float().norm(dim=1), part.amax(dim=1) == part.amin(dim=1)) for part in weight.split(_CHUNK_ROWS)]
    norm, constant = (torch.cat(column) for column in zip(*parts, strict=True))
    zero = norm == 0
    same = _equal_rows(weight, norm, among=~zero & ~constant)
    rest = ~(zero | constant | same)
    return {
        "all_zero": _ids(zero),
        "one_value": _ids(constant & ~zero),
        "equal_rows": _ids(same),
        "odd_norm": _ids(rest & _far_from_the_others(norm, rest)),
    }


def _equal_rows(weight: torch.Tensor, norm: torch.Tensor, *, among: torch.Tensor) -> torch.Tensor:
    """[V] bool, rows that equal another row; only rows of the same norm are compared element by element."""
    same = torch.zeros_like(among)
    candidates = among.nonzero().flatten()
    _, group, count = norm[candidates].unique(return_inverse=True, return_counts=True)
    for number in (count > 1).nonzero().flatten().tolist():
        members = candidates[group == number]
        _, kind, sizes = weight[members].unique(dim=0, return_inverse=True, return_counts=True)
        same[members[sizes[kind] > 1]] = True
    return same


def _far_from_the_others(norm: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """[V] bool, rows whose norm is far from the median of those `among`."""
    if not among.any():
        return torch.zeros_like(among)
    size = norm.clamp(min=torch.finfo(torch.float32).tiny).log()
    middle = size[among].median()
    distance = (size - middle).abs()
    spread = 1.4826 * distance[among].median()
    return distance > torch.clamp(_SPREADS * spread, min=_FAR)


def _ids(chosen: torch.Tensor) -> list[int]:
    return list(chosen.nonzero().flatten().tolist())


def _listed(ids: Sequence[int], tokenizer: Any) -> str:
    shown = ", ".join(f"{token} {tokenizer.convert_ids_to_tokens(token)!r}" for token in ids[:_MOST_LISTED])
    more = f" and {len(ids) - _MOST_LISTED} more" if len(ids) > _MOST_LISTED else ""
    return f"{len(ids)} {'token' if len(ids) == 1 else 'tokens'} ({shown}{more})"
