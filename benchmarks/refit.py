"""Measure how long each phase of a refit takes, relative to a memcpy of the same bytes in the same run.

    python benchmarks/refit.py [--rounds 5] [--device cuda] [--write]

134.5 million float32 parameters in the shapes of SmolLM2-135M are sent from a policy process to a generation process on one
machine, over shared memory (on one GPU: by CUDA IPC) and over gloo; every refit is verified. Two comparisons alternate their
sides in one run and report wall-clock and CPU seconds of all processes with their range: shared memory that is kept or
allocated in each refit, and in one process, tensors shared by reference that are verified by address, by fingerprints of both
sides, or by fingerprints and the canary. `--write` writes the tables to benchmarks/results/refit.md, or refit_cuda.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rl_core.weights.fingerprint import tensor_digest
from rl_core.weights.manifest import manifest_of
from rl_core.weights.receiver import WeightSink
from rl_core.weights.source import WeightSource
from rl_train.weight_sync.canary import RefitCanary, make_canary
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import ByReferenceTransport, CollectiveTransport, SharedMemoryTransport

RESULTS = Path(__file__).parent / "results"
DEVICE = "RLCORE_BENCHMARK_DEVICE"
"""Environment variable with the device of both processes."""
LAYERS, HIDDEN, KEYS, INNER, VOCABULARY = 30, 576, 192, 1536, 49152


def shapes() -> dict[str, tuple[int, ...]]:
    shapes_by_name: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        parts = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KEYS, HIDDEN),
            "self_attn.v_proj": (KEYS, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }
        shapes_by_name |= {f"model.layers.{layer}.{part}.weight": shape for part, shape in parts.items()}
    return shapes_by_name


class Timed:
    """Adds up the seconds of each operation, inside the worker."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        device = os.environ.get(DEVICE, "cpu")
        self.context = SimpleNamespace(rank=0, device=device)
        self.weights = {name: torch.randn(shape, device=device) for name, shape in shapes().items()}
        self.seconds: dict[str, float] = {}
        self.keeps_segments = True
        self._segments: Any = None
        self._set_aside: Any = None

    def keep_segments(self, keeps: bool) -> None:
        """Whether shared memory stays mapped between buckets and refits; the other side's is set aside meanwhile."""
        if keeps != self.keeps_segments:
            self._segments, self._set_aside = self._set_aside, self._segments
        self.keeps_segments = keeps

    def cpu_seconds(self) -> float:
        """CPU time of this process so far."""
        return time.process_time()

    def timed(self, method: str, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return getattr(self, method)(*args, **kwargs)
        finally:
            self.seconds[method] = self.seconds.get(method, 0.0) + time.perf_counter() - started

    def take_seconds(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, {}
        return taken

    def clock(self) -> float:
        """The current time, after all pending device work is finished."""
        if self.context.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()


class Policy(Timed, WeightSource):
    version = 0

    def iter_weights(self, names=None):
        for name in names if names is not None else self.weights:
            yield name, self.weights[name]

    def weight_manifest(self):
        return manifest_of(self.weights)

    def get_weight_version(self) -> int:
        return self.version

    def step(self) -> None:
        self.version += 1
        for tensor in self.weights.values():
            tensor.add_(1e-3)

    def finish_refit(self) -> None:
        super().finish_refit()
        if not self.keeps_segments and self._segments is not None:
            self._segments.close()
            self._segments = None

    def offload_before_refit(self) -> None: ...

    def offload_after_refit(self) -> None: ...

    def memcpy(self) -> float:
        """Seconds to copy the same tensors within this process, into memory that was touched before."""
        if not hasattr(self, "copy"):
            self.copy = {name: tensor.clone() for name, tensor in self.weights.items()}
        started = self.clock()
        for name, tensor in self.weights.items():
            self.copy[name].copy_(tensor)
        return self.clock() - started

    def digest_seconds(self, kind: str) -> float:
        started = self.clock()
        for tensor in self.weights.values():
            tensor_digest(tensor, kind=kind)  # type: ignore[arg-type]
        return self.clock() - started


class Engine(Timed, WeightSink):
    def named_weights(self):
        return self.weights

    def update_weights(self, ipc_handles):
        if not self.keeps_segments:
            self._segments = None
        super().update_weights(ipc_handles)

    def invalidate_kv_cache(self) -> bool:
        return True


_worker: Any = None


def _start(worker_class: type) -> None:
    global _worker
    _worker = worker_class()


def _call(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    plain = method in ("take_seconds", "memcpy", "digest_seconds", "keep_segments", "cpu_seconds")
    return getattr(_worker, method)(*args, **kwargs) if plain else _worker.timed(method, *args, **kwargs)


class WorkerProxy:
    """A worker in a separate process."""

    start, call = staticmethod(_start), staticmethod(_call)
    PENDING = ("init_collective", "broadcast_weights_for_collective", "update_weights_from_collective")

    def __init__(self, worker_class: type) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(max_workers=1, mp_context=spawn, initializer=self.start, initargs=(worker_class,))

    restarts = 0
    num_workers = 1

    def restart_dead(self, cause: Exception | None = None) -> bool:
        return False

    @property
    def weight_version(self) -> int:
        return int(self.get_weight_version())

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            future: Future[Any] = self.pool.submit(self.call, method, args, kwargs)
            return [future] if method in self.PENDING else future.result()

        return call


def measure(policy: WorkerProxy, engine: WorkerProxy, transport: type, rounds: int) -> dict[str, float]:
    """Median seconds of each item; a memcpy before each refit."""
    sender = WeightSender(policy, transport, buffer_bytes=512 * 2**20)  # type: ignore[arg-type]
    sync = WeightSynchronizer(policy, engine, sender)  # type: ignore[arg-type]
    collected: list[dict[str, float]] = []
    for number in range(rounds + 1):
        policy.step()
        policy.take_seconds(), engine.take_seconds()
        copied = policy.memcpy()
        metrics = sync.sync()
        items = {f"policy: {verb}": spent for verb, spent in policy.take_seconds().items()}
        items |= {f"engine: {verb}": spent for verb, spent in engine.take_seconds().items()}
        if number > 0:  # the first joins the group and touches memory for the first time
            collected.append({"memcpy": copied, **metrics, **items})
    sync.close()
    return {item: statistics.median(row.get(item, 0.0) for row in collected) for item in collected[0]}


@dataclass(frozen=True)
class Side:
    """One side of a comparison."""

    name: str
    refit: Callable[[], object]
    """Refits once, after an optimizer step that is not measured."""


def compare(title: str, sides: list[Side], step: Callable[[], None], cpu: Callable[[], float], rounds: int) -> list[str]:
    """Refit each side in turn; wall-clock and CPU seconds of the rounds after the first."""
    wall: dict[str, list[float]] = {side.name: [] for side in sides}
    spent: dict[str, list[float]] = {side.name: [] for side in sides}
    for number in range(rounds + 1):
        for side in sides:
            step()
            started, used = time.perf_counter(), cpu()
            side.refit()
            if number > 0:  # the first touches memory for the first time
                wall[side.name].append(time.perf_counter() - started)
                spent[side.name].append(cpu() - used)
    lines = [f"## {title}", "", "| | CPU seconds | wall-clock seconds |", "| --- | --- | --- |"]
    lines += [f"| {side.name} | {spread(spent[side.name])} | {spread(wall[side.name])} |" for side in sides]
    return [*lines, ""]


def spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"


def compare_segments(policy: WorkerProxy, engine: WorkerProxy, rounds: int) -> list[str]:
    """Shared memory that both sides keep mapped, against segments of one refit that are mapped for each bucket."""
    sender = WeightSender(policy, SharedMemoryTransport)  # type: ignore[arg-type]
    sync = WeightSynchronizer(policy, engine, sender)  # type: ignore[arg-type]

    sides = []
    for name, keeps in (("allocated in each refit", False), ("kept", True)):

        def run(keeps: bool = keeps) -> None:
            policy.keep_segments(keeps)
            engine.keep_segments(keeps)
            sync.sync()

        sides.append(Side(name, run))

    def cpu() -> float:
        return time.process_time() + float(policy.cpu_seconds()) + float(engine.cpu_seconds())

    return compare("Shared memory between processes", sides, policy.step, cpu, rounds)


class ComparedByReference(ByReferenceTransport):
    """Compares fingerprints in each refit, as if memory were not shared."""

    shares_memory = False


def compare_in_one_process(rounds: int, precision: str) -> list[str]:
    """A Transformers policy and engine that share tensors, with each way of verifying a refit."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy

    torch.set_num_threads(1)
    options: Any = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    options |= {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(**options)).save_pretrained(folder)
        policy = HuggingFacePolicy(folder, precision=precision, max_total_sequence_length=256)
        engine = HuggingFaceGeneration(folder, precision=precision, max_new_tokens=64)
        policy.wait_ready(), engine.wait_ready()

    def synchronizer(transport: type, canary: RefitCanary | None = None, **checks: Any) -> WeightSynchronizer:
        return WeightSynchronizer(policy, engine, WeightSender(policy, transport, **checks), canary=canary)

    exact = precision == "float32"
    rows = make_canary(range(100, 40_000), num_receivers=1, max_length=256, exact=exact, tolerance=10.0)
    canary = RefitCanary(lambda: rows)
    sides = [
        Side(
            "fingerprints and canary",
            synchronizer(ComparedByReference, canary=canary, digests_are_held=False).sync,
        ),
        Side("fingerprints", synchronizer(ComparedByReference).sync),
        Side("addresses", synchronizer(ByReferenceTransport).sync),
    ]
    try:
        return compare(f"In one process, {precision}", sides, lambda: None, time.process_time, rounds)
    finally:
        engine.shutdown()
        policy.shutdown()


def table(name: str, results: dict[str, float]) -> list[str]:
    lines = [f"## {name}", "", "| item | seconds | x memcpy |", "| --- | --- | --- |"]
    rows = ["memcpy", "refit/push_s", "refit/prove_s", "refit/prepare_s", "refit/total_s"]
    rows += sorted((item for item in results if item.startswith(("policy", "engine")) and results[item] > 0.001), key=str)
    lines += [f"| {item} | {results[item]:.3f} | {results[item] / results['memcpy']:.2f} |" for item in rows]
    rate = results["refit/bytes"] / results["refit/push_s"] / 1e9
    return [
        *lines,
        "",
        f"{rate:.2f} GB/s pushed; a verified refit takes {results['refit/total_s'] / results['memcpy']:.1f} memcpys.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    os.environ[DEVICE] = options.device
    machine = "no GPU" if options.device == "cpu" else f"on one {torch.cuda.get_device_name()}"
    policy, engine = WorkerProxy(Policy), WorkerProxy(Engine)
    try:
        size = sum(torch.Size(shape).numel() for shape in shapes().values()) * 4
        lines = [
            "# Refit",
            "",
            f"`python benchmarks/refit.py`: {size / 4e6:.1f} million float32 parameters ({size / 1e6:.0f} MB, {len(shapes())}"
            f" tensors), one policy process, one generation process, one thread each; {os.cpu_count()} cores, {machine}. "
            f"Median of {options.rounds} refits, each with a memcpy of the same tensors (one thread, touched memory) just "
            "before it. Operations of the two sides overlap, so they add up to more than the push.",
            "",
        ]
        for transport in (SharedMemoryTransport, CollectiveTransport):
            lines += table(transport.name, measure(policy, engine, transport, options.rounds))
        if options.device == "cpu":
            lines += compare_segments(policy, engine, options.rounds)
            for precision in ("float32", "bfloat16"):
                lines += compare_in_one_process(options.rounds, precision)
        for kind in ("xxh3", "wsum"):
            spent = min(policy.digest_seconds(kind) for _ in range(3))
            lines.append(f"Fingerprint `{kind}` on one thread: {spent / size * 1e9:.2f} ns/byte.")
    finally:
        policy.pool.shutdown()
        engine.pool.shutdown()
    print("\n".join(lines))
    if options.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / ("refit.md" if options.device == "cpu" else "refit_cuda.md")).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
