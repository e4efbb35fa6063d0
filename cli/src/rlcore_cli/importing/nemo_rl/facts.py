"""Properties of a whole NeMo RL config, used to convert single keys; and the keys that rlcore needs in addition.

Maps datasets of NeMo RL to datasets of rlcore, with the fields that NeMo RL reads by default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from rlcore_cli.importing.rows import MISSING, Defaulted, ForeignConfig

ALGORITHMS = ("grpo", "ppo", "sft", "dpo", "rm", "distillation")
"""The supported algorithms; the first section found is used."""

COLOCATED = "policy and engine are always colocated"


def algorithm_of(foreign: ForeignConfig) -> str | None:
    """The first algorithm of the config that rlcore supports, or None."""
    return next((name for name in ALGORITHMS if name in foreign.values), None)


def is_megatron(foreign: ForeignConfig) -> bool:
    """Whether the policy backend is Megatron."""
    return foreign.get("policy.megatron_cfg.enabled") is True


def samples(foreign: ForeignConfig) -> bool:
    """Whether the algorithm samples."""
    return algorithm_of(foreign) in ("grpo", "ppo", "distillation")


def ranks(foreign: ForeignConfig) -> int:
    """Number of training ranks."""
    return foreign.number("cluster.gpus_per_node", 1) * foreign.number("cluster.num_nodes", 1)


def has_pairs(foreign: ForeignConfig) -> bool:
    """Whether the algorithm trains on preference pairs. NeMo RL counts pairs; rlcore counts two rows per pair."""
    return algorithm_of(foreign) in ("dpo", "rm")


def held_out_share(foreign: ForeignConfig) -> float:
    """Fraction of the training data that NeMo RL holds out if there is no other validation data; 0.0 if none."""
    written = foreign.get("data.train.split_validation_size", foreign.get("data.default.split_validation_size", 0.0))
    is_share = isinstance(written, float) and 0.0 < written < 1.0
    return written if is_share and foreign.get("data.validation") is None else 0.0


def validates(foreign: ForeignConfig) -> bool:
    """Whether there is validation data that can be converted."""
    held_out = foreign.get("data.validation")
    is_one = isinstance(held_out, Mapping) or (isinstance(held_out, list) and len(held_out) == 1)
    return is_one or foreign.get("data.val_data_path") is not None or held_out_share(foreign) > 0.0


def is_on(key: str) -> Callable[[ForeignConfig], bool]:
    """Whether a key is true."""
    return lambda foreign: foreign.get(key) is True


def engine_is(name: str) -> Callable[[ForeignConfig], bool]:
    """Whether the generation backend has this name."""
    return lambda foreign: foreign.get("policy.generation.backend") == name


def additions(foreign: ForeignConfig, native: Mapping[str, Any]) -> Iterator[Defaulted]:
    """Keys that rlcore needs and that correspond to no key of the config."""
    algorithm = algorithm_of(foreign)
    if algorithm is not None and not any(key.startswith(f"{algorithm}.") for key in native):
        yield Defaulted(key=algorithm, value={}, reason="algorithm with its default settings")
    for section in ("policy", "value", "teacher"):
        if not any(key.startswith(f"{section}.") for key in native):
            continue
        backend = native.get(f"{section}.backend")
        if backend is None:
            yield Defaulted(
                key=f"{section}.backend", value="hf", reason="NeMo RL trains with PyTorch's DTensor unless Megatron is enabled"
            )
        if backend != "megatron" and f"{section}.hf_cfg.lora" not in native and ranks(foreign) > 1:
            reason = "NeMo RL shards weights over the ranks"
            yield Defaulted(key=f"{section}.hf_cfg.data_parallel", value="fsdp2", reason=reason)
        yield from _scored_tokens(section, native)
    if samples(foreign):
        yield from _engine_additions(foreign, native)
    if native.get("logger.loggers.wandb.enabled") is True:
        yield Defaulted(key="logger.loggers.wandb.mode", value="online", reason="NeMo RL uploads; the default here is offline")


def _engine_additions(foreign: ForeignConfig, native: Mapping[str, Any]) -> Iterator[Defaulted]:
    if native.get("policy.generation.backend") == "vllm":
        at = "policy.generation.vllm_cfg"
        size = foreign.number(f"{at}.tensor_parallel_size", 1) * foreign.number(f"{at}.pipeline_parallel_size", 1)
        if size > 1:
            reason = f"{ranks(foreign)} GPUs, {size} per replica"
            yield Defaulted(key="policy.generation.num_workers", value=max(1, ranks(foreign) // size), reason=reason)
        yield Defaulted(key=f"{at}.sleep_level", value=1, reason="NeMo RL frees the engine's memory during training")
    if "policy.generation.val_temperature" not in native and foreign.get("policy.generation") is not None:
        value = foreign.get("policy.generation.temperature", 1.0)
        yield Defaulted(
            key="policy.generation.val_temperature", value=value, reason="NeMo RL validates at the training temperature"
        )
    if any(key.startswith("data.") for key in native):
        yield Defaulted(key="data.on_long_prompt", value="drop", reason="NeMo RL drops longer prompts from training")


def _scored_tokens(section: str, native: Mapping[str, Any]) -> Iterator[Defaulted]:
    """`logprob_mb_tokens`, if it is not set: the default may be smaller than the longest row."""
    longest = native.get(f"{section}.max_total_sequence_length")
    for batching in ("dynamic_batching", "sequence_packing"):
        at = f"{section}.{batching}"
        if native.get(f"{at}.enabled") is True and f"{at}.logprob_mb_tokens" not in native and isinstance(longest, int):
            yield Defaulted(key=f"{at}.logprob_mb_tokens", value=longest, reason="the token budget must fit the longest row")


SPLITS = ("train", "validation")
FILES = ("ResponseDataset", "openai_format", "PreferenceDataset", "BinaryPreferenceDataset")
"""NeMo RL datasets that are given by a file path or a name on the Hugging Face Hub."""


@dataclass(frozen=True)
class _Named:
    """A dataset that is built into NeMo RL: its location on the Hugging Face Hub and its fields."""

    path: str
    split: str = "train"
    subset: str | None = None
    question: str = "problem"
    answer: str = "answer"
    more: Mapping[str, Any] = field(default_factory=dict)


_GSM8K = _Named("openai/gsm8k", subset="main", question="question", more={"record_fn": "gsm8k"})
_NAMED = {
    "OpenMathInstruct-2": _Named("nvidia/OpenMathInstruct-2", split="train_1M", answer="expected_answer"),
    "DeepScaler": _Named("agentica-org/DeepScaleR-Preview-Dataset"),
    "OpenR1-Math-220k": _Named("open-r1/OpenR1-Math-220k", subset="default"),
    "AIME2024": _Named("HuggingFaceH4/aime_2024"),
    "gsm8k": _GSM8K,
    "GSM8K": _GSM8K,
}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A dataset of rlcore.

    Attributes:
        component: Its name.
        keys: Values for keys that the NeMo RL config does not set.
    """

    component: str
    keys: Mapping[str, Any]

    @property
    def is_hugging_face(self) -> bool:
        """Whether it reads a Hugging Face dataset, which has splits and subsets."""
        return self.component.endswith("huggingface")


