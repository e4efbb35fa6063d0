"""Public modules that have moved: importing an old path gives the names of the new module, each with a `DeprecationWarning`.

docs/api_policy.md says how long an old path works. The finder is asked only for modules that exist nowhere else.
"""

from __future__ import annotations

import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from rl_core.first_use import imported_from

NEW_PATHS: Final = {
    "rl_backends_vllm.server_extension": "rl_backends_vllm.refit",
    "rl_core.config.tool_section": "rl_core.config.schema",
    "rl_core.data.bin_packing": "rl_core.data.row_planner",
    "rl_core.data.conversation_tokens": "rl_core.data.tokenizer",
    "rl_core.data.padding": "rl_core.data.shared_prefix",
    "rl_core.dispatch.generation": "rl_backends_base.distributed_generation",
    "rl_core.dispatch.policy": "rl_backends_base.distributed_policy",
    "rl_core.interfaces.dataset": "rl_core.interfaces.records",
    "rl_core.interfaces.loss": "rl_core.interfaces.policy",
    "rl_core.interfaces.messages": "rl_core.interfaces.records",
    "rl_core.interfaces.tool_runner": "rl_core.tools",
    "rl_core.interfaces.trainable": "rl_core.interfaces.policy",
    "rl_core.interfaces.weights": "rl_core.interfaces.policy",
    "rl_core.plugins.capabilities": "rl_core.plugins.component",
    "rl_core.plugins.record": "rl_core.plugins.component",
    "rl_core.weights.checkpoint_names": "rl_backends_base.checkpoint_names",
    "rl_core.training.data_only": "rl_backends_base.data_only",
    "rl_core.training.loaded_model": "rl_core.data.loaded_model",
    "rl_core.training.microbatch_splitter": "rl_backends_base.microbatches",
    "rl_core.training.optimizer_settings": "rl_backends_base.optimizer_settings",
    "rl_core.training.policy_worker": "rl_backends_base.policy_worker",
    "rl_train.algorithms.advantages": "rl_train.algorithms.estimators",
    "rl_train.algorithms.critic": "rl_train.algorithms.ppo",
    "rl_train.algorithms.gae": "rl_train.algorithms.ppo",
    "rl_train.algorithms.kl": "rl_train.algorithms.losses",
    "rl_train.algorithms.validation": "rl_train.validate",
    "rl_train.config.runtime_needs": "rl_train.config.algorithm",
    "rl_train.diagnostics.by_model_name": "rl_train.diagnostics.decoding",
    "rl_train.rollouts.segments": "rl_train.rollouts.trajectory",
    "rl_train.runtime.python_data": "rl_train.trainers.trainer_data",
    "rl_train.runtime.trainers": "rl_train.trainers.trainers",
    "rl_train.validation": "rl_train.logprob_agreement",
}

"""Old module to new module."""
NEW_NAMES: Final = {
    "rl_core.backend": {
        "rl_backends_base": "CheckpointNames DAMAGE_ERRORS TRAINER_FILE DataOnlyBytes DataOnlyReader "
        "DistributedGeneration DistributedPolicy MicrobatchSplitter OptimizerSettings PolicyWorkerBase build_scheduler "
        "call_named first_non_finite_loss non_finite_step_error read_metadata read_state_file read_trainer_file reason_of "
        "reduce_metrics scored_tokens write_error"
    },
    "rl_core.plugins.component": {"rl_core.plugins.requirements": "check_one_of check_requirements unmet_needs version_of"},
    "rl_core.interfaces": {"rl_core.tools.specs": "Tool", "rl_core.tools.environment": "ToolEnvironment"},
}
"""Module to new module to the names that have moved there, separated by spaces."""


class OldPaths:
    """A finder and loader of the modules in `NEW_PATHS`, and of packages that had only such modules."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """How to load an old path; None for any other name."""
        is_package = any(old.startswith(f"{name}.") for old in NEW_PATHS)
        if not is_package and name not in NEW_PATHS:
            return None
        return ModuleSpec(name, self, is_package=is_package)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Python's own empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Give the module the names of the new one."""
        old = module.__name__
        if old not in NEW_PATHS:
            return
        new = NEW_PATHS[old]

        def load(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(f"module {old!r} has no attribute {name!r}")
            value = imported_from(new, name)
            warnings.warn(f"{old}.{name} has moved to {new}.", DeprecationWarning, stacklevel=2)
            return value

        module.__dict__["__getattr__"] = load


def install() -> None:
    """Let Python find old paths."""
    if not any(isinstance(finder, OldPaths) for finder in sys.meta_path):
        sys.meta_path.append(OldPaths())
