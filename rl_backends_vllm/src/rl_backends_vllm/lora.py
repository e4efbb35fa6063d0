"""The LoRA adapter of a vLLM worker process: every request uses it, and each refit replaces it in place, without a file.

vLLM loads adapters from folders. Here the tensors of a refit become a `LoRAModel` in the worker, under the ID that every
request carries, so rows in progress continue with the new tensors. vLLM fuses adapters as it fuses the layers (q, k and v; gate
and up) and copies A and s B into buffers of its layers. Before the first adapter arrives, B is 0.

On a CPU, vLLM's products of adapters copy A and B for each token of a step, and round s B to the data type of the base model;
`OneAdapterProducts` replaces them. On a GPU, vLLM's kernels accept only 16-bit adapters, so A and s B are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
import vllm
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name

from rl_backends_vllm.config import VllmEngineConfig
from rl_backends_vllm.sources import why_not_adapted
from rl_core.backend import LORA_A, LORA_B, LORA_SCALE
from rl_core.errors import ConfigError, NotSupportedError, WeightSyncError

_KEY: Final = "policy.generation.lora"
REQUEST: Final = LoRARequest("rlcore", 1, "sent by the policy")
"""What every request of an engine with adapters carries. vLLM requires a path, but reads none of an adapter that it has."""


def lora_arguments(config: VllmEngineConfig, *, device: str, dtype: str, hf_config: Any) -> dict[str, Any]:
    """The arguments of `vllm.EngineArgs` for one adapter of the linear layers of a model, except its head.

    Args:
        config: the section; `max_lora_rank` is set.
        device: "cpu" or "cuda".
        dtype: data type of the engine.
        hf_config: the model's configuration.

    Raises:
        ConfigError: vLLM cannot adapt this model, or has no adapters for this device and data type.
    """
    problem = why_not_adapted(hf_config)
    if device != "cpu" and dtype == "float32":
        problem = "on GPUs, vLLM supports adapters in bfloat16 and float16 only, and this engine computes in float32"
    if problem is not None:
        raise ConfigError(f"policy.generation.lora: adapter cannot be used: {problem}. Set it to merged.", key=_KEY)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=config.trust_remote_code)
    head = model.get_output_embeddings()
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D) and module is not head]
    return {
        "enable_lora": True,
        "max_lora_rank": config.max_lora_rank,
        "max_loras": 1,
        # vLLM's default is the data type of the engine. It does not know float32 by name.
        "lora_dtype": torch.float32 if device == "cpu" else "auto",
        # With adapters of the head, vLLM would reserve memory for them, and refuse vocabularies above 258048 tokens.
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in layers}),
    }


class EngineAdapter:
    """The adapter of the model in one process.

    Args:
        worker: vLLM's worker, started with `enable_lora`.

    Raises:
        NotSupportedError: this version of vLLM stores adapters differently.
    """

    def __init__(self, worker: Any) -> None:
        self._runner = worker.model_runner
        try:
            manager = self._manager = worker.get_model().lora_manager
            self._modules, self._fused = manager.modules, manager.packed_modules
            self._dtype, self._max_rank = manager.lora_config.lora_dtype, manager.lora_config.max_lora_rank
            mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
            self._mapper = None if mapper is None else mapper.get_rename_mapper()
            self._products = [each for each in manager.punica_wrapper_mapping.values() if type(each) is PunicaWrapperCPU]
            for products in self._products:
                products.__class__ = OneAdapterProducts
            self.replace({})
        except AttributeError as error:
            raise NotSupportedError(
                f"vLLM {vllm.__version__} stores LoRA adapters differently from 0.32 ({error}): set policy.generation.lora to "
                "merged.",
                key=_KEY,
            ) from error

    def refuse_unsupported(self, ranks: Mapping[str, int]) -> None:
        """Raise WeightSyncError for layers that vLLM does not adapt, and for ranks above the engine's maximum.

        Args:
            ranks: name of each adapted layer in the checkpoint to its rank.
        """
        if unknown := [layer for layer in ranks if self._module_of(layer) is None]:
            raise WeightSyncError(
                f"The policy sends an adapter of {unknown[0]!r}, which is not a linear layer that vLLM can adapt "
                f"({len(unknown)} such layers). Set policy.generation.lora to merged."
            )
        if (largest := max(ranks.values(), default=0)) > self._max_rank:
            raise WeightSyncError(
                f"The policy sends adapters of rank {largest}, but the engine was started with max_lora_rank {self._max_rank}. "
                "Raise policy.generation.vllm_cfg.max_lora_rank."
            )

    def replace(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Compute with these adapters from now on; layers without one compute with their base alone.

        Args:
            tensors: name to A [rank, in], B [out, rank] and scale [] of each adapted layer; they are kept.

        Raises:
            WeightSyncError: the buffers of vLLM's layers do not have these tensors afterwards.
        """
        layers = {
            name.removesuffix(LORA_A): (a.to(self._dtype), _scaled(tensors, name.removesuffix(LORA_A)).to(self._dtype))
            for name, a in tensors.items()
            if name.endswith(LORA_A)
        }
        self._runner.reset_lora_state()
        if layers:
            # Alpha is the rank, so vLLM does not scale B again.
            weights = {(name := self._name(of)): LoRALayerWeights(name, len(a), len(a), a, b) for of, (a, b) in layers.items()}
            rank = max(len(a) for a, _ in layers.values())
            self._manager.add_adapter(LoRAModel(REQUEST.lora_int_id, rank, weights))
        else:
            self._runner.lora_manager.add_dummy_lora(REQUEST, 1)
        self._manager.activate_adapter(REQUEST.lora_int_id)
        if inactive := [layer for layer, (a, b) in layers.items() if not self._is_active(layer, a, b)]:
            raise WeightSyncError(f"vLLM does not compute with the new adapters of {', '.join(inactive[:5])}.")
        adapted = {id(module): module for module, _ in filter(None, map(self._module_of, layers))}
        for products in self._products:
            products.use(adapted.values())

    def _is_active(self, layer: str, a: torch.Tensor, b: torch.Tensor) -> bool:
        module, index = self._module_of(layer) or (None, 0)
        if module is None or self._manager.lora_index_to_id[0] != REQUEST.lora_int_id:
            return False
        if module.tp_size > 1:
            a, b = (_shard(cut, t, index, module.n_slices) for cut, t in ((module.slice_lora_a, a), (module.slice_lora_b, b)))
        buffers = module.lora_a_stacked[index][0, 0], module.lora_b_stacked[index][0, 0]
        return all(
            torch.equal(buffer[: len(matrix), : matrix.shape[1]], matrix.to(buffer.device))
            for buffer, matrix in zip(buffers, (a, b), strict=True)
        )

    def _module_of(self, layer: str) -> tuple[Any, int] | None:
        """The layer of vLLM that has buffers of adapters, and the index of the checkpoint's layer among those that it fuses."""
        name = self._name(layer)
        fused = next((fused for fused, names in self._fused.items() if name in names), name)
        names = self._fused.get(fused, [name])
        module = self._modules.get(fused)
        # Embeddings and heads have one tensor instead of a tuple.
        stacked = getattr(module, "lora_a_stacked", None)
        return (module, names.index(name)) if isinstance(stacked, tuple) and len(stacked) == len(names) else None

    def _name(self, layer: str) -> str:
        name: str = parse_fine_tuned_lora_name(f"base_model.model.{layer}{LORA_A}", self._mapper)[0]
        return name


