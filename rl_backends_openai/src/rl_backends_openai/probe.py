"""Checks on connecting: whether the server has the model, and whether it returns what training requires."""

from __future__ import annotations

from rl_backends_openai.config import OpenAIConfig
from rl_backends_openai.server import OpenAIServer, Reply
from rl_core.data.generation_io import Prompt
from rl_core.errors import ConfigError
from rl_core.http import HttpError

_PROMPT = (1, 2, 3)
_FILTERED_ERROR = 1e-3
_AT = "policy.generation.openai_cfg"


async def probe(server: OpenAIServer, config: OpenAIConfig) -> int | None:
    """Sample a token and check the response.

    Returns:
        Maximum number of tokens of prompt and completion; None if the server does not report it.

    Raises:
        ConfigError: the model does not exist on the server, or the server cannot be used for training although
            `weight_updates` is set; names the flag that is missing.
        HttpError: the server is not reachable or refused the request.
    """
    settings = config.openai_cfg
    limit = await _limit_of_model(server, settings.model)
    prompt = Prompt(number=0, tokens=list(_PROMPT), limit=1, seed=1)
    messages = [{"role": "user", "content": "1"}]
    try:
        reply = await server.sample(prompt, messages, greedy=False)
    except HttpError as error:
        if settings.api == "inference" and error.status in (403, 404, 405):
            raise ConfigError(
                f"{_AT}.api: {settings.base_url} does not have /inference/v1/generate ({error}). Start vLLM with "
                "--enable-scale-out, use `rlcore serve`, or set api: completions."
            ) from error
        raise
    if settings.weight_updates is not None:
        _refuse_incomplete(reply, config)
        await _refuse_raw_logprobs(server, prompt, config)
    return limit


async def _limit_of_model(server: OpenAIServer, model: str) -> int | None:
    models = await server.models()
    if models is None:
        return None
    entries = {str(entry.get("id")): entry for entry in models}
    if entries and model not in entries:
        names = ", ".join(sorted(entries)[:10])
        raise ConfigError(f"{_AT}.model: the server {server.name} has no model {model!r}. It has: {names}.")
    limit = entries.get(model, {}).get("max_model_len")
    return limit if isinstance(limit, int) else None


def _refuse_incomplete(reply: Reply, config: OpenAIConfig) -> None:
    own = config.openai_cfg
    where = f"{own.base_url} cannot be used for training with api: {own.api}: its response has no"
    if reply.token_ids is None:
        raise ConfigError(
            f"{where} `token_ids`. Use a server that supports `return_token_ids`, such as vLLM or `rlcore serve`."
        )
    if reply.logprobs is None or len(reply.logprobs) != len(reply.token_ids):
        raise ConfigError(
            f"{where} log-probability for each token (`logprobs`). Start vLLM with --max-logprobs 1 or more and "
            "--logprobs-mode processed_logprobs, or use `rlcore serve`."
        )


async def _refuse_raw_logprobs(server: OpenAIServer, prompt: Prompt, config: OpenAIConfig) -> None:
    """With `top_k` 1 the sampled token has probability 1, unless log-probabilities are those from before the filter."""
    try:
        reply = await server.sample(prompt, None, greedy=False, top_k=1)
    except HttpError as error:
        if error.status == 400:  # the server does not support top_k; the canary compares log-probabilities in any case
            return
        raise
    if reply.logprobs and abs(reply.logprobs[0]) > _FILTERED_ERROR:
        raise ConfigError(
            f"{config.openai_cfg.base_url} cannot be used for training: its log-probabilities are not those of the "
            f"distribution that tokens are sampled from (with top_k 1, the token has {reply.logprobs[0]:.3f} nats, not 0). "
            "Start vLLM with --logprobs-mode processed_logprobs."
        )
