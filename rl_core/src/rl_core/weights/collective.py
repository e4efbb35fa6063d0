"""Weights over a separate process group: gloo, or NCCL if every rank has its own GPU.

Rank 0 is the policy's; the default process group is not used, since trainer and sampler each have their own. A refit is a plan
(names, forms, buckets, version) followed by one broadcast per bucket. Two buffers alternate: while one is sent, the sender
packs the next bucket and the receivers load the previous one. A receiver that rejects a tensor continues to receive and raises
at the end, and a sender that fails reports it in the next broadcast, so no rank is left waiting and the group stays usable. If
a rank dies, the ranks connected to it fail immediately; each closes its own connections, so that the failure reaches all.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore, Work  # type: ignore[attr-defined]

from rl_core.errors import WeightSyncError
from rl_core.interfaces.policy import RefitManifest
from rl_core.rendezvous.interfaces import own_address
from rl_core.rendezvous.stores import open_store
from rl_core.weights.manifest import ALIGNMENT, Placement, fill, lay_out

Load = Callable[[Mapping[str, torch.Tensor], str, int], None]
"""Receives one bucket: tensors, refit, weight version."""

_PREFIX = ALIGNMENT
"""Bytes before a bucket's tensors; the first is 0 unless the sender has failed."""
_GAVE_UP = 1
_CALLED_OFF = "called_off"
"""Set in the store by a driver if a rank will never join."""
_MESH_S = 30.0
"""Timeout for ranks to connect to each other once all are present."""
_LISTENS_S = 10.0
"""Timeout for a live policy to start listening once it was called to join."""
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"


class WeightCollective:
    """One rank of the group that weights are broadcast in."""

    def __init__(self, ip: str, port: int, world_size: int, *, rank: int, device: str, timeout_s: float) -> None:
        """A rank that has not joined yet.

        Args:
            ip: address that rank 0 listens on.
            port: a free port there.
            world_size: number of ranks; rank 0 sends.
            rank: this rank.
            device: "cpu" or "cuda", the device of this rank's weights.
            timeout_s: timeout of each broadcast, and of joining.
        """
        self._place = (ip, port)
        self._ranks = (rank, world_size)
        self._timeout = timedelta(seconds=timeout_s)
        self._store: TCPStore | None = None
        self._group: Any = None
        self._device = torch.device(device)
        self._buffers: list[torch.Tensor] = []

    def join(self) -> None:
        """Join; returns once all ranks have.

        Rank 0 keeps its store until `close`, even if joining fails, so that a late rank can read there that joining was
        aborted instead of trying to connect until its timeout.

        Raises:
            WeightSyncError: not all ranks joined in time, or joining was aborted.
        """
        (ip, port), (rank, world_size) = self._place, self._ranks
        try:
            self._store = open_store(ip, port, is_master=rank == 0, timeout=self._timeout)
            self._device, self._group = _make_group(
                self._store, ip, port, world_size, rank=rank, device=self._device.type, timeout=self._timeout
            )
        except (torch.distributed.DistError, RuntimeError) as error:
            raise WeightSyncError(
                f"Rank {rank} of {world_size} could not join the weight collective at {ip}:{port} within "
                f"{self._timeout.total_seconds():g} s: {error}. All ranks must be able to reach that address; set "
                "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to select the interface."
            ) from error
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=self._device) for _ in range(2)]
        if self._device.type == "cuda":
            # NCCL connects in the first broadcast, without a timeout: do it now, when all ranks have just arrived.
            self._wait(self._broadcast(self._buffer(0, 0)))

    def send(
        self,
        manifest: RefitManifest,
        buckets: Sequence[Sequence[str]],
        tensors: Iterator[tuple[str, torch.Tensor]],
        *,
        sent: RefitManifest | None = None,
        refit: str,
        version: int,
    ) -> int:
        """Broadcast every bucket, from rank 0.

        Args:
            manifest: forms of the tensors, as `tensors` yields them.
            buckets: their names.
            tensors: name and tensor, in the order of the buckets.
            sent: the forms in which they are sent; their own by default.
            refit: id of this refit.
            version: weight version of the tensors.

        Returns:
            Bytes sent.

        Raises:
            WeightSyncError: a rank is gone.
        """
        laid_out = [lay_out(sent or manifest, names) for names in buckets]
        plan = {
            "refit": refit,
            "weight_version": version,
            "buckets": [{name: asdict(place) for name, place in places.items()} for places, _ in laid_out],
            "num_bytes": [size for _, size in laid_out],
        }
        self._send_plan(plan)
        on_the_wire: list[Work | None] = [None, None]
        for number, (places, size) in enumerate(laid_out):
            turn = number % 2
            self._wait(on_the_wire[turn])
            buffer = self._buffer(turn, size)
            try:
                buffer[:_PREFIX].zero_()
                fill(buffer[_PREFIX:], places, islice(tensors, len(places)), manifest)
            except BaseException:
                buffer[0] = _GAVE_UP
                self._wait(on_the_wire[1 - turn])
                self._wait(self._broadcast(buffer))
                raise
            on_the_wire[turn] = self._broadcast(buffer)
        for work in on_the_wire:
            self._wait(work)
        return sum(size for _, size in laid_out)

    def receive(self, load: Load) -> None:
        """Take part in one `send` and pass each bucket on as (tensors, refit, version).

        The tensors are views, which the next bucket but one overwrites.

        Raises:
            WeightSyncError: the first one raised by `load`, the sender failed, or a rank is gone.
        """
        plan = self._receive_plan()
        sizes: list[int] = plan["num_bytes"]
        refused: Exception | None = None
        coming = self._start_receiving(0, sizes)
        for number, forms in enumerate(plan["buckets"]):
            buffer, work = coming
            self._wait(work)
            if int(buffer[0]) == _GAVE_UP:
                raise WeightSyncError(
                    f"The policy aborted before bucket {number + 1} of {len(sizes)} of the refit to version "
                    f"{plan['weight_version']}; see its own error."
                )
            coming = self._start_receiving(number + 1, sizes)
            if refused is None:
                tensors = {name: Placement(**form).view(buffer[_PREFIX:]) for name, form in forms.items()}
                try:
                    load(tensors, plan["refit"], plan["weight_version"])
                except Exception as error:  # raised below, once no rank waits for this one
                    refused = error
        if refused is not None:
            raise refused

    def close(self) -> None:
        """Leave the group; calling it twice is fine."""
        group, self._group = self._group, None
        if group is not None and self._device.type == "cuda":
            # All broadcasts are done. NCCL's `shutdown` would also wait for the other ranks to leave.
            group.abort()
        elif group is not None:
            # Connections close with the object; `shutdown` alone leaves them open, and peers waiting.
            group.shutdown()
        self._store = None
        self._buffers = []

    def _start_receiving(self, number: int, sizes: Sequence[int]) -> tuple[torch.Tensor, Work | None]:
        if number >= len(sizes):
            return torch.empty(0), None
        if number >= 2 and self._device.type == "cuda":
            # Tensors loaded from this buffer were copied asynchronously.
            torch.cuda.current_stream(self._device).synchronize()
        buffer = self._buffer(number % 2, sizes[number])
        return buffer, self._broadcast(buffer)

    def _buffer(self, turn: int, size: int) -> torch.Tensor:
        needed = _PREFIX + size
        if self._buffers[turn].numel() < needed:
            self._buffers[turn] = torch.empty(needed, dtype=torch.uint8, device=self._device)
        return self._buffers[turn][:needed]

    def _send_plan(self, plan: Mapping[str, Any]) -> None:
        text = torch.frombuffer(bytearray(json.dumps(plan).encode()), dtype=torch.uint8).to(self._device)
        self._wait(self._broadcast(torch.tensor([text.numel()], dtype=torch.int64, device=self._device)))
        self._wait(self._broadcast(text))

    def _receive_plan(self) -> dict[str, Any]:
        length = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._wait(self._broadcast(length))
        text = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        self._wait(self._broadcast(text))
        plan: dict[str, Any] = json.loads(bytes(text.cpu().numpy()))
        return plan

    def _broadcast(self, tensor: torch.Tensor) -> Work:
        if self._group is None:
            raise WeightSyncError("This rank has left the weight collective: join again with init_collective on both sides.")
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        work: Work = self._group.broadcast([tensor], options)
        return work

    def _wait(self, work: Work | None) -> None:
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            self.close()
            raise WeightSyncError(
                f"A broadcast of weights failed: {str(error).partition('. This is typically')[0]}. A rank of the weight "
                "collective died or lost its connection; this rank has left the collective, so that no rank waits for it."
            ) from error


