"""The advice in our messages is tried: commands and options parse, keys exist, and values are allowed."""

import ast
import re
from dataclasses import dataclass
from functools import cache

import pytest
import typer
import yaml
from documents import ROOT
from pydantic import TypeAdapter, ValidationError

from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.config.reference import schema_index
from rlcore_cli.explain import known_keys
from rlcore_cli.main import app

HOLE = "\x00"
"""An expression of an f-string."""
_QUOTED = re.compile(r"`([^`\n]+)`")
_AFTER_COLON = re.compile(r": (rlcore [^`;,\n]+)(?!.* or )")
_ASSIGNMENT = re.compile(rf"([a-z{HOLE}][\w.{HOLE}]*)(?:: |=)([^`]+)")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
_PAGE = re.compile(r"docs/[\w/]+\.md(?:#[\w-]+)?")


@dataclass(frozen=True)
class Message:
    """A string of a source file that is not a docstring."""

    file: str
    line: int
    text: str

    @property
    def place(self):
        return f"{self.file}:{self.line}"


@cache
def messages():
    """All strings that have a space, in all sources."""
    found = []
    for path in sorted(ROOT.glob("*/src/**/*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            text = text_of(node) if id(node) not in docs and id(node) not in parts else None
            if text and " " in text:
                found.append(Message(str(path.relative_to(ROOT)), node.lineno, text))
    return found


def text_of(node):
    """The text of a string or an f-string, with holes; None for other nodes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
    return None


def commands():
    """The words of each command in a message, after `rlcore`."""
    for message in messages():
        for quoted in (*_QUOTED.findall(message.text), *_AFTER_COLON.findall(message.text)):
            if quoted.startswith("rlcore "):
                yield message, quoted.partition(",")[0].rstrip(".").split()[1:]


def assignments():
    """Each `key: value` and `key=value` in backticks: the key, and the value as it is written."""
    for message in messages():
        for quoted in _QUOTED.findall(message.text):
            if found := _ASSIGNMENT.fullmatch(quoted):
                yield message, *found.groups()


def keys(sections):
    """Each dotted key in a message that begins with the name of a section."""
    pattern = re.compile(rf"(?<![\w.\-/])(?:{'|'.join(sorted(sections))})(?:\.(?:[a-z][a-z0-9_]*|{HOLE}))+(?![\w(/])")
    for message in messages():
        yield from ((message, key) for key in pattern.findall(message.text))


def options():
    """Each option in a message that shows no command of another program."""
    for message in messages():
        yield from ((message, option) for option in _OPTION.findall(message.text))


def pages():
    """Each page of the documentation that a message names, with its anchor."""
    for message in messages():
        yield from ((message, page) for page in _PAGE.findall(message.text))


COMMAND = typer.main.get_command(app)
INDEX = schema_index(Registry(discover()))
KEYS = [key.split(".") for key in known_keys(INDEX)]
SECTIONS = {key[0] for key in KEYS} - {"<name>"}
OTHER_PROGRAMS = {
    "--address": "ray",
    "--depth": "git",
    "--enable-scale-out": "vllm",
    "--force-reinstall": "pip",
    "--head": "ray",
    "--logprobs-mode": "vllm",
    "--max-logprobs": "vllm",
    "--no-deps": "pip",
    "--no-such-option": "an option that the kit expects to be refused",
    "--ray": "pytest",
    "--security-opt": "docker",
    "--shm-size": "docker",
}
"""Options in our messages that are not ours."""
OPEN = "a value that an expression gives"
NUMBERS = ("N", "STEPS")
FILES_WITHOUT_KEYS = {"rl_serve/src/rl_serve/requests.py"}
"""Their `key: value` are fields of requests to the server."""
NOT_OURS = {"policy.megatron_cfg.enabled": "a key of NeMo RL"}


def fits(known, part):
    return known == part or known.startswith("<") or (HOLE in part and re.fullmatch(part.replace(HOLE, ".*"), known))


def endings_like(key):
    """The keys that end in the parts of a key; an expression in a key stands for any text."""
    parts = key.split(".")
    for known in KEYS:
        if len(known) >= len(parts) and all(map(fits, known[-len(parts) :], parts)):
            yield known


def fields_like(key):
    for known in endings_like(key):
        yield from (field for _, field in INDEX.find(tuple(known)))


def test_commands_in_messages_parse():
    wrong, number = [], 0
    for message, words in commands():
        number += 1
        remaining = [re.sub(f"^{HOLE}$", "x", "1" if word in NUMBERS else word) for word in words]
        context = COMMAND.make_context("rlcore", list(remaining), resilient_parsing=True)
        try:
            while hasattr(context.command, "commands") and remaining:
                name = remaining.pop(0)
                context = context.command.get_command(context, name).make_context(name, list(remaining), parent=context)
        except Exception as error:
            # A sentence may name a command without its arguments.
            if type(error).__name__ not in ("MissingParameter", "NoArgsIsHelpError") and not wants_value(error):
                wrong.append(f"{message.place}: rlcore {' '.join(words)}: {error!r}")
    assert wrong == []
    assert number > 50


def wants_value(error):
    """Whether the last word is an option whose value the sentence leaves out."""
    return "requires an argument" in str(error)


def test_keys_in_messages_exist():
    found = list(keys(SECTIONS))
    wrong = [f"{m.place}: {key}" for m, key in found if not exists(key) and key not in NOT_OURS and not key.endswith(".yaml")]
    assert wrong == []
    assert len(found) > 150


def exists(key):
    return any(len(known) == key.count(".") + 1 for known in endings_like(key)) or INDEX.find(tuple(key.split(".")))


def leaves(key, value):
    """A key with its value, or those of the keys that the value has."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(f"{key}.{name}", inner)
    else:
        yield key, value


def problem_of(key, value):
    """Why a key cannot be set to a value; None if it can."""
    fields = list(fields_like(key)) or [field for _, field in INDEX.find(tuple(key.split(".")))]
    if not fields and not any(endings_like(key)):
        return f"there is no key {key}"
    is_wrong = value != OPEN and fields and not any(allows(field, value) for field in fields)
    return f"{key} cannot be {value!r}" if is_wrong else None


def test_assignments_in_messages_set_keys_that_exist_to_values_that_they_allow():
    found = [each for each in assignments() if each[0].file not in FILES_WITHOUT_KEYS and each[1:] != ("key", "value")]
    wrong = []
    for message, key, text in found:
        is_open = re.search(rf"{HOLE}|%s|\.\.\.", text) is not None
        given = leaves(key, OPEN if is_open else yaml.safe_load(text))
        wrong += [f"{message.place}: {problem}" for each in given if (problem := problem_of(*each)) is not None]
    assert wrong == []
    assert len(found) > 80


def allows(field, value):
    if field.is_free:
        return True
    try:
        TypeAdapter(field.info.annotation).validate_python(value)
    except ValidationError:
        return False
    return True


def contexts(context):
    """The context of a command, and those of the commands within it."""
    yield context
    for name in context.command.list_commands(context) if hasattr(context.command, "commands") else ():
        inner = context.command.get_command(context, name)
        yield from contexts(inner.make_context(name, [], parent=context, resilient_parsing=True))


def test_options_in_messages_exist():
    root = COMMAND.make_context("rlcore", [], resilient_parsing=True)
    ours = {
        option for each in contexts(root) for it in each.command.get_params(each) for option in (*it.opts, *it.secondary_opts)
    }
    wrong = {f"{m.place}: {option}" for m, option in options() if option not in ours and option not in OTHER_PROGRAMS}
    assert wrong == set()
    assert len(ours) > 60


def test_pages_in_messages_exist():
    missing = [f"{message.place}: {page}" for message, page in pages() if not (ROOT / page.partition("#")[0]).is_file()]
    assert missing == []


@pytest.mark.parametrize("vague", [r"\b(raise|increase|lower) (the|this) limit\b"])
def test_no_remedy_names_a_setting_without_its_key(vague):
    assert [message.place for message in messages() if re.search(vague, message.text)] == []
