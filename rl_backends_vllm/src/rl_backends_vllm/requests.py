"""Rows as vLLM's requests, and its finished requests as rows; knows no engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.data.completions import Completion, Prompt
from rl_core.data.splitmix import mix
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
        """The `vllm.SamplingParams` of one row: final output only, with the log-probability of each sampled token."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        strings = [*self.stop_strings, *prompt.stop_strings]
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


def check_stop_strings(prompts: Iterable[Prompt], *, reads_text: bool) -> None:
    """Raise DataError, naming the row, where one has stop strings and there is no tokenizer to read text with."""
    for prompt in prompts:
        if prompt.stop_strings and not reads_text:
            raise DataError(
                f"Row {prompt.number} has stop strings {list(prompt.stop_strings)}, but there is no tokenizer to read text "
                "with. Give one: policy.tokenizer.name."
            )


def engine_seeds(seeds: Iterable[int]) -> list[int]:
    """What vLLM is given for the seeds of rows: its -1 means none, and on a CPU its draws know the lower 32 bits alone."""
    mixed: list[int] = (mix(torch.tensor(list(seeds), dtype=torch.int64)) & (2**63 - 1)).tolist()
    return mixed


def completion_of(output: Any, *, prompt: Sequence[int], weight_version: int) -> Completion:
    """A finished `vllm.RequestOutput` as a row.

    Raises:
        RLCoreError: vLLM gave the row up, or another number of log-probabilities than of tokens.
    """
    [found] = output.outputs
    if found.finish_reason not in ("stop", "length"):
        raise RLCoreError(
            f"vLLM ended request {output.request_id} after {len(found.token_ids)} tokens with {found.finish_reason!r}, "
            "neither a stop nor a limit: the row is no sample. Remove whatever in vllm_kwargs asks for it."
        )
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
