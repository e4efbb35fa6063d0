"""Seeds of samples, which only depend on the run's seed and the sampled prompt, not on the time or the worker."""

from __future__ import annotations

import hashlib
import struct
from enum import IntEnum


class SampleStream(IntEnum):
    """Purpose of rollouts; the seeds of a prompt differ between them."""

    TRAINING = 0
    VALIDATION = 1


def rollout_seed(run_seed: int, stream: SampleStream, *, ordinal: int, sample: int, turn: int) -> int:
    """The seed in [0, 2^63) of one turn of one rollout.

    It depends neither on the training step nor on the other rows of the batch, so a resumed run, an additional draw of dynamic
    sampling and a prefetching source all give a prompt the same seed. A prompt that was put back is sampled again with its
    seed, by newer weights.

    Args:
        run_seed: the algorithm's `seed`.
        stream: purpose of the rollout.
        ordinal: the prompt's number, from 0: for training in the loader's endless order (`BatchedDataLoader.next_ordinal`), for
            validation among the prompts of one validation.
        sample: which rollout of the prompt, from 0.
        turn: which turn of the rollout, from 0.
    """
    return sample_seed(run_seed, stream, ordinal, sample, turn)


def sample_seed(*parts: int) -> int:
    """A seed in [0, 2^63): a hash of integers.

    Args:
        parts: integers that identify the draw, each within 64 bits.
    """
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1
