"""Measure each phase of a refit of vLLM from a Transformers policy, against a memcpy of the same bytes and vLLM's own loading.

    python benchmarks/vllm_refit.py --model path/to/SmolLM2-135M-Instruct.gguf --dtype float32 --engine-dtype bfloat16

Policy and engine are separate processes. The weights are sent over shared memory, as in `rlcore train`, and every refit is
verified by digests, by the layers that received them and by a canary. `vLLM alone` is vLLM's reload of the same weights from a
state dict in the engine's own memory. It includes the packing of a tied head, which vLLM's reload omits, but no digest, check
or copy of rlcore. It and the memcpy use the dtype in which the weights are sent, the narrower of the two.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import refit
import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.weight_sync.canary import RefitCanary, make_canary
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import SharedMemoryTransport

LENGTH = 128
ON_GPU = torch.cuda.is_available()
OWN_PARTS = ("refit_begins", "load_into_vllm", "weights_changed")


def now() -> float:
    """The current time, after all pending GPU work is finished."""
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


class Timed:
    """Adds up the seconds of each operation, inside the process that holds `inner`."""

    inner: Any

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def clock(self, item: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[item] = self.seconds.get(item, 0.0) + time.perf_counter() - started

    def timed(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with self.clock(method):
            own = getattr(type(self), method, None)
            return own(self, *args, **kwargs) if own else getattr(self.inner, method)(*args, **kwargs)

    def take_seconds(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, {}
        return taken

    def get_weight_version(self) -> int:
        return int(self.inner.weight_version)


class Policy(Timed):
    """The Transformers policy."""

    def __init__(self) -> None:
        super().__init__()
        from rl_backends_hf import HuggingFacePolicy
        from rl_backends_hf.config import HFPolicyConfig
        from rl_core.config.schema import OptimizerConfig

        optimizer = OptimizerConfig(kwargs={"lr": 1e-5})
        self.inner = HuggingFacePolicy(
            config=HFPolicyConfig(
                model_name=os.environ["REFIT_MODEL"],
                precision=os.environ["REFIT_DTYPE"],
                max_total_sequence_length=LENGTH,
                optimizer=optimizer,
            )
        )

    def step(self) -> None:
        from rl_train.algorithms.losses import NLLLossFn

        ids = torch.arange(2, 18).view(2, 8)
        batch = BatchedDataDict(
            input_ids=ids,
            input_lengths=torch.full((2,), 8),
            token_mask=torch.ones(ids.shape),
            sample_mask=torch.ones(2),
        )
        self.inner.train(batch, NLLLossFn())

    def save_state(self) -> str:
        """Writes the weights to a file, so that the engine can load them into its own memory."""
        path = f"/dev/shm/vllm_refit-{os.getpid()}.pt"
        torch.save(dict(self._as_sent()), path)
        return path

    def memcpy(self) -> float:
        """Seconds to copy all weights within this process on one thread, into memory that was touched before."""
        weights = [tensor for _, tensor in self._as_sent()]
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            copies = [tensor.clone() for tensor in weights]
            started = now()
            for copy, tensor in zip(copies, weights, strict=True):
                copy.copy_(tensor)
            return now() - started
        finally:
            torch.set_num_threads(threads)

    def _as_sent(self) -> Iterator[tuple[str, torch.Tensor]]:
        dtypes = [getattr(torch, os.environ[name]) for name in ("REFIT_DTYPE", "REFIT_ENGINE_DTYPE")]
        narrower = min(dtypes, key=lambda dtype: dtype.itemsize)
        for name, tensor in self.inner.group.worker.iter_weights():
            yield name, tensor.detach().to(narrower)


class Engine(Timed):
    """vLLM in this process; the phases of its receiver are timed separately."""

    def __init__(self) -> None:
        super().__init__()
        from rl_backends_vllm import VllmGeneration
        from rl_backends_vllm import refit as receiving

        for name in (*OWN_PARTS, "_clone_pending_weights"):
            self._time(receiving.VllmWeightReceiver, name)
        inner_digest = receiving.tensor_digests

        def tensor_digests(*args: Any, **kwargs: Any) -> dict[str, str]:
            with self.clock("in it: digests"):
                return inner_digest(*args, **kwargs)

        receiving.tensor_digests = tensor_digests
        self.inner = VllmGeneration(
            None,
            {
                "model_name": os.environ["REFIT_MODEL"],
                "max_new_tokens": 16,
                "vllm_cfg": {"precision": os.environ["REFIT_ENGINE_DTYPE"], "max_model_len": LENGTH, "kv_cache_gib": 0.25},
            },
        )
        self.inner.wait_ready()

    def _time(self, owner: type, name: str) -> None:
        method = getattr(owner, name)

        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.clock(f"in it: {name.strip('_')}"):
                return method(*args, **kwargs)

        setattr(owner, name, timed)

    def alone(self, path: str) -> float:
        """Seconds of vLLM's own reload from tensors in the memory of this process."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        worker = self.inner.group.worker._engine._engine.model_executor.driver_worker.worker
        model = worker.get_model()
        state = torch.load(path)
        Path(path).unlink()
        with torch.device(worker.device), set_current_vllm_config(worker.vllm_config), torch.no_grad():
            started = now()
            initialize_layerwise_reload(model)
            model.load_weights(iter(state.items()))
            finalize_layerwise_reload(model, worker.model_config)
            for module in model.modules():
                if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                    module.quant_method.process_weights_after_loading(module)
            return now() - started


