"""Finds embedding rows that were never trained, and embeddings that are not tied as the model's config says.

A policy's embeddings are read through its refit methods, which every backend has.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.errors import NotSupportedError, WeightSyncError
from rl_core.interfaces.policy import ColocatablePolicyInterface, RefitManifest
from rl_core.weights.cuda_ipc import device_uuid, open_handles
from rl_train.data.unknown_tokens import WITHOUT_ROWS
from rl_train.diagnostics.diagnosis import Diagnosis, DiagnosisStatus

UNTRAINED = "untrained_embeddings"
TIED = "tied_embeddings"
ROWS = "token_rows"
_MOST_LISTED = 12
_FAR = math.log(3.0)
"""A norm is an outlier if it is at least three times the median or at most a third of it, and also beyond `_SPREADS`."""
_SPREADS = 6.0
"""Robust standard deviations (1.4826 times the median absolute deviation) of the logarithm of the norms."""
_CHUNK_ROWS = 16384
_INPUTS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embeddings", "embedding")
_OUTPUTS = ("lm_head", "embed_out", "output_layer", "output")
"""Names of the modules with these weights in models of Transformers."""


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
    broken = {token for kind, ids in kinds.items() if kind != "odd_norm" for token in ids} & set(used_ids)
    listed = "; ".join(f"{kind.replace('_', ' ')}: {_listed(ids, tokenizer)}" for kind, ids in kinds.items() if ids)
    found = listed or f"none of {num_tokens} rows is zero, constant, equal to another row, or of unusual norm"
    if broken:
        found = f"this run uses {_listed(sorted(broken), tokenizer)}. {found}"
    return Diagnosis(
        name=UNTRAINED,
        status=_severity(listed, broken),
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
    every_row = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    used = sorted(every_row.union(used_ids).intersection(missing))
    found = f"all {len(tokenizer)} tokens have one of the {rows} rows of the embedding"
    if missing:
        found = f"this run uses {_listed(used, tokenizer)}. " if used else ""
        found += f"without one of the {rows} rows of the embedding: {_listed(missing, tokenizer)}"
    return Diagnosis(
        name=ROWS,
        status=_severity(missing, used),
        found=found,
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
    stated = "not set" if declared is None else str(declared).lower()
    found = f"tie_word_embeddings is {stated} in the model's config, and {actual}"
    details = {
        "declared": declared,
        "tied": weights.are_tied,
        "equal": weights.are_equal,
        "input": weights.input_name,
        "output": weights.output_name,
    }
    return Diagnosis(
        name=TIED,
        status=_tying_status(weights, declared),
        found=found,
        why="A program that loads the saved model by this config would tie separate matrices, or separate tied ones, and "
        "compute outputs that differ from those of the trained model.",
        remedy="Correct tie_word_embeddings in the model's config.json, or load the model from the folder that it was first "
        "saved to.",
        details=details,
    )


def _severity(suspicious: Collection[object], used: Collection[object]) -> DiagnosisStatus:
    return DiagnosisStatus.FAILED if used else DiagnosisStatus.WARNING if suspicious else DiagnosisStatus.OK


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


@dataclass(frozen=True, kw_only=True)
class EmbeddingWeights:
    """The matrices between token ids and hidden states."""

    input_name: str
    """Name in the manifest."""
    input: torch.Tensor
    """[V, H], on the CPU: the row of each token id."""
    output_name: str | None
    """Name in the manifest; None if the policy sends no separate output matrix: it is tied to the input."""
    output: torch.Tensor | None
    """[V, H], on the CPU."""

    @property
    def are_tied(self) -> bool:
        """Whether input and output share one matrix: the policy sends only one."""
        return self.output is None

    @property
    def are_equal(self) -> bool:
        """Whether input and output matrix have the same values."""
        return self.output is None or (self.output.shape == self.input.shape and torch.equal(self.output, self.input))


def read_embeddings(policy: ColocatablePolicyInterface, *, by_reference: bool, buffer_bytes: int = 2**28) -> EmbeddingWeights:
    """Copy the policy's current embeddings.

    Args:
        policy: a policy on this node.
        by_reference: whether the policy computes in this process.
        buffer_bytes: maximum number of bytes in transit.

    Raises:
        NotSupportedError: none of its weights has the name of an input embedding.
        WeightSyncError: its GPU is not visible to this process.
    """
    manifest = policy.prepare_refit_info() or {}
    input_name, output_name = embedding_names(manifest, num_tokens=getattr(policy, "facts", {}).get("vocab_size"))
    if input_name is None:
        raise NotSupportedError(
            f"None of the policy's {len(manifest)} weights has the name of an input embedding "
            f"(expected one of: {', '.join(_INPUTS)}; or one name with 'emb', of a matrix with a row for each token)."
        )
    wanted = {input_name, output_name} - {None}
    read: dict[str, torch.Tensor] = {}
    try:
        for keys in policy.prepare_weights_for_ipc(buffer_bytes):
            if wanted.isdisjoint(keys):
                continue
            handles = policy.get_weights_ipc_handles(keys, by_reference=by_reference)
            opened = open_handles(handles, _device(handles))
            read.update({name: opened[name].detach().to("cpu", copy=True) for name in keys if name in wanted})
    finally:
        policy.finish_refit()
    return EmbeddingWeights(
        input_name=input_name,
        input=read[input_name],
        output_name=output_name,
        output=read[output_name] if output_name is not None else None,
    )


def embedding_names(manifest: RefitManifest, *, num_tokens: int | None) -> tuple[str | None, str | None]:
    """Names of input and output embedding: those of Transformers; in other models, the only matrices that can be them.

    Args:
        manifest: name to (shape, dtype) of each weight.
        num_tokens: V; None if it is unknown.
    """
    of_tokens = [name for name, (shape, _) in manifest.items() if len(shape) == 2 and shape[0] == num_tokens]
    inputs = [name for name in of_tokens if "emb" in name]
    input_name = _named(manifest, _INPUTS) or (inputs[0] if len(inputs) == 1 else None)
    shape = manifest[input_name][0] if input_name is not None else None
    others = [name for name in of_tokens if name != input_name and manifest[name][0] == shape]
    return input_name, _named(manifest, _OUTPUTS) or (others[0] if len(others) == 1 else None)


def _named(manifest: RefitManifest, modules: tuple[str, ...]) -> str | None:
    """The matrix of the first of `modules` that exists; the largest if several submodels have one."""
    for module in modules:
        found = [
            name for name, (shape, _) in manifest.items() if len(shape) == 2 and name.split(".")[-2:] == [module, "weight"]
        ]
        if found:
            return max(found, key=lambda name: manifest[name][0][0])
    return None


def _device(handles: Mapping[str, object]) -> torch.device:
    """The device on which the handles can be opened: the visible GPU that they belong to, else the CPU."""
    devices = handles.get("devices")
    if not isinstance(devices, Mapping):
        return torch.device("cpu")
    for index in range(torch.cuda.device_count()):
        if device_uuid(torch.device("cuda", index)) in devices:
            return torch.device("cuda", index)
    raise WeightSyncError(
        f"The policy's weights are on GPUs ({', '.join(devices)}) that are not visible to this process. Add them to "
        "CUDA_VISIBLE_DEVICES."
    )