def abort_rendezvous(ip: str, port: int) -> None:
    """Make ranks that wait at `ip:port` for another one give up immediately; no effect if nothing listens there."""
    try:
        open_store(ip, port, is_master=False, timeout=timedelta(seconds=_LISTENS_S)).set(_CALLED_OFF, "1")
    except RuntimeError:
        # Rank 0 is not there, so no rank waits at its store; the caller raises its own error.
        return


def _make_group(
    store: TCPStore, ip: str, port: int, world_size: int, *, rank: int, device: str, timeout: timedelta
) -> tuple[torch.device, Any]:
    """NCCL if every rank has its own GPU, otherwise gloo; the ranks exchange this through the store."""
    mine = f"cuda {torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}" if device == "cuda" else "cpu"
    store.set(f"device/{rank}", mine)
    devices = _devices_of_all(store, world_size, timeout)
    store.set_timeout(min(timeout, timedelta(seconds=_MESH_S)))
    prefixed = PrefixStore("weights", store)
    if all(kind != "cpu" for kind in devices) and len(set(devices)) == world_size:
        from torch.distributed import ProcessGroupNCCL

        nccl_options = ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        with _waits_that_raise():
            group = ProcessGroupNCCL(prefixed, rank, world_size, nccl_options)
        return torch.device("cuda", torch.cuda.current_device()), group
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = min(timeout, timedelta(seconds=_MESH_S))
    options._devices = [ProcessGroupGloo.create_device(hostname=own_address(ip))]
    return torch.device("cpu"), ProcessGroupGloo(prefixed, rank, world_size, options)


@contextmanager
def _waits_that_raise() -> Iterator[None]:
    """Make an NCCL group created in the block wait on the host, and raise if a rank is gone or late.

    Otherwise `wait` returns immediately, the next access to the memory hangs, and finally a watchdog kills the process.
    """
    before = os.environ.get(_BLOCKING)
    os.environ[_BLOCKING] = "1"
    try:
        yield
    finally:
        del os.environ[_BLOCKING]
        os.environ.update({} if before is None else {_BLOCKING: before})


def _devices_of_all(store: TCPStore, world_size: int, timeout: timedelta) -> list[str]:
    """The device of each rank, once all are present."""
    keys = [f"device/{rank}" for rank in range(world_size)]
    until = time.monotonic() + timeout.total_seconds()
    while not store.check(keys):
        if store.check([_CALLED_OFF]):
            raise RuntimeError("another rank died or failed before it had joined")
        if time.monotonic() > until:
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            raise RuntimeError(f"rank {', '.join(missing)} did not join")
        time.sleep(0.01)
    return [store.get(key).decode() for key in keys]
