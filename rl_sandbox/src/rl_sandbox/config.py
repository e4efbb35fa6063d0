"""The config section of a sandbox (`env.<task>.sandbox`). Lightweight imports only."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rl_core.config.section import Section


class SandboxConfig(Section):
    """Where model-written programs run, and their limits."""

    backend: str = "local"
    """Sandbox component; `local` runs programs on the machine of the worker."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of another backend. `local` has none; its settings are the other keys."""
    require: Literal["isolated_uid", "user_namespace", "rlimits"] = "user_namespace"
    """Weakest acceptable isolation. The strongest level that works is used; it is an error if that is weaker than this.
    `rlimits` only limits resources: programs can then read the files and use the network of the user who started the run."""
    python: str | None = None
    """Python interpreter that runs the programs; defaults to the interpreter of the worker."""
    packages: tuple[str, ...] = ()
    """Modules that programs may import besides the standard library, such as `[numpy]`. They must be installed for `python`.
    If any are listed, all packages of that interpreter are visible."""
    timeout_s: float = Field(default=10.0, gt=0.0)
    """Time limit of one call, in seconds of wall-clock time."""
    memory_mb: int = Field(default=512, ge=64)
    """Memory limit of each process in MiB. With cgroups, also of all processes of a session together, without files."""
    max_processes: int = Field(default=32, ge=4)
    """Maximum number of processes and threads in a session."""
    disk_mb: int = Field(default=64, ge=1)
    """Disk space of a session in MiB, which is held in memory. Shared memory (`/dev/shm`) has a limit of the same size."""
    output_kb: int = Field(default=64, ge=1)
    """Maximum size of the returned stdout and of stderr, in KiB each. The rest is discarded."""

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> SandboxConfig:
        if self.backend == "local" and self.options:
            raise ValueError(
                f"options has {', '.join(sorted(self.options))}, but the backend `local` has no options: remove them"
            )
        return self
