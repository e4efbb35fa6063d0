"""How NeMo RL's sections `data` and `env` become ours: a row for every place that a dataset's key may have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rl_core.config.importing.nemo_rl.facts import algorithm_of, has_pairs, held_out_share, samples
from rl_core.config.importing.nemo_rl.sources import FILES, SPLITS, dataset, source_of
from rl_core.config.importing.rows import LEFT_OPEN, Added, Becomes, Decision, Refused, Row, Theirs, Unneeded, by, never

_PROCESSORS = ("math_hf_data_processor", "sft_processor", "preference_processor")
_ONE_ANSWER = ("sft", "grpo", "ppo", "distillation")
_Value = Callable[[Any, str, Theirs], Decision]


def rows() -> list[Row]:
    """A row for each key of a dataset, under each of the sections that may hold it; older configs had none of these."""
    found = never("data", " ".join(_KEYS), "an older layout: move it to data.train, and to data.validation, and import again")
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
            return Refused("several datasets are drawn by weight here, not joined: write each under data.mix")
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
    source = source_of(theirs, split)
    if source is not None:
        note = "" if given in FILES else "of the hub, or of its cache"
        return Becomes({f"data.{split}.dataset_name": source.component}, note)
    return Refused(
        f"no dataset of ours is known to read it: write JSON lines and set data.{split}.path, or take parquet, huggingface or "
        "a dataset of your own"
    )


def _of_source(ours: str, *, only: Sequence[str] = (), note: str = "") -> _Value:
    """A key of a dataset, under another name; `only` names algorithms that have it."""

    def value(given: Any, split: str, theirs: Theirs) -> Decision:
        if source_of(theirs, split) is None:
            return Refused("it belongs to a dataset that is not here")
        if only and algorithm_of(theirs) not in only:
            return Unneeded(f"{algorithm_of(theirs)} does not read it")
        return Becomes({f"data.{split}.{ours}": given}, note)

    return value


def _path(given: Any, split: str, theirs: Theirs) -> Decision:
    if (dataset(theirs, split) or {}).get("dataset_name") in FILES:
        return _of_source("path")(given, split, theirs)
    return Unneeded("a dataset with a name has a place of its own")


def _answer(given: Any, split: str, theirs: Theirs) -> Decision:
    """The field of the answer: what is trained on for sft, what is expected otherwise."""
    key = "response_key" if algorithm_of(theirs) == "sft" else "output_key"
    return _of_source(key, only=_ONE_ANSWER)(given, split, theirs)


def _part(ours: str) -> _Value:
    """A split or a subset, which datasets of Hugging Face have."""

    def value(given: Any, split: str, theirs: Theirs) -> Decision:
        source = source_of(theirs, split)
        if source is not None and source.is_of_hugging_face:
            return Becomes({f"data.{split}.{ours}": given})
        return Unneeded("a file is read whole")

    return value


def _held_out(given: Any, split: str, theirs: Theirs) -> Decision:
    if split == "validation" or not given:
        return Unneeded("nothing is held out of it")
    if theirs.get("data.validation") is not None:
        return Refused("data.validation is there, and validates alone")
    if not held_out_share(theirs):
        return Refused("a share of the rows is held out here, never a number of them: data.split.validation")
    return Becomes({"data.split.validation": given}, "each row by what it asks, so not the same rows")


def _seed(given: Any, split: str, theirs: Theirs) -> Decision:
    if split == "train" and held_out_share(theirs):
        return Becomes({"data.split.seed": given})
    return Unneeded("it draws what is held out, and nothing is")


def _prompt(given: Any, split: str, theirs: Theirs) -> Decision:
    if given is None:
        return Unneeded("the field is asked as it is")
    if has_pairs(theirs):
        return Refused("a template is not applied to pairs: write the prompts as they are to be asked")
    source = source_of(theirs, split)
    if source is not None and "record_fn" in source.keys:
        return Refused("a function makes the records of this dataset, and fills no template")
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


_KEYS: dict[str, _Value] = {
    "dataset_name": _name,
    "data_path": _path,
    "input_key": _of_source("input_key", only=_ONE_ANSWER),
    "output_key": _answer,
    "chat_key": _of_source("input_key", only=_ONE_ANSWER, note="a list of messages is a conversation"),
    "prompt_key": _of_source("prompt_key", only=("dpo", "rm")),
    "chosen_key": _of_source("chosen_key", only=("dpo", "rm")),
    "rejected_key": _of_source("rejected_key", only=("dpo", "rm")),
    "system_prompt": _of_source("system_prompt"),
    "prompt_file": _prompt,
    "system_prompt_file": _unless_null("no system prompt is added", "write its text under `system_prompt`"),
    "env_name": _task,
    "processor": _processor,
    "subset": _part("subset"),
    "split": _part("split"),
    "split_validation_size": _held_out,
    "seed": _seed,
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
        if dataset(theirs, split) is None:
            continue
        at, source = f"data.{split}", source_of(theirs, split)
        if source is None:
            name = "preference" if has_pairs(theirs) else "jsonl"
            yield Added(key=f"{at}.dataset_name", value=name, reason="a file of JSON lines in its place")
        implied = {} if source is None else source.keys
        for key, value in implied.items():
            if f"{at}.{key}" not in ours:
                yield Added(key=f"{at}.{key}", value=value, reason="what theirs reads unless told otherwise")
        if "path" not in implied and f"{at}.path" not in ours:
            yield Added(key=f"{at}.path", value=LEFT_OPEN, reason="left open: the file to read")
    yield from _environments(theirs, ours)


def _environments(theirs: Theirs, ours: Mapping[str, Any]) -> Iterator[Added]:
    tasks = theirs.get("env")
    for task, section in tasks.items() if samples(theirs) and isinstance(tasks, Mapping) else ():
        # `env` also has switches (`should_use_...: false`), which are not tasks.
        if not isinstance(section, Mapping | None):
            continue
        if not any(key.startswith(f"env.{task}.") for key in ours):
            yield Added(key=f"env.{task}", value={}, reason="the task, with its defaults")
        if ours.get(f"env.{task}.name", task) == "math":
            reason = "NeMo RL also grades answers without a box; false does the same here, and pays for more wrong answers"
            yield Added(key=f"env.{task}.require_box", value=True, reason=reason)
