"""Sends weights in buckets: the policy writes one while the generation backend loads the previous one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from rl_core.errors import DeadlineExceededError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface
from rl_core.interfaces.weights import TransportContext


def push_buckets(
    context: TransportContext,
    policy: ColocatablePolicyInterface,
    generation: GenerationInterface,
    write: Callable[[int, list[str]], Mapping[str, Any]],
    *,
    overdue: Callable[[str], str],
) -> int:
    """Send all weights of a policy; two buckets are in transit at a time.

    Args:
        context: size of both buckets together, and the deadline of the refit.
        policy: the sender.
        generation: the receiver.
        write: writes the bucket with this number, from 0, and these names; returns the argument of `update_weights`.
        overdue: text of the error if the deadline has passed while a bucket is loaded, such as "3 of 7".

    Returns:
        Bytes sent.

    Raises:
        DeadlineExceededError: the refit took longer than `context.deadline_s`.
    """
    deadline = time.monotonic() + context.deadline_s
    buckets = policy.prepare_weights_for_ipc(context.buffer_bytes // 2, receiver_dtypes=context.receiver_dtypes())
    reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rlcore-refit")
    loading: list[Future[None]] = []
    moved = 0

    def finish_loading(number: int) -> None:
        if wait(loading, timeout=max(deadline - time.monotonic(), 0.0)).not_done:
            raise DeadlineExceededError(overdue(f"{number} of {len(buckets)}"))
        for loaded in loading:
            loaded.result()

    try:
        for number, names in enumerate(buckets):
            handles = write(number, names)
            finish_loading(number)
            loading = [reader.submit(generation.update_weights, handles)]
            moved += int(handles["num_bytes"])
        context.on_sent()
        finish_loading(len(buckets))
    except BaseException:
        # Otherwise the engine would continue loading into the next refit.
        wait(loading, timeout=max(deadline - time.monotonic(), 0.0))
        raise
    finally:
        reader.shutdown(wait=False, cancel_futures=True)
    return moved
