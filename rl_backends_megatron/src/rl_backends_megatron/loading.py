"""Builds a Hugging Face model on these ranks and loads its weights."""

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
from rl_core.backend import check_files, refuse_other_head
from rl_core.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """This rank's share of a model.

    Attributes:
        folder: its folder.
        hf: its Hugging Face config.
        chunks: the layers.
        bridge: maps its weights to Hugging Face names.
        scalar: whether it has a scalar head.
    """

    folder: Path
    hf: Any
    chunks: Chunks
    bridge: Bridge
    scalar: bool

    def load_initial_weights(self, into: SetWeight = torch.Tensor.copy_) -> None:
        """Load the weights from the model's own folder; a missing scalar head is initialized with zeros.

        Args:
            into: sets one weight.

        Raises:
            CheckpointError: the folder is incomplete, or its weights do not match its config.
        """
        with self._tensors(self.folder) as source:
            self.bridge.load(source_with_head(source, self.hf) if self.scalar else source, into)

    def load_weights(self, folder: Path, into: SetWeight = torch.Tensor.copy_) -> None:
        """Load the weights from another folder.

        Args:
            folder: contains safetensors.
            into: sets one weight.

        Raises:
            CheckpointError: the folder is incomplete or has another model.
        """
        with self._tensors(folder) as source:
            self.bridge.load(source, into)

    def _tensors(self, folder: Path) -> SafetensorsFolder:
        tensors = SafetensorsFolder(folder)
        check_files(str(folder), head="scalar" if self.scalar else "tokens", error=CheckpointError)
        return tensors

    @property
    def vocab_size(self) -> int:
        """V, without padding."""
        size: int = self.hf.vocab_size
        return size


def load_model(config: MegatronPolicyConfig, ranks: Ranks) -> LoadedModel:
    """The configured model with its weights on the rank's device; collective.

    Raises:
        UserError: the model does not exist, its family is not supported, or it has another head.
        CheckpointError: its weights are incomplete or corrupt.
    """
    model = build_model(config, ranks)
    model.load_initial_weights()
    return model


def build_model(config: MegatronPolicyConfig, ranks: Ranks) -> LoadedModel:
    """The configured model on the rank's device, without initialized weights; collective.

    Raises:
        UserError: the model does not exist, its family is not supported, or it has another head.
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
