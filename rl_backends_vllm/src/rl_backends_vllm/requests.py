"""Converts rows to vLLM requests, and finished requests to rows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.config.schema import GenerationConfig
from rl_core.data.generation_io import PROMPT_LOGPROBS, Completion, Prompt, mix
from rl_core.errors import DataError, RLCoreError

GREEDY_TEMPERATURE = "rlcore_greedy_temperature"
"""Key of `SamplingParams.extra_args`: the temperature of a greedy row's log-probabilities; see `rl_backends_vllm.greedy`."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Sampling settings of all rows.

    Attributes:
        config: the section `policy.generation`.
        end_ids: tokens that end a row.
    """

    config: GenerationConfig
    end_ids: frozenset[int]

    def parameters(self, prompt: Prompt, *, greedy: bool, streams: bool = False) -> Any:
        """The `vllm.SamplingParams` of one row, with the log-probability of each sampled token.

        Args:
            prompt: the row.
            greedy: take the most likely token at each position.
            streams: output all tokens so far after each step, instead of the finished row only.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        config, strings = self.config, list(prompt.stop_strings)
        schema = prompt.sampling.get("json_schema")
        return SamplingParams(
            temperature=0.0 if greedy else config.temperature,
            top_p=1.0 if greedy else config.top_p,
            top_k=0 if greedy or config.top_k is None else config.top_k,
            seed=None if greedy else engine_seed(prompt.seed),
            max_tokens=prompt.limit,
            stop=strings or None,
            stop_token_ids=sorted(self.end_ids.union(prompt.sampling.get("stop_token_ids") or ())),
            logprobs=prompt.sampling.get("top_logprobs", 0),
            prompt_logprobs=prompt.sampling.get(PROMPT_LOGPROBS),
            flat_logprobs=True,
            detokenize=bool(strings),
            skip_special_tokens=False,
            structured_outputs=None if schema is None else StructuredOutputsParams(json=json.dumps(schema)),
            output_kind=RequestOutputKind.CUMULATIVE if streams else RequestOutputKind.FINAL_ONLY,
            extra_args={GREEDY_TEMPERATURE: config.temperature} if greedy and config.temperature != 1.0 else None,
        )


def engine_seed(seed: int) -> int:
    """A row's seed as vLLM needs it: mixed, because a CPU uses only its lower 32 bits, and non-negative, as -1 means none."""
    return int(mix(torch.tensor(seed)) & (2**63 - 1))


def completion_so_far(output: Any, *, prompt: Sequence[int], weight_version: int) -> Completion:
    """An unfinished `vllm.RequestOutput` as a row with the tokens that also have a log-probability."""
    [sample] = output.outputs
    # vLLM continues to append to its lists, perhaps in another thread.
    logprobs, alternatives = _scores(sample.logprobs)
    tokens = list(sample.token_ids)[: len(logprobs)]
    return Completion(
        prompt=prompt,
        tokens=tokens,
        logprobs=logprobs[: len(tokens)],
        truncated=False,
        weight_version=weight_version,
        top_logprobs=None if alternatives is None else alternatives[: len(tokens)],
    )


def completion_of(output: Any, *, prompt: Sequence[int]) -> Completion:
    """A finished `vllm.RequestOutput` as a row.

    Raises:
        RLCoreError: vLLM aborted the row, or returned a wrong number of log-probabilities or weight versions.
    """
    [sample] = output.outputs
    if sample.finish_reason not in ("stop", "length"):
        raise RLCoreError(
            f"vLLM ended request {output.request_id} after {len(sample.token_ids)} tokens with {sample.finish_reason!r}, not "
            "at a stop or the length limit, so the row is not a valid sample. Remove the setting in vllm_kwargs that causes it."
        )
    tokens = list(sample.token_ids)
    logprobs, alternatives = _scores(sample.logprobs)
    if len(logprobs) != len(tokens):
        raise RLCoreError(
            f"vLLM returned {len(logprobs)} log-probabilities for {len(tokens)} tokens of request {output.request_id}. "
            "Training needs exactly one per token. Remove the setting in vllm_kwargs that changes this."
        )
    versions = [int(span.version) for span in sample.weight_versions or () for _ in range(span.start, span.end)]
    if len(versions) != len(tokens):
        raise RLCoreError(
            f"vLLM returned {len(versions)} weight versions for {len(tokens)} tokens of request {output.request_id}."
        )
    return Completion(
        prompt=prompt,
        tokens=tokens,
        logprobs=logprobs,
        truncated=sample.finish_reason == "length",
        weight_version=min(versions),
        token_versions=versions,
        top_logprobs=alternatives,
        prompt_logprobs=None if output.prompt_logprobs is None else _positions(output.prompt_logprobs),
    )


_Alternatives = list[list[tuple[int, float]]]
"""Ids and log-probabilities of the most likely tokens at each position."""


def _scores(flat: Any) -> tuple[list[float], _Alternatives | None]:
    """The log-probability of each sampled token in `vllm.logprobs.FlatLogprobs`, and the alternatives if there are any."""
    if flat is None:
        return [], None
    ends = list(flat.end_indices)
    if not ends or ends[-1] == len(ends):
        return flat.logprobs[: len(ends)], None
    positions = _positions(flat)
    logprobs = [logprob for (_, logprob), *_ in positions]
    return logprobs, [[top for top in position[1:] if top[1] > -math.inf] for position in positions]


def _positions(flat: Any) -> _Alternatives:
    """Each token with its log-probability, followed by the most likely ones, among which it may be again."""
    return [
        list(zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True))
        for start, end in zip(flat.start_indices, flat.end_indices, strict=False)
    ]


def row_error(error: BaseException) -> RLCoreError | None:
    """The error of a row that vLLM refuses, such as one with an unsupported JSON schema; None for other failures."""
    from vllm.exceptions import VLLMClientError

    return DataError(f"vLLM does not accept the row: {error}") if isinstance(error, VLLMClientError) else None
