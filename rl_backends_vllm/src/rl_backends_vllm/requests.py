"""Rows as vLLM's requests, and its finished requests as rows; knows no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.data.completions import Completion, Prompt
from rl_core.errors import DataError, RLCoreError

GREEDY_TEMPERATURE = "rlcore_greedy_temperature"
"""Key of `SamplingParams.extra_args`: the temperature of a greedy row's log-probabilities; see `rl_backends_vllm.greedy`."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How every row is sampled.

    Attributes:
        temperature: logits are divided by it.
        top_p: of the likeliest tokens whose probability reaches it.
        top_k: of the so many likeliest tokens; None for all.
        stop_strings: those of every row.
        end_ids: tokens that end a row.
        has_tokenizer: whether the engine can read text.
    """

    temperature: float
    top_p: float
    top_k: int | None
    stop_strings: tuple[str, ...]
    end_ids: frozenset[int]
    has_tokenizer: bool

    def parameters(self, prompt: Prompt, *, seed: int, greedy: bool) -> Any:
        """The `vllm.SamplingParams` of one row: final output only, with the log-probability of each sampled token.

        Raises:
            DataError: the row has stop strings, and the model no tokenizer to read text with.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        strings = [*self.stop_strings, *prompt.stop_strings]
        if strings and not self.has_tokenizer:
            raise DataError(
                f"Row {prompt.number} has stop strings {strings}, but there is no tokenizer to read text with. Give one: "
                "policy.tokenizer.name."
            )
        return SamplingParams(
            temperature=0.0 if greedy else self.temperature,
            top_p=1.0 if greedy else self.top_p,
            top_k=0 if greedy or self.top_k is None else self.top_k,
            seed=None if greedy else seed,
            max_tokens=prompt.limit,
            stop=strings or None,
            stop_token_ids=sorted(self.end_ids),
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(strings),
            skip_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={GREEDY_TEMPERATURE: self.temperature} if greedy and self.temperature != 1.0 else None,
        )


def completion_of(output: Any, *, prompt: Sequence[int], weight_version: int) -> Completion:
    """A finished `vllm.RequestOutput` as a row.

    Raises:
        RLCoreError: vLLM gave another number of log-probabilities than of tokens.
    """
    [found] = output.outputs
    tokens = list(found.token_ids)
    logprobs = [] if found.logprobs is None else list(found.logprobs.logprobs)
    if len(logprobs) != len(tokens):
        raise RLCoreError(
            f"vLLM gave {len(logprobs)} log-probabilities for the {len(tokens)} tokens of request {output.request_id}. "
            "Training needs exactly one each; remove whatever in vllm_kwargs asks for more."
        )
    return Completion(
        prompt=prompt,
        tokens=tokens,
        logprobs=logprobs,
        truncated=found.finish_reason == "length",
        weight_version=weight_version,
    )
