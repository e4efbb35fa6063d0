"""Compares the probabilities of tokens decoded one at a time with those of a full forward pass over the row.

There are two full passes: the engine's prefill (of the prompt and the beginning of its completion) and the policy's scoring
pass. A difference from the first means a broken cache or kernel of the engine; one from the second, any difference between
sampler and trainer, by range of positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import PolicyInterface
from rl_core.testing.outputs.models import generated
from rl_train.diagnostics.diagnosis import Diagnosis, DiagnosisStatus
from rl_train.logprob_agreement import TokenDifferences, compare_log_probabilities

DECODE = "decode_against_prefill"
POLICY = "engine_against_policy"
_WHY = (
    "A run trains on the log-probabilities that decoding reports. If they differ from those of a full pass, importance ratios "
    "and KL terms are wrong although all weights are correct, often more so in long completions."
)


def check_decode_against_prefill(
    generation: GenerationInterface, prompts: BatchedDataDict[Any], *, threshold: float
) -> Diagnosis:
    """Decode greedily, then sample single tokens again with the beginning of the completion as part of the prompt.

    The first token of such a request comes from a prefill. If two tokens are almost equally likely, the two passes may
    choose different ones; their log-probabilities are compared anyway, since each is the largest of its pass.

    Args:
        generation: the engine.
        prompts: see `GenerationDatumSpec`; the engine's own limit is the length of the completions.
        threshold: maximum exp(mean |d|) of the tokens that are sampled again.
    """
    generation.prepare_for_generation()
    try:
        decoded = generated(generation, prompts, greedy=True)
        places = _places(decoded)
        if not places:
            return _too_short(decoded)
        prefilled = generated(generation, _prefixes(decoded, places), greedy=True)
    finally:
        generation.finish_generation()
    rows, columns = torch.tensor(places).unbind(dim=1)
    first = prefilled["unpadded_sequence_lengths"] - prefilled["generation_lengths"]
    answers = torch.arange(len(places))
    token_ids = decoded["output_ids"][rows, columns]
    same = prefilled["output_ids"][answers, first] == token_ids
    differences = TokenDifferences(token_ids, prefilled["logprobs"][answers, first], decoded["logprobs"][rows, columns])
    starts = (decoded["unpadded_sequence_lengths"] - decoded["generation_lengths"])[rows]
    error = float(differences.sizes.mean().exp())
    [worst] = differences.worst()
    largest = float(differences.sizes[worst])
    details = {
        "multiplicative_error": _plain(error),
        "max_abs_difference": _plain(largest),
        "worst_position": int(columns[worst] - starts[worst]),
        "last_position": int((columns - starts).max()),
        "num_tokens": len(places),
        "same_token_frac": float(same.double().mean()),
        "threshold": threshold,
    }
    found = (
        f"exp(mean |d|) is {error:.6f} over {len(places)} tokens up to position {details['last_position']}; the largest |d| is "
        f"{largest:.2g} nats, at position {details['worst_position']}; {int(same.sum())} of {len(places)} "
        "tokens are the same"
    )
    if error <= threshold:
        return Diagnosis(name=DECODE, status=DiagnosisStatus.OK, found=found, details=details)
    return Diagnosis(
        name=DECODE,
        status=DiagnosisStatus.FAILED,
        found=f"{found}; at most {threshold:.6g} is allowed",
        why=_WHY,
        remedy="Disable the engine's prefix cache, compiled graphs and attention kernel one after the other, and try float32. "
        "The change that removes the difference is the cause.",
        details=details,
    )


def check_engine_against_policy(
    policy: PolicyInterface, generation: GenerationInterface, prompts: BatchedDataDict[Any], *, threshold: float
) -> Diagnosis:
    """Sample, score the same tokens with the policy, and compare both by position in the completion.

    Args:
        policy: scores the sampled tokens.
        generation: samples; it has the policy's weights.
        prompts: see `GenerationDatumSpec`.
        threshold: maximum exp(mean |d|), over all tokens and over each range of positions with enough tokens.
    """
    agreement = compare_log_probabilities(policy, generation, prompts)
    failures = agreement.failures(threshold)
    first, last = agreement.by_position[0], agreement.by_position[-1]
    details = {
        "multiplicative_error": _plain(agreement.multiplicative_error),
        "max_abs_difference": _plain(agreement.max_abs_difference),
        "num_tokens": agreement.num_tokens,
        "by_position": {part.label: _plain(part.multiplicative_error) for part in agreement.by_position},
        "threshold": threshold,
    }
    if failures:
        return Diagnosis(
            name=POLICY,
            status=DiagnosisStatus.FAILED,
            found="; ".join(failures),
            why=_WHY,
            remedy="Run `rlcore check logprobs` to see which tokens differ; docs/validation.md lists common causes.",
            details=details,
        )
    return Diagnosis(
        name=POLICY,
        status=DiagnosisStatus.OK,
        found=f"exp(mean |d|) is {agreement.multiplicative_error:.6f} over {agreement.num_tokens} tokens: "
        f"{first.multiplicative_error:.6f} at position {first.label} of the completion, "
        f"{last.multiplicative_error:.6f} at {last.label}",
        details=details,
    )


def _places(decoded: BatchedDataDict[Any]) -> list[tuple[int, int]]:
    """(row, column) of decoded tokens: the second of a completion, the third, the fifth, the ninth and so on, and the last."""
    found = []
    for row, (end, sampled) in enumerate(
        zip(decoded["unpadded_sequence_lengths"].tolist(), decoded["generation_lengths"].tolist(), strict=True)
    ):
        start = end - sampled
        doubling = (1 << power for power in range(sampled.bit_length()))
        found += [(row, start + offset) for offset in sorted({*doubling, sampled - 1}) if 0 < offset < sampled]
    return found


def _prefixes(decoded: BatchedDataDict[Any], places: list[tuple[int, int]]) -> BatchedDataDict[Any]:
    rows = [decoded["output_ids"][row, :column] for row, column in places]
    return BatchedDataDict(
        {
            "input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
            "input_lengths": torch.tensor([len(row) for row in rows]),
            "max_new_tokens": torch.ones(len(rows), dtype=torch.int64),
        }
    )


def _too_short(decoded: BatchedDataDict[Any]) -> Diagnosis:
    details: Mapping[str, Any] = {"num_tokens": 0}
    return Diagnosis(
        name=DECODE,
        status=DiagnosisStatus.WARNING,
        found=f"all {decoded.size} greedy completions have one token, so nothing was decoded after the prefill",
        why=_WHY,
        remedy="Use prompts with longer completions, or increase policy.generation.max_new_tokens.",
        details=details,
    )


def _plain(number: float) -> float | None:
    """JSON has no infinity and no NaN."""
    return number if math.isfinite(number) else None
