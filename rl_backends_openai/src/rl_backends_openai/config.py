"""The section `policy.generation` with `backend: openai`. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from rl_core.config.diagnostics import KeyPath
from rl_core.config.schema import GenerationConfig, PolicyConfig, Section, TokenizerConfig

if TYPE_CHECKING:
    from rl_core.config.schema import RunSections

NO_KEY = "EMPTY"
"""The customary API key of servers that check none."""
_OWNED = frozenset(
    {"model", "prompt", "messages", "token_ids", "n", "stream", "temperature", "top_p", "top_k", "seed", "stop"}
    | {"stop_token_ids", "logprobs", "return_token_ids", "sampling_params", "images"}
)


class OpenAIServerConfig(Section):
    """`policy.generation.openai_cfg`."""

    base_url: str
    """URL of the server up to the version, such as `http://localhost:7000/v1`."""
    api_key: str | None = Field(default=None, repr=False)
    """API key of the server. It must come from the environment, as in `${oc.env:OPENAI_API_KEY}`, or be `EMPTY`."""
    model: str
    """Name of the model on the server."""
    api: Literal["completions", "inference", "chat"] = "completions"
    """Endpoint to sample with: `completions` (`/v1/completions`) and `inference` (`/inference/v1/generate`) take and return
    token ids, which training requires. `chat` (`/v1/chat/completions`) lets the server render the messages, for evaluation and
    data only."""
    weight_updates: Literal["rlcore", "vllm"] | None = None
    """How the server receives the policy's weights: `rlcore` for `rlcore serve --allow-weight-updates DIR`, `vllm` for a server
    started with the command of `rlcore serve --print-vllm-command`. By default the server keeps its own weights, which allows
    evaluation and data only."""
    admin_key: str | None = Field(default=None, repr=False)
    """Key for weight updates of `rlcore serve`. It must come from the environment, as in `${oc.env:RLCORE_SERVE_ADMIN_KEY}`."""
    max_concurrent_requests: int = Field(default=64, ge=1)
    """Maximum number of requests at the same time; each row is one request."""
    timeout_s: float = Field(default=300.0, gt=0.0)
    """Timeout of one attempt, in seconds."""
    deadline_s: float = Field(default=900.0, gt=0.0)
    """Timeout of a request with all its attempts, in seconds. A row whose request fails is not scored."""
    max_retries: int = Field(default=4, ge=0)
    """Maximum number of retries after a timeout, a connection error, or a status such as 429 or 503. Pauses between attempts
    grow from 0.5 to 30 seconds, or are as long as the server requests."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each sampling request, such as `{reasoning_effort: low}`; null removes a field, such as
    `{max_tokens: null, max_completion_tokens: 512}`."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Maximum number of tokens of prompt and completion; defaults to the policy's `max_total_sequence_length`, or less if the
    server's limit is lower."""
    tokenizer: TokenizerConfig | None = None
    """Tokenizer of the model, used if the server returns text; defaults to that of the policy."""

    @field_validator("base_url")
    @classmethod
    def _is_a_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("base_url is not an HTTP URL. Write it as http://host:port/v1")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError("base_url must not have a password, a query or a fragment. Pass secrets as api_key")
        return url

    @field_validator("extra_body")
    @classmethod
    def _keeps_our_fields(cls, fields: dict[str, Any]) -> dict[str, Any]:
        if owned := sorted(_OWNED & fields.keys()):
            raise ValueError(f"extra_body cannot set {owned[0]}: policy.generation determines it")
        return fields

    @property
    def root_url(self) -> str:
        """URL of the server without the version."""
        return self.base_url.rstrip("/").removesuffix("/v1")


