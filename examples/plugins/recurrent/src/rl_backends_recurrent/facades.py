"""What a run constructs; the base classes start the workers in their own processes, or in this one."""

from rl_backends_base import DistributedGeneration, DistributedPolicy
from rl_backends_recurrent.engine import RecurrentEngineWorker
from rl_backends_recurrent.policy import RecurrentPolicyWorker


class RecurrentPolicy(DistributedPolicy):
    """One worker per rank; rows are divided among them."""

    worker_class = RecurrentPolicyWorker


class RecurrentGeneration(DistributedGeneration):
    """One worker per replica; rows are divided among them."""

    worker_class = RecurrentEngineWorker
