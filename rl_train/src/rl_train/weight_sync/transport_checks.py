"""What the run checks of a weight transport in each refit: the return value of `push`, and the versions after it."""

from __future__ import annotations

from typing import SupportsIndex

from rl_core.errors import BrokenPromiseError, WeightSyncError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface
from rl_core.interfaces.weights import WeightTransport
from rl_core.testing.outputs.columns import class_label

_SHOWN = 5


def push_weights(transport: WeightTransport, policy: ColocatablePolicyInterface, engine: GenerationInterface) -> int:
    """Push once; returns the bytes moved.

    Raises:
        BrokenPromiseError: `push` does not return a number of bytes.
    """
    moved: object = transport.push(policy, engine)
    if not isinstance(moved, SupportsIndex):
        raise BrokenPromiseError(
            f"`push` of the weight transport {class_label(type(transport))} returned {moved!r}. It must return the number of "
            "bytes moved, as an integer: 0 if nothing was copied."
        )
    return int(moved)


def check_versions(transport: WeightTransport, policy: ColocatablePolicyInterface, engine: GenerationInterface) -> None:
    """Check that the engine has the policy's weight version after a push.

    Raises:
        WeightSyncError: it has another one; names the tensors that are missing.
    """
    policy_version, engine_version = policy.weight_version, engine.weight_version
    if policy_version == engine_version:
        return
    if engine_version < 0:
        engine.weight_fingerprint()  # names the missing tensors if others have arrived
    names = list(policy.prepare_refit_info() or ())
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    raise WeightSyncError(
        f"After the refit the policy is at weight version {policy_version} and the generation backend at {engine_version}: "
        + ("no weights arrived, or those of another step. " if engine_version >= 0 else "no weights arrived. ")
        + f"`push` of the weight transport {class_label(type(transport))} must send all {len(names)} tensors in every refit "
        f"({', '.join(names[:_SHOWN])}{more}). Resume the run from its last checkpoint."
    )
