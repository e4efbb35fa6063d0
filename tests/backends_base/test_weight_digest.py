"""The sample of a rank's weights."""

import pytest
import torch

from rl_core.weights.fingerprint import digest_of


def weights(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(f"{number}", torch.randn(8, 16, generator=generator)) for number in range(count)]


@pytest.mark.parametrize("count", [1, 64, 65, 84, 112, 448, 504, 1000])
@pytest.mark.parametrize("period", [2, 3, 7])
def test_a_change_of_every_nth_tensor_changes_the_sample(count, period):
    before = digest_of(weights(count), whole=False)
    assert digest_of(weights(count), whole=False) == before
    for first in range(min(count, period)):
        changed = [(name, tensor + (number % period == first)) for number, (name, tensor) in enumerate(weights(count))]
        assert digest_of(changed, whole=False) != before
