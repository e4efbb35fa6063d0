"""The memory limit of kept keys and values."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from rl_backends_hf.sampling.rows import SessionCache

BYTES_PER_TOKEN = 8


def slots():
    """Every slot holds a key and a value of one float32 for each token."""
    return SimpleNamespace(copy_of=lambda slot, length: [(torch.zeros(1, length, 1), torch.zeros(1, length, 1))])


def test_a_row_larger_than_the_whole_limit_is_not_kept_and_discards_no_other_session():
    cache = SessionCache(10 * BYTES_PER_TOKEN)
    cache.put("a", [1] * 4, slots(), 0)
    cache.put("b", [1] * 5, slots(), 1)
    cache.put("c", [1] * 11, slots(), 2)
    assert (len(cache), cache.num_bytes) == (2, 9 * BYTES_PER_TOKEN)
    assert cache.take("c") is None
    # A row that fits discards the least recently used session only.
    cache.put("c", [1] * 3, slots(), 2)
    assert cache.take("a") is None
    assert cache.take("b") is not None


def test_a_session_that_outgrows_the_limit_keeps_none_of_its_earlier_turn():
    cache = SessionCache(10 * BYTES_PER_TOKEN)
    cache.put("a", [1] * 4, slots(), 0)
    cache.put("a", [1] * 11, slots(), 0)
    assert (len(cache), cache.num_bytes) == (0, 0)
