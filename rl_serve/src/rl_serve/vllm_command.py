"""The command that starts vLLM's own server so that `backend: openai` can train with it (`--print-vllm-command`)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from rl_core.dispatch.worker_facade import local_device
from rl_core.errors import ConfigError
from rl_serve.update_options import UpdateOptions

FOLDER = "RLCORE_WEIGHT_UPDATES_DIR"
"""Environment variable with the folder from which the worker extension loads weights."""
EXTENSION = "rl_backends_vllm.server_extension.ServerWeights"


_ON_A_CPU = ("--enforce-eager", "--kv-cache-memory-bytes", str(2**30), "--no-enable-chunked-prefill")
"""Compiling takes a minute there, vLLM would take most of the memory, and rows with seeds need whole prompts."""


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
    arguments = {
        "--model": model,
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
