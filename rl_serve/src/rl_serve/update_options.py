"""Options of `rlcore serve` for weight updates, and the command with which vLLM's own server accepts updates."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rl_core.data.hub import model_source
from rl_core.dispatch.worker_facade import local_device
from rl_core.errors import ConfigError
from rl_serve.served_model import is_run

ADMIN_KEY = "RLCORE_SERVE_ADMIN_KEY"
"""Environment variable with the admin key."""
FOLDER = "RLCORE_WEIGHT_UPDATES_DIR"
"""Environment variable with the folder from which the worker extension loads weights."""
EXTENSION = "rl_backends_vllm.refit.ServerWeights"
_ON_A_CPU = ("--enforce-eager", "--kv-cache-memory-bytes", str(2**30), "--no-enable-chunked-prefill")
"""Compiling takes a minute there, vLLM would take most of the memory, and rows with seeds need whole prompts."""


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


def vllm_command(
    model: str,
    *,
    updates: UpdateOptions | None,
    name: str | None,
    host: str,
    port: int,
    refused: Mapping[str, object],
    device: str | None = None,
) -> str:
    """The shell command, in one line.

    Args:
        model: name or folder of the model.
        updates: the folder of the weights.
        name: name of the model in the API; by default the last component of `model`.
        host: address to listen on.
        port: port to listen on.
        refused: options of our own server with their values.
        device: "cpu" or "cuda"; by default that of this machine.

    Raises:
        ConfigError: options of our own server were given, or others could replace the weights.
    """
    assert updates is not None
    for option, value in refused.items():
        if value:
            raise ConfigError(f"--print-vllm-command: {option} has no effect on vLLM's own server. Remove it.")
    if host not in ("127.0.0.1", "::1", "localhost"):
        raise ConfigError(
            f"--print-vllm-command with --host {host}: vLLM's routes for weight updates check no key, so it must listen "
            "on 127.0.0.1. Reach it from other machines through a tunnel."
        )
    variables = {"VLLM_SERVER_DEV_MODE": "1", FOLDER: str(updates.folder)}
    source, revision = model_source(model)
    arguments = {
        "--model": source,
        **({"--revision": revision, "--tokenizer-revision": revision} if revision is not None else {}),
        "--served-model-name": name or Path(model).name,
        "--host": host,
        "--port": str(port),
        "--logprobs-mode": "processed_logprobs",
        # Otherwise, the model's top-p, top-k and penalties apply to requests that do not set them.
        "--generation-config": "vllm",
        "--worker-extension-cls": EXTENSION,
    }
    words = ["python", "-m", "vllm.entrypoints.openai.api_server", "--enable-scale-out"]
    words += [word for pair in arguments.items() for word in pair]
    words += _ON_A_CPU if (device or local_device()) == "cpu" else ()
    return " ".join([*(f"{key}={shlex.quote(value)}" for key, value in variables.items()), shlex.join(words)])
