"""Turns the parameters of a request into rows for the engine."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rl_core.data.generation_io import PROMPT_LOGPROBS
from rl_core.data.images import RowImage
from rl_core.plugins.component import Capability
from rl_serve.engine import SamplingRow
from rl_serve.errors import ApiError
from rl_serve.requests import SamplingParameters
from rl_serve.served_model import ServedModel
from rl_train.rollouts.trajectory import sample_seed

_MIN_TEMPERATURE = 1e-6
MAX_HEADER_BYTES = 16 * 1024
"""Default of `Limits.max_header_bytes`, which also limits headers that arrive in several pieces."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the server."""

    max_body_bytes: int = 4 * 2**20
    """Size of a request's body."""
    max_header_bytes: int = MAX_HEADER_BYTES
    """Size of a request's headers and path."""
    max_concurrent_requests: int = 256
    """Number of sampling requests that run at the same time; more are answered with 429."""
    body_timeout_s: float = 60.0
    """Time that a client may take to send a body, in seconds."""
    read_timeout_s: float = 60.0
    """Time that a client may take to read a part of its response, in seconds."""
    max_rows: int = 128
    """Number of completions of one request: prompts times `n`."""

    def with_body(self, max_request_mib: int | None, *, has_images: bool) -> Limits:
        """The limits for bodies of this size, by default 20 MiB if they may have images, else `max_body_bytes`."""
        mib = 20 if max_request_mib is None and has_images else max_request_mib
        return self if mib is None else replace(self, max_body_bytes=mib << 20)


@dataclass(frozen=True, kw_only=True)
class ParameterNames:
    """Names of a request's parameters, for errors."""

    prompt: str = "prompt"
    max_tokens: str = "max_tokens"
    top_logprobs: str = "logprobs"
    json_schema: str = "response_format"


@dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """The rows that the engine samples for one request; row p * n + i is choice i of prompt p."""

    rows: list[SamplingRow]
    greedy: bool
    n: int = 1
    """Completions per prompt."""
    names: ParameterNames = field(default_factory=ParameterNames)


def plan_sampling(
    model: ServedModel,
    limits: Limits,
    prompts: Sequence[Sequence[int]],
    parameters: SamplingParameters,
    *,
    n: int = 1,
    max_tokens: int | None,
    names: ParameterNames | None = None,
    top_logprobs: int = 0,
    prompt_logprobs: bool = False,
    json_schema: Mapping[str, Any] | None = None,
    images: Sequence[RowImage] = (),
) -> SamplingPlan:
    """The rows of a request.

    Args:
        model: the served model.
        limits: the server's limits.
        prompts: token ids of each prompt.
        parameters: how to sample; unset ones are the server's, and the seed is random.
        n: completions per prompt.
        max_tokens: new tokens per completion; None for the engine's default, or as many as fit.
        names: names of the parameters; by default those of `/v1/completions`.
        top_logprobs: number of most likely tokens to return at each position.
        prompt_logprobs: whether to return log-probabilities of the prompt's tokens, and the same number of most likely ones.
        json_schema: what completions must fit; None for any text.
        images: the images in the only prompt.

    Raises:
        ApiError: the server cannot sample this way, or a prompt is empty, too long, or has an unknown token.
    """
    names = names or ParameterNames()
    stop_strings = parameters.stop_strings()
    greedy = parameters.temperature == 0
    if parameters.temperature is not None and 0 < parameters.temperature < _MIN_TEMPERATURE:
        raise ApiError(
            400,
            f"temperature must be 0 (greedy) or at least {_MIN_TEMPERATURE:g}: smaller ones exceed the range of numbers.",
            param="temperature",
        )
    options: dict[str, Any] = parameters.row_options()
    if missing := sorted(options.keys() - set(model.row_options)):
        raise ApiError(
            400,
            f"The generation backend {model.backend!r} does not support {missing[0]}. Remove it.",
            param=missing[0],
            code="unsupported_parameter",
        )
    if not greedy:
        options |= _own_sampling(model, parameters)
    if top_logprobs:
        refuse_without(model, Capability.TOP_LOGPROBS, names.top_logprobs)
        options["top_logprobs"] = top_logprobs
    if prompt_logprobs:
        if PROMPT_LOGPROBS not in model.row_options:
            reason = f"the generation backend {model.backend!r} does not report log-probabilities of the prompt. Remove one."
            raise ApiError(400, f"echo with logprobs: {reason}", param="echo", code="unsupported_parameter")
        options[PROMPT_LOGPROBS] = top_logprobs
    if json_schema is not None:
        options["json_schema"] = json_schema
    refuse_many_rows(limits, len(prompts), n)
    base = new_seed() if parameters.seed is None else parameters.seed
    rows = []
    for number, prompt in enumerate(prompts):
        new_tokens = _new_tokens(model, prompt, max_tokens, names)
        rows += [
            SamplingRow(
                prompt=prompt,
                seed=sample_seed(base, number, choice),
                max_new_tokens=new_tokens,
                stop_strings=stop_strings,
                sampling=options or None,
                images=images,
            )
            for choice in range(n)
        ]
    return SamplingPlan(rows=rows, greedy=greedy, n=n, names=names)


