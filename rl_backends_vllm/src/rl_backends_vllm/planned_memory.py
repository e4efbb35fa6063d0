"""Predicts the memory of a replica of vLLM from the model's config, without weights and without importing vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rl_backends_vllm.device import cpu_kv_bytes, row_kv_bytes, token_kv_bytes
from rl_backends_vllm.model_folder import auto_class, read_config
from rl_core.errors import NotSupportedError

if TYPE_CHECKING:
    from rl_backends_vllm.config import VllmConfig

_LARGE: Final = 70 * 2**30
"""Bytes of a GPU from which on vLLM 0.32 decodes 1024 rows together by default, not 256; its exception for the A100 is not
considered."""


class EngineMemory:
    """The memory of one process of a replica. See `EngineMemory` in `rl_train.plan.planner`."""

    libraries = 590 * 2**20
    """Bytes of a process on CPUs with a started engine, without weights and cache; config `vllm` of plan_vs_measured.py."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config

    @property
    def processes(self) -> int:
        """Number of processes of a replica; on GPUs, each has its own."""
        return self._config.vllm_cfg.processes

    def by_phase(
        self, *, rows: int, prompt: int, on_gpu: bool, limit: int | None, shares_weights: bool
    ) -> dict[str, dict[str, int]]:
        """Of `limit`, vLLM takes `gpu_memory_utilization`. It never shares the weights of the policy."""
        vllm_cfg = self._config.vllm_cfg
        hf_config = read_config(str(self._config.model_name), trust_remote_code=vllm_cfg.trust_remote_code)
        count = _weights(hf_config, trust_remote_code=vllm_cfg.trust_remote_code)
        weights = count * (4 if vllm_cfg.precision == "float32" else 2) // vllm_cfg.processes
        if not on_gpu:
            size, text = cpu_kv_bytes(vllm_cfg, hf_config), hf_config.get_text_config(decoder=True)
            # vLLM replaces the weights of a layer once it has all of them, and packs an output layer that is tied.
            embeddings = weights * text.vocab_size * text.hidden_size // count
            packed = embeddings if getattr(hf_config, "tie_word_embeddings", False) else 0
            held = {"weights": weights, "packed output layer": packed, "keys and values": size}
            return {"held": held, "rollout": {}, "refit": {"new weights": weights - embeddings}}
        row, share = row_kv_bytes(vllm_cfg, hf_config, latent=True), vllm_cfg.gpu_memory_utilization
        if vllm_cfg.kv_cache_gib is not None:
            size, unused = int(vllm_cfg.kv_cache_gib * 2**30), 0
        elif limit is None:
            size, unused = rows * row, 0
        else:
            size = max(row, int(share * limit) - weights)
            # vLLM does not start if its share is too small, so the GPU would have to be larger.
            unused = 0 if size > row else int((weights + row) * (1 / share - 1))
        return {"held": {"weights": weights}, "rollout": {"keys and values": size, "outside the engine's share": unused}}

    def decoding(self, *, rows: int, length: int, limit: int) -> dict[str, float]:
        vllm_cfg = self._config.vllm_cfg
        hf_config = read_config(str(self._config.model_name), trust_remote_code=vllm_cfg.trust_remote_code)
        phases = self.by_phase(rows=rows, prompt=length, on_gpu=True, limit=limit, shares_weights=False)
        if _keeps_states(hf_config):
            raise NotSupportedError("how many rows fit into vLLM's cache is unknown for a model with recurrent layers")
        token = token_kv_bytes(vllm_cfg, hf_config, latent=True)
        most = vllm_cfg.max_num_seqs or (1024 if limit >= _LARGE else 256)
        together = max(1, min(rows, most, phases["rollout"]["keys and values"] // (length * token)))
        return {"rows": together, "weights": phases["held"]["weights"], "token": token, "step_s": 0.0}

    def not_counted(self) -> list[str]:
        left_out = ["activations and recorded graphs, which vLLM takes from its share of the GPU"]
        trusts_code = self._config.vllm_cfg.trust_remote_code
        hf_config = read_config(str(self._config.model_name), trust_remote_code=trusts_code)
        if _keeps_states(hf_config):
            left_out.append("recurrent states, which are in vLLM's cache: its size is that of keys and values in all layers")
        if self._config.reads_images(hf_config):
            left_out.append("images, and what the vision tower computes of them")
        return left_out

    def saving_overrides(self) -> list[str]:
        return ["policy.generation.vllm_cfg.gpu_memory_utilization=0.8"]


def _keeps_states(hf_config: Any) -> bool:
    """Whether layers have a state of constant size, by the cache of Transformers."""
    from transformers import DynamicCache

    try:
        return any(hasattr(layer, "recurrent_states") for layer in DynamicCache(config=hf_config).layers)
    except KeyError:  # a type of attention that only the model's own code has, as in DeepSeek V4
        return False


def _weights(hf_config: Any, *, trust_remote_code: bool) -> int:
    import torch

    with torch.device("meta"):
        model = auto_class(hf_config).from_config(hf_config, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters())
