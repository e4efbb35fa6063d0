"""What a run constructs: the workers, which import torch, start in their own processes or in this one."""

from rl_backends_base import DistributedGeneration, DistributedPolicy


class LitGPTPolicy(DistributedPolicy):
    """One worker per rank; rows are divided among them."""

    def __init__(self, *, config, cluster=None, deadlines=None, name="policy"):
        from rl_backends_litgpt.policy import LitGPTPolicyWorker

        super().__init__(worker_class=LitGPTPolicyWorker, config=config, cluster=cluster, deadlines=deadlines, name=name)


class LitGPTGeneration(DistributedGeneration):
    """One worker per replica; rows are divided among them."""

    def __init__(self, *, config, cluster=None, deadlines=None):
        from rl_backends_litgpt.engine import LitGPTEngineWorker

        super().__init__(worker_class=LitGPTEngineWorker, config=config, cluster=cluster, deadlines=deadlines)
