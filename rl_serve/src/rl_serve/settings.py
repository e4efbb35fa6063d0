"""Settings of `rlcore serve`: the server that requests are forwarded to, and what happens to prompts and answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from rl_core.config.diagnostics import KeyPath, Node, Problems, SourceLocation, node_from_plain
from rl_core.config.introspection import NO_DEFAULT, all_fields, find_field
from rl_core.config.section import Section
from rl_core.config.validator import Validator
from rl_core.errors import ConfigError
from rl_sandbox.config import SandboxConfig
from rl_train.config.data_sections import ImagesConfig
from rl_train.config.secrets import Secrets
from rl_train.config.sources import escape, read_sources, resolve
from rl_train.config.values import apply_overrides
from rl_train.prompts.prompt_files import prompt_problem


class BackendSection(Section):
    """`server`: the OpenAI-compatible server that requests are forwarded to."""

    server_type: Literal["vllm", "openai"] = "vllm"
    """`vllm`: a server at `host` and `port` with `/health` and token endpoints, such as vLLM or `rlcore serve` itself.
    `openai`: any OpenAI-compatible API at `base_url`, without token endpoints."""
    host: str = "localhost"
    """Host of a `vllm` server."""
    port: int = Field(default=5000, ge=1, le=65535)
    """Port of a `vllm` server."""
    base_url: str | None = None
    """URL of an `openai` server up to the version, such as `https://example.com/v1`."""
    api_key: str | None = Field(default=None, repr=False)
    """API key of the server; read it from the environment with `${oc.env:NAME}`."""
    model: str | None = None
    """Name of the model on the server. By default, the first one that it lists."""
    timeout_s: float = Field(default=600.0, gt=0.0)
    """Timeout of one attempt, in seconds."""
    max_retries: int = Field(default=2, ge=0)
    """Maximum number of further attempts after a connection error, a timeout or a status such as 503; streams have none."""

    @field_validator("host")
    @classmethod
    def _is_host(cls, host: str) -> str:
        if not host or any(char in host for char in "/@? "):
            raise ValueError(f"host is {host!r}: write a name or an address, without a scheme, port or path")
        return host

    @model_validator(mode="after")
    def _address_fits_type(self) -> BackendSection:
        if self.server_type == "openai" and self.base_url is None:
            raise ValueError("server_type openai requires base_url, such as https://example.com/v1")
        if self.server_type == "vllm" and self.base_url is not None:
            raise ValueError("base_url requires server_type openai; a vllm server has host and port")
        return self

    @property
    def url(self) -> str:
        """The server's URL up to the version."""
        return self.base_url or f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}/v1"


