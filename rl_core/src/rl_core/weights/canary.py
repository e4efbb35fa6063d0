"""A few rows that the engine samples and the policy scores after each refit: what the engine computes with is the policy's.

Fingerprints prove that every weight arrived. They do not see what an engine does with it afterwards: fusing, packing,
quantising, keeping an old copy. The canary sees that, as far as arithmetic noise lets it: log-probabilities of the same tokens,
computed by the engine's own kernels and by the policy's. It knows neither side's model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.splitmix import derived_seeds
from rl_core.errors import WeightSyncError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface

EXACT_TOLERANCE = 1e-3
"""Nats a token, where both sides compute in float32: measured are 1e-6 (a million parameters) to 1e-5 (135 million)."""
ROUNDED_TOLERANCE = 0.2
"""Nats a token, where a side computes in bfloat16 or less: measured is 0.045 (135 million parameters)."""
_ROWS = 4
_PROMPT_TOKENS = 12
_NEW_TOKENS = 4
_SEED = 20_240_601


@dataclass(frozen=True, kw_only=True)
class Canary:
    """Rows that are sampled and scored.

    Attributes:
        rows: a `GenerationDatumSpec`; distinct prompts, so that every replica gets some.
        tolerance: most mean |difference| of log-probabilities, in nats a token.
        greedy: take the likeliest tokens; needed where sampling is filtered (top-p, top-k), since log-probabilities are then
            those of the filtered distribution.
    """

    rows: BatchedDataDict[Any]
    tolerance: float
    greedy: bool = False

    def prove(self, policy: ColocatablePolicyInterface, generation: GenerationInterface) -> float:
        """The mean |difference|, in nats a token, over all sampled tokens.

        Raises:
            WeightSyncError: it is above the tolerance, or no number; names the token that is furthest apart.
        """
        generation.prepare_for_generation()
        output = generation.generate(self.rows, greedy=self.greedy)
        lengths, sampled = output["unpadded_sequence_lengths"], output["generation_lengths"]
        position = torch.arange(output["output_ids"].shape[1])
        mask = (position >= (lengths - sampled).unsqueeze(1)) & (position < lengths.unsqueeze(1))
        scored = policy.get_logprobs(BatchedDataDict({"input_ids": output["output_ids"], "input_lengths": lengths}))
        apart = (scored["logprobs"] - output["logprobs"]).double().abs() * mask
        mean = float(apart.sum() / mask.sum())
        if not mean <= self.tolerance:
            raise WeightSyncError(self._apart(mean, apart, output, scored["logprobs"]))
        return mean

    def _apart(self, mean: float, apart: torch.Tensor, output: BatchedDataDict[Any], scored: torch.Tensor) -> str:
        row, place = divmod(int(apart.nan_to_num(float("inf")).argmax()), apart.shape[1])
        return (
            "After the refit every weight has arrived, and the generation backend still computes otherwise than the policy: "
            f"log-probabilities of the canary's tokens are {mean:.3g} nats apart in the mean (allowed: {self.tolerance:g}), at "
            f"most {float(apart[row, place]):.3g}: token {int(output['output_ids'][row, place])} at position {place} of row "
            f"{row} has {float(output['logprobs'][row, place]):.4f} in the engine and {float(scored[row, place]):.4f} in the "
            "policy. Either the engine went on with an older copy of a weight, or the arithmetic of the two sides is further "
            "apart than is safe to train on: `rlcore check-logprobs` shows how far, policy.generation.canary_tolerance sets "
            "what is allowed."
        )


def make_canary(
    token_ids: Sequence[int],
    *,
    num_receivers: int,
    max_length: int,
    exact: bool,
    tolerance: float | None = None,
    greedy: bool = False,
) -> Canary:
    """A canary of random prompts.

    Args:
        token_ids: the vocabulary, without special tokens.
        num_receivers: replicas, at most; each gets four rows.
        max_length: most tokens of a row.
        exact: both sides compute in float32.
        tolerance: instead of the one for `exact`.
        greedy: see `Canary`.
    """
    rows = _ROWS * num_receivers
    width = max(1, min(_PROMPT_TOKENS, max_length // 2))
    vocabulary = torch.tensor(sorted(token_ids), dtype=torch.int64)
    noise = derived_seeds(_SEED, 0, rows * width).abs() % len(vocabulary)
    return Canary(
        rows=BatchedDataDict(
            {
                "input_ids": vocabulary[noise].view(rows, width),
                "input_lengths": torch.full((rows,), width, dtype=torch.int64),
                "sample_seeds": derived_seeds(_SEED, 1, rows),
                "max_new_tokens": torch.full((rows,), min(_NEW_TOKENS, max_length - width), dtype=torch.int64),
            }
        ),
        tolerance=tolerance if tolerance is not None else EXACT_TOLERANCE if exact else ROUNDED_TOLERANCE,
        greedy=greedy,
    )
