"""Low-rank adapters (LoRA, by peft) for the frozen linear layers and fused experts of a model.

An adapted layer computes W x + s B A x, with W frozen, A [rank, in] and B [out, rank] trained, and s = alpha / rank (alpha /
sqrt(rank) with rsLoRA). Hu et al. 2021, https://arxiv.org/abs/2106.09685. B is initialized with zeros, so the model starts as
its base model. With adapters disabled it *is* the base model, which therefore serves as the reference policy at no cost.
Adapters are float32 whatever the dtype of the base, so they need no separate master weights.

peft adapts tensors of experts by computing W + s B A of all experts in the dtype of W for each call. Only its modules, and with
them its names and files, are used for them: `AdaptedWeight` computes the products.

A scalar head is trained in full in addition to the adapters, in float32, and saved with them.

The model is never merged in place. Exported weights are W + s B A, computed for one weight at a time in a temporary tensor.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rl_backends_base.adapter_folder import AdapterFolder, check_same_adapter, check_same_tensors
from rl_backends_base.adapters import AdaptedWeight, replace_in_calls
from rl_backends_base.checkpoint_names import OF_TENSOR
from rl_backends_base.shards import placeholders_of_shards, whole
from rl_backends_hf.lora_targets import expert_targets, experts_hint, lora_targets
from rl_backends_hf.model_options import NEEDS_PEFT, LoRAConfig
from rl_backends_hf.pictures import language_model
from rl_backends_hf.quantized import QuantizedLinear
from rl_backends_hf.scoring.scoring_model import HEAD_NAME, scalar_head
from rl_core.backend import LORA_A, LORA_B, LORA_SCALE, Head, RefitManifest, dtype_name, manifest_of, weights_of
from rl_core.data.hub import model_source
from rl_core.data.model_digests import ADAPTER_WEIGHTS, BASE_WEIGHTS, recorded_base, weights_digest
from rl_core.errors import CheckpointError, NotSupportedError, UserError

_log = logging.getLogger("rlcore")
_NAME: Final = "default"
"""peft's name of the only adapter; its files do not contain it."""
_SECTION: Final = "policy.hf_cfg.lora"
_HEAD_KEY: Final = f"base_model.model.{HEAD_NAME}.weight"
"""Key in peft's files of a scalar head that is saved in full."""


