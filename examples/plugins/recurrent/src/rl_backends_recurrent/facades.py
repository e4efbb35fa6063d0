"""What a run constructs: the workers, which import torch, start in their own processes or in this one."""

from rl_core.backend import DistributedGeneration, DistributedPolicy


class RecurrentPolicy(DistributedPolicy):
    """One worker per rank; rows are divided among them."""

    def __init__(self, *, config, cluster=None, deadlines=None, name="policy"):
        from rl_backends_recurrent.policy import RecurrentPolicyWorker

        super().__init__(worker_class=RecurrentPolicyWorker, config=config, cluster=cluster, deadlines=deadlines, name=name)


class RecurrentGeneration(DistributedGeneration):
    """One worker per replica; rows are divided among them."""

    def __init__(self, *, config, cluster=None, deadlines=None):
        from rl_backends_recurrent.engine import RecurrentEngineWorker

        super().__init__(worker_class=RecurrentEngineWorker, config=config, cluster=cluster, deadlines=deadlines)
