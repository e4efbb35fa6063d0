"""Conversions of NeMo RL's datasets: the keys of `data.train`, `data.validation` and `data.default`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from rlcore_cli.importing.foreign import MISSING, Decision, Defaulted, ForeignConfig, Mapped, Redundant, Unsupported

SPLITS = ("train", "validation")
_FILES = ("ResponseDataset", "openai_format", "PreferenceDataset", "BinaryPreferenceDataset")
"""NeMo RL datasets that are given by a file path or a name on the Hugging Face Hub."""
_PROCESSORS = ("math_hf_data_processor", "sft_processor", "preference_processor")
_ONE_ANSWER = ("sft", "grpo", "ppo", "distillation")
_Value = Callable[[Any, str, ForeignConfig], Decision]


def conversions() -> Iterator[tuple[str, Callable[[Any, ForeignConfig], Decision]]]:
    """Each dataset key in each section that may contain it, with its conversion. Older configs have these keys in `data`."""
    old = Unsupported("old layout: move it to data.train and data.validation, then import again")
    for key, value in _KEYS.items():
        yield f"data.{key}", lambda given, foreign: old
        yield f"data.default.{key}", _default(key, value)
        for split in SPLITS:
            yield f"data.{split}.{key}", _own(split, value)
            yield f"data.{split}.*.{key}", _listed(split, value)


def additions(foreign: ForeignConfig, native: Mapping[str, Any]) -> Iterator[Defaulted]:
    """Keys that a dataset needs and that correspond to no key of the config."""
    for split in SPLITS:
        if _dataset(foreign, split) is None:
            continue
        at, source = f"data.{split}", _source(foreign, split)
        if source is None:
            name = "preference" if foreign.has_pairs else "jsonl"
            yield Defaulted(key=f"{at}.dataset_name", value=name, reason="a JSON-lines file replaces it")
        implied = {} if source is None else source.keys
        for key, value in implied.items():
            if f"{at}.{key}" not in native:
                yield Defaulted(key=f"{at}.{key}", value=value, reason="NeMo RL's default")
        if "path" not in implied and f"{at}.path" not in native:
            yield Defaulted(key=f"{at}.path", value=MISSING, reason="to be set: the file to read")


@dataclass(frozen=True)
class _Source:
    """A dataset of rlcore, and values for keys that the NeMo RL config does not set."""

    component: str
    keys: Mapping[str, Any]


def _dataset(foreign: ForeignConfig, split: str) -> Mapping[str, Any] | None:
    """The keys of a split, including those of `data.default`; None if it has no dataset or several."""
    section = foreign.get(f"data.{split}")
    if isinstance(section, list) and len(section) == 1:
        section = section[0]
    if not isinstance(section, Mapping):
        return None
    defaults = foreign.get("data.default", {})
    return {**(defaults if isinstance(defaults, Mapping) else {}), **section}


def _source(foreign: ForeignConfig, split: str) -> _Source | None:
    """The rlcore dataset that reads a split; None if no dataset supports it."""
    section = _dataset(foreign, split) or {}
    name = str(section.get("dataset_name"))
    if name in _HUB and not foreign.has_pairs:
        at, fields = _HUB[name]
        return _Source("huggingface", {"path": None, "split": "train", "subset": None, **at, **_fields(foreign, *fields)})
    component = _component(str(section.get("data_path", MISSING)), pairs=foreign.has_pairs)
    if name not in _FILES or component is None:
        return None
    keys: dict[str, dict[str, Any]] = {
        "PreferenceDataset": {"prompt_key": "context"},
        "BinaryPreferenceDataset": {},
        "openai_format": {"input_key": "messages", "output_key": None},
        "ResponseDataset": _fields(foreign, "input", "output"),
    }
    return _Source(component, keys[name])


def _fields(foreign: ForeignConfig, question: str = "", answer: str = "") -> dict[str, Any]:
    """The fields of a record. The answer is the response to train on for sft, the expected answer otherwise."""
    if not question:
        return {}
    answers = {"response_key": answer, "output_key": None} if foreign.algorithm == "sft" else {"output_key": answer}
    return {"input_key": question, **answers}


def _component(path: str, *, pairs: bool) -> str | None:
    """The dataset for a path, chosen by file extension; without an extension it is a Hugging Face dataset."""
    endings = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet", "": "huggingface"}
    form = "jsonl" if path == MISSING else endings.get(PurePath(path).suffix)
    if pairs and form is not None:
        return "preference" if form == "jsonl" else f"preference_{form}"
    return form


_GSM8K: tuple[dict[str, Any], tuple[str, ...]] = ({"path": "openai/gsm8k", "subset": "main", "record_fn": "gsm8k"}, ())
_HUB: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "OpenMathInstruct-2": ({"path": "nvidia/OpenMathInstruct-2", "split": "train_1M"}, ("problem", "expected_answer")),
    "DeepScaler": ({"path": "agentica-org/DeepScaleR-Preview-Dataset"}, ("problem", "answer")),
    "OpenR1-Math-220k": ({"path": "open-r1/OpenR1-Math-220k", "subset": "default"}, ("problem", "answer")),
    "AIME2024": ({"path": "HuggingFaceH4/aime_2024"}, ("problem", "answer")),
    "gsm8k": _GSM8K,
    "GSM8K": _GSM8K,
}
"""Datasets that are built into NeMo RL: their repositories on the Hugging Face Hub, and their question and answer fields."""


def _own(split: str, value: _Value) -> Callable[[Any, ForeignConfig], Decision]:
    return lambda given, foreign: value(given, split, foreign)


def _listed(split: str, value: _Value) -> Callable[[Any, ForeignConfig], Decision]:
    def decide(given: Any, foreign: ForeignConfig) -> Decision:
        if len(foreign.get(f"data.{split}", ())) > 1:
            return Unsupported("several datasets are mixed by weight, not concatenated: list them under data.mix")
        return value(given, split, foreign)

    return decide


def _default(key: str, value: _Value) -> Callable[[Any, ForeignConfig], Decision]:
    """A key of `data.default`, for the splits that do not set it."""

    def decide(given: Any, foreign: ForeignConfig) -> Decision:
        splits = [split for split in SPLITS if _dataset(foreign, split) is not None]
        inheriting = [split for split in splits if key not in _single(foreign, split)]
        if not inheriting:
            return Redundant("each dataset sets its own value" if splits else "there is no dataset to apply it to")
        found = [value(given, split, foreign) for split in inheriting]
        becomes = [one for one in found if isinstance(one, Mapped)]
        if not becomes:
            return found[0]
        return Mapped({key: it for one in becomes for key, it in one.values.items()}, becomes[0].note)

    return decide


def _single(foreign: ForeignConfig, split: str) -> Mapping[str, Any]:
    section = foreign.get(f"data.{split}")
    alone = section[0] if isinstance(section, list) else section
    return alone if isinstance(alone, Mapping) else {}


def _name(given: Any, split: str, foreign: ForeignConfig) -> Decision:
    source = _source(foreign, split)
    if source is not None:
        note = "" if given in _FILES else "read from the Hugging Face Hub or its cache"
        return Mapped({f"data.{split}.dataset_name": source.component}, note)
    return Unsupported(
        f"no dataset reads this format: convert it to JSON lines and set data.{split}.path, or use parquet, huggingface or "
        "your own dataset"
    )


def _of_source(native: str, *, algorithms: Sequence[str] = (), note: str = "") -> _Value:
    """A dataset key with another name; `algorithms` are those that use it, all if empty."""

    def value(given: Any, split: str, foreign: ForeignConfig) -> Decision:
        if _source(foreign, split) is None:
            return Unsupported("its dataset is not supported")
        if algorithms and foreign.algorithm not in algorithms:
            return Redundant(f"{foreign.algorithm} does not use it")
        return Mapped({f"data.{split}.{native}": given}, note)

    return value


def _path(given: Any, split: str, foreign: ForeignConfig) -> Decision:
    if (_dataset(foreign, split) or {}).get("dataset_name") in _FILES:
        return _of_source("path")(given, split, foreign)
    return Redundant("the path of a named dataset is fixed")


def _answer(given: Any, split: str, foreign: ForeignConfig) -> Decision:
    """The answer field: the response to train on for sft, the expected answer otherwise."""
    key = "response_key" if foreign.algorithm == "sft" else "output_key"
    return _of_source(key, algorithms=_ONE_ANSWER)(given, split, foreign)


def _split_or_subset(native: str) -> _Value:
    """A split or subset, which only Hugging Face datasets have."""

    def value(given: Any, split: str, foreign: ForeignConfig) -> Decision:
        source = _source(foreign, split)
        if source is not None and source.component.endswith("huggingface"):
            return Mapped({f"data.{split}.{native}": given})
        return Redundant("files have no splits or subsets")

    return value


def _held_out(given: Any, split: str, foreign: ForeignConfig) -> Decision:
    if split == "validation" or not given:
        return Redundant("nothing is held out of this dataset")
    if foreign.get("data.validation") is not None:
        return Unsupported("the config has data.validation, which is used for validation")
    if not foreign.held_out_share:
        return Unsupported("only a fraction of the rows can be held out, not a number: set data.split.validation")
    return Mapped({"data.split.validation": given}, "rows are chosen by a hash of the prompt, so they differ from NeMo RL's")


def _seed(given: Any, split: str, foreign: ForeignConfig) -> Decision:
    if split == "train" and foreign.held_out_share:
        return Mapped({"data.split.seed": given})
    return Redundant("it seeds the held-out split, and nothing is held out")


def _prompt(given: Any, split: str, foreign: ForeignConfig) -> Decision:
    if given is None:
        return Redundant("the field is used unchanged as the prompt")
    if foreign.has_pairs:
        return Unsupported("prompt templates are not applied to preference pairs: write the full prompts into the data")
    source = _source(foreign, split)
    if source is not None and "record_fn" in source.keys:
        return Unsupported("a function builds the records of this dataset and applies no template")
    return Mapped({f"data.{split}.prompt": given}, "a text file with one {} works unchanged; the file must exist")


def _task(given: Any, split: str, foreign: ForeignConfig) -> Decision:
    if not foreign.samples:
        return Redundant(f"{foreign.algorithm} uses no environment")
    return Mapped({f"data.{split}.task_name": given})


def _processor(given: Any, split: str, foreign: ForeignConfig) -> Decision:
    if given in (None, *_PROCESSORS):
        return Redundant("the algorithm determines how records are processed")
    return Unsupported("the dataset converts records to messages: write the fields as JSON lines, or use your own dataset")


def _unless_null(since: str, reason: str) -> _Value:
    return lambda given, split, foreign: Redundant(since) if given in (None, 0) else Unsupported(reason)


_KEYS: dict[str, _Value] = {
    "dataset_name": _name,
    "data_path": _path,
    "input_key": _of_source("input_key", algorithms=_ONE_ANSWER),
    "output_key": _answer,
    "chat_key": _of_source("input_key", algorithms=_ONE_ANSWER, note="a list of messages is read as a conversation"),
    "prompt_key": _of_source("prompt_key", algorithms=("dpo", "rm")),
    "chosen_key": _of_source("chosen_key", algorithms=("dpo", "rm")),
    "rejected_key": _of_source("rejected_key", algorithms=("dpo", "rm")),
    "system_prompt": _of_source("system_prompt"),
    "prompt_file": _prompt,
    "system_prompt_file": _unless_null("no system prompt is added", "put its text into `system_prompt`"),
    "env_name": _task,
    "processor": _processor,
    "subset": _split_or_subset("subset"),
    "split": _split_or_subset("split"),
    "split_validation_size": _held_out,
    "seed": _seed,
    "repeat": _unless_null(
        "each prompt is used once by default", "to sample each prompt several times, set val_num_generations_per_prompt"
    ),
}
