"""A small model as a policy worker and a generation worker that only refit, with real tensors."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from rl_backends_base import add_adapters
from rl_core.weights.manifest import manifest_of, weights_of
from rl_core.weights.receiver import WeightSink
from rl_core.weights.source import WeightSource


class TinyModel(nn.Module):
    """Square matrices of equal shape (so that a swap or a transposition fits), a tied head, a buffer, a scalar, a bias."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(32, width)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.norm = nn.Parameter(torch.randn(width))
        self.temperature = nn.Parameter(torch.randn(()))
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("running", torch.randn(width))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.to(dtype)


def context(rank: int = 0) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, device="cpu")


class TinyPolicy(WeightSource):
    def __init__(self, context, config=None, seed: int = 1, width: int = 8) -> None:
        self.context = context
        self.model = TinyModel(seed, width=width)
        self.version = 0

    def setup(self):
        return {"device": "cpu"}

    def iter_weights(self, names=None):
        weights = weights_of(self.model)
        for name in names if names is not None else weights:
            yield name, weights[name]

    def weight_manifest(self):
        return manifest_of(weights_of(self.model))

    def get_weight_version(self) -> int:
        return self.version

    def step(self) -> int:
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for tensor in weights_of(self.model).values():
                tensor.add_(torch.randn(tensor.shape, generator=generator))
        self.version += 1
        return self.version

    def offload_before_refit(self) -> None: ...

    def offload_after_refit(self) -> None: ...

    def weights(self):
        return {name: tensor.detach().clone() for name, tensor in weights_of(self.model).items()}

    def shutdown(self) -> None:
        self.leave_refit()


class TinyEngine(WeightSink):
    dtype = torch.float32

    def __init__(self, context, config=None, seed: int = 2, width: int = 8) -> None:
        self.context = context
        self.model = TinyModel(seed, self.dtype, width=width)
        self.changes = 0

    def setup(self):
        return {"device": "cpu"}

    def named_weights(self):
        return weights_of(self.model)

    def weights_changed(self) -> None:
        self.changes += 1

    def invalidate_kv_cache(self) -> bool:
        return True

    def weights(self):
        return {name: tensor.detach().clone() for name, tensor in weights_of(self.model).items()}

    def num_changes(self) -> int:
        return self.changes

    def shutdown(self) -> None:
        self.leave_refit()


class HalfPrecisionEngine(TinyEngine):
    dtype = torch.bfloat16


class SlowEngine(TinyEngine):
    """Loads each bucket slowly and reports whether it is loading."""

    loading = False

    def load_weights(self, tensors) -> None:
        self.loading = True
        time.sleep(0.3)
        super().load_weights(tensors)
        self.loading = False

    def is_loading(self) -> bool:
        return self.loading


class ForgetfulEngine(TinyEngine):
    """Reports that it loaded everything but leaves one tensor unchanged."""

    def load_weights(self, tensors) -> None:
        WeightSink.load_weights(self, {name: tensor for name, tensor in tensors.items() if name != "k.weight"})


class ForgetfulSecondReplica(ForgetfulEngine):
    def load_weights(self, tensors) -> None:
        (ForgetfulEngine if self.context.rank == 1 else TinyEngine).load_weights(self, tensors)


class PolicyThatLoses(TinyPolicy):
    def prepare_weights_for_ipc(self, budget_bytes: int = 2**20, **kwargs):
        for bucket in super().prepare_weights_for_ipc(budget_bytes, **kwargs):
            if "q.weight" in bucket:
                bucket.remove("q.weight")
        self._refit.buckets[:] = [bucket for bucket in self._refit.buckets if bucket]
        return self._refit.buckets


class PolicyThatRepeats(TinyPolicy):
    def prepare_weights_for_ipc(self, budget_bytes: int = 2**20, **kwargs):
        super().prepare_weights_for_ipc(budget_bytes, **kwargs).append(["q.weight"])
        return self._refit.buckets


class GatheringPolicy(TinyPolicy):
    """One of two ranks, which take part in gathering each tensor."""

    def join(self, port: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=self.context.rank == 0)
        dist.init_process_group("gloo", store=store, rank=self.context.rank, world_size=2)

    def iter_weights(self, names=None):
        for name, tensor in super().iter_weights(names):
            whole = tensor.detach().clone()
            dist.broadcast(whole, src=0)
            yield name, whole

    def shutdown(self) -> None:
        super().shutdown()
        dist.destroy_process_group()


class MortalEngine(TinyEngine):
    """Its process ends in the second bucket."""

    buckets = 0

    def load_weights(self, tensors) -> None:
        self.buckets += 1
        if self.buckets == 2:
            os._exit(1)
        super().load_weights(tensors)


class PolicyThatBreaks(TinyPolicy):
    """Fails after gathering three tensors, as if another rank had died."""

    def iter_weights(self, names=None):
        for name, tensor in super().iter_weights(names):
            if name == "k.weight":
                raise OSError("the disk of k.weight is gone")
            yield name, tensor


ADAPTED = {"q": 3, "k": 8}
"""Rank of the adapter of each adapted layer; A and B of one are square."""


class AdaptedPolicy(TinyPolicy):
    """Trains adapters of two layers; all other weights are frozen."""

    def __init__(self, context, config=None, seed: int = 1, width: int = 8) -> None:
        super().__init__(context, config, seed, width)
        add_adapters(self.model, ADAPTED)

    def step(self) -> int:
        generator = torch.Generator().manual_seed(self.version)
        for name, tensor in weights_of(self.model).items():
            if ".lora_" in name:
                tensor.add_(torch.randn(tensor.shape, generator=generator))
        self.version += 1
        return self.version


class AdaptedEngine(TinyEngine):
    """Computes with adapters of any layers; records the names that arrive in each refit, and how often layers are prepared."""

    def __init__(self, context, config=None, seed: int = 2, width: int = 8) -> None:
        super().__init__(context, config, seed, width)
        self.arrived: list[set[str]] = []
        self.prepared = 0

    def expect_adapters(self, ranks) -> None:
        add_adapters(self.model, ranks)
        self.prepared += 1

    def refit_begins(self) -> None:
        self.arrived.append(set())

    def load_weights(self, tensors) -> None:
        super().load_weights(tensors)
        self.arrived[-1] |= tensors.keys()

    def load_by_reference(self, tensors) -> None:
        super().load_by_reference(tensors)
        self.arrived[-1] |= tensors.keys()

    def names_of_refits(self) -> list[set[str]]:
        return self.arrived
