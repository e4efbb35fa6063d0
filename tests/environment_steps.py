"""The checked response of an environment to a batch, in columns."""

import torch

from rl_core.environments.scorer import environment_return
from rl_core.testing.outputs import environment as environment_checks


def step_checked(environment, task_name, message_log_batch, metadata):
    """What `step` returned, checked, as an `EnvironmentReturn`."""
    results = environment_checks.step_checked(environment, task_name, message_log_batch, metadata)
    return environment_return(results)._replace(terminateds=torch.tensor([result.terminated for result in results]))