class LoraAdapters:
    """The adapters of one model, which is changed in place: its base weights are frozen, its adapters are trainable.

    Args:
        model: a plain model, possibly sharded; then `iter_weights` is collective over the ranks.
        config: `policy.hf_cfg.lora`.
        base: `policy.model_name`, recorded in the adapter's files as its base model.
        head: the model's head type; a scalar head is trained too.
        exports_merged: whether `manifest` and `iter_weights` have the sum of weight and adapter, or both separately.

    Raises:
        UserError: peft is not installed, or the config names modules that do not exist or cannot be adapted.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: LoRAConfig,
        *,
        base: str,
        head: Head = "tokens",
        exports_merged: bool = True,
    ) -> None:
        peft = _peft()
        self._exports_merged = exports_merged
        self._head = scalar_head(model) if head == "scalar" else None
        targets = lora_targets(model, config, head=self._head or model.get_output_embeddings())
        adapted = {f"{name}.weight" for name in targets} | expert_targets(model, config)
        hint = experts_hint(model)
        # Names would match layers of a vision tower as well.
        by_name = isinstance(config.target_modules, list) and language_model(model) is model
        settings = peft.LoraConfig(
            task_type=peft.TaskType.CAUSAL_LM if head == "tokens" else None,
            r=config.rank,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            # peft itself would expand `all-linear` and expressions to fused experts as well.
            target_modules=config.target_modules if by_name else sorted(targets),
            exclude_modules=config.exclude_modules if by_name else None,
            target_parameters=config.target_parameters or None,
            use_rslora=config.use_rslora,
            use_dora=config.use_dora,
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        )
        self._uses_dora = config.use_dora
        # A is random: draw the same on all ranks, and leave the state of their generators unchanged.
        devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
        # For a sharded layer, peft would create an adapter of the shape of this rank's shard.
        with torch.random.fork_rng(devices=sorted(devices, key=str)), placeholders_of_shards(model):
            torch.manual_seed(config.seed)
            try:
                self._peft_model = peft.get_peft_model(model, settings)
            except ValueError as error:
                raise UserError(
                    f"`policy.hf_cfg.lora`: peft {peft.__version__} cannot adapt {base}: {error}{hint}",
                    key="policy.hf_cfg.lora",
                ) from error
        self._base = base
        self._settings = self._peft_model.peft_config[_NAME]
        source, self._settings.revision = model_source(base)
        self._settings.base_model_name_or_path = str(Path(source).resolve()) if Path(source).exists() else source
        self._model = model
        modules = model.named_modules()
        self._quantized = {f"{name}.weight": module for name, module in modules if isinstance(module, QuantizedLinear)}
        self._quantization = next((layer.quantization for layer in self._quantized.values()), "none")
        self._current_names, self._layers = _names_of_base(model, peft.tuners.lora.LoraLayer)
        _check_adapted_parameters(adapted, self._layers, model, hint=hint)
        for layer in filter(_is_of_experts, self._layers.values()):
            layer.forward = layer.base_layer.__call__  # peft would compute the sum of all experts
            replace_in_calls(layer.get_base_layer(), _parameter_of(layer), partial(_adapted_in_calls, layer))
        if self._head is not None:
            self._head.float().requires_grad_(True)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute with the base model, without adapters, while the block runs."""
        with self._peft_model.disable_adapter():
            yield

    def manifest(self) -> RefitManifest:
        """Name to (shape, dtype) of the base model's weights under its own names, followed by those of unmerged adapters."""
        return {**self._frozen, **manifest_of(self._unmerged())}

    @cached_property
    def _frozen(self) -> RefitManifest:
        live = {**weights_of(self._model), **{key: layer.form() for key, layer in self._quantized.items()}}
        return {name: (tuple(live[key].shape), dtype_name(live[key].dtype)) for name, key in self._current_names.items()}

    def iter_weights(self, names: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of each weight as if the adapters were merged, or of each weight and each adapter.

        A merged weight is a new tensor each time, so keeping one does not keep the base alive; other tensors are the frozen
        base's.

        Args:
            names: these, in this order; all by default.
        """
        unmerged = self._unmerged()
        wanted = (*self._current_names, *unmerged) if names is None else names
        # Going through the modules of a large model takes longer than sending adapters alone.
        live = weights_of(self._model) if any(name not in unmerged for name in wanted) else {}
        for name in wanted:
            if name in unmerged:
                yield name, unmerged[name]
                continue
            key, layer = self._current_names[name], self._layers.get(name)
            weight = self._quantized[key].full_weight() if key in self._quantized else whole(live[key].detach())
            yield name, self._merged(layer, weight) if layer is not None and self._exports_merged else weight

    def _unmerged(self) -> dict[str, torch.Tensor]:
        """The tensors of unmerged adapters, with the names of `rl_core.weights.adapters`; none if they are merged."""
        tensors: dict[str, torch.Tensor] = {}
        for name, layer in self._layers.items() if not self._exports_merged else ():
            module = name + OF_TENSOR if _is_of_experts(layer) else name.removesuffix(".weight")
            tensors[module + LORA_A] = layer.lora_A[_NAME].weight.detach()
            tensors[module + LORA_B] = layer.lora_B[_NAME].weight.detach()
            tensors[module + LORA_SCALE] = torch.tensor(float(layer.scaling[_NAME]), device=layer.lora_A[_NAME].weight.device)
        return tensors

    def merge_and_unload(self) -> None:
        """Merge the adapters into the base and remove them, leaving a plain model. This object must not be used afterwards."""
        for layer in self._quantized.values():
            layer.dequantize()
        for layer in self._layers.values():
            weight = layer.get_base_layer().get_parameter(_parameter_of(layer))
            weight.data = self._merged(layer, weight.detach())
            layer.enable_adapters(False)  # calls of experts would add them again
        self._peft_model.unload()

    def save(self, folder: Path, *, rank: int) -> None:
        """Write the adapter from rank 0 in peft's format: its config and one safetensors file."""
        if rank != 0:
            return
        self.save_config(folder)
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in self._tensors().items()},
            folder / ADAPTER_WEIGHTS,
            metadata={"format": "pt", "quantization": self._quantization, **self._base_weights},
        )

    @cached_property
    def _base_weights(self) -> dict[str, str]:
        """What the file of weights says about the base; peft and vLLM ignore it."""
        digest = weights_digest(self._base)
        return {} if digest is None else {BASE_WEIGHTS: digest}

    def save_config(self, folder: Path) -> None:
        """Write the adapter's config."""
        folder.mkdir(parents=True, exist_ok=True)
        # With `inference_mode: false` in its files, peft would load a trainable model.
        written = copy.copy(self._settings)
        written.inference_mode = True
        if written.target_parameters:
            written.target_parameters = sorted(written.target_parameters)  # peft has made it a set
        if self._head is not None:
            # If set when the adapters are created, peft would replace the head with a wrapper and a copy.
            written.task_type, written.modules_to_save = _peft().TaskType.SEQ_CLS, [HEAD_NAME]
        written.save_pretrained(folder)

    def start_from(self, config: LoRAConfig) -> None:
        """Load the adapter that training starts from; every rank reads it. A scalar head may be missing in it.

        Args:
            config: `policy.hf_cfg.lora`, with an `adapter_path`.

        Raises:
            UserError: it does not fit the config or the model, or was trained on another base.
        """
        assert config.adapter_path is not None
        folder = AdapterFolder(config.adapter_path)
        head = "tokens" if self._head is None else "scalar"
        folder.check(config.model_dump(), model_name=self._base, head=head, at=_SECTION)
        if (own := self._settings.base_model_name_or_path) != folder.base_name and recorded_base(folder.path) is None:
            _log.warning("The adapter in %s names %s as its base, and is trained on %s.", folder.name, folder.base_name, own)
        try:
            self.load(folder.path, head_is_optional=True)
        except CheckpointError as error:
            key = "policy.hf_cfg.lora.adapter_path"
            raise UserError(f"`{key}`: {error}", key=key) from error

    def load(self, folder: Path, *, head_is_optional: bool = False) -> None:
        """Load the adapters from `folder`; every rank reads it.

        Args:
            folder: as written by `save`, or by peft.
            head_is_optional: keep the model's scalar head if there is none in the folder.

        Raises:
            CheckpointError: the folder is missing, incomplete, or has another adapter; the adapters are unchanged.
        """
        check_same_adapter(folder, self._settings.to_dict(), at=_SECTION)
        try:
            with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
                quantization = (file.metadata() or {}).get("quantization", self._quantization)
            saved = load_file(folder / ADAPTER_WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"Cannot read the adapter in {folder}: {type(error).__name__}: {error}") from error
        if quantization != self._quantization:
            raise CheckpointError(
                f"The adapter in {folder} was trained on a base with quantization {quantization}, and here it is "
                f"{self._quantization}, which is another policy. Set `load_in_4bit`, `load_in_8bit` and `quantization` of "
                "`policy.hf_cfg` as in the run that wrote it.",
                key="policy.hf_cfg.load_in_4bit",
            )
        adapters = self._tensors()
        if head_is_optional and _HEAD_KEY not in saved:
            adapters.pop(_HEAD_KEY, None)
        shapes = {name: tensor.shape for name, tensor in saved.items()}
        check_same_tensors(folder, shapes, {name: tensor.shape for name, tensor in adapters.items()}, at=_SECTION)
        with torch.no_grad():
            for name, tensor in adapters.items():
                tensor.copy_(saved[name])

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The adapter tensors under the names of peft's files."""
        # With `auto`, peft would check on the hub whether the vocabulary has grown; embeddings are never adapted here.
        tensors: dict[str, torch.Tensor] = _peft().get_peft_model_state_dict(self._peft_model, save_embedding_layers=False)
        return tensors if self._head is None else {**tensors, _HEAD_KEY: self._head.weight}

    @torch.no_grad()
    def _merged(self, layer: Any, weight: torch.Tensor) -> torch.Tensor:
        """A new tensor, summed in float32 and rounded once."""
        if _is_of_experts(layer):
            return _adapted_experts(layer, weight).total()
        total: torch.Tensor = layer.get_delta_weight(_NAME).float().add_(weight)
        if self._uses_dora:
            # Liu et al. 2024, https://arxiv.org/abs/2402.09353, equation 5: a trained magnitude for each output.
            magnitude = layer.lora_magnitude_vector[_NAME].weight.float()
            inputs = 0 if layer.fan_in_fan_out else 1
            total *= (magnitude / torch.linalg.vector_norm(total, dim=inputs)).unsqueeze(inputs)
        return total.to(weight.dtype)