def dataset(foreign: ForeignConfig, split: str) -> Mapping[str, Any] | None:
    """The keys of a split, including those of `data.default`; None if it has no dataset or several."""
    section = foreign.get(f"data.{split}")
    if isinstance(section, list) and len(section) == 1:
        section = section[0]
    if not isinstance(section, Mapping):
        return None
    defaults = foreign.get("data.default", {})
    return {**(defaults if isinstance(defaults, Mapping) else {}), **section}


def source_of(foreign: ForeignConfig, split: str) -> Source | None:
    """The rlcore dataset that reads a split; None if no dataset supports it."""
    section = dataset(foreign, split) or {}
    name = str(section.get("dataset_name"))
    if name in _NAMED and not has_pairs(foreign):
        return _on_the_hub(_NAMED[name], algorithm_of(foreign))
    component = _component(str(section.get("data_path", MISSING)), pairs=has_pairs(foreign))
    if name not in FILES or component is None:
        return None
    return Source(component=component, keys=_read(name, algorithm_of(foreign)))


def _on_the_hub(named: _Named, algorithm: str | None) -> Source:
    where = {"path": named.path, "split": named.split, "subset": named.subset}
    fields: dict[str, Any] = {} if named.more else {"input_key": named.question, **_answer(algorithm, named.answer)}
    return Source(component="huggingface", keys={**where, **fields, **named.more})


def _component(path: str, *, pairs: bool) -> str | None:
    """The dataset for a path, chosen by file extension; without an extension it is a Hugging Face dataset."""
    endings = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet", "": "huggingface"}
    form = "jsonl" if path == MISSING else endings.get(PurePath(path).suffix)
    if pairs and form is not None:
        return "preference" if form == "jsonl" else f"preference_{form}"
    return form


def _read(name: str, algorithm: str | None) -> dict[str, Any]:
    if name == "PreferenceDataset":
        return {"prompt_key": "context"}
    if name == "BinaryPreferenceDataset":
        return {}
    if name == "openai_format":
        return {"input_key": "messages", "output_key": None}
    return {"input_key": "input", **_answer(algorithm, "output")}


def _answer(algorithm: str | None, key: str) -> dict[str, Any]:
    """The key of the answer field: the response to train on for sft, the expected answer otherwise."""
    return {"response_key": key, "output_key": None} if algorithm == "sft" else {"output_key": key}