_side: Any = None


def _start(side: type) -> None:
    global _side
    _side = side()


def _call(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    plain = method in ("take_seconds", "memcpy", "alone", "step", "save_state")
    return getattr(_side, method)(*args, **kwargs) if plain else _side.timed(method, *args, **kwargs)


class WorkerProxy(refit.WorkerProxy):
    """One side, in a separate process."""

    start, call = staticmethod(_start), staticmethod(_call)


def measure(options: argparse.Namespace, policy: Any, engine: Any) -> dict[str, float]:
    """Median seconds of each item; a memcpy and a load by vLLM alone before each refit."""
    exact = not ON_GPU and options.dtype == "float32" and options.engine_dtype in (None, "float32")
    sync = WeightSynchronizer(
        policy,
        engine,
        WeightSender(policy, SharedMemoryTransport, digests_are_held=False),
        canary=RefitCanary(lambda: make_canary(range(100, 40_000), num_receivers=1, max_length=LENGTH, exact=exact)),
    )
    collected: list[dict[str, float]] = []
    for number in range(options.rounds + 1):
        policy.step()
        state = policy.save_state()
        items = {"memcpy": policy.memcpy(), "vLLM alone": engine.alone(state)}
        policy.take_seconds(), engine.take_seconds()
        items |= sync.sync()
        items |= {f"policy: {verb}": spent for verb, spent in policy.take_seconds().items()}
        items |= {f"engine: {verb}": spent for verb, spent in engine.take_seconds().items()}
        if number > 0:  # the first touches memory for the first time
            collected.append(items)
    sync.close()
    return {item: statistics.median(row.get(item, 0.0) for row in collected) for item in collected[0]}


def show(results: dict[str, float]) -> list[str]:
    # The canary is computation, not transfer: it is shown, but not included in the bound.
    moved = results["refit/total_s"] - results["refit/canary_s"]
    allowed = 3 * results["memcpy"] + results["vLLM alone"]
    rows = ["memcpy", "vLLM alone", "refit/prepare_s", "refit/push_s", "refit/prove_s", "refit/canary_s", "refit/total_s"]
    rows += sorted(item for item in results if item.startswith(("policy", "engine")) and results[item] > 0.001)
    return [
        "| item | seconds |",
        "| --- | --- |",
        *(f"| {item} | {results[item]:.3f} |" for item in rows),
        "",
        f"{results['refit/bytes'] / 1e6:.0f} MB. Without the canary {moved:.3f} s; three memcpys and vLLM alone are "
        f"{allowed:.3f} s: {moved / allowed:.2f} of that.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Transformers folder, or a GGUF file")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="dtype of the policy's weights")
    parser.add_argument("--engine-dtype", choices=["float32", "bfloat16"], help="dtype of the engine; the policy's by default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="threads per side, as over Ray with that many cores")
    parser.add_argument("--json", type=Path, help="append the results, one JSON object per line")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        # OpenMP's runtime and threads are chosen when a process starts.
        from rl_backends_vllm.device import worker_environment

        settings = {
            "OMP_NUM_THREADS": str(options.threads),
            "REFIT_MODEL": options.model,
            "REFIT_DTYPE": options.dtype,
            "REFIT_ENGINE_DTYPE": options.engine_dtype or options.dtype,
        }
        environment = {**os.environ, **worker_environment(use_gpus=ON_GPU), **settings}
        sys.exit(subprocess.call([sys.executable, *sys.argv, "--inside"], env=environment))
    policy, engine = WorkerProxy(Policy), WorkerProxy(Engine)
    try:
        results = measure(options, policy, engine)
    finally:
        policy.pool.shutdown()
        engine.pool.shutdown()
    print("\n".join(show(results)))
    if options.json is not None:
        with options.json.open("a") as file:
            file.write(json.dumps({"dtype": options.dtype, "engine_dtype": options.engine_dtype, "found": results}) + "\n")


if __name__ == "__main__":
    main()
