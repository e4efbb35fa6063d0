"""Options of `rlcore serve` for weight updates."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from rl_core.errors import ConfigError

ADMIN_KEY = "RLCORE_SERVE_ADMIN_KEY"
"""Environment variable with the admin key."""


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """Weight updates that the server accepts."""

    folder: Path
    """Folder of the weights, without symbolic links."""
    admin_key: str = field(repr=False)
    """Key that updates require; empty for vLLM's own server, which checks none."""


def admin_key_of_environment() -> str | None:
    """The admin key; None if there is none."""
    return os.environ.get(ADMIN_KEY, "").strip() or None


def read_update_options(target: str, folder: Path | None, *, is_for_vllm: bool = False) -> UpdateOptions | None:
    """Check `--allow-weight-updates`; None without it.

    Args:
        target: the served model or run.
        folder: value of the option.
        is_for_vllm: whether the command of vLLM's own server is printed.

    Raises:
        ConfigError: the folder does not exist, there is no admin key, or a run is served.
    """
    from rl_serve.served_model import is_run

    if folder is None:
        if is_for_vllm:
            raise ConfigError("--print-vllm-command requires --allow-weight-updates DIR, the folder of the weights.")
        return None
    if is_run(Path(target)):
        raise ConfigError(
            f"--allow-weight-updates: {target} is a run, which is served with the weights of its checkpoint. Convert the "
            "checkpoint (rlcore convert) and serve the model."
        )
    if not folder.is_dir():
        raise ConfigError(f"--allow-weight-updates {folder}: this folder does not exist. Create it first.")
    key = admin_key_of_environment()
    if key is None and not is_for_vllm:
        raise ConfigError(f"--allow-weight-updates requires an admin key: set the environment variable {ADMIN_KEY}.")
    return UpdateOptions(folder=folder.resolve(), admin_key=key or "")
