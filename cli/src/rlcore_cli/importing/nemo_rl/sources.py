"""Maps datasets of NeMo RL to datasets of rlcore, with the fields that NeMo RL reads by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from rlcore_cli.importing.nemo_rl.facts import algorithm_of, has_pairs
from rlcore_cli.importing.rows import MISSING, ForeignConfig

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