def _names_of_base(model: nn.Module, layer_class: type) -> tuple[dict[str, str], dict[str, Any]]:
    """Map each base weight's original name to its current one, and each adapted weight's name to its layer."""
    adapted: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, layer_class)}
    added = {
        f"{name}.{key}" for name, layer in adapted.items() for key in layer.state_dict() if not key.startswith("base_layer.")
    }
    names = {_name_of_base(live, adapted): live for live in weights_of(model) if live not in added}
    layers = {f"{_name_of_base(name, adapted)}.{_parameter_of(layer)}": layer for name, layer in adapted.items()}
    return names, {name: layer for name, layer in layers.items() if name in names}


def _name_of_base(live: str, adapted: Mapping[str, Any]) -> str:
    """A name without the wrappers of adapted modules, which may be nested."""
    kept, path = [], ""
    for part in live.split("."):
        if part != "base_layer" or path not in adapted:
            kept.append(part)
        path = f"{path}.{part}" if path else part
    return ".".join(kept)


def _parameter_of(layer: Any) -> str:
    """Name in its module of the weight that a layer of peft adapts."""
    return str(getattr(layer, "parameter_name", "weight"))


def _is_of_experts(layer: Any) -> bool:
    return hasattr(layer, "parameter_name")


def _adapted_experts(layer: Any, weight: torch.Tensor) -> AdaptedWeight:
    factors = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
    return AdaptedWeight.of(layer.get_base_layer(), weight, *factors, scale=float(layer.scaling[_NAME]))


def _adapted_in_calls(layer: Any) -> AdaptedWeight | None:
    if layer.disable_adapters:
        return None
    return _adapted_experts(layer, layer.get_base_layer().get_parameter(_parameter_of(layer)))


def _check_adapted_parameters(targets: set[str], layers: Mapping[str, Any], model: PreTrainedModel, *, hint: str) -> None:
    """For some families, peft adapts parameters other than the targets (fused experts), with other ranks."""
    known = {id(parameter) for layer in layers.values() for parameter in layer.parameters()}
    trained = {name for name, each in model.named_parameters() if each.requires_grad and id(each) not in known}
    if odd := sorted((layers.keys() ^ targets) | trained):
        alone = sorted({name.split(".")[-2] for name in targets & layers.keys() if name.endswith(".weight")})
        raise NotSupportedError(
            f"`policy.hf_cfg.lora.target_modules`: for a {type(model).__name__}, peft also adapts parameters other than the "
            f"given linear layers, such as {odd[0]}, with other ranks. Name only layers that it adapts alone: "
            f"[{', '.join(alone)}].{hint}",
            key="policy.hf_cfg.lora.target_modules",
        )


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UserError(NEEDS_PEFT.format(reason=error), key="policy.hf_cfg.lora") from error
    return peft
