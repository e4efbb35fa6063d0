"""Requests to an OpenAI-compatible server: one row in, its tokens and log-probabilities out.

On connecting, `probe` checks whether the server has the model, and whether it returns what training requires.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from safetensors.torch import save

from rl_backends_openai.config import OpenAIConfig
from rl_core.data.generation_io import Prompt
from rl_core.data.images import RowImage
from rl_core.errors import ConfigError, RLCoreError
from rl_core.event_loop import in_thread
from rl_core.http import HttpClient, HttpError, RequestLimits

_MAX_SEED = 2**63 - 1
_LABEL = "rlcore-"
_INFERENCE = "inference/v1/generate"
_FINISHED = ("stop", "length", "tool_calls", "eos", "eos_token", "content_filter", None)
"""Reasons that end a completion; others, such as `abort`, mean that the server gave up."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a server returned for one row.

    Attributes:
        token_ids: sampled tokens; None if the server returns only text.
        logprobs: of each token, in nats; None if the server returns none.
        text: the completion, without the stop string; None for `inference`.
        truncated: whether a length limit ended it.
        weight_version: the server's version of the weights; None if it does not report one.
    """

    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    text: str | None = None
    truncated: bool = False
    weight_version: int | None = None


class OpenAIServer:
    """Samples rows with one of the endpoints of a server. Belongs to one event loop.

    Args:
        config: the section `policy.generation`.
    """

    def __init__(self, config: OpenAIConfig) -> None:
        settings = config.openai_cfg
        self._config, self._own = config, settings
        self.name = settings.base_url
        limits = RequestLimits(
            concurrency=settings.max_concurrent_requests,
            timeout_s=settings.timeout_s,
            deadline_s=settings.deadline_s,
            max_retries=settings.max_retries,
        )
        url = settings.root_url if settings.api == "inference" else settings.base_url
        self._client = HttpClient(base_url=url, api_key=settings.api_key, limits=limits)
        self._encoding = asyncio.Semaphore(limits.concurrency)
        """So that there are not more bodies with pictures in memory than requests."""
        self._models = HttpClient(base_url=settings.base_url, api_key=settings.api_key, limits=limits)

    async def models(self) -> list[Mapping[str, Any]] | None:
        """The entries of `/v1/models`; None if the server does not have this endpoint.

        Raises:
            HttpError: the server is not reachable, or refused the key.
        """
        try:
            response = await self._models.get_json("models")
        except HttpError as error:
            if error.status in (403, 404, 405, 501):
                return None
            raise
        data = response.body.get("data") if isinstance(response.body, Mapping) else None
        return [entry for entry in data if isinstance(entry, Mapping)] if isinstance(data, list) else None

    async def sample(
        self,
        prompt: Prompt,
        messages: Sequence[Mapping[str, Any]] | None,
        *,
        greedy: bool,
        top_k: int | None = None,
    ) -> Reply:
        """Sample one row.

        Args:
            prompt: tokens, limit, seed, stop strings, and images, which `api: inference` sends with the tensors of the policy.
            messages: the conversation, for `api: chat`.
            greedy: take the most likely tokens.
            top_k: replaces the config's.

        Raises:
            HttpError: all attempts failed, or the server refused the request.
            RLCoreError: the response does not have the form of the endpoint.
        """
        sampling = self._sampling(prompt, greedy=greedy, top_k=top_k)
        if self._own.api == "inference":
            body: dict[str, Any] = {"token_ids": prompt.tokens, "sampling_params": {**sampling, "logprobs": 0}}
            if not prompt.images:
                return await self._reply(_INFERENCE, body, _inference_reply)
            async with self._encoding:
                body["images"] = await in_thread(lambda: [_sent_image(image) for image in prompt.images], name="rlcore-images")
                return await self._reply(_INFERENCE, body, _inference_reply)
        if self._own.api == "chat":
            body = {"messages": [dict(message) for message in messages or ()], **sampling}
            return await self._reply("chat/completions", body, _chat_reply)
        body = {"prompt": prompt.tokens, "logprobs": 0, "return_token_ids": True, **sampling}
        return await self._reply("completions", body, _completion_reply)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()
        await self._models.close()

    def _sampling(self, prompt: Prompt, *, greedy: bool, top_k: int | None) -> dict[str, Any]:
        config = self._config
        fields: dict[str, Any] = {
            "temperature": 0.0 if greedy else config.temperature,
            "seed": prompt.seed & _MAX_SEED,
            "max_tokens": prompt.limit,
        }
        if not greedy and config.top_p != 1.0:
            fields["top_p"] = config.top_p
        if not greedy and (top_k or config.top_k) is not None:
            fields["top_k"] = top_k or config.top_k
        if prompt.stop_strings:
            fields["stop"] = list(prompt.stop_strings)
        if config.stop_token_ids:
            fields["stop_token_ids"] = config.stop_token_ids
        return fields

    async def _reply(self, path: str, body: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Reply]) -> Reply:
        """The reply to a request, of whose first choice `read` takes the tokens or the text."""
        fields = {"model": self._own.model, **body, **self._own.extra_body}
        response = await self._client.post_json(path, {key: value for key, value in fields.items() if value is not None})
        try:
            choice = dict(response.body["choices"][0])
            reason = choice.get("finish_reason")
            if reason in _FINISHED:
                return replace(read(choice), truncated=reason == "length")
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise RLCoreError(
                f"The response of the server to {path} does not have the form of this endpoint ({type(error).__name__}: "
                f"{error}). Check policy.generation.openai_cfg.base_url and api."
            ) from error
        raise HttpError(
            f"POST {path}: the server ended the completion with {reason!r}", status=response.status, is_temporary=True
        )


def _completion_reply(choice: Mapping[str, Any]) -> Reply:
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    return Reply(
        token_ids=_tokens(choice),
        logprobs=None if logprobs is None else [float(value) for value in logprobs],
        text=str(choice["text"]),
        weight_version=_version(choice),
    )


def _inference_reply(choice: Mapping[str, Any]) -> Reply:
    content = (choice.get("logprobs") or {}).get("content")
    return Reply(
        token_ids=_tokens(choice),
        logprobs=None if content is None else [float(entry["logprob"]) for entry in content],
        weight_version=_version(choice),
    )


def _chat_reply(choice: Mapping[str, Any]) -> Reply:
    return Reply(text=str(choice["message"].get("content") or ""))


def _sent_image(image: RowImage) -> dict[str, Any]:
    """An image as `/inference/v1/generate` of `rlcore serve` takes it."""
    names = ("digest", "start", "length", "placeholder_id", "num_placeholders")
    tensors = save({name: tensor.detach().cpu().contiguous() for name, tensor in image.inputs.items()})
    return {**{name: getattr(image, name) for name in names}, "tensors": base64.b64encode(tensors).decode()}


def _tokens(choice: Mapping[str, Any]) -> list[int] | None:
    tokens = choice.get("token_ids")
    return None if tokens is None else [int(token) for token in tokens]


def _version(fields: Mapping[str, Any]) -> int | None:
    """The oldest weight version of a choice: ours is a number, vLLM reports the label of each span of tokens."""
    spans = fields.get("weight_versions")
    if spans:
        return min(version_of_label(str(span["version"])) for span in spans)
    version = fields.get("weight_version")
    return None if version is None else int(version)


def version_label(version: int) -> str:
    """Label of a weight version in vLLM."""
    return f"{_LABEL}{version}"


def version_of_label(label: str) -> int:
    """The weight version; -1 for a label that this backend did not set, such as that of a server that was restarted."""
    number = label.removeprefix(_LABEL)
    return int(number) if label.startswith(_LABEL) and number.isdigit() else -1


_PROMPT = (1, 2, 3)
_FILTERED_ERROR = 1e-3
_AT = "policy.generation.openai_cfg"


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What a server reports about its model.

    Attributes:
        max_model_len: maximum number of tokens of prompt and completion; None if it is not reported.
        reads_images: whether prompts of token ids may have images, which is so for `rlcore serve` of a vision-language model.
    """

    max_model_len: int | None = None
    reads_images: bool = False


async def probe(server: OpenAIServer, config: OpenAIConfig) -> ServerFacts:
    """Sample a token and check the response; returns what the server reports about the model.

    Raises:
        ConfigError: the model does not exist on the server, or the server cannot be used for training although
            `weight_updates` is set; names the flag that is missing.
        HttpError: the server is not reachable or refused the request.
    """
    settings = config.openai_cfg
    facts = await _facts_of_model(server, settings.model)
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
    return facts


async def _facts_of_model(server: OpenAIServer, model: str) -> ServerFacts:
    models = await server.models()
    if models is None:
        return ServerFacts()
    entries = {str(entry.get("id")): entry for entry in models}
    if entries and model not in entries:
        names = ", ".join(sorted(entries)[:10])
        raise ConfigError(f"{_AT}.model: the server {server.name} has no model {model!r}. It has: {names}.")
    entry = entries.get(model, {})
    limit = entry.get("max_model_len")
    return ServerFacts(
        max_model_len=limit if isinstance(limit, int) else None, reads_images=entry.get("reads_token_images") is True
    )


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
