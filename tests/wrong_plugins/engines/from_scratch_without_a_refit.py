"""Written from scratch, without the methods that a refit calls."""

from rl_core.interfaces import GenerationInterface


class Engine(GenerationInterface):
    capabilities = ("in_process",)

    def __init__(self, *, config, cluster=None, deadlines=None):
        self.config = config

    def generate(self, data, greedy=False):
        raise AssertionError("a run without weights must not sample")

    def prepare_for_generation(self, *args, **kwargs):
        return True

    def finish_generation(self, *args, **kwargs):
        return True
