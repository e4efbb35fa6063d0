"""Digests that prove two copies of the weights equal, bit for bit.

A tensor's digest covers its dtype, its shape and every bit in row-major order; the combined one also covers names, and does
not depend on the order of the tensors. There are two kinds, and both sides must use the same:

- `xxh3`: XXH3-128 over the bytes in place. For the CPU.
- `wsum`: a sum of 32-bit words, each times an odd pseudo-random 64-bit weight of its position, modulo 2**64. Integer sums do
  not depend on the order of addition, so it is exact on any device and needs no copy to another. One changed word always
  changes it (an odd weight is invertible modulo 2**64); two exchanged words leave it equal with a probability of at most
  2**-32.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Literal

import torch
import xxhash

from rl_core.data.generation_io import mix
from rl_core.errors import WeightSyncError
from rl_core.weights.manifest import ON_ONE_THREAD, dtype_name

Kind = Literal["xxh3", "wsum"]

_WORDS = 1 << 18
"""Words per chunk: its weights are computed once per device, and its products (2 MiB) stay in a CPU's cache."""
_SHOWN = 5
_CHUNKS_AT_ONCE = {"cpu": 1, "cuda": 64}
_SAMPLED_TENSORS = 64
"""Drawn at random: at equal distances, they could be only the first matrices of adapters, which the first step leaves."""
_SAMPLED_ELEMENTS = 64
"""Elements of each sampled tensor, evenly spaced."""
_MASK = (1 << 64) - 1
_GOLDEN = -7046029254386353131
"""0x9E3779B97F4A7C15, the increment of splitmix64, as an int64."""


def natural_kind(device: torch.device) -> Kind:
    """The kind that needs no copy of tensors on this device."""
    return "xxh3" if device.type == "cpu" else "wsum"


def tensor_digest(tensor: torch.Tensor, *, kind: Kind = "xxh3") -> str:
    """Digest of one tensor, such as `float32[4,3]:9f86...`; about 0.1 ns per byte (`xxh3`, CPU) if it is contiguous.

    Args:
        tensor: any dtype, shape and device; a tensor that is not contiguous is copied first.
        kind: see the module docstring.
    """
    return tensor_digests([("", tensor)], kind=kind)[""]


def tensor_digests(
    tensors: Iterable[tuple[str, torch.Tensor]], *, kind: Kind = "xxh3", dtypes: Mapping[str, torch.dtype] | None = None
) -> dict[str, str]:
    """Name to `tensor_digest`; for `wsum`, the host waits once for all of them, after the last.

    Args:
        tensors: name and tensor; a tensor may change once the next one is taken.
        kind: see the module docstring.
        dtypes: name to the dtype to cast to; its own by default.
    """
    forms: dict[str, str] = {}
    values: dict[str, str] = {}
    sums: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        dtype = (dtypes or {}).get(name, tensor.dtype)
        forms[name] = f"{dtype_name(dtype)}[{','.join(map(str, tensor.shape))}]"
        # Strides of axes of length 0 or 1 are arbitrary, even if a tensor counts as contiguous.
        flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
        if kind == "wsum":
            sums[name] = _weighted_sum(flat.to(dtype))
        else:
            values[name] = _xxh3(flat, dtype)
    if sums:
        totals = torch.stack(list(sums.values())).tolist()
        values = {name: f"{total & _MASK:016x}" for name, total in zip(sums, totals, strict=True)}
    return {name: f"{form}:{values[name]}" for name, form in forms.items()}


def combine(digests: Mapping[str, str], *, kind: Kind = "xxh3") -> str:
    """One digest of all tensors, by name: `<kind>:<hex>`; the order of the mapping does not matter."""
    lines = "".join(f"{len(name)}:{name}={digests[name]}\n" for name in sorted(digests))
    return f"{kind}:{xxhash.xxh3_128_hexdigest(lines.encode())}"


