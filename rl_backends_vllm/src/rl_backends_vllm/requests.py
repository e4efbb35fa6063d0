"""Converts rows to vLLM requests, and finished requests to rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.data.generation_io import Completion, Prompt
from rl_core.data.stateless_rng import mix
from rl_core.errors import RLCoreError

GREEDY_TEMPERATURE = "rlcore_greedy_temperature"
"""Key of `SamplingParams.extra_args`: the temperature of a greedy row's log-probabilities; see `rl_backends_vllm.greedy`."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Sampling settings of all rows.

    Attributes:
        temperature: logits are divided by it.
        top_p: cumulative probability of the most likely tokens to sample from.
        top_k: number of most likely tokens to sample from; None for all.
        end_ids: tokens that end a row.
    """

    temperature: float
    top_p: float
    top_k: int | None
    end_ids: frozenset[int]

    def parameters(self, prompt: Prompt, *, greedy: bool, streams: bool = False) -> Any:
        """The `vllm.SamplingParams` of one row, with the log-probability of each sampled token.

        Args:
            prompt: the row.
            greedy: take the most likely token at each position.
            streams: output all tokens so far after each step, instead of the finished row only.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        strings = list(prompt.stop_strings)
        return SamplingParams(
            temperature=0.0 if greedy else self.temperature,
            top_p=1.0 if greedy else self.top_p,
            top_k=0 if greedy or self.top_k is None else self.top_k,
            seed=None if greedy else engine_seed(prompt.seed),
            max_tokens=prompt.limit,
            stop=strings or None,
            stop_token_ids=sorted(self.end_ids),
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(strings),
            skip_special_tokens=False,
            output_kind=RequestOutputKind.CUMULATIVE if streams else RequestOutputKind.FINAL_ONLY,
            extra_args={GREEDY_TEMPERATURE: self.temperature} if greedy and self.temperature != 1.0 else None,
        )


def engine_seed(seed: int) -> int:
    """A row's seed as vLLM needs it: mixed, because a CPU uses only its lower 32 bits, and non-negative, as -1 means none."""
    return int(mix(torch.tensor(seed)) & (2**63 - 1))


def completion_so_far(output: Any, *, prompt: Sequence[int], weight_version: int) -> Completion:
    """An unfinished `vllm.RequestOutput` as a row with the tokens that also have a log-probability."""
    [sample] = output.outputs
    # vLLM continues to append to both lists, perhaps in another thread.
    logprobs = [] if sample.logprobs is None else list(sample.logprobs.logprobs)
    tokens = list(sample.token_ids)[: len(logprobs)]
    return Completion(
        prompt=prompt, tokens=tokens, logprobs=logprobs[: len(tokens)], truncated=False, weight_version=weight_version
    )


def completion_of(output: Any, *, prompt: Sequence[int], weight_version: int) -> Completion:
    """A finished `vllm.RequestOutput` as a row.

    Raises:
        RLCoreError: vLLM aborted the row, or returned a wrong number of log-probabilities.
    """
    [sample] = output.outputs
    if sample.finish_reason not in ("stop", "length"):
        raise RLCoreError(
            f"vLLM ended request {output.request_id} after {len(sample.token_ids)} tokens with {sample.finish_reason!r}, not "
            "at a stop or the length limit, so the row is not a valid sample. Remove the setting in vllm_kwargs that causes it."
        )
    tokens = list(sample.token_ids)
    logprobs = [] if sample.logprobs is None else list(sample.logprobs.logprobs)
    if len(logprobs) != len(tokens):
        raise RLCoreError(
            f"vLLM returned {len(logprobs)} log-probabilities for {len(tokens)} tokens of request {output.request_id}. "
            "Training needs exactly one per token. Remove the setting in vllm_kwargs that changes this."
        )
    return Completion(
        prompt=prompt,
        tokens=tokens,
        logprobs=logprobs,
        truncated=sample.finish_reason == "length",
        weight_version=weight_version,
    )
