"""Full garbage collections are rare while a run steps, and younger ones are not."""

import gc
from contextlib import nullcontext

from rl_train.garbage_collection import rare_full_collections


def collections(context):
    """How many collections of each generation happen while 400,000 objects are kept."""
    counts = [0, 0, 0]

    def count(phase, info):
        counts[info["generation"]] += phase == "start"

    # Objects of other tests do not count: Python puts off a full collection until a quarter of all objects are new.
    gc.freeze()
    gc.collect()
    gc.callbacks.append(count)
    try:
        with context:
            kept = [[number] for number in range(400_000)]
        del kept
    finally:
        gc.callbacks.remove(count)
        gc.unfreeze()
    return counts


def test_full_collections_are_rare_and_younger_ones_as_frequent():
    young, middle, full = collections(nullcontext())
    few_young, few_middle, few_full = collections(rare_full_collections())
    assert few_full < full
    assert few_young + few_middle + few_full >= 0.9 * (young + middle + full)


def test_the_thresholds_are_restored():
    before = gc.get_threshold()
    with rare_full_collections():
        assert gc.get_threshold() != before
    assert gc.get_threshold() == before
