"""Whether a training backend and an inference backend agree on the probability of the same tokens; knows neither."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DataError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import PolicyInterface


@dataclass(frozen=True, kw_only=True)
class LogProbabilityAgreement:
    """How far two backends' log-probabilities of the same sampled tokens are apart.

    With d = log p of the training backend minus log p of the inference backend, over all sampled tokens.
    """

    multiplicative_error: float
    """exp(mean |d|); 1 where they agree."""
    mean_difference: float
    """Mean d, in nats: a bias shows here."""
    max_abs_difference: float
    """Largest |d|, in nats."""
    kl: float
    """Estimate (k3) of KL(inference || training), in nats a token."""
    num_tokens: int
    """Sampled tokens that were compared."""


def compare_log_probabilities(
    training_backend: PolicyInterface, inference_backend: GenerationInterface, test_data: BatchedDataDict[Any]
) -> LogProbabilityAgreement:
    """Sample from the inference backend and score its tokens with the training backend.

    Args:
        training_backend: scores.
        inference_backend: samples; it must hold the same weights and have the same temperature.
        test_data: prompts, see `GenerationDatumSpec`.

    Raises:
        DataError: no token was sampled.
    """
    inference_backend.prepare_for_generation()
    output = inference_backend.generate(test_data, greedy=False)
    inference_backend.finish_generation()
    lengths, sampled = output["unpadded_sequence_lengths"], output["generation_lengths"]
    scored: BatchedDataDict[Any] = BatchedDataDict({"input_ids": output["output_ids"], "input_lengths": lengths})
    trained = training_backend.get_logprobs(scored)["logprobs"]
    position = torch.arange(output["output_ids"].shape[1])
    mask = (position >= (lengths - sampled).unsqueeze(1)) & (position < lengths.unsqueeze(1))
    if not mask.any():
        raise DataError("No token was sampled, so there is nothing to compare. Give prompts that leave room for an answer.")
    difference = (trained - output["logprobs"])[mask].double()
    return LogProbabilityAgreement(
        multiplicative_error=float(difference.abs().mean().exp()),
        mean_difference=float(difference.mean()),
        max_abs_difference=float(difference.abs().max()),
        kl=float((difference.expm1() - difference).mean()),
        num_tokens=int(mask.sum()),
    )


def validate_log_probability_consistency(
    training_backend: PolicyInterface,
    inference_backend: GenerationInterface,
    test_data: BatchedDataDict[Any],
    threshold: float = 1.05,
) -> bool:
    """Whether the multiplicative error exp(mean |Δ log p|) of the sampled tokens is at most `threshold`.

    Args:
        training_backend: scores.
        inference_backend: samples.
        test_data: prompts.
        threshold: 1.05 is usual for bfloat16; float32 backends agree within 1.001.
    """
    agreement = compare_log_probabilities(training_backend, inference_backend, test_data)
    return agreement.multiplicative_error <= threshold