def digest_of(weights: Iterable[tuple[str, torch.Tensor]], *, whole: bool) -> tuple[str, bool] | None:
    """The digest, and whether all weights in it are float32; None without weights.

    Args:
        weights: name and tensor of each weight or shard.
        whole: digest every element instead of a sample.
    """
    tensors = [(name, tensor.detach()) for name, tensor in weights if tensor.numel()]
    if not tensors:
        return None
    exact = all(tensor.dtype == torch.float32 for _, tensor in tensors)
    if whole:
        kind = natural_kind(tensors[0][1].device)
        return combine(tensor_digests(tensors, kind=kind), kind=kind), exact
    drawn = random.Random(0).sample(tensors, min(len(tensors), _SAMPLED_TENSORS))
    sample = torch.cat([tensor.reshape(-1)[:: -(-tensor.numel() // _SAMPLED_ELEMENTS)].float() for _, tensor in drawn])
    return tensor_digest(sample.cpu()), exact


def describe_differences(
    one: Mapping[str, str], other: Mapping[str, str], *, sides: tuple[str, str] = ("the policy", "the engine")
) -> list[str]:
    """One line per tensor whose digests differ, the first five by name, with a hint if it equals another tensor."""
    owner = {digest: name for name, digest in one.items()}
    lines = []
    for name in sorted(one.keys() | other.keys()):
        ours, theirs = one.get(name), other.get(name)
        if ours == theirs:
            continue
        whose = owner.get(theirs or "")
        hint = f" (which is {sides[0]}'s {whose})" if whose is not None else ""
        lines.append(f"{name}: {ours or 'absent'} in {sides[0]}, {theirs or 'absent'} in {sides[1]}{hint}")
    return lines[:_SHOWN] + ([f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])


def _xxh3(flat: torch.Tensor, dtype: torch.dtype) -> str:
    """Digest of a tensor as `dtype`; cast in pieces on the CPU, because allocating a copy would cost several times the hash."""
    if flat.numel() == 0 or dtype == flat.dtype or flat.device.type != "cpu":
        return xxhash.xxh3_128_hexdigest(flat.to(dtype).cpu().view(torch.uint8).numpy().data if flat.numel() else b"")
    digest, piece = xxhash.xxh3_128(), torch.empty(ON_ONE_THREAD, dtype=dtype)
    for part in flat.split(ON_ONE_THREAD):
        digest.update(piece[: part.numel()].copy_(part).view(torch.uint8).numpy().data)
    return str(digest.hexdigest())


def _weighted_sum(flat: torch.Tensor) -> torch.Tensor:
    """The sum, as an int64 on the tensor's device."""
    words = _as_words(flat)
    weights = _position_weights(flat.device)
    per_call = _WORDS * _CHUNKS_AT_ONCE.get(flat.device.type, 1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), per_call):
        block = words[start : start + per_call]
        full = block.numel() // _WORDS * _WORDS
        first, rest = start // _WORDS, block[full:].to(torch.int64)
        parts = (block[:full].view(-1, _WORDS).to(torch.int64) * weights).sum(dim=1)
        parts = torch.cat([parts, (rest * weights[: rest.numel()]).sum(dim=0, keepdim=True)])
        chunks = torch.arange(first, first + len(parts), device=flat.device)
        total += (parts * _odd_noise(~chunks)).sum()
    return total


def _as_words(flat: torch.Tensor) -> torch.Tensor:
    """The bits as integers: 32-bit words where the length allows it, whole elements otherwise.

    The choice depends only on length and dtype, so both copies of a tensor are split alike.
    """
    length = flat.numel() * flat.element_size()
    if flat.element_size() in (4, 8, 16) or length % 4 == 0:
        misplaced = flat.storage_offset() * flat.element_size() % 4 != 0
        return (flat.clone() if misplaced else flat).view(torch.int32)
    return flat.view(torch.int16 if flat.element_size() == 2 else torch.uint8)


@lru_cache(maxsize=16)
def _position_weights(device: torch.device) -> torch.Tensor:
    return _odd_noise(torch.arange(_WORDS, dtype=torch.int64, device=device))


def _odd_noise(index: torch.Tensor) -> torch.Tensor:
    """An odd int64 for each index: the finaliser of splitmix64, in arithmetic that wraps equally on every device."""
    return mix(index * _GOLDEN) | 1


def same_digests_on_every_replica(per_replica: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Name to digest, equal on all replicas.

    Raises:
        WeightSyncError: a replica differs from the first; names the tensors.
    """
    first = per_replica[0]
    for rank, digests in enumerate(per_replica[1:], 1):
        lines = describe_differences(first, digests, sides=("replica 0", f"replica {rank}"))
        if lines:
            raise WeightSyncError("The generation replicas do not have the same weights:\n  " + "\n  ".join(lines))
    return dict(first)
