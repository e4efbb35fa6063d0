"""The transports of rl_train keep the promises of weight transports."""

import pytest

from rl_core.testing import WeightTransportConformance


class TestByReference(WeightTransportConformance):
    component = "by_reference"


class TestSharedMemory(WeightTransportConformance):
    component = "shared_memory"


class TestDisk(WeightTransportConformance):
    component = "disk"


@pytest.mark.full("tests/core/weights broadcasts between Ray actors")
@pytest.mark.ray
class TestCollective(WeightTransportConformance):
    component = "collective"


@pytest.mark.full("tests/core/weights sends files and shared memory between Ray actors")
@pytest.mark.ray
class TestDiskOverRay(WeightTransportConformance):
    component = "disk"
    uses_ray = True


@pytest.mark.full("tests/core/weights sends files and shared memory between Ray actors")
@pytest.mark.ray
class TestSharedMemoryOverRay(WeightTransportConformance):
    component = "shared_memory"
    uses_ray = True
