"""Names of vLLM's engine arguments, parsed from its source: importing vLLM would add six seconds to `rlcore validate`."""

from __future__ import annotations

import ast
import importlib.util
from functools import lru_cache
from pathlib import Path

_CFG = "set policy.generation.vllm_cfg.{} instead."
_SAME_NAME = (
    "enable_prefix_caching",
    "enforce_eager",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "load_format",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "pipeline_parallel_size",
    "seed",
    "tensor_parallel_size",
    "trust_remote_code",
)
_REPLICAS = (
    "data_parallel_address",
    "data_parallel_backend",
    "data_parallel_rank",
    "data_parallel_rpc_port",
    "data_parallel_size",
    "data_parallel_size_local",
)
OWNED = {
    "model": "set policy.generation.model_name instead.",
    **dict.fromkeys(("revision", "tokenizer_revision"), "append it to the model's name: NAME@REVISION."),
    "dtype": _CFG.format("precision"),
    "tokenizer": _CFG.format("tokenizer"),
    "kv_cache_memory_bytes": _CFG.format("kv_cache_gib"),
    "enable_sleep_mode": _CFG.format("sleep_level"),
    "structured_outputs_config": "other backends ignore some keywords of a JSON schema.",
    "logprobs_mode": "log-probabilities are always those of the sampling distribution.",
    "worker_extension_cls": "refits use it.",
    "generation_config": "policy.generation and the model's end tokens determine sampling.",
    "override_generation_config": "policy.generation determines sampling; see stop_token_ids and temperature there.",
    "logits_processors": "training could not score the tokens under the sampling distribution.",
    "skip_tokenizer_init": "it is set automatically if the model has no tokenizer.",
    "enable_chunked_prefill": "it depends on the device: on a CPU, vLLM does not support it for rows with seeds.",
    "disable_log_stats": "engine statistics are part of the run's metrics.",
    **{name: _CFG.format(name) for name in _SAME_NAME},
    **dict.fromkeys(_REPLICAS, "each replica is one engine; set policy.generation.num_workers to run several."),
}
"""Arguments that `vllm_kwargs` cannot set, and what to do instead."""


@lru_cache(maxsize=1)
def known_engine_arguments() -> frozenset[str]:
    """Field names of `vllm.EngineArgs`; empty if vLLM is not installed, which is reported elsewhere."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return frozenset()
    source = Path(spec.origin).parent / "engine" / "arg_utils.py"
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            return frozenset(
                field.target.id
                for field in node.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id[0] != "_"
            )
    return frozenset()
