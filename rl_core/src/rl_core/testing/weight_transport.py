"""Conformance of weight transports: a policy and an engine of the kit, with tensors that are easily damaged on the way."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.dispatch.facades import GenerationFacade, PolicyFacade
from rl_core.errors import DeadlineExceededError
from rl_core.interfaces.policy import TransportContext, WeightTransport
from rl_core.plugins.component import Kind, capability_problem, is_path
from rl_core.rendezvous.interfaces import free_port
from rl_core.testing.promises import Condition, Conformance, Found, must_raise, promise
from rl_core.testing.reference import ReferenceSender
from rl_core.weights.fingerprint import describe_differences, tensor_digests
from rl_core.weights.manifest import dtype_of
from rl_core.weights.receiver import WeightSink

_BUFFER, _DEADLINE_S, _SHORT_S = 6144, 60.0, 0.2
_ARRIVES = "test_every_tensor_arrives_bit_for_bit"


def make_tensors(version: int) -> dict[str, torch.Tensor]:
    """The weights of a version: views, special values, several dtypes, and a name that no module has."""
    generator = torch.Generator().manual_seed(version)
    shared = torch.randn(8, 20, 16, generator=generator)
    tensors = {f"layers.{layer}.weight": shared[layer] for layer in range(7)}
    tensors |= {"transposed": shared[7].T, "tied": shared[0], "rounded": torch.randn(9, 3, generator=generator)}
    tensors |= {"half": tensors["rounded"].bfloat16(), "steps": torch.tensor([2**60 + version, -version])}
    tensors["Über/a b"] = torch.tensor(version + 0.5)
    tensors["special"] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, version])
    return tensors


class PolicyEnd(ReferenceSender):
    """A policy worker that only sends."""

    def __init__(self, context: Any, config: Any) -> None:
        super().__init__(make_tensors(0), Path())
        self.context = context

    def setup(self) -> dict[str, Any]:
        return {}

    def train(self, *, seed: int) -> None:
        self._version, self.weights = seed, make_tensors(seed)

    shutdown = ReferenceSender.leave_refit


class EngineEnd(WeightSink):
    """A generation worker that only receives, and can be slow or fail."""

    def __init__(self, context: Any, config: Any) -> None:
        self.context, self.seconds, self.fails = context, 0.0, False
        self.tensors = {name: torch.zeros_like(tensor) for name, tensor in make_tensors(0).items()}
        self.tensors["rounded"] = self.tensors["rounded"].bfloat16()

    def setup(self) -> dict[str, Any]:
        return {}

    def disturb(self, seconds: float, fails: bool) -> None:
        """From now on, take some seconds for each bucket, or fail once it is loaded."""
        self.seconds, self.fails = seconds, fails

    def named_weights(self) -> Mapping[str, torch.Tensor]:
        return self.tensors

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        threading.Event().wait(self.seconds)
        super().load_weights(tensors)
        if self.fails:
            raise OSError("the kit's engine cannot load this bucket")

    def load_by_reference(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors["rounded"] = self.tensors["rounded"].float()  # shared memory has the policy's dtype
        super().load_by_reference(tensors)
        if self.fails:
            raise OSError("the kit's engine cannot load this bucket")

    shutdown = WeightSink.leave_refit


class _Subject:
    """Both ends, and the bytes that one of them has written and the other not yet loaded."""

    def __init__(self, policy: PolicyFacade, engine: GenerationFacade, transport: type[WeightTransport]) -> None:
        self.policy, self.engine, self.transport = policy, engine, transport
        self.dtypes: Mapping[str, str] = {}
        self.version, self.in_transit, self.most = 0, 0, 0
        self._write, self._load = policy.get_weights_ipc_handles, engine.update_weights
        policy.get_weights_ipc_handles = self._written  # type: ignore[method-assign]
        engine.update_weights = self._loaded  # type: ignore[method-assign]

    def push(self, transport: WeightTransport) -> int:
        """Push new weights."""
        self.version, self.in_transit, self.most = self.version + 1, 0, 0
        self.policy.group.run_all("train", seed=self.version)
        self.dtypes = self.engine.prepare_refit_info(self.policy.prepare_refit_info() or {})
        try:
            return transport.push(self.policy, self.engine)
        finally:
            self.policy.finish_refit()

    def _written(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        handles = self._write(*args, **kwargs)
        self.in_transit += int(handles["num_bytes"])
        self.most = max(self.in_transit, self.most)
        return handles

    def _loaded(self, ipc_handles: Mapping[str, Any]) -> None:
        self._load(ipc_handles)
        self.in_transit -= int(ipc_handles["num_bytes"])


_COPYING = Condition(text="the engine shares the policy's memory", holds=lambda kit: not kit.registered().load().shares_memory)


class WeightTransportConformance(Conformance[_Subject]):
    """Promises of weight transports. One that requires `collective` runs over Ray, and one by reference in this process."""

    kind = Kind.WEIGHT_TRANSPORT
    minimum = 7
    created_again = True

    @classmethod
    def create(cls) -> _Subject:
        chosen: type[WeightTransport] = cls.registered().load(expect=WeightTransport)
        if (problem := capability_problem(chosen.requires)) is not None:
            raise Found(problem)
        cluster = None if "by_reference" in chosen.requires else cls.cluster(needs_ray="collective" in chosen.requires)
        sections = PolicyConfig(backend="kit", model_name="kit"), GenerationConfig(backend="kit")
        # Refits are called, and no method that is abstract: those with rows, which backends define.
        kinds = [type("Kit", (base,), dict.fromkeys(base.__abstractmethods__)) for base in (PolicyFacade, GenerationFacade)]
        workers = 1 if cluster is None else 2
        policy = kinds[0](worker_class=PolicyEnd, config=sections[0], cluster=cluster)
        cls._exits.callback(policy.shutdown)
        engine = kinds[1](worker_class=EngineEnd, config=sections[1], cluster=cluster, num_workers=workers)
        cls._exits.callback(engine.shutdown)
        return _Subject(policy, engine, chosen)

    @promise("It is created with a `TransportContext`, and `name` is the name under which it is registered.")
    def test_it_is_created_from_its_context(self) -> str:
        transport = self._transport()
        if not is_path(self.component) and transport.name != self.component:
            raise Found(f"`name` is {transport.name!r}, which errors of a run would show instead of {self.component!r}.")
        return f"it requires {', '.join(transport.requires) or 'no capability'}"

    @promise("Every tensor arrives bit for bit in the engine's dtype, under the version of the policy, in every push.")
    def test_every_tensor_arrives_bit_for_bit(self) -> None:
        transport = self._transport()
        for _ in range(2):
            self._push_all(transport)

    @promise("`push` returns the number of bytes moved; 0 if nothing was copied.", after=_ARRIVES)
    def test_push_returns_the_bytes_moved(self) -> str:
        moved = self.subject().push(self._transport())
        dtypes = {name: dtype_of(dtype) for name, dtype in self.subject().dtypes.items()}
        copied = make_tensors(0) if _COPYING.holds(type(self)) else {}
        least = sum(tensor.numel() * dtypes[name].itemsize for name, tensor in copied.items())
        if not isinstance(moved, int) or not least <= moved <= 2 * least:  # buckets have padding
            raise Found(f"it returned {moved!r}, and the tensors have {least} bytes.")
        return f"{moved} bytes"

    @promise("At most `buffer_bytes` are in transit at a time.", applies=_COPYING, after=_ARRIVES)
    def test_the_buffer_limits_the_bytes_in_transit(self) -> str:
        self.subject().push(self._transport())
        if (most := self.subject().most) > _BUFFER:
            raise Found(f"{most} bytes were written and not yet loaded, with `buffer_bytes` {_BUFFER}.")
        return f"at most {most} of {_BUFFER} bytes"

    @promise("If the engine cannot load a bucket, `push` raises, and the next push sends everything.", after=_ARRIVES)
    def test_a_failed_push_is_an_error_and_the_next_one_is_complete(self) -> None:
        subject, transport = self.subject(), self._transport()
        subject.engine.group.run_all("disturb", 0.0, True)
        try:
            with must_raise(Exception, otherwise="the engine raised an error while it loaded, and `push` returned."):
                subject.push(transport)
        finally:
            subject.engine.group.run_all("disturb", 0.0, False)
        self._push_all(transport)

    @promise("No file is left in `context.folder`, also after a push that failed.", after=_ARRIVES)
    def test_no_file_is_left(self) -> None:
        if left := sorted(str(path.relative_to(self._folder)) for path in self._folder.rglob("*")):
            raise Found(f"{len(left)} files or folders are left, such as {left[0]}.")

    @promise("`close` may be called twice, and before the first push.")
    def test_close_may_be_called_twice(self) -> None:
        for _ in range(2):
            transport = self._transport()
            transport.close()
            transport.close()

    @promise("A push that takes longer than `deadline_s` is a `DeadlineExceededError`.", applies=_COPYING, after=_ARRIVES)
    def test_a_slow_push_ends_at_its_deadline(self) -> None:
        self.subject().engine.group.run_all("disturb", 2 * _SHORT_S, False)
        slow = f"the engine took {2 * _SHORT_S:g} s for each bucket, and `deadline_s` was {_SHORT_S:g}."
        with must_raise(DeadlineExceededError, otherwise=slow):
            self.subject().push(self._transport(deadline_s=_SHORT_S))

    def _push_all(self, transport: WeightTransport) -> None:
        """Push, and compare what has arrived."""
        subject = self.subject()
        subject.push(transport)
        if (version := subject.engine.weight_version) != subject.version:
            raise Found(f"the engine has weight version {version} after a push of version {subject.version}.")
        arrived = subject.engine.weight_digests()
        dtypes = {name: dtype_of(digest.partition("[")[0]) for name, digest in arrived.items()}
        sent = tensor_digests(make_tensors(subject.version).items(), dtypes=dtypes)
        if differences := describe_differences(sent, arrived):
            raise Found("; ".join(differences))

    def _transport(self, *, deadline_s: float = _DEADLINE_S) -> WeightTransport:
        subject = self.subject()
        context = TransportContext(
            buffer_bytes=_BUFFER,
            deadline_s=deadline_s,
            wait=lambda calls, seconds: [call.result(seconds) for call in calls],
            rendezvous=lambda: ("127.0.0.1", free_port("127.0.0.1")),
            folder=self._folder,
            receiver_dtypes=lambda: subject.dtypes,
            num_receivers=subject.engine.num_workers,
        )
        transport = subject.transport(context)
        self._exits.callback(transport.close)
        return transport
