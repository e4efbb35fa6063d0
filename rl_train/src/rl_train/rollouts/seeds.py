"""Seeds of samples: a function of the run's seed and of what is sampled, never of when or where."""

from __future__ import annotations

import hashlib
from enum import IntEnum


class SampleStream(IntEnum):
    """What rollouts are for; the same prompt has other seeds in each."""

    TRAINING = 0
    VALIDATION = 1


def rollout_seed(run_seed: int, stream: SampleStream, *, ordinal: int, sample: int, turn: int) -> int:
    """The seed in [0, 2^63) of one turn of one rollout.

    It depends neither on the step that trains on the rollout nor on what is sampled together with it, so that a resumed run, a
    further draw of dynamic sampling and a source that samples ahead all give a prompt the same seed.

    Args:
        run_seed: the algorithm's `seed`.
        stream: what the rollout is for.
        ordinal: the prompt's number, from 0: in training in the loader's endless order (`BatchedDataLoader.next_ordinal`), in
            validation among the prompts of one validation.
        sample: which rollout of the prompt, from 0.
        turn: which turn of the rollout, from 0.
    """
    return sample_seed(run_seed, stream, ordinal, sample, turn)


def sample_seed(*parts: int) -> int:
    """A seed in [0, 2^63): a hash of whole numbers.

    Args:
        parts: what identifies the draw, each within 64 bits.
    """
    digest = hashlib.blake2b(b"".join(int(part).to_bytes(8, "little", signed=True) for part in parts), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1
