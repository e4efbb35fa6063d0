"""Predicts the memory of a replica of vLLM from the model's config, without weights and without importing vLLM.

Predicts the time in which a replica of vLLM samples on this machine's CPUs, from the model's config and without its weights.

An engine with two layers and random weights is started in another process, as a worker of the run would be, and samples for a
moment. This takes about ten seconds, most of them to import vLLM. The last layer is timed on its own, and counts for the layers
that are missing.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import torch

from rl_backends_vllm.config import VllmConfig
from rl_backends_vllm.device import cpu_kv_bytes, row_kv_bytes, token_kv_bytes, worker_environment
from rl_backends_vllm.model_folder import read_config
from rl_backends_vllm.standalone import standalone_context
from rl_backends_vllm.worker import VllmGenerationWorker
from rl_core.backend import BatchedDataDict
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
            size = cpu_kv_bytes(vllm_cfg, hf_config)
            # vLLM replaces the weights of a layer once it has all of them, and packs an output layer that is tied.
            embeddings = weights * hf_config.vocab_size * hf_config.hidden_size // count
            packed = embeddings if getattr(hf_config, "tie_word_embeddings", False) else 0
            held = {"weights": weights, "packed output layer": packed, "keys and values": size}
            return {"held": held, "rollout": {}, "refit": {"new weights": weights - embeddings}}
        row, share = row_kv_bytes(vllm_cfg, hf_config), vllm_cfg.gpu_memory_utilization
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
        token = token_kv_bytes(vllm_cfg, hf_config)
        most = vllm_cfg.max_num_seqs or (1024 if limit >= _LARGE else 256)
        together = max(1, min(rows, most, phases["rollout"]["keys and values"] // (length * token)))
        return {"rows": together, "weights": phases["held"]["weights"], "token": token, "step_s": 0.0}

    def not_counted(self) -> list[str]:
        return ["activations and recorded graphs, which vLLM takes from its share of the GPU"]

    def saving_overrides(self) -> list[str]:
        return ["policy.generation.vllm_cfg.gpu_memory_utilization=0.8"]


def _weights(hf_config: Any, *, trust_remote_code: bool) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters())


_log = logging.getLogger(__name__)
_DEPTH: Final = 2
"""Maximum number of layers of the model that is timed."""
_STEPS: Final = 16
"""Number of steps that are timed; the fastest counts."""
_PROMPT: Final = 512
"""Maximum number of prompt tokens that are computed."""
_BLOCK: Final = 128
"""Tokens per block of the KV cache; whole blocks of equal prompts are computed once."""
_TIMEOUT_S: Final = 300.0


class EngineTime:
    """The time of one replica. See `EngineTime` in `rl_train.plan.time_plan`."""

    refit_bytes_per_s = 2e8

    def __init__(self, config: VllmConfig) -> None:
        self._config = config

    def seconds(self, *, rows: int, prompts: int, prompt: int, completion: int) -> float:
        """Seconds in which a replica samples its rows; see `EngineTime` in `rl_train.plan.time_plan`.

        Raises:
            NotSupportedError: the engine cannot be measured here.
        """
        vllm_cfg = self._config.vllm_cfg
        if vllm_cfg.processes > 1:
            raise NotSupportedError("engines of several processes (vllm_cfg.tensor_parallel_size) are not measured")
        if vllm_cfg.enforce_eager is False:
            raise NotSupportedError("compiling the model (vllm_cfg.enforce_eager: false) takes too long to try")
        hf = read_config(str(self._config.model_name), trust_remote_code=vllm_cfg.trust_remote_code)
        if hf.get_text_config(decoder=True) is not hf:
            raise NotSupportedError(f"the layers of {type(hf).__name__} are part of a larger model")
        fitting = cpu_kv_bytes(vllm_cfg, hf) // row_kv_bytes(vllm_cfg, hf)
        together = max(1, min(rows, fitting, vllm_cfg.max_num_seqs or rows))
        measured = _measured_elsewhere(self._config, rows=together, prompt=prompt, cached=prompt + completion // 2)
        missing: int = max(0, hf.num_hidden_layers - _DEPTH)
        step = measured["step"] + missing * measured["step_layer"]
        token = measured["prompt_token"] + missing * measured["prompt_token_layer"]
        shared = (prompt - 1) // _BLOCK * _BLOCK if vllm_cfg.enable_prefix_caching else 0
        prefill: float = token * (prompts * shared + rows * (prompt - shared))
        return prefill + -(-rows // together) * completion * step


def _measured_elsewhere(config: VllmConfig, **sizes: int) -> dict[str, float]:
    """The result of `measure` in another process.

    Raises:
        NotSupportedError: the process failed.
    """
    _log.warning("Starting a vLLM engine with two layers for the time of a step. This takes about ten seconds.")
    environment = worker_environment(use_gpus=False, python=config.python) | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    try:
        done = subprocess.run(
            [config.python or sys.executable, "-m", __name__],
            input=json.dumps({"config": config.model_dump(mode="json"), **sizes}),
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotSupportedError(f"a small vLLM engine did not start: {error}") from error
    if done.returncode:
        raise NotSupportedError(f"a small vLLM engine failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def measure(config: VllmConfig, *, rows: int, prompt: int, cached: int) -> dict[str, float]:
    """CPU-seconds of a `prompt_token` and of a decoding `step` with two layers, and of one layer of each.

    Args:
        config: the section.
        rows: rows that are sampled together.
        prompt: tokens of a prompt.
        cached: tokens of each row in the cache while steps are timed.
    """
    hf = read_config(str(config.model_name), trust_remote_code=config.vllm_cfg.trust_remote_code)
    depth = hf.num_hidden_layers
    lists = {key: value[:_DEPTH] for key, value in hf.to_dict().items() if isinstance(value, list) and len(value) == depth}
    width, cached = min(prompt, _PROMPT), cached // _BLOCK * _BLOCK + 1
    length = max(width, cached) + _STEPS + 2
    shape = {"num_hidden_layers": min(_DEPTH, depth), "max_position_embeddings": max(length, hf.max_position_embeddings)}
    small = config.vllm_cfg.model_copy(
        update={
            "async_engine": False,
            "load_format": "dummy",
            "enable_prefix_caching": True,
            "max_model_len": length,
            "max_num_batched_tokens": None,
        }
    )
    cache = (rows + 1) * row_kv_bytes(small, hf) * min(_DEPTH, depth) // depth
    fields = {
        "vllm_cfg": small.model_copy(update={"kv_cache_gib": min(1.0, cache / 2**30)}),
        "vllm_kwargs": {**config.vllm_kwargs, "hf_overrides": {**lists, **shape}},
        "max_new_tokens": _STEPS + 1,
        "stop_strings": None,
    }
    worker = _TimedWorker(standalone_context(), config.model_copy(update=fields))
    vocab = worker.setup()["vocab_size"]
    try:
        worker.watch_layers()
        few = max(1, min(rows, _PROMPT // width))
        prefill, decode = worker.sample(torch.randint(vocab, (few, width)))
        _, step = worker.sample(torch.randint(vocab, (1, cached)).expand(rows, -1))
    finally:
        worker.shutdown()
    token, token_layer = (max(0.0, first - later) / (few * width) for first, later in zip(prefill, decode, strict=True))
    return {"prompt_token": token, "prompt_token_layer": token_layer, "step": step[0], "step_layer": step[1]}


class _TimedWorker(VllmGenerationWorker):
    """A worker with random weights that times the steps of its engine."""

    def watch_layers(self) -> None:
        """Record when the output of each layer has been computed."""
        self._marks = list[float]()
        self._running.rpc(self._watch)  # type: ignore[arg-type]  # vLLM calls a function with each of its workers

    def _watch(self, process: Any) -> None:
        lists = (module for module in process.get_model().modules() if isinstance(module, torch.nn.ModuleList))
        for layer in next(lists):
            layer.register_forward_hook(lambda *_: self._marks.append(time.thread_time()))

    def sample(self, prompts: torch.Tensor) -> tuple[tuple[float, float], tuple[float, float]]:
        """Seconds of the first step, and of the fastest of those that follow; of both, also those of the last layer.

        Args:
            prompts: [rows, tokens].
        """
        lengths = torch.full((len(prompts),), prompts.shape[1])
        for prompt in self._reader.read(BatchedDataDict({"input_ids": prompts, "input_lengths": lengths})):
            self._add(f"{prompts.shape}-{prompt.number}", prompt, greedy=False)
        steps = [self._timed_step() for _ in range(_STEPS)]
        self._requests.clear()
        whole, layer = (min(numbers) for numbers in zip(*steps[1:], strict=True))
        return steps[0], (whole, layer)

    def _timed_step(self) -> tuple[float, float]:
        self._marks.clear()
        began = time.thread_time()
        self._requests.collect(0.0)
        whole = time.thread_time() - began
        return whole, self._marks[-1] - self._marks[-2] if len(self._marks) > 1 else 0.0


def main() -> None:
    """Print the result of `measure` as JSON; its arguments are read from the standard input."""
    result = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what vLLM prints
    given = json.load(sys.stdin)
    measured = measure(VllmConfig.model_validate(given.pop("config")), **given)
    with os.fdopen(result, "w") as out:
        json.dump(measured, out)


if __name__ == "__main__":
    main()