def refuse_without(model: ServedModel, capability: str, param: str) -> None:
    """Refuse a parameter that requires a capability of the generation backend.

    Raises:
        ApiError: the backend does not have it.
    """
    if capability not in model.capabilities:
        raise ApiError(
            400,
            f"{param} requires the capability `{capability}`, which the generation backend {model.backend!r} does not have. "
            "Remove it.",
            param=param,
            code="unsupported_parameter",
        )


def refuse_long_text(model: ServedModel, texts: Iterable[str], *, param: str) -> None:
    """Refuse a prompt with more characters than fit into the model's context, because it takes long to tokenize.

    Raises:
        ApiError: the texts together are too long.
    """
    length = sum(map(len, texts))
    if model.max_prompt_chars is not None and length > model.max_prompt_chars:
        raise ApiError(
            400,
            f"The prompt has {length} characters, but the model's context has {model.max_model_len} tokens, which are at most "
            f"{model.max_prompt_chars} characters.",
            param=param,
            code="context_length_exceeded",
        )


def refuse_many_rows(limits: Limits, prompts: int, n: int) -> None:
    """Refuse more completions than a request may have.

    Raises:
        ApiError: it has more.
    """
    if prompts * n > limits.max_rows:
        raise ApiError(400, f"{prompts} prompts times n={n} exceed the {limits.max_rows} completions of a request.", param="n")


def _own_sampling(model: ServedModel, parameters: SamplingParameters) -> dict[str, float]:
    """The parameters that differ from the engine's.

    Raises:
        ApiError: the engine samples all rows with its own.
    """
    engine = {"temperature": model.temperature, "top_p": model.top_p, "top_k": model.top_k}
    requested = parameters.sampling()
    if requested.get("top_k", 1) < 1:  # all tokens
        requested["top_k"] = None if model.top_k is None else model.vocab_size
    changed = {name: value for name, value in requested.items() if name in engine and value != engine[name]}
    if changed and not model.reads_sampling:
        name, value = next(iter(changed.items()))
        allowed = "unset" if engine[name] is None else f"{engine[name]:g}"
        if name == "temperature":
            allowed = f"0 (greedy) or {allowed}"
        raise ApiError(
            400,
            f"{name} must be {allowed}, because this generation backend samples all requests alike. Start the server with "
            f"policy.generation.{name}={value:g} to change it.",
            param=name,
            code="unsupported_value",
        )
    return changed


def new_seed() -> int:
    """A random seed for a request without one."""
    return secrets.randbits(63)


def _new_tokens(model: ServedModel, prompt: Sequence[int], requested: int | None, names: ParameterNames) -> int:
    if not prompt:
        raise ApiError(400, "The prompt is empty: it must have at least one token.", param=names.prompt)
    free = None if model.max_model_len is None else model.max_model_len - len(prompt)
    if free is not None and free < (requested or 1):
        reason = f" and {names.max_tokens} is {requested}, but" if requested else ", which leave no room for an answer:"
        raise ApiError(
            400,
            f"The prompt has {len(prompt)} tokens{reason} the model's context has {model.max_model_len} tokens.",
            param=names.prompt if free < 1 else names.max_tokens,
            code="context_length_exceeded",
        )
    if max(prompt) >= model.vocab_size:
        raise ApiError(
            400, f"Token id {max(prompt)} is not in the vocabulary of {model.vocab_size} tokens.", param=names.prompt
        )
    wanted = model.max_new_tokens if requested is None else requested
    return wanted if free is None else min(wanted, free)
