"""`HuggingFacePolicy`: any causal LM of Transformers as a policy, in this process or over a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from rl_backends_hf.config import HFConfig, HFPolicyConfig
from rl_backends_hf.worker import HFPolicyWorker
from rl_core.config.schema import DeadlineConfig
from rl_core.dispatch.policy import DistributedPolicy
from rl_core.errors import ConfigError
from rl_core.plugins.component import did_you_mean

if TYPE_CHECKING:
    from rl_core.cluster.sharding import NamedSharding
    from rl_core.cluster.virtual_cluster import RayVirtualCluster


class HuggingFacePolicy(DistributedPolicy):
    """A causal LM of Transformers that scores, trains, samples, and hands its weights on.

    `HuggingFacePolicy("path/to/model", torch_dtype="bfloat16")` runs in this process; with `cluster=` it runs over the
    cluster's ranks.

    Args:
        model_name: name, folder or GGUF file.
        config: the whole section `policy`, in place of `model_name` and the arguments below.
        cluster: where the workers run; without one, a single worker runs in this process.
        num_workers: ranks; all of the cluster's by default.
        deadlines: how long to wait for what.
        sharding: the named grid of ranks; all of them along `data` by default.
        torch_dtype: `float32` or `bfloat16`, as text or as torch's dtype; the promised name of `precision`.
        **fields: any field of `HFPolicyConfig`, or of its `hf_cfg`, by name: `trust_remote_code`, `device_map`,
            `load_in_8bit`, `optimizer={...}`, `generation={...}` and so on.

    Raises:
        ConfigError: a field does not exist or has a value that is not allowed.
    """

    def __init__(
        self,
        model_name: str | None = None,
        *,
        config: HFPolicyConfig | None = None,
        cluster: RayVirtualCluster | None = None,
        num_workers: int | None = None,
        deadlines: DeadlineConfig | None = None,
        sharding: NamedSharding | None = None,
        torch_dtype: str | torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(
            worker_class=HFPolicyWorker,
            config=_section(model_name, config, torch_dtype, fields),
            cluster=cluster,
            num_workers=num_workers,
            deadlines=deadlines,
            sharding=sharding,
        )


def _section(
    model_name: str | None, config: HFPolicyConfig | None, torch_dtype: str | torch.dtype | None, fields: dict[str, Any]
) -> HFPolicyConfig:
    """The one section that the constructor's arguments amount to."""
    if config is not None:
        if model_name is not None or torch_dtype is not None or fields:
            raise ConfigError(
                "HuggingFacePolicy got a whole `config` and fields beside it: put them into the config, for example with "
                "`config.model_copy(update={...})`."
            )
        return config
    if model_name is None:
        raise ConfigError("HuggingFacePolicy needs a model: HuggingFacePolicy('path/to/model') or config=HFPolicyConfig(...).")
    values: dict[str, Any] = {"model_name": model_name}
    own = dict(fields.pop("hf_cfg", None) or {})
    for key, value in fields.items():
        if key in HFPolicyConfig.model_fields:
            values[key] = value
        elif key in HFConfig.model_fields:
            own[key] = value
        else:
            known = sorted({*HFPolicyConfig.model_fields, *HFConfig.model_fields, "torch_dtype", "cluster"})
            raise ConfigError(
                f"HuggingFacePolicy has no argument {key!r}.{did_you_mean(key, known)} It takes the fields of "
                "`policy` and of `policy.hf_cfg`: " + ", ".join(known) + "."
            )
    if torch_dtype is not None:
        values["precision"] = str(torch_dtype).removeprefix("torch.")
    if isinstance(values.get("generation"), dict):
        values["generation"] = _generation_section(values["generation"])
    try:
        return HFPolicyConfig(**values, hf_cfg=HFConfig(**own))
    except ValidationError as error:
        raise ConfigError(f"HuggingFacePolicy: {_problems(error)}") from error


def _generation_section(fields: dict[str, Any]) -> Any:
    from rl_backends_hf.config import HFGenerationConfig

    try:
        return HFGenerationConfig(**fields)
    except ValidationError as error:
        raise ConfigError(f"HuggingFacePolicy, `generation`: {_problems(error)}") from error


def _problems(error: ValidationError) -> str:
    return "; ".join(
        f"`{'.'.join(map(str, problem['loc']))}`: {problem['msg']} (found {problem['input']!r})"
        for problem in error.errors(include_url=False)
    )