class ChatSettings(Section):
    """What chat completions and `/generate` do with prompts and answers. Token endpoints ignore it."""

    prompt_config: str | None = None
    """Prompt config that fills prompts: a packaged one such as `generic/math`, or a file. None by default."""
    examples_type: str | None = None
    """Few-shot examples of the prompt config, replacing its own."""
    code_execution: bool = False
    """Whether Python code blocks of answers run in a sandbox; the model reads the output and continues."""
    max_code_rounds: int = Field(default=4, ge=1)
    """Maximum number of times per answer that code is run."""
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    """Where code runs, and its limits."""
    max_request_mib: int | None = Field(default=None, ge=1)
    """Largest size of the body of a request, in MiB. By default 20 for a model that reads images and for a proxy, else 4."""
    evaluator: str | None = None
    """Environment that compares an answer with `expected_answer`; for a run, one of its tasks. By default the run's own
    environment, and `math` for a model and a proxy."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> ChatSettings:
        if self.examples_type is not None and self.prompt_config is None:
            raise ValueError("examples_type requires prompt_config")
        if self.prompt_config is not None and (problem := prompt_problem(self.prompt_config, self.examples_type)):
            raise ValueError(f"prompt_config: {problem}")
        fields = self.model_fields_set
        if not self.code_execution and fields & {"sandbox", "max_code_rounds"}:
            raise ValueError("sandbox and max_code_rounds require code_execution: true")
        return self


class ServedImages(ImagesConfig):
    """`images`: limits of the images in requests. A run is served with its own `processor_kwargs` if none are given."""

    section: ClassVar[str] = "images"

    max_images: int = Field(default=16, ge=0)
    """Largest number of images in the messages of a request."""
    max_file_mib: int = Field(default=16, ge=1)
    """Largest size of an image file, in MiB."""
    max_megapixels: int = Field(default=64, ge=1)
    """Largest number of pixels of an image before it is resized, in millions."""
    cache_mib: int = Field(default=256, ge=0)
    """Memory for images that are kept after they were resized, in MiB, so that those of earlier turns are not read again."""


class ModelSettings(ChatSettings):
    """The settings of a local model."""

    images: ServedImages = Field(default_factory=ServedImages)
    """Limits of the images in requests, for models that read images."""


class ServeSettings(ChatSettings):
    """The settings of a proxy."""

    start_server: Literal[True] = True
    """Accepted for scripts that set it; the command always starts a server."""
    server: BackendSection = Field(default_factory=BackendSection)
    """The server that requests are forwarded to."""
    generate_port: int = Field(default=7000, ge=0, le=65535)
    """Port to listen on, as the option `--port`; 0 chooses a free one."""
    dry_run: bool = False
    """Print the settings and check them, without listening."""


CHAT_KEYS = frozenset(ModelSettings.model_fields)
"""Keys that apply to a local model."""


def load_settings(files: Sequence[Path], overrides: Sequence[str]) -> tuple[ServeSettings, str]:
    """The settings, and their text as YAML, without secrets.

    Args:
        files: config files; the values of each override those of the files before it.
        overrides: `key=value` and `++key=value`.

    Raises:
        InvalidConfigError: lists every mistake with its location.
    """
    settings, secrets, interpolations = _load(ServeSettings, files, overrides)
    shown = secrets.redacted(settings.model_dump(mode="json", exclude={"start_server", "dry_run"}), interpolations)
    if settings.server.api_key is not None and ("server", "api_key") not in interpolations:
        shown["server"]["api_key"] = "[hidden]"
    return settings, yaml.safe_dump(escape(shown), sort_keys=False, allow_unicode=True, width=120)


def load_chat_settings(files: Sequence[Path], overrides: Sequence[str]) -> ModelSettings:
    """The settings of a local model.

    Raises:
        InvalidConfigError: as `load_settings`.
    """
    settings: ModelSettings = _load(ModelSettings, files, overrides)[0]
    return settings


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides of the answers' settings, and those of the model or run.

    Raises:
        ConfigError: one belongs to a proxy.
    """
    of_settings: list[str] = []
    others: list[str] = []
    for text in overrides:
        key = text.lstrip("+").partition("=")[0].partition(".")[0]
        if key in ServeSettings.model_fields and key not in CHAT_KEYS:
            raise ConfigError(
                f"override `{text}`: {key} is a setting of a proxy, but a model is served here. Remove one of them."
            )
        (of_settings if key in CHAT_KEYS else others).append(text)
    return of_settings, others


def _load(model: Any, files: Sequence[Path], overrides: Sequence[str]) -> tuple[Any, Secrets, dict[KeyPath, str]]:
    secrets = Secrets()
    problems = Problems(redact=secrets.redact)
    start = SourceLocation(source="rlcore serve")
    written: Node = read_sources(list(files), problems=problems) if files else node_from_plain({}, location=start)
    problems.raise_if_any()
    written, _ = apply_overrides(written, overrides, problems=problems)

    def default_at(path: KeyPath) -> Any:
        found = find_field(model, path)
        return NO_DEFAULT if found is None else found.default

    values, interpolations = resolve(
        written, default_at=default_at, known=[field.path for field in all_fields(model)], problems=problems, secrets=secrets
    )

    def ending_in(name: str) -> list[KeyPath]:
        return [field.path for field in all_fields(model) if field.name.casefold() == name.casefold()]

    validator = Validator(written=written, problems=problems, find_elsewhere=ending_in)
    settings = validator.validate(model, values, path=())
    problems.raise_if_any()
    return settings, secrets, interpolations
