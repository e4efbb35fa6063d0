"""Config of the environment `tools`. Lightweight imports only."""

from __future__ import annotations

from pydantic import Field, model_validator

from rl_core.config.tool_section import ToolEnvironmentConfig
from rl_sandbox.config import SandboxConfig


class ToolsEnvironmentConfig(ToolEnvironmentConfig):
    """`env.tools`: the model may call tools, and its final answer must equal the expected one."""

    tools: tuple[str, ...] = Field(default=("calculator",), min_length=1)
    """Tools that the model can call: `calculator`, `python`, or functions by path, such as `my_tools:search`."""
    require_box: bool = True
    r"""Whether to grade only the content of the last `\boxed{}`. If false, an answer without a box is graded by its last number
    or formula."""
    grading_timeout_s: float = Field(default=5.0, gt=0.0)
    """CPU time limit of comparing one answer, in seconds. When it expires, the answer counts as wrong."""
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    """Where the code of the tool `python` runs, and its limits. `timeout_s` applies to each call, and must be below
    `call_timeout_s`."""

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