class OpenAIConfig(GenerationConfig):
    """`policy.generation` with `backend: openai`."""

    backend: str = "openai"
    """Name of a registered generation backend, or the dotted path of its class."""
    openai_cfg: OpenAIServerConfig
    """Settings of the server."""

    @model_validator(mode="before")
    @classmethod
    def _updates_go_through_files(cls, given: Any) -> Any:
        own = given.get("openai_cfg") if isinstance(given, dict) else None
        kind = own.get("weight_updates") if isinstance(own, dict) else getattr(own, "weight_updates", None)
        return {"refit_transport": "disk", **given} if kind is not None else given

    @model_validator(mode="after")
    def _has_no_worker_keys(self) -> Self:
        starts_no_workers = dict.fromkeys(("num_workers", "python", "max_restarts"), "which starts no workers")
        for name, reason in {**starts_no_workers, "eos_token_id": "whose server ends completions"}.items():
            if getattr(self, name) != GenerationConfig.model_fields[name].default:
                raise ValueError(f"{name} has no effect with backend: openai, {reason}. Remove the key")
        return self

    @model_validator(mode="after")
    def _weight_updates_are_complete(self) -> Self:
        kind = self.openai_cfg.weight_updates
        if kind is None:
            return self
        if self.openai_cfg.api == "chat":
            raise ValueError("openai_cfg.weight_updates requires token ids: set openai_cfg.api to completions or inference")
        if self.refit_transport != "disk":
            raise ValueError(
                f"refit_transport is {self.refit_transport!r}, but a server receives weights by disk. Remove the key"
            )
        if self.refit_folder is None:
            raise ValueError(
                "refit_folder is required with openai_cfg.weight_updates: the folder that the server was started with "
                "(--allow-weight-updates DIR), as this machine sees it"
            )
        if kind == "rlcore" and self.openai_cfg.admin_key is None:
            raise ValueError(
                "openai_cfg.admin_key is required with weight_updates: rlcore. Set it to ${oc.env:RLCORE_SERVE_ADMIN_KEY}, the "
                "key that the server was started with"
            )
        return self

    @property
    def has_own_weights(self) -> bool:
        return self.openai_cfg.weight_updates is None

    @property
    def weights_key(self) -> str | None:
        return "openai_cfg.weight_updates"

    def adapter_problem(self, policy: PolicyConfig) -> str | None:
        if self.openai_cfg.weight_updates == "rlcore":
            return None
        return "only `rlcore serve` receives adapters (openai_cfg.weight_updates: rlcore)"

    @property
    def image_api_problem(self) -> str | None:
        """Why rows cannot have images, whatever the server; None if they can."""
        own = self.openai_cfg
        if own.api != "inference":
            return (
                f"openai_cfg.api is {own.api}, which cannot take tokens and the tensors of their images. Set openai_cfg.api to "
                "inference, and use `rlcore serve` of a vision-language model"
            )
        if own.weight_updates == "vllm":
            return (
                "openai_cfg.weight_updates is vllm, and vLLM's own server cannot receive the tensors of images. Start `rlcore "
                "serve MODEL --backend vllm`, and set openai_cfg.weight_updates to rlcore"
            )
        return None

    def image_problem(self, policy: PolicyConfig) -> str | None:
        return self.image_api_problem

    def conflicts(self, run: RunSections) -> Iterator[tuple[KeyPath, str]]:
        """Checks that API keys come from the environment, because a config is stored in the run folder."""
        yield from super().conflicts(run)
        if self.resources is not None:
            yield ("resources",), "has no effect: the server runs on its own machines. Remove it."
        known = {*os.environ.values(), NO_KEY, None}
        for name, example in (("api_key", "OPENAI_API_KEY"), ("admin_key", "RLCORE_SERVE_ADMIN_KEY")):
            if getattr(self.openai_cfg, name) not in known:
                yield (
                    ("openai_cfg", name),
                    "is a literal key, and run folders contain the config. Store the key in an environment variable and write "
                    f"${{oc.env:{example}}}.",
                )

    def for_policy(self, policy: PolicyConfig) -> Self:
        """This section with unset values from the policy: tokenizer and length."""
        server = self.openai_cfg
        limit = policy.max_total_sequence_length
        filled = {
            "max_model_len": min(server.max_model_len or limit, limit),
            "tokenizer": server.tokenizer or policy.tokenizer,
        }
        return super().for_policy(policy).model_copy(update={"openai_cfg": server.model_copy(update=filled)})
