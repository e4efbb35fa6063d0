"""The machinery of a backend: the author writes the model, and the classes here do the rest.

The names below are loaded when they are first used: torch.distributed.checkpoint takes almost a second to import, and
engines do not need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.first_use import import_on_first_use

if TYPE_CHECKING:
    from rl_backends_base.adapters import AddedAdapter as AddedAdapter
    from rl_backends_base.adapters import add_adapters as add_adapters
    from rl_backends_base.checkpoint_names import CheckpointNames as CheckpointNames
    from rl_backends_base.data_only import DAMAGE_ERRORS as DAMAGE_ERRORS
    from rl_backends_base.data_only import TRAINER_FILE as TRAINER_FILE
    from rl_backends_base.data_only import DataOnlyBytes as DataOnlyBytes
    from rl_backends_base.data_only import DataOnlyReader as DataOnlyReader
    from rl_backends_base.data_only import read_metadata as read_metadata
    from rl_backends_base.data_only import read_state_file as read_state_file
    from rl_backends_base.data_only import read_trainer_file as read_trainer_file
    from rl_backends_base.data_only import reason_of as reason_of
    from rl_backends_base.data_only import write_error as write_error
    from rl_backends_base.distributed_generation import DistributedGeneration as DistributedGeneration
    from rl_backends_base.distributed_policy import DistributedPolicy as DistributedPolicy
    from rl_backends_base.engine_worker import TokenwiseWorker as TokenwiseWorker
    from rl_backends_base.microbatches import MicrobatchRows as MicrobatchRows
    from rl_backends_base.microbatches import MicrobatchSplitter as MicrobatchSplitter
    from rl_backends_base.microbatches import ScoringInput as ScoringInput
    from rl_backends_base.microbatches import first_non_finite_loss as first_non_finite_loss
    from rl_backends_base.microbatches import non_finite_step_error as non_finite_step_error
    from rl_backends_base.microbatches import padded_input as padded_input
    from rl_backends_base.microbatches import reduce_metrics as reduce_metrics
    from rl_backends_base.microbatches import scored_tokens as scored_tokens
    from rl_backends_base.optimizer import OptimizerChain as OptimizerChain
    from rl_backends_base.optimizer_settings import OptimizerSettings as OptimizerSettings
    from rl_backends_base.optimizer_settings import build_scheduler as build_scheduler
    from rl_backends_base.optimizer_settings import call_named as call_named
    from rl_backends_base.optimizer_step import LossOfMicrobatch as LossOfMicrobatch
    from rl_backends_base.parallel import FullyShard as FullyShard
    from rl_backends_base.parallel import Parallel as Parallel
    from rl_backends_base.parallel import join_ranks as join_ranks
    from rl_backends_base.policy_worker import PolicyWorkerBase as PolicyWorkerBase
    from rl_backends_base.row_sampler import RowSampler as RowSampler
    from rl_backends_base.row_sampler import TokenModel as TokenModel
    from rl_backends_base.rows import Row as Row
    from rl_backends_base.token_choice import SamplingParameters as SamplingParameters
    from rl_backends_base.torch_policy import TorchPolicyWorker as TorchPolicyWorker
    from rl_backends_base.training_state import TrainingState as TrainingState
    from rl_backends_base.training_state import TrainingStateBase as TrainingStateBase

__version__ = "0.1.0"
__getattr__ = import_on_first_use(__name__)
