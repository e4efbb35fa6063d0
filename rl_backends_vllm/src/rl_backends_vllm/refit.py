"""Receives weights inside a vLLM worker process, loads them with vLLM's layerwise reload, and verifies that all were applied.

A weight is received (its digest is computed then, over the bytes that vLLM will read); vLLM fuses, shards and, on a CPU, packs
it into an opaque handle; the engine computes with the result. The last step is verified per layer: every layer must have
received its tensors in this refit, and every packed handle must be new. Afterwards, the canary of the weight synchronizer
compares the log-probabilities of its prompts.

vLLM keeps references to tensors of incomplete layers, so the remaining tensors of a bucket are cloned before its memory is
reused. The reload does not update the packed copy of a tied output layer, so it is packed again here. On a CPU, vLLM packs the
experts of a mixture only when it creates their kernel, so the kernel is removed first.

Two classes are mixed into vLLM's worker class. `RefitExtension` serves the run's own engines: their workers may run in other
processes, from which vLLM reports exceptions as a line of text, so arguments and results are pickled here, and the original
exception is raised in the caller. `ServerWeights` serves vLLM's own server, started with
`--worker-extension-cls rl_backends_vllm.refit.ServerWeights`. Clients call its methods through the route `/collective_rpc`,
which exists only with `VLLM_SERVER_DEV_MODE=1` and passes strings. Nothing is unpickled: weights are safetensors files below
`RLCORE_WEIGHT_UPDATES_DIR`, and arguments and results are JSON or plain text.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from rl_backends_base import CheckpointNames
from rl_backends_vllm.device import enable_amx
from rl_backends_vllm.model_folder import auto_class
from rl_backends_vllm.shm_cleanup import unlink_shared_memory
from rl_backends_vllm.torch_threads import use_torch_threads
from rl_core.backend import (
    LORA_A,
    LORA_B,
    LORA_SCALE,
    RefitManifest,
    WeightReceiver,
    dtype_name,
    dtype_of,
    file_digest,
    manifest_of,
    manifest_to_send,
    natural_kind,
    refuse_non_finite_file,
    resolve_below,
    tensor_digests,
    weights_of,
)
from rl_core.errors import NotSupportedError, RLCoreError, WeightSyncError

if TYPE_CHECKING:
    from rl_backends_vllm.lora import EngineAdapter


class VllmWeightReceiver(WeightReceiver):
    """The receiver of one process of one replica.

    Args:
        worker: vLLM's worker, which holds the model.
        replica: index of the replica.
        device: "cpu" or "cuda".
    """

    context: Any

    def __init__(self, worker: Any, *, replica: int, device: str) -> None:
        self.context = SimpleNamespace(rank=replica, device=device)
        self._worker = worker
        self._digests: dict[str, str] = {}
        self._expected: RefitManifest | None = None
        self._rounds_to: str | None = None
        self._sent_dtypes: dict[str, str] = {}
        self._packed_before: dict[torch.nn.Module, Any] = {}
        self._tied: set[str] = set()
        self._layer_infos: list[Any] = []
        self._adapter: EngineAdapter | None = None
        self._adapter_forms: dict[str, tuple[tuple[int, ...], str]] = {}
        self._adapter_tensors: dict[str, torch.Tensor] = {}
        if worker.vllm_config.lora_config is not None:
            from rl_backends_vllm.lora import EngineAdapter

            self._adapter = EngineAdapter(worker)

    def collective_rank(self) -> int:
        processes = int(self._worker.vllm_config.parallel_config.world_size)  # of the replica
        return 1 + int(self.context.rank) * processes + int(self._worker.rank)

    def expected_weights(self) -> RefitManifest:
        """Weights of a Transformers model with the same configuration, because vLLM has no list of the names it accepts.

        Also the tensors of the adapters that the policy has announced.
        """
        if self._expected is None:
            model_config = self._worker.model_config
            # vLLM's backend for models of Transformers needs its config to create them.
            with self._vllm_context(), torch.device("meta"):
                model = auto_class(model_config.hf_config).from_config(
                    model_config.hf_config, trust_remote_code=model_config.trust_remote_code
                )
            own = manifest_of(weights_of(model))
            named = CheckpointNames(model, {name: shape for name, (shape, _) in own.items()}).manifest(own)
            self._rounds_to = _uniform_dtype(self._model)
            self._expected = {name: (shape, self._rounds_to or dtype) for name, (shape, dtype) in named.items()}
        return {**self._expected, **self._adapter_forms}

    def expect_adapters(self, ranks: Mapping[str, int]) -> None:
        if self._adapter is None:
            raise NotSupportedError(
                "This engine was started without adapters: set policy.generation.vllm_cfg.max_lora_rank, or "
                "policy.generation.lora: merged.",
                key="policy.generation.lora",
            )
        self._adapter.refuse_unsupported(ranks)
        self._adapter_forms = {}
        weights = self.expected_weights()
        for layer, rank in ranks.items():
            size_out, size_in = weights[f"{layer}.weight"][0] if f"{layer}.weight" in weights else (0, 0)
            forms = {LORA_A: (rank, size_in), LORA_B: (size_out, rank), LORA_SCALE: ()}
            self._adapter_forms |= {layer + suffix: (shape, "float32") for suffix, shape in forms.items()}

    def prepare_refit_info(self, info: RefitManifest) -> dict[str, str]:
        """Begin a refit and return the dtypes to send; digests are computed on weights as they are transferred."""
        if not any(name.endswith(LORA_A) for name in info):
            self._adapter_forms = {}
        receiver_dtypes = super().prepare_refit_info(info)
        self._sent_dtypes = {
            name: dtype for name, (_, dtype) in manifest_to_send(info, receiver_dtypes if self._rounds_to else {}).items()
        }
        return self._sent_dtypes

    def digests_of_weights(self) -> dict[str, str]:
        return dict(self._digests)

    def refit_begins(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        self._digests, self._adapter_tensors = {}, {}
        if self._ledger is not None and self._ledger.leaves_out_frozen:
            return
        self._undo_partial_reload()
        self._tied = _shared_weights(self._model)
        self._packed_before = {module: module.cpu_linear for module in self._model.modules() if hasattr(module, "cpu_linear")}
        if self._device().type == "cpu":
            for method in _moe_methods(self._model).values():
                method.moe_kernel = None
        with self._vllm_context():
            initialize_layerwise_reload(self._model)
        # Used after every bucket; looking them up again would take as long as a small bucket.
        self._layer_infos = [get_layerwise_info(layer) for layer in self._model.modules()]

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        # With CUDA IPC these are the policy's own tensors, in its dtype.
        rounded = {name: tensor.to(dtype_of(self._sent_dtypes[name])) for name, tensor in tensors.items()}
        self._digests |= tensor_digests(rounded.items(), kind=natural_kind(self._device()))
        self.load_into_vllm(rounded)

    def load_into_vllm(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let vLLM fuse, shard and pack the tensors; keeps no reference to the sender's memory."""
        adapters = {name: tensor.clone() for name, tensor in tensors.items() if name in self._adapter_forms}
        self._adapter_tensors |= adapters
        if len(adapters) < len(tensors):
            weights = [(name, tensor) for name, tensor in tensors.items() if name not in adapters]
            with self._vllm_context():
                self._model.load_weights(iter(weights))  # type: ignore[operator]
            self._clone_pending_weights()

    def weights_changed(self) -> None:
        if self._ledger is None or not self._ledger.leaves_out_frozen:
            self._finish_reload()
        if self._adapter is not None:
            self._replace_adapter(self._adapter)

    def _replace_adapter(self, adapter: EngineAdapter) -> None:
        if missing := [name for name in self._adapter_forms if name not in self._adapter_tensors]:
            raise WeightSyncError(f"vLLM has not received {missing[0]!r} of the adapters ({len(missing)} such tensors).")
        with self._vllm_context():
            adapter.replace(self._adapter_tensors)

    def _finish_reload(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        incomplete = [f"{name} ({reason})" for name, reason in self._incomplete_layers()]
        if incomplete:
            raise WeightSyncError(
                "vLLM did not update all layers in this refit: " + ", ".join(incomplete[:5]) + ". "
                "The engine would compute with weights of different versions."
            )
        with self._vllm_context(), _without_warnings():
            finalize_layerwise_reload(self._model, self._worker.model_config)
            self._repack_tied_heads()
        stale = [name for name, module in self._model.named_modules() if self._is_stale(module)]
        if self._device().type == "cpu":
            stale += [name for name, method in _moe_methods(self._model).items() if method.moe_kernel is None]
        if stale:
            raise WeightSyncError(f"vLLM still uses packed weights from before the refit in {', '.join(stale[:5])}.")
        self._packed_before = {}

    @property
    def _model(self) -> torch.nn.Module:
        # Without the wrapper that records graphs on a GPU.
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
            # A tied head is loaded with its embedding; a padded vocabulary is never completely loaded.
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
        """Restore tensors that a failed reload had removed; the next reload sends all weights anyway."""
        from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()

    @contextmanager
    def _vllm_context(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        use_torch_threads()
        with torch.device(self._worker.device), set_current_vllm_config(self._worker.vllm_config), torch.no_grad():
            yield


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence vLLM's warnings about layers without new tensors, such as rotary tables and tied heads; they were checked."""
    log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _uniform_dtype(model: torch.nn.Module) -> str | None:
    """The dtype in which vLLM loads all weights; None if there are several, such as a router bias in float32."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    # The metadata from before packing, which leaves empty parameters.
    loaded = [tensor for layer in model.modules() for tensor in get_layerwise_info(layer).restore_metadata[0].values()]
    dtypes = {dtype_name(tensor.dtype) for tensor in loaded if tensor.dtype.is_floating_point}
    return dtypes.pop() if len(dtypes) == 1 else None


def _moe_methods(model: torch.nn.Module) -> dict[str, Any]:
    """Layer name to the method that computes the experts of a mixture."""
    methods = {name: getattr(module, "quant_method", None) for name, module in model.named_modules()}
    return {name: method for name, method in methods.items() if hasattr(method, "moe_kernel")}


def _shared_weights(model: torch.nn.Module) -> set[str]:
    """Names of modules that share their `weight` parameter with an earlier module."""
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


METHODS = frozenset(
    {
        "prepare_refit_info", "update_weights", "init_collective", "update_weights_from_collective", "weight_digests",
        "weight_fingerprint", "get_weight_version", "require_complete_weights", "leave_refit", "expected_weights",
    }
)  # fmt: skip
"""Receiver methods that may be called remotely."""


class RefitExtension:
    """Mixed into `vllm.v1.worker.worker_base.Worker` by `EngineArgs.worker_extension_cls`."""

    rlcore_receiver: VllmWeightReceiver | None = None

    def rlcore_init_receiver(self, replica: int, device: str) -> None:
        """Create the weight receiver of this process. Must be called first, before the first row."""
        enable_amx(device)
        unlink_shared_memory()
        self.rlcore_receiver = VllmWeightReceiver(self, replica=replica, device=device)

    def rlcore_refit(self, method: str, arguments: bytes) -> bytes:
        """Call a method of the receiver with pickled (args, kwargs); returns its pickled result or exception."""
        if method not in METHODS:
            raise AttributeError(f"{method!r} is not a refit method")
        args, kwargs = pickle.loads(arguments)
        try:
            result: tuple[Any, Exception | None] = (getattr(self.rlcore_receiver, method)(*args, **kwargs), None)
        except Exception as error:  # raised again on the other side
            result = (None, error)
        return pickle.dumps(result)


def pack(*args: Any, **kwargs: Any) -> bytes:
    """Arguments for `rlcore_refit`."""
    return pickle.dumps((args, kwargs))


def unpack(answers: list[bytes]) -> list[Any]:
    """Results of all processes; raises the first exception."""
    results = [pickle.loads(answer) for answer in answers]
    for _, error in results:
        if error is not None:
            raise error
    return [value for value, _ in results]


FOLDER = "RLCORE_WEIGHT_UPDATES_DIR"
"""Environment variable with the folder of the weights."""
_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# vLLM imports this module before it computes anything.
enable_amx(_DEVICE)


class ServerWeights:
    """Mixed into `vllm.v1.worker.worker_base.Worker`. Each method returns JSON; a failure is `{"error": reason}`."""

    rlcore_weights: VllmWeightReceiver | None = None

    def rlcore_prepare(self, weights: str) -> str:
        """Begin an update.

        Args:
            weights: JSON of name to [shape, dtype].

        Returns:
            `dtypes`: name to the dtype in which each weight must be sent.
        """

        def prepare() -> dict[str, Any]:
            manifest = {name: (tuple(shape), dtype) for name, (shape, dtype) in json.loads(weights).items()}
            return {"dtypes": self._rlcore_receiver().prepare_refit_info(manifest)}

        return _as_json(prepare)

    def rlcore_update(self, file: str, refit: str, version: str, digest: str) -> str:
        """Load one file.

        Args:
            file: its path below the folder.
            refit: name of the update.
            version: number of optimizer steps behind the weights.
            digest: XXH3-128 of the file.
        """

        def update() -> dict[str, Any]:
            path = resolve_below(_folder(), file)
            if file_digest(path) != digest:
                raise WeightSyncError(
                    f"{file} differs from the file that was written: this server's folder is another one or out of date. "
                    "Start the server with the policy's refit_folder."
                )
            refuse_non_finite_file(path)
            handles = {"kind": "disk", "file": str(path), "refit": refit, "weight_version": int(version)}
            self._rlcore_receiver().update_weights(handles)
            return {"weight_version": self._rlcore_receiver().get_weight_version()}

        return _as_json(update)

    def rlcore_version(self) -> str:
        """`weight_version`; -1 before the first update and during an update."""
        return _as_json(lambda: {"weight_version": self._rlcore_receiver().get_weight_version()})

    def rlcore_fingerprint(self) -> str:
        """`fingerprint` of the received weights, and `digests`, name to the digest of each."""

        def fingerprint() -> dict[str, Any]:
            receiver = self._rlcore_receiver()
            return {"fingerprint": receiver.weight_fingerprint(), "digests": receiver.weight_digests()}

        return _as_json(fingerprint)

    def _rlcore_receiver(self) -> VllmWeightReceiver:
        if self.rlcore_weights is None:
            self.rlcore_weights = VllmWeightReceiver(self, replica=0, device=_DEVICE)
        return self.rlcore_weights


def _folder() -> Path:
    folder = os.environ.get(FOLDER)
    if not folder:
        raise WeightSyncError(f"The server was started without {FOLDER}, the folder of the weights.")
    return Path(folder).resolve()


def _as_json(function: Callable[[], dict[str, Any]]) -> str:
    """The result; an error must be returned, because vLLM stops its engine if a worker raises."""
    try:
        return json.dumps(function())
    except (RLCoreError, ValueError, TypeError, AssertionError, RuntimeError) as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})
