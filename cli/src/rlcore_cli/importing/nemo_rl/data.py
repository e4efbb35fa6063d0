"""Conversions of NeMo RL's sections `data` and `env`, with a row for each section that may contain a dataset key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlcore_cli.importing.nemo_rl.facts import (
    FILES,
    SPLITS,
    algorithm_of,
    dataset,
    has_pairs,
    held_out_share,
    samples,
    source_of,
)
from rlcore_cli.importing.rows import (
    MISSING,
    Decision,
    Defaulted,
    ForeignConfig,
    Mapped,
    Redundant,
    Row,
    Unsupported,
    converted,
    unsupported,
)

_PROCESSORS = ("math_hf_data_processor", "sft_processor", "preference_processor")
_ONE_ANSWER = ("sft", "grpo", "ppo", "distillation")
_Value = Callable[[Any, str, ForeignConfig], Decision]


def rows() -> list[Row]:
    """A row for each dataset key in each section that may contain it. Older configs have these keys directly in `data`."""
    result = unsupported("data", " ".join(_KEYS), "old layout: move it to data.train and data.validation, then import again")
    for key, value in _KEYS.items():
        result.append(converted(f"data.default.{key}", _default(key, value)))
        for split in SPLITS:
            result += [
                converted(f"data.{split}.{key}", _own(split, value)),
                converted(f"data.{split}.*.{key}", _listed(split, value)),
            ]
    return result


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
        splits = [split for split in SPLITS if dataset(foreign, split) is not None]
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
    source = source_of(foreign, split)
    if source is not None:
        note = "" if given in FILES else "read from the Hugging Face Hub or its cache"
        return Mapped({f"data.{split}.dataset_name": source.component}, note)
    return Unsupported(
        f"no dataset reads this format: convert it to JSON lines and set data.{split}.path, or use parquet, huggingface or "
        "your own dataset"
    )


def _of_source(native: str, *, algorithms: Sequence[str] = (), note: str = "") -> _Value:
    """A dataset key with another name; `algorithms` are those that use it, all if empty."""

    def value(given: Any, split: str, foreign: ForeignConfig) -> Decision:
        if source_of(foreign, split) is None:
            return Unsupported("its dataset is not supported")
        if algorithms and algorithm_of(foreign) not in algorithms:
            return Redundant(f"{algorithm_of(foreign)} does not use it")
        return Mapped({f"data.{split}.{native}": given}, note)

    return value


def _path(given: Any, split: str, foreign: ForeignConfig) -> Decision:
    if (dataset(foreign, split) or {}).get("dataset_name") in FILES:
        return _of_source("path")(given, split, foreign)
    return Redundant("the path of a named dataset is fixed")


def _answer(given: Any, split: str, foreign: ForeignConfig) -> Decision:
    """The answer field: the response to train on for sft, the expected answer otherwise."""
    key = "response_key" if algorithm_of(foreign) == "sft" else "output_key"
    return _of_source(key, algorithms=_ONE_ANSWER)(given, split, foreign)


def _split_or_subset(native: str) -> _Value:
    """A split or subset, which only Hugging Face datasets have."""

    def value(given: Any, split: str, foreign: ForeignConfig) -> Decision:
        source = source_of(foreign, split)
        if source is not None and source.is_hugging_face:
            return Mapped({f"data.{split}.{native}": given})
        return Redundant("files have no splits or subsets")

    return value


def _held_out(given: Any, split: str, foreign: ForeignConfig) -> Decision:
    if split == "validation" or not given:
        return Redundant("nothing is held out of this dataset")
    if foreign.get("data.validation") is not None:
        return Unsupported("the config has data.validation, which is used for validation")
    if not held_out_share(foreign):
        return Unsupported("only a fraction of the rows can be held out, not a number: set data.split.validation")
    return Mapped({"data.split.validation": given}, "rows are chosen by a hash of the prompt, so they differ from NeMo RL's")


def _seed(given: Any, split: str, foreign: ForeignConfig) -> Decision:
    if split == "train" and held_out_share(foreign):
        return Mapped({"data.split.seed": given})
    return Redundant("it seeds the held-out split, and nothing is held out")


def _prompt(given: Any, split: str, foreign: ForeignConfig) -> Decision:
    if given is None:
        return Redundant("the field is used unchanged as the prompt")
    if has_pairs(foreign):
        return Unsupported("prompt templates are not applied to preference pairs: write the full prompts into the data")
    source = source_of(foreign, split)
    if source is not None and "record_fn" in source.keys:
        return Unsupported("a function builds the records of this dataset and applies no template")
    return Mapped({f"data.{split}.prompt": given}, "a text file with one {} works unchanged; the file must exist")


def _task(given: Any, split: str, foreign: ForeignConfig) -> Decision:
    if not samples(foreign):
        return Redundant(f"{algorithm_of(foreign)} uses no environment")
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


def length_of_prompts(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the maximum prompt length, which must leave space for a completion."""
    longest = foreign.number("policy.max_total_sequence_length", 0)
    if not samples(foreign):
        return Redundant("without sampling, policy.max_total_sequence_length limits the rows")
    if isinstance(value, int) and longest and value >= longest:
        return Mapped({"data.max_input_seq_length": longest - 1}, "one token is reserved for the completion")
    return Mapped({"data.max_input_seq_length": value})


def additions(foreign: ForeignConfig, native: Mapping[str, Any]) -> Iterator[Defaulted]:
    """Keys that a dataset or task needs and that correspond to no key of the config."""
    for split in SPLITS:
        if dataset(foreign, split) is None:
            continue
        at, source = f"data.{split}", source_of(foreign, split)
        if source is None:
            name = "preference" if has_pairs(foreign) else "jsonl"
            yield Defaulted(key=f"{at}.dataset_name", value=name, reason="a JSON-lines file replaces it")
        implied = {} if source is None else source.keys
        for key, value in implied.items():
            if f"{at}.{key}" not in native:
                yield Defaulted(key=f"{at}.{key}", value=value, reason="NeMo RL's default")
        if "path" not in implied and f"{at}.path" not in native:
            yield Defaulted(key=f"{at}.path", value=MISSING, reason="to be set: the file to read")
    yield from _environments(foreign, native)


def _environments(foreign: ForeignConfig, native: Mapping[str, Any]) -> Iterator[Defaulted]:
    tasks = foreign.get("env")
    for task, section in tasks.items() if samples(foreign) and isinstance(tasks, Mapping) else ():
        # `env` also has switches (`should_use_...: false`), which are not tasks.
        if not isinstance(section, Mapping | None):
            continue
        if not any(key.startswith(f"env.{task}.") for key in native):
            yield Defaulted(key=f"env.{task}", value={}, reason="task with its default settings")
        if native.get(f"env.{task}.name", task) == "math":
            reason = "NeMo RL also grades answers without a box, as false does here; false rewards more wrong answers"
            yield Defaulted(key=f"env.{task}.require_box", value=True, reason=reason)
