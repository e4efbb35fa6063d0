"""What a worker needs to know about itself, such as its rank; and explanations of full memory. Independent of Ray and torch."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import psutil

from rl_core.data.process_seed import seed_process
from rl_core.errors import RLCoreError


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """The first constructor argument of a worker.

    Attributes:
        rank: The worker's rank in its group, 0 to world_size - 1.
        world_size: Workers in the group.
        local_rank: Rank among the group's workers on this node. On GPUs each worker sees only its own device, as `cuda:0`,
            whatever its local rank.
        node_rank: Index of the node within the group.
        master_address: Address of rank 0 for a `torch.distributed` rendezvous.
        master_port: Port there; it was free when the group started.
        coords: Axis name to coordinate in the group's grid, such as {"data": 1, "tensor": 0}.
        device: Device that the worker computes on.
        num_threads: Threads for its computations.
        seed: Seeds the process's generators before the worker is created. Ranks with the same data coordinate, which hold
            parts of one copy of the model, have the same seed.
        run_in_process: The worker shares the driver's process and must not change global state (default process group,
            thread counts, signal handlers).
    """

    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    master_address: str
    master_port: int
    coords: Mapping[str, int] = field(default_factory=dict)
    device: Literal["cpu", "cuda"] = "cpu"
    num_threads: int = 1
    seed: int = 0
    run_in_process: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "coords", MappingProxyType(dict(self.coords)))

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy cannot be pickled: rebuild from the plain values.
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return partial(WorkerContext, **{**values, "coords": dict(self.coords)}), ()


def construct(worker_class: type, context: WorkerContext, kwargs: Mapping[str, Any]) -> Any:
    """Construct the worker, with its context if it takes one.

    The context is passed if the first parameter of the constructor is named `context` or annotated as `WorkerContext`, or if
    it has a keyword-only parameter `context`.
    """
    parameters = list(inspect.signature(worker_class).parameters.values())
    if parameters and parameters[0].kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
        first = parameters[0]
        annotation = first.annotation if isinstance(first.annotation, str) else getattr(first.annotation, "__name__", "")
        if first.name == "context" or annotation.split(".")[-1] == "WorkerContext":
            return worker_class(context, **kwargs)
    if any(p.kind is inspect.Parameter.KEYWORD_ONLY and p.name == "context" for p in parameters):
        return worker_class(**kwargs, context=context)
    return worker_class(**kwargs)


def seed_call(worker: Any, context: WorkerContext, method: str, arguments: Sequence[Any]) -> None:
    """Seed the process for a call of a policy or engine that may draw numbers, which are then the same in a resumed run.

    `train` depends on the weight version, `generate` on the `sample_seeds` of its rows, and `poll` on those that arrive. Other
    calls continue the generators. So does `train` in the driver's process, which is seeded by `Run.steps`.
    """
    numbers: list[int] = []
    if method == "train" and not context.run_in_process and hasattr(worker, "get_weight_version"):
        numbers = [context.coords.get("data", context.rank), worker.get_weight_version()]
    elif method in ("generate", "poll") and hasattr(worker, "get_weight_version"):
        rows = [arguments[0]] if method == "generate" else [request.row for request in arguments[0]]
        numbers = [seed for row in rows if "sample_seeds" in row for seed in row["sample_seeds"].tolist()]
    if numbers:
        seed_process(context.seed, *numbers)


_TEXTS = ("out of memory", "outofmemory", "memoryerror", "allocate memory", "not enough memory", "alloc_failed")
"""In the errors of torch and its libraries on GPUs and CPUs, and of the operating system; in lower case."""
_PHASES = {
    "loading": ("setup",),
    "scoring": ("get_logprobs", "get_topk_logprobs", "get_values"),
    "training": ("train", "prepare_for_training"),
    "sampling": ("generate", "poll", "prepare_for_generation"),
    "saving or loading a checkpoint": ("save_checkpoint", "load_checkpoint", "find_non_finite"),
}


@contextmanager
def explaining_memory(worker: Any, doing: str) -> Iterator[None]:
    """Replace an error of full memory by one that says what was in memory, measured before the block is left.

    Args:
        worker: a `MeasuredWorker`; errors of other workers are unchanged.
        doing: the method of the worker that the block calls, or a description of the block.

    Raises:
        RLCoreError: memory was full; chained to the original exception.
    """
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        is_full = any(each in text.lower() for each in _TEXTS) and not isinstance(error, RLCoreError)
        if not is_full or not hasattr(worker, "memory_advice"):
            raise
        named = (phase for phase, methods in _PHASES.items() if doing in methods)
        doing = next(named, "a refit" if hasattr(worker, doing) else doing)
        raise RLCoreError(f"Out of memory in {doing} ({text}). {_contents(worker)} {worker.memory_advice(doing)}") from error


def return_freed_memory() -> None:
    """Return free pages of the heap to the system; a few microseconds if there are none.

    glibc keeps freed blocks of up to 32 MiB, which is faster than to map each again. But tensors of another size rarely fit
    there, so a process would grow to the sum of what its microbatches and phases need. Other C libraries have no such function.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def halved(key: str, value: int, smallest: int = 1) -> list[str]:
    """The advice to halve the value of a key; empty if it cannot be lower."""
    return [f"lower `{key}` from {value} to {max(smallest, value // 2)}"] if value > smallest else []


def _contents(worker: Any) -> str:
    """What is in the memory of the worker's device, in a sentence; tensors of two kinds count as the first."""
    import torch

    on_gpu, counted, sizes = worker.context.device == "cuda", set[int](), dict[str, int]()
    for kind, tensors in worker.tensors_by_kind().items():
        new = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.is_cuda == on_gpu}
        sizes[kind] = sum(size for address, size in new.items() if address not in counted)
        counted |= new.keys()
    if on_gpu:
        used, cached, (free, total) = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()
    else:
        memory, used = psutil.virtual_memory(), psutil.Process().memory_info().rss
        cached, free, total = used, memory.available, memory.total
    sizes["activations and others"] = used - sum(sizes.values())
    sizes |= {"unused in torch's cache": cached - used, "other processes": total - free - cached, "free": free}
    listed = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in sizes.items() if size > 0)
    return f"In the {'GPU' if on_gpu else 'host'} memory of {total / 2**30:.2f} GiB were, in GiB: {listed}."
