"""Config of the environment `tools`. Lightweight imports only."""

from __future__ import annotations

from pydantic import Field, model_validator

from rl_core.config.section import Section
from rl_core.config.tool_section import ToolEnvironmentConfig
from rl_sandbox.config import SandboxConfig


class McpServerConfig(Section):
    """An MCP server (Model Context Protocol) whose tools the model can call; either `command` or `url`."""

    command: tuple[str, ...] = ()
    """Command that starts the server, which is then used over stdin and stdout. Each environment worker starts its own."""
    env: dict[str, str] = Field(default_factory=dict, repr=False)
    """Environment variables of the command. It inherits only a few from the worker, such as `PATH` and `HOME`."""
    url: str | None = None
    """URL of a running server with the transport `streamable HTTP`, such as `http://localhost:8000/mcp`."""
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    """HTTP headers of requests to `url`, such as `{Authorization: "Bearer ${oc.env:TOKEN}"}`."""
    tools: tuple[str, ...] | None = None
    """Names of the server's tools that the model can call; null: all."""
    per_rollout: bool = False
    """Whether every rollout has its own server (or connection to `url`), which starts with its first call and ends with it. If
    false, the rollouts of a worker share one."""
    start_timeout_s: float = Field(default=60.0, gt=0.0)
    """Seconds in which the server must have started and answered."""

    @model_validator(mode="after")
    def _has_one_transport(self) -> McpServerConfig:
        if bool(self.command) == (self.url is not None):
            raise ValueError("set either command or url")
        if self.env and not self.command:
            raise ValueError("env applies to command, which is not set: remove env")
        if self.headers and self.url is None:
            raise ValueError("headers apply to url, which is not set: remove headers")
        return self


class ToolsEnvironmentConfig(ToolEnvironmentConfig):
    """`env.tools`: the model may call tools, and its final answer must equal the expected one."""

    tools: tuple[str, ...] = ("calculator",)
    """Tools that the model can call: `calculator`, `python`, or functions by path, such as `my_tools:search`."""
    mcp_servers: dict[str, McpServerConfig] = Field(default_factory=dict)
    """MCP servers, by any name. Their tools are offered in addition to `tools`, which may then be empty."""
    require_box: bool = True
    r"""Whether to grade only the content of the last `\boxed{}`. If false, an answer without a box is graded by its last number
    or formula."""
    grading_timeout_s: float = Field(default=5.0, gt=0.0)
    """CPU time limit of comparing one answer, in seconds. When it expires, the answer counts as wrong."""
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    """Where the code of the tool `python` runs, and its limits. `timeout_s` applies to each call, and must be below
    `call_timeout_s`."""

    @model_validator(mode="after")
    def _has_tools(self) -> ToolsEnvironmentConfig:
        if not self.tools and not self.mcp_servers:
            raise ValueError("tools is empty: list at least one tool, or set mcp_servers")
        return self

    @model_validator(mode="after")
    def _sandbox_is_used(self) -> ToolsEnvironmentConfig:
        if "python" not in self.tools and self.sandbox != SandboxConfig():
            raise ValueError("sandbox applies to the tool `python`, which is not in `tools`: add it, or remove sandbox")
        if "python" in self.tools and self.sandbox.timeout_s >= self.call_timeout_s:
            raise ValueError(
                f"sandbox.timeout_s ({self.sandbox.timeout_s:g}) must be below call_timeout_s ({self.call_timeout_s:g}), so "
                "that the sandbox stops the code before the call is given up"
            )
        return self
