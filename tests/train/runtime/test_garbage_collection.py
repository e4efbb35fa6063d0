"""Full garbage collections are rare while a run steps, and younger ones are not."""

import gc
import json
import os
import subprocess
import sys

from rl_train.garbage_collection import rare_full_collections

COLLECTIONS = """
import gc, json
from contextlib import nullcontext
from rl_train.garbage_collection import rare_full_collections

def collections(context):
    counts = [0, 0, 0]

    def count(phase, info):
        counts[info["generation"]] += phase == "start"

    gc.collect()
    gc.callbacks.append(count)
    with context:
        kept = [[number] for number in range(400_000)]
    gc.callbacks.remove(count)
    return counts

print(json.dumps([collections(nullcontext()), collections(rare_full_collections())]))
"""


def test_full_collections_are_rare_and_younger_ones_as_frequent():
    # In a new process, with Python's thresholds: the tests have other ones, and Python puts off a full collection
    # until a quarter of all objects are new.
    environment = {name: value for name, value in os.environ.items() if name != "RLCORE_TEST_IMPORTS"}
    output = subprocess.run(
        [sys.executable, "-c", COLLECTIONS], env=environment, capture_output=True, text=True, check=True
    ).stdout
    (young, middle, full), (few_young, few_middle, few_full) = json.loads(output)
    assert few_full < full
    assert few_young + few_middle + few_full >= 0.9 * (young + middle + full)


def test_the_thresholds_are_restored():
    before = gc.get_threshold()
    with rare_full_collections():
        assert gc.get_threshold() != before
    assert gc.get_threshold() == before
