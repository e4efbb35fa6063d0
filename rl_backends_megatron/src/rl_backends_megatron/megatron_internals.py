"""What this backend uses of Megatron-Core beyond its public interface; the only module here with such names.

Each name is an `Internal`. All of them are private to one version, so `check_megatron` requires that version at start, and that
everything that this backend reads or replaces exists in it. docs/compatibility.md lists them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import version
from typing import Any, Final
from unittest.mock import patch

from rl_core.errors import UserError

MEGATRON_VERSION: Final = "0.16.1"


@dataclass(frozen=True)
class Internal:
    """A function, class or attribute of a module of Megatron-Core.

    Attributes:
        module: its module.
        path: its name there, such as `Class.method`.
    """

    module: str
    path: str

    @property
    def name(self) -> str:
        """The last component of the path: the attribute's name on an instance of the class."""
        return self.path.rpartition(".")[2]

    def owner(self) -> Any:
        """The module or class that has it."""
        return reduce(getattr, self.path.split(".")[:-1], importlib.import_module(self.module))

    def of(self, instance: Any) -> Any:
        """Its value on an instance of the class."""
        return getattr(instance, self.name)

    def replace(self, value: Any) -> None:
        """Replace it for the rest of the process."""
        setattr(self.owner(), self.name, value)

    def replaced(self, value: Any) -> Any:
        """A context manager that replaces it within its block."""
        return patch.object(self.owner(), self.name, value)


END_OF_FORWARD = Internal("megatron.core.models.gpt.gpt_model", "GPTModel._postprocess")
RESULTS_QUEUE = Internal("megatron.core.dist_checkpointing.strategies.filesystem_async", "_results_queue")
CHECKPOINT_READER = Internal("megatron.core.dist_checkpointing.strategies.torch", "_get_filesystem_reader")
CHECKPOINT_PLANNER = Internal("megatron.core.dist_checkpointing.strategies.torch", "MCoreLoadPlanner")
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
GATHERED_STATE = Internal(_OPTIMIZER, "DistributedOptimizer.get_parameter_state_dp_zero")
LOADED_STATE = Internal(_OPTIMIZER, "DistributedOptimizer._set_main_param_and_optimizer_states")
ENTRIES_OF_PARAMETER = Internal(_OPTIMIZER, "DistributedOptimizer._get_model_param_range_map")
GET_RANDOM_STATE = Internal("megatron.core.tensor_parallel.random", "_get_cuda_rng_state")
SET_RANDOM_STATE = Internal("megatron.core.tensor_parallel.random", "_set_cuda_rng_state")
ROUTER_GATE = Internal("megatron.core.transformer.moe.moe_utils", "RouterGatingLinearFunction")
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
COPY_STREAM = Internal(_DISPATCHER, "MoEAlltoAllTokenDispatcher.cuda_dtoh_stream")
COPY_TO_HOST = Internal(_DISPATCHER, "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize")


def check_megatron() -> None:
    """Check that the installed Megatron-Core is the supported version.

    Raises:
        UserError: it is another version, or lacks a name of this module.
    """
    installed = version("megatron-core")
    if installed != MEGATRON_VERSION:
        raise UserError(
            f"megatron-core {installed} is installed, but this backend requires {MEGATRON_VERSION}, because it uses private "
            f"names. Install it with `pip install megatron-core=={MEGATRON_VERSION}`."
        )
    for internal in [value for value in globals().values() if isinstance(value, Internal)]:
        try:
            getattr(internal.owner(), internal.name)
        except AttributeError as error:
            raise UserError(
                f"{internal.module} has no {internal.path}, although megatron-core reports version {installed}: the "
                f"installation is modified or incomplete. Reinstall it with `pip install --force-reinstall --no-deps "
                f"megatron-core=={installed}`."
            ) from error
