"""A model of Hugging Face on these ranks: chunks built, weights read, bridge made; knows no training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_backends_megatron.bridge import Bridge, SetWeight
from rl_backends_megatron.config import MegatronPolicyConfig
from rl_backends_megatron.cpu_shim import cpu_shim
from rl_backends_megatron.families import family_of
from rl_backends_megatron.hf_folder import SafetensorsFolder, find_folder, read_config
from rl_backends_megatron.model import Chunks, build_chunks, is_tied, sizes_of
from rl_backends_megatron.parallel import Ranks
from rl_backends_megatron.scalar_head import source_with_head, with_scalar_head
from rl_core.training.heads import refuse_other_head


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """This rank's part of a model.

    Attributes:
        folder: where it is read from.
        hf: its Hugging Face config.
        chunks: the layers.
        bridge: its weights under Hugging Face names.
        scalar: whether it ends in a scalar head.
    """

    folder: Path
    hf: Any
    chunks: Chunks
    bridge: Bridge
    scalar: bool

    def load_initial_weights(self, into: SetWeight = torch.Tensor.copy_) -> None:
        """Set the weights to those of the model's own folder; a scalar head that it does not have is zero.

        Args:
            into: sets one.

        Raises:
            CheckpointError: the folder is torn, or its weights are of another model than its config.
        """
        with SafetensorsFolder(self.folder) as source:
            self.bridge.load(source_with_head(source, self.hf) if self.scalar else source, into)

    def load_weights(self, folder: Path, into: SetWeight = torch.Tensor.copy_) -> None:
        """Set the weights to those in another folder.

        Args:
            folder: holds safetensors.
            into: sets one.

        Raises:
            CheckpointError: the folder is torn, or of another model.
        """
        with SafetensorsFolder(folder) as source:
            self.bridge.load(source, into)

    @property
    def vocab_size(self) -> int:
        """V, without padding."""
        size: int = self.hf.vocab_size
        return size


def load_model(config: MegatronPolicyConfig, ranks: Ranks) -> LoadedModel:
    """The model that the config names, with its weights, on the rank's device; collective.

    Raises:
        UserError: there is no such model, no table for its family, or its head is another.
        CheckpointError: its weights are torn.
    """
    model = build_model(config, ranks)
    model.load_initial_weights()
    return model


def build_model(config: MegatronPolicyConfig, ranks: Ranks) -> LoadedModel:
    """The model that the config names, whose weights are not set yet, on the rank's device; collective.

    Raises:
        UserError: there is no such model, no table for its family, or its head is another.
    """
    folder = find_folder(config.model_name)
    hf = read_config(folder)
    family = family_of(hf, model_name=config.model_name)
    refuse_other_head(hf, config.head, name=config.model_name)
    scalar = config.head == "scalar"
    if scalar:
        family = with_scalar_head(family)
    with cpu_shim():
        chunks = build_chunks(hf, family, config, device=ranks.device.type)
        bridge = Bridge(
            chunks.modules,
            family,
            sizes_of(hf),
            ranks,
            tied=is_tied(hf, config),
            num_experts=chunks.config.num_moe_experts,
        )
    for module in chunks.modules:
        module.to(ranks.device)
    return LoadedModel(folder=folder, hf=hf, chunks=chunks, bridge=bridge, scalar=scalar)
