"""Our own distributions keep the promises of plugins as packages."""

from rl_core.testing import PackagingConformance


class TestHF(PackagingConformance):
    component = "hf"


class TestTrain(PackagingConformance):
    component = "train"


class TestEnvironments(PackagingConformance):
    component = "rl-envs"