def _scaled(tensors: Mapping[str, torch.Tensor], layer: str) -> torch.Tensor:
    return tensors[layer + LORA_B] * tensors[layer + LORA_SCALE]


def _shard(cut: Callable[[Any], Any], matrix: torch.Tensor, index: int, layers: int) -> torch.Tensor:
    """What vLLM keeps on this tensor-parallel rank of a matrix of one of the fused layers."""
    shard: torch.Tensor = cut(matrix) if layers == 1 else cut([matrix if at == index else None for at in range(layers)])[index]
    return shard


class OneAdapterProducts(PunicaWrapperCPU):
    """Products of the one adapter of all rows, in float32 and rounded once, when they are added to those of the base."""

    _factors: Mapping[int, tuple[torch.Tensor, torch.Tensor]] = {}
    """ID of a layer's buffers to the factors of all layers that it fuses: A [in, ranks] and s B [ranks, out]."""

    def use(self, modules: Iterable[Any]) -> None:
        """Compute with the adapters that these layers of vLLM have in their buffers now; others have none."""
        self._factors = {
            id(module.lora_a_stacked): (
                torch.cat([a[0, 0] for a in module.lora_a_stacked]).t().float(),
                torch.block_diag(*(b[0, 0] for b in module.lora_b_stacked)).t().float(),
            )
            for module in modules
        }

    def add_lora_linear(
        self, y: torch.Tensor, x: torch.Tensor, lora_a_stacked: Sequence[torch.Tensor], *args: Any, **kwargs: Any
    ) -> None:
        """Add s B A x to the outputs of a layer.

        Args:
            y: outputs of the base [tokens, out], changed in place.
            x: inputs [tokens, in].
            lora_a_stacked: the layer's buffers.
            *args: not used, as `use` has read the buffers.
            **kwargs: the same.
        """
        if not self.no_lora and (factors := self._factors.get(id(lora_a_stacked))) is not None:
            y += x.float() @ factors[0] @ factors[1]

    def add_lora_embedding(self, *args: Any, **kwargs: Any) -> None:
        """Embeddings have no adapters."""

    def add_lora_logits(self, *args: Any, **kwargs: Any) -> None:
        """Output layers have no adapters."""
