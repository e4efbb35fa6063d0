"""Finds, reads and checks prompt configs and lists of few-shot examples, packaged ones by name.

A prompt config is a YAML file with the messages of a prompt and its few-shot examples, in the format of NeMo-Skills. A list of
examples is a file in YAML or JSON Lines.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from rl_core.config.diagnostics import KeyPath, Node, Problems, SourceLocation
from rl_core.config.section import Section
from rl_core.config.validator import Validator
from rl_core.errors import DataError
from rl_core.plugins.component import did_you_mean
from rl_train.files import locate
from rl_train.yaml_reader import read_yaml

PACKAGED = Path(__file__).parent / "prompt_configs"
PACKAGED_EXAMPLES = Path(__file__).parent / "prompt_examples"
EXAMPLES = "examples"
"""The placeholder of the user message that the few-shot examples replace."""
BM25S = "pip install 'rl-train[prompts]'"
"""Installs the package that searches for the nearest examples."""
_UNSUPPORTED = {
    "code_tags": "code in few-shot examples is written as it is: write the code blocks into the examples",
    "image_field": "images are not supported",
    "image_position": "images are not supported",
    "audio_field": "audio is not supported",
}
"""Keys of NeMo-Skills that have no effect here, and what to do instead."""


class FewShotExamples(Section):
    """Few-shot examples (`few_shot_examples`); `{examples}` in the user message is replaced by them."""

    prefix: str = ""
    """Text before the first example. Omitted if there are no examples."""
    template: str = ""
    """Text of one example; `{name}` is replaced by a field of the example."""
    suffix: str = ""
    """Text after the last example. Omitted if there are no examples."""
    examples_type: str | None = None
    """Examples by the name of a packaged list, or by the path of a YAML or JSON Lines file."""
    examples: tuple[dict[str, Any], ...] = ()
    """Examples written into the prompt config itself."""
    retrieval_field: str | None = None
    """Field by which the nearest examples of `retrieval_file` are searched (BM25). Rows and examples need this field."""
    retrieval_file: str | None = None
    """JSON Lines or YAML file in which the nearest examples are searched."""
    retrieved_entries: int = Field(default=10, ge=1)
    """Number of nearest examples to choose from, not counting the row itself."""
    retrieved_few_shots: int = Field(default=5, ge=1)
    """Number of nearest examples in the prompt. The nearest is the last."""
    randomize_retrieved_entries: bool = False
    """Only false is allowed: the prompt of a row must not change during a run."""
    max_retrieved_chars: int | None = Field(default=None, ge=1)
    """Nearest examples are left out if `max_retrieved_chars_field` has this many characters or more. No limit by default."""
    max_retrieved_chars_field: str = "reference_solution"
    """Field that `max_retrieved_chars` limits."""

    @model_validator(mode="after")
    def _one_choice(self) -> FewShotExamples:
        if (self.retrieval_field is None) != (self.retrieval_file is None):
            raise ValueError("retrieval_field and retrieval_file must be set together")
        chosen = [key for key in ("examples_type", "examples", "retrieval_field") if getattr(self, key)]
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} both select the examples: keep one of them")
        if self.randomize_retrieved_entries:
            raise ValueError("randomize_retrieved_entries must be false: the prompt of a row must not change during a run")
        return self

    @property
    def are_chosen(self) -> bool:
        """Whether the file selects examples."""
        return bool(self.examples_type or self.examples or self.retrieval_field)


class PromptFile(Section):
    """The content of a prompt config."""

    user: str
    """The user message. `{name}` is replaced by a field of the row, `{examples}` by the few-shot examples."""
    system: str | None = None
    """The system message; none by default."""
    few_shot_examples: FewShotExamples | None = None
    """The few-shot examples."""


def packaged_prompts() -> list[str]:
    """The names of the packaged prompt configs."""
    return packaged_names(PACKAGED)


def find_prompt(path_or_name: str | Path) -> Path:
    """The file of a prompt config; raises DataError as `find_file`."""
    return find_file(path_or_name, packaged=PACKAGED, kind="prompt")


def read_prompt(path_or_name: str | Path, examples_type: str | None = None) -> PromptFile:
    """The checked content of a prompt config: a YAML file, a text file that is the user message, or a packaged name.

    Args:
        path_or_name: The path or name.
        examples_type: Name or path of few-shot examples, replacing the `examples_type` of the file.

    Raises:
        DataError: It does not exist or is invalid. The message has one line per problem, with file and line.
    """
    path = find_prompt(path_or_name)
    start = SourceLocation(str(path_or_name), 1, 1, str(path))
    problems = Problems()
    written = _read(path, start, problems)
    prompt = None if problems.found else _validated(written, problems)
    if prompt is not None:
        prompt = _with_examples_type(prompt, examples_type, written, problems)
        _check_texts(prompt, written, problems)
        _check_examples(prompt, written, problems)
    if problems.found or prompt is None:
        raise DataError("\n".join(str(problem) for problem in problems.found))
    return prompt


def prompt_problem(path_or_name: str, examples_type: str | None = None) -> str | None:
    """Why `read_prompt` fails; None if the prompt config is valid."""
    try:
        read_prompt(path_or_name, examples_type)
    except DataError as error:
        return str(error) if str(error).endswith((".", "?")) else f"{error}."
    return None


def placeholders(text: str) -> list[str]:
    """The names in the braces of a text, in order; "" for `{}`.

    Raises:
        ValueError: Braces do not match, or contain something other than a name.
    """
    fields = []
    for _, field, spec, conversion in string.Formatter().parse(text):
        if field is None:
            continue
        # Only names: an attribute or an index would give templates access to the record's objects.
        if (field and not field.isidentifier()) or spec or conversion:
            raise ValueError(f"{{{field}}} is not a plain field name")
        fields.append(field)
    return fields


def _read(path: Path, start: SourceLocation, problems: Problems) -> Node:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        problems.add(f"The file cannot be read: {error}.", location=start)
        text = ""
    if path.suffix not in (".yaml", ".yml"):
        return Node({"user": Node(text, location=start, key_location=start)}, location=start, key_location=start)
    root = None if problems.found else read_yaml(text, location=start, problems=problems)
    if root is not None and isinstance(root.value, dict):
        return root
    if not problems.found:
        problems.add("A prompt config must be a mapping with the key `user`.", location=start)
    return Node({}, location=start, key_location=start)


def _validated(written: Node, problems: Problems) -> PromptFile | None:
    values: dict[str, Any] = written.plain()
    for key in sorted(values.keys() & _UNSUPPORTED.keys()):
        if values.pop(key) is not None:
            problems.add(f"is not supported: {_UNSUPPORTED[key]}.", location=written.value[key].key_location, path=(key,))
    few_shot = values.get("few_shot_examples")
    if isinstance(few_shot, dict):
        for key in ("examples_type", "retrieval_file"):
            if isinstance(name := few_shot.get(key), str):
                location = written.nearest(("few_shot_examples", key)).location
                few_shot[key] = locate(name, location=location) or name
    validator = Validator(written=written, problems=problems, find_elsewhere=lambda _: [])
    instance = validator.validate(PromptFile, values, path=())
    return instance if isinstance(instance, PromptFile) else None


def _with_examples_type(prompt: PromptFile, examples_type: str | None, written: Node, problems: Problems) -> PromptFile:
    if examples_type is None:
        return prompt
    few_shot = prompt.few_shot_examples
    if few_shot is None:
        problems.add(
            f"examples_type is {examples_type!r}, but this prompt config has no `few_shot_examples` with a template for "
            "examples: choose another prompt config, or write your own.",
            location=written.location,
        )
        return prompt
    if few_shot.retrieval_field or few_shot.examples:
        problems.add(
            f"examples_type is {examples_type!r}, but the prompt config selects its examples itself "
            f"({'retrieval_field' if few_shot.retrieval_field else 'examples'}): keep one of them.",
            location=written.nearest(("few_shot_examples",)).key_location,
        )
        return prompt
    return prompt.model_copy(update={"few_shot_examples": few_shot.model_copy(update={"examples_type": examples_type})})


def _check_texts(prompt: PromptFile, written: Node, problems: Problems) -> None:
    """Report braces that do not match, and `{examples}` that is missing or cannot be filled."""
    few_shot, template = prompt.few_shot_examples, ("few_shot_examples", "template")
    texts: list[tuple[KeyPath, str]] = [(("user",), prompt.user), (("system",), prompt.system or "")]
    if few_shot is not None:
        texts.append((template, few_shot.template))
    names: dict[KeyPath, list[str]] = {}

    def report(path: KeyPath, message: str) -> None:
        problems.add(message, location=written.nearest(path).location, path=path)

    for path, text in texts:
        try:
            names[path] = placeholders(text)
        except ValueError as error:
            report(path, f"{error} (write {{{{ and }}}} for literal braces).")
    if "" in names.get(template, []):
        report(template, "{} cannot be filled: write the name of a field.")
    uses_examples = EXAMPLES in names.get(("user",), [EXAMPLES])
    if EXAMPLES in names.get(("system",), []):
        report(("system",), "{examples} can only be used in the user message.")
    if few_shot is None and EXAMPLES in names.get(("user",), []):
        remedy = "add the section `few_shot_examples`. (A field of the rows must have another name.)"
        report(("user",), f"{{examples}} cannot be filled: {remedy}")
    if few_shot is not None and few_shot.are_chosen and not uses_examples:
        problems.add(
            "the examples would have no effect: the user message does not contain {examples}.",
            location=written.nearest(("few_shot_examples",)).key_location,
            path=("few_shot_examples",),
        )
    if few_shot is not None and few_shot.are_chosen and not few_shot.template:
        problems.add(
            "is required. It is the text of one example, with `{name}` for its fields.",
            location=written.nearest(template).key_location,
            path=template,
            is_missing=True,
        )


def _check_examples(prompt: PromptFile, written: Node, problems: Problems) -> None:
    """Report examples that do not exist or lack a field of the template."""
    few_shot = prompt.few_shot_examples
    if few_shot is None or not few_shot.are_chosen or problems.found:
        return
    key = next(key for key in ("examples_type", "examples", "retrieval_file") if getattr(few_shot, key))
    path: KeyPath = ("few_shot_examples", key)
    location = written.nearest(path).location
    is_nearest = key == "retrieval_file"
    if is_nearest and find_spec("bm25s") is None:
        problems.add(f"searching for the nearest examples needs the package bm25s: {BM25S}.", location=location, path=path)
        return
    needed = needed_fields(few_shot)
    try:
        if few_shot.examples:
            check_fields(few_shot.examples, needed)
        else:
            name = few_shot.examples_type or str(few_shot.retrieval_file)
            file = Path(name) if is_nearest else find_examples(name)
            # Only the first row of a file that may be large; the run checks the others when it reads them.
            check_fields(read_examples(file, limit=1 if is_nearest else None), needed)
    except DataError as error:
        problems.add(f"{error}.", location=location, path=path)


def needed_fields(few_shot: FewShotExamples) -> list[str]:
    """The fields that each example must have."""
    names = [name for name in placeholders(few_shot.template) if name]
    names += [] if few_shot.retrieval_field is None else [few_shot.retrieval_field]
    names += [] if few_shot.max_retrieved_chars is None else [few_shot.max_retrieved_chars_field]
    return list(dict.fromkeys(names))


def check_fields(examples: Iterable[dict[str, Any]], needed: list[str]) -> None:
    """Check that all examples have the needed fields, with texts or numbers.

    Raises:
        DataError: A field is missing or has another type.
    """
    for number, example in enumerate(examples, start=1):
        for name in needed:
            if not isinstance(example.get(name), str | int | float):
                found = f"is {example[name]!r}" if name in example else f"is missing: the example has {sorted(example)}"
                raise DataError(
                    f"example {number}: the field {name!r} {found}.{did_you_mean(name, sorted(example))} Examples need a text "
                    "or a number for each field of the template"
                )


def packaged_names(folder: Path) -> list[str]:
    """The names of the YAML files in a packaged folder and its subfolders: their paths without the suffix."""
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def find_file(path_or_name: str | Path, *, packaged: Path, kind: str) -> Path:
    """The file at a path, or the packaged file of that name.

    Args:
        path_or_name: The path or name.
        packaged: The folder of the packaged files.
        kind: What the file contains, for errors: "prompt", "list of examples".

    Raises:
        DataError: There is neither such a file nor such a packaged one.
    """
    for path in (Path(path_or_name), packaged / f"{path_or_name}.yaml"):
        if path.is_file():
            return path
    names = packaged_names(packaged)
    raise DataError(
        f"there is neither a file nor a packaged {kind} {str(path_or_name)!r}.{did_you_mean(str(path_or_name), names)} "
        f"Packaged {kind.partition(' ')[0]}s: {', '.join(names)}"
    )


def packaged_examples() -> list[str]:
    """The names of the packaged lists of examples."""
    return packaged_names(PACKAGED_EXAMPLES)


def find_examples(path_or_name: str | Path) -> Path:
    """The file of a list of examples; raises DataError as `find_file`."""
    return find_file(path_or_name, packaged=PACKAGED_EXAMPLES, kind="list of examples")


def read_examples(path: Path, *, limit: int | None = None) -> list[dict[str, Any]]:
    """The examples of a file: a YAML list of mappings, or JSON Lines.

    Args:
        path: The file; `.yaml` and `.yml` are YAML, any other is JSON Lines.
        limit: Read only this many; all by default.

    Raises:
        DataError: The file does not exist, has no examples, or is in another format; the message has the line.
    """
    try:
        is_yaml = path.suffix in (".yaml", ".yml")
        examples = _from_yaml(path)[:limit] if is_yaml else _from_json_lines(path, limit)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the examples {path} cannot be read: {error}") from error
    if not examples:
        raise DataError(f"the file {path} has no examples")
    return examples


def _from_yaml(path: Path) -> list[dict[str, Any]]:
    problems = Problems()
    location = SourceLocation(str(path), 1, 1, str(path))
    root = read_yaml(path.read_text(encoding="utf-8-sig"), location=location, problems=problems)
    if problems.found:
        raise DataError("\n".join(str(problem) for problem in problems.found))
    items = root.value if root is not None and isinstance(root.value, list) else None
    if items is None:
        raise DataError(f"{path}: expected a list of examples, each a mapping of its fields")
    for item in items:
        if not isinstance(item.value, dict):
            raise DataError(f"{item.location}: expected an example, a mapping of its fields")
    return [item.plain() for item in items]


def _from_json_lines(path: Path, limit: int | None) -> list[dict[str, Any]]:
    examples: list[dict[str, Any]] = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if limit is not None and len(examples) == limit:
                break
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}:{number}: invalid JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: expected a JSON object, found a {type(row).__name__}")
            examples.append(row)
    return examples
