"""What a run constructs; the base classes start the workers in their own processes, or in this one."""

from rl_backends_recurrent.engine import RecurrentEngineWorker
from rl_backends_recurrent.policy import RecurrentPolicyWorker
from rl_core.backend import DistributedGeneration, DistributedPolicy


class RecurrentPolicy(DistributedPolicy):
    """One worker per rank; rows are divided among them."""

    worker_class = RecurrentPolicyWorker


class RecurrentGeneration(DistributedGeneration):
    """One worker per replica; rows are divided among them."""

    worker_class = RecurrentEngineWorker
