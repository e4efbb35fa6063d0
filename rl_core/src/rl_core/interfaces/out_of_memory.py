"""Explains full memory: what a worker was doing, what was in memory, and the keys to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from rl_core.errors import RLCoreError

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
