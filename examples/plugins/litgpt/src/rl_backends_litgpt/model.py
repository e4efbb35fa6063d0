"""Folders of LitGPT: `lit_model.pth`, `model_config.yaml` and the tokenizer's files."""

from pathlib import Path

import torch
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import save_config

from rl_core.errors import CheckpointError, NotSupportedError

WEIGHTS = "lit_model.pth"


def load(folder) -> GPT:
    """The model of a folder, float32."""
    config = Config.from_file(Path(folder) / "model_config.yaml")
    if config.sliding_window_size is not None:
        raise NotSupportedError(
            f"{config.name} attends to a sliding window, for which LitGPT's cache takes no prompt longer than the window."
        )
    model = GPT(config)
    model.load_state_dict(read_weights(folder))
    return model.float()


def read_weights(folder) -> dict[str, torch.Tensor]:
    """The weights of a folder, by LitGPT's names."""
    try:
        stored = torch.load(Path(folder) / WEIGHTS, mmap=True, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder} has no LitGPT weights: {error}") from error
    return stored.get("model", stored)


def save(weights, config: Config, folder: Path) -> None:
    """Write weights and config."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(dict(weights), folder / WEIGHTS)
    save_config(config, folder)
