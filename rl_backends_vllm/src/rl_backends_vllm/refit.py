"""The receiving half of a refit inside a vLLM worker process: loads through vLLM's own reload, and proves that all of it took.

A weight goes through three hands: it arrives (its digest is taken then, over the bytes that vLLM will read), vLLM fuses, shards
and, on a CPU, packs it into an opaque handle, and the engine computes with that. The last step is proven layer by layer: every
layer has taken its tensors in this refit, and every packed handle is a new one. Log-probabilities of a canary prompt, compared
by `rl_core.weights.canary` afterwards, close the circle.

vLLM keeps references to the tensors of layers that are not complete yet, so what is left of a bucket is cloned before its
memory is reused; and its reload leaves the packed copy of a tied output layer as it was, so that one is packed again here. On a
CPU it packs the experts of a mixture when it makes their kernel and at no other time, so the kernel is taken away first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from rl_core.errors import WeightSyncError
from rl_core.interfaces.policy import RefitManifest
from rl_core.weights.checkpoint_names import CheckpointNames
from rl_core.weights.fingerprint import natural_kind, tensor_digest
from rl_core.weights.manifest import as_sent, dtype_name, dtype_of, manifest_of, weights_of
from rl_core.weights.receiver import WeightReceiver


class VllmWeightReceiver(WeightReceiver):
    """One process of one replica.

    Args:
        worker: vLLM's worker, which holds the model.
        context: where it computes (`device`) and which replica it belongs to (`rank`).
        rank_in_replica: of this process among those of its replica.
        processes: of the replica.
    """

    def __init__(self, worker: Any, *, context: Any, rank_in_replica: int, processes: int) -> None:
        self.context = context
        self._worker, self._rank_in_replica, self._processes = worker, rank_in_replica, processes
        self._digests: dict[str, str] = {}
        self._expected: RefitManifest | None = None
        self._rounds_to: str | None = None
        self._sent_dtypes: dict[str, str] = {}
        self._packed_before: dict[torch.nn.Module, Any] = {}
        self._tied: set[str] = set()
        self._layer_infos: list[Any] = []

    def collective_rank(self) -> int:
        return 1 + self.context.rank * self._processes + self._rank_in_replica

    def expected_weights(self) -> RefitManifest:
        """The weights of a Transformers model of the same configuration: vLLM reads its names and knows no list of them."""
        if self._expected is None:
            from transformers import AutoModelForCausalLM

            model_config = self._worker.model_config
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(
                    model_config.hf_config, trust_remote_code=model_config.trust_remote_code
                )
            own = manifest_of(weights_of(model))
            named = CheckpointNames(model, {name: shape for name, (shape, _) in own.items()}).manifest(own)
            self._rounds_to = _uniform_dtype(self._model)
            self._expected = {name: (shape, self._rounds_to or dtype) for name, (shape, dtype) in named.items()}
        return self._expected

    def prepare_refit_info(self, info: RefitManifest) -> dict[str, str]:
        """See `GenerationInterface.prepare_refit_info`; digests are taken of weights in the form in which they travel."""
        kept = super().prepare_refit_info(info)
        self._sent_dtypes = {name: dtype for name, (_, dtype) in as_sent(info, kept if self._rounds_to else {}).items()}
        return self._sent_dtypes

    def digests_of_weights(self) -> dict[str, str]:
        return dict(self._digests)

    def refit_begins(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        self._undo_partial_reload()
        self._digests = {}
        self._tied = _shared_weights(self._model)
        self._packed_before = {module: module.cpu_linear for module in self._model.modules() if hasattr(module, "cpu_linear")}
        if self._device().type == "cpu":
            for method in _moe_methods(self._model).values():
                method.moe_kernel = None
        with self._vllm_context():
            initialize_layerwise_reload(self._model)
        # Looked through after every bucket; finding them anew would take as long as a small bucket.
        self._layer_infos = [get_layerwise_info(layer) for layer in self._model.modules()]

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        kind = natural_kind(self._device())
        # By CUDA IPC they are the policy's own tensors, in its own dtype.
        rounded = {name: tensor.to(dtype_of(self._sent_dtypes[name])) for name, tensor in tensors.items()}
        for name, tensor in rounded.items():
            self._digests[name] = tensor_digest(tensor, kind=kind)
        self.load_into_vllm(rounded)

    def load_into_vllm(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fuse, shard, pack: vLLM's part, with nothing of the sender's memory kept."""
        with self._vllm_context():
            self._model.load_weights(iter(tensors.items()))  # type: ignore[operator]
        self._clone_pending_weights()

    def weights_changed(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        incomplete = [f"{name} ({found})" for name, found in self._incomplete_layers()]
        if incomplete:
            raise WeightSyncError(
                "vLLM took the weights of this refit and left layers as they were: " + ", ".join(incomplete[:5]) + ". "
                "The engine would compute with weights of several versions."
            )
        with self._vllm_context(), _without_warnings():
            finalize_layerwise_reload(self._model, self._worker.model_config)
            self._repack_tied_heads()
        old = [name for name, module in self._model.named_modules() if self._is_stale(module)]
        if self._device().type == "cpu":
            old += [name for name, method in _moe_methods(self._model).items() if method.moe_kernel is None]
        if old:
            raise WeightSyncError(f"vLLM still computes with packed weights of before the refit in {', '.join(old[:5])}.")
        self._packed_before = {}

    @property
    def _model(self) -> torch.nn.Module:
        # Out of what wraps it on a GPU to record graphs.
        model: torch.nn.Module = self._worker.get_model()
        return model

    def _incomplete_layers(self) -> Iterator[tuple[str, str]]:
        from vllm.model_executor.layers.attention import is_deferred_attention_layer
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for name, layer in self._model.named_modules():
            info = get_layerwise_info(layer)
            if not info.can_load() or not info.load_numel_total or is_deferred_attention_layer(layer):
                continue
            # A tied head is loaded as the embedding that it shares its tensor with; a padded vocabulary is never full.
            if isinstance(layer, ParallelLMHead) and name in self._tied:
                continue
            if isinstance(layer, VocabParallelEmbedding) and info.load_numel > 0:
                continue
            if any(True for _ in layer.named_parameters(recurse=False)):
                yield name, f"{info.load_numel} of {info.load_numel_total} elements"

    def _clone_pending_weights(self) -> None:
        for info in self._layer_infos:
            for _, call in info.loaded_weights:
                for name, value in call.arguments.items():
                    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                        call.arguments[name] = value.clone()

    def _repack_tied_heads(self) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in self._model.modules():
            if isinstance(module, ParallelLMHead) and self._is_stale(module):
                module.quant_method.process_weights_after_loading(module)

    def _is_stale(self, module: torch.nn.Module) -> bool:
        return module in self._packed_before and module.cpu_linear is self._packed_before[module]

    def _undo_partial_reload(self) -> None:
        """Put the tensors back that a reload which failed half-way had taken away: the next one sends all weights anyway."""
        from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()

    @contextmanager
    def _vllm_context(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with torch.device(self._worker.device), set_current_vllm_config(self._worker.vllm_config), torch.no_grad():
            yield


@contextmanager
def _without_warnings() -> Iterator[None]:
    """VLLM warns of every layer that no tensor was addressed to, rotary tables and tied heads too; what counts was checked."""
    log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _uniform_dtype(model: torch.nn.Module) -> str | None:
    """The dtype that vLLM reads every weight in; None where a model has several, such as a router's bias in float32."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    # As they were before vLLM packed them, which leaves empty parameters behind.
    loaded = [tensor for layer in model.modules() for tensor in get_layerwise_info(layer).restore_metadata[0].values()]
    dtypes = {dtype_name(tensor.dtype) for tensor in loaded if tensor.dtype.is_floating_point}
    return dtypes.pop() if len(dtypes) == 1 else None


def _moe_methods(model: torch.nn.Module) -> dict[str, Any]:
    """By the layer's name, what computes the experts of each mixture."""
    found = {name: getattr(module, "quant_method", None) for name, module in model.named_modules()}
    return {name: method for name, method in found.items() if hasattr(method, "moe_kernel")}


def _shared_weights(model: torch.nn.Module) -> set[str]:
    """Names of modules whose `weight` is the parameter of a module before them."""
    seen: set[int] = set()
    shared = set()
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        if id(weight) in seen:
            shared.add(name)
        seen.add(id(weight))
    return shared
