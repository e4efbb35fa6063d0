"""Seeds of samples: a function of the run's seed and of what is sampled, never of when or where."""

from __future__ import annotations

import hashlib


def sample_seed(*parts: int) -> int:
    """A seed in [0, 2^63) for a sample.

    Args:
        parts: what identifies the sample: the run's seed, the step, the prompt, which of its group, the turn.
    """
    digest = hashlib.blake2b(b"".join(part.to_bytes(8, "little", signed=True) for part in parts), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1
