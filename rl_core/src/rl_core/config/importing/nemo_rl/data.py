"""How NeMo RL's sections `data` and `env` become ours: a row for every place that a dataset's key may have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rl_core.config.importing.nemo_rl.facts import algorithm_of, samples
from rl_core.config.importing.rows import LEFT_OPEN, Added, Becomes, Decision, Refused, Row, Theirs, Unneeded, by

SPLITS = ("train", "validation")
FILES = ("ResponseDataset", "openai_format", "PreferenceDataset", "BinaryPreferenceDataset")
"""Their datasets that are files of JSON lines."""

_PROCESSORS = ("math_hf_data_processor", "sft_processor", "preference_processor")
_OF_A_FILE = "a file of JSON lines is read whole"
_Value = Callable[[Any, str, Theirs], Decision]


def dataset(theirs: Theirs, split: str) -> Mapping[str, Any] | None:
    """The keys of a split, those of `data.default` among them; None where theirs has no such dataset, or several."""
    found = theirs.get(f"data.{split}")
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, Mapping):
        return None
    defaults = theirs.get("data.default", {})
    return {**(defaults if isinstance(defaults, Mapping) else {}), **found}


def rows() -> list[Row]:
    """A row for each key of a dataset, under each of the sections that may hold it."""
    found = []
    for key, value in _KEYS.items():
        found.append(by(f"data.default.{key}", _default(key, value)))
        for split in SPLITS:
            found += [by(f"data.{split}.{key}", _own(split, value)), by(f"data.{split}.*.{key}", _listed(split, value))]
    return found


def _own(split: str, value: _Value) -> Callable[[Any, Theirs], Decision]:
    return lambda given, theirs: value(given, split, theirs)


def _listed(split: str, value: _Value) -> Callable[[Any, Theirs], Decision]:
    def decide(given: Any, theirs: Theirs) -> Decision:
        if len(theirs.get(f"data.{split}", ())) > 1:
            return Refused(f"data.{split} is one dataset here: join the files, with a field for the task")
        return value(given, split, theirs)

    return decide


def _default(key: str, value: _Value) -> Callable[[Any, Theirs], Decision]:
    """A key of `data.default`, for the splits that do not have it themselves."""

    def decide(given: Any, theirs: Theirs) -> Decision:
        splits = [split for split in SPLITS if dataset(theirs, split) is not None]
        open_to_it = [split for split in splits if key not in _single(theirs, split)]
        if not open_to_it:
            return Unneeded("each dataset says its own" if splits else "there is no dataset that it would be of")
        found = [value(given, split, theirs) for split in open_to_it]
        becomes = [one for one in found if isinstance(one, Becomes)]
        if not becomes:
            return found[0]
        return Becomes({key: it for one in becomes for key, it in one.values.items()}, becomes[0].note)

    return decide


def _single(theirs: Theirs, split: str) -> Mapping[str, Any]:
    found = theirs.get(f"data.{split}")
    alone = found[0] if isinstance(found, list) else found
    return alone if isinstance(alone, Mapping) else {}


def _name(given: Any, split: str, theirs: Theirs) -> Decision:
    if given in FILES:
        name = "preference" if algorithm_of(theirs) == "dpo" else "jsonl"
        return Becomes({f"data.{split}.dataset_name": name})
    return Refused(
        f"{given} is fetched by its name there, and no dataset of that name is here: write it as JSON lines, and set "
        f"data.{split}.path"
    )


def _of_files(ours: str, *, only: Sequence[str] = (), note: str = "") -> _Value:
    """A key of a dataset of JSON lines, under another name; `only` names algorithms that have it."""

    def value(given: Any, split: str, theirs: Theirs) -> Decision:
        name = (dataset(theirs, split) or {}).get("dataset_name")
        if name not in FILES:
            return Refused(f"it belongs to {name}, which is not here")
        if only and algorithm_of(theirs) not in only:
            return Unneeded(f"{algorithm_of(theirs)} does not read it")
        return Becomes({f"data.{split}.{ours}": given}, note)

    return value


def _answer(given: Any, split: str, theirs: Theirs) -> Decision:
    """The field of the answer: what is trained on for sft, what is expected otherwise."""
    key = "response_key" if algorithm_of(theirs) == "sft" else "output_key"
    return _of_files(key, only=("sft", "grpo"))(given, split, theirs)


def _prompt(given: Any, split: str, theirs: Theirs) -> Decision:
    if given is None:
        return Unneeded("the field is asked as it is")
    if algorithm_of(theirs) == "dpo":
        return Refused("a template is not applied to pairs: write the prompts as they are to be asked")
    return Becomes({f"data.{split}.prompt": given}, "a text file with one {} serves as it is; it must be there")


def _task(given: Any, split: str, theirs: Theirs) -> Decision:
    if not samples(theirs):
        return Unneeded(f"{algorithm_of(theirs)} asks no environment")
    return Becomes({f"data.{split}.task_name": given})


def _processor(given: Any, split: str, theirs: Theirs) -> Decision:
    if given in (None, *_PROCESSORS):
        return Unneeded("the algorithm says what a record becomes")
    return Refused("records become messages by the dataset: write the fields as JSON lines, or a dataset of your own")


def _unless_null(since: str, reason: str) -> _Value:
    return lambda given, split, theirs: Unneeded(since) if given in (None, 0) else Refused(reason)


def _always(decision: Decision) -> _Value:
    return lambda given, split, theirs: decision


_KEYS: dict[str, _Value] = {
    "dataset_name": _name,
    "data_path": _of_files("path"),
    "input_key": _of_files("input_key", only=("sft", "grpo")),
    "output_key": _answer,
    "chat_key": _of_files("input_key", only=("sft", "grpo"), note="a list of messages is a conversation"),
    "prompt_key": _of_files("prompt_key", only=("dpo",)),
    "chosen_key": _of_files("chosen_key", only=("dpo",)),
    "rejected_key": _of_files("rejected_key", only=("dpo",)),
    "system_prompt": _of_files("system_prompt"),
    "prompt_file": _prompt,
    "system_prompt_file": _unless_null("no system prompt is added", "write its text under `system_prompt`"),
    "env_name": _task,
    "processor": _processor,
    "subset": _unless_null(_OF_A_FILE, _OF_A_FILE),
    "split": _always(Unneeded("the file is the split")),
    "split_validation_size": _unless_null("nothing is held out", "held-out data is a file of its own: data.validation"),
    "seed": _always(Unneeded("it splits the data there, which is not done here")),
    "repeat": _unless_null("once by default", "ask several samples of each prompt: val_num_generations_per_prompt"),
}


def length_of_prompts(value: Any, theirs: Theirs) -> Decision:
    """The most tokens of a prompt, which must leave room for an answer."""
    longest = theirs.number("policy.max_total_sequence_length", 0)
    if not samples(theirs):
        return Unneeded("rows of an algorithm that does not sample are held to policy.max_total_sequence_length")
    if isinstance(value, int) and longest and value >= longest:
        return Becomes({"data.max_input_seq_length": longest - 1}, "an answer has one token at least")
    return Becomes({"data.max_input_seq_length": value})


def environment_class(value: Any, theirs: Theirs) -> Decision:
    """An environment's class by its path; those of NeMo's own packages are not there."""
    if str(value).endswith("nemo_rl.environments.math_environment.MathEnvironment"):
        return Becomes({"env.*.name": "math"}, "the environment `math` in place of NeMo's class")
    if str(value).startswith(("nemo_rl.", "nemo_skills.", "nemo_gym.")):
        return Refused("the class is NeMo's: port it, as an EnvironmentInterface of rl_core")
    return Becomes({"env.*.env_cls": value})


def additions(theirs: Theirs, ours: Mapping[str, Any]) -> Iterator[Added]:
    """What a dataset or a task needs and no key of theirs says."""
    for split in SPLITS:
        found = dataset(theirs, split)
        if found is None:
            continue
        at, is_file = f"data.{split}", found.get("dataset_name") in FILES
        if f"{at}.dataset_name" not in ours:
            name = "preference" if algorithm_of(theirs) == "dpo" else "jsonl"
            yield Added(key=f"{at}.dataset_name", value=name, reason="a file of JSON lines in place of a dataset by name")
        if f"{at}.path" not in ours:
            yield Added(key=f"{at}.path", value=LEFT_OPEN, reason="left open: the file to read")
        yield from _their_fields(found, at, algorithm_of(theirs), ours) if is_file else ()
    tasks = theirs.get("env")
    for task in tasks if samples(theirs) and isinstance(tasks, Mapping) else ():
        if not any(key.startswith(f"env.{task}.") for key in ours):
            yield Added(key=f"env.{task}", value={}, reason="the task, with its defaults")


def _their_fields(found: Mapping[str, Any], at: str, algorithm: str | None, ours: Mapping[str, Any]) -> Iterator[Added]:
    """The fields of a record that theirs reads unless told otherwise, where ours would read others."""
    if algorithm == "dpo":
        fields = {"prompt_key": "context"} if found["dataset_name"] == "PreferenceDataset" else {}
    elif found["dataset_name"] == "openai_format":
        fields = {"input_key": "messages"}
    else:
        fields = {"input_key": "input", "response_key" if algorithm == "sft" else "output_key": "output"}
    if algorithm == "sft":
        yield Added(key=f"{at}.output_key", value=None, reason="no environment expects an answer")
    for key, value in fields.items():
        if f"{at}.{key}" not in ours:
            yield Added(key=f"{at}.{key}", value=value, reason="what theirs reads unless told otherwise")
