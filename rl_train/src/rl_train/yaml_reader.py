"""Parses YAML into values with source locations. Independent of the schema.

Scalars are parsed as by OmegaConf (YAML 1.1, but `1e-5` is a number and a date is text). Rejected: duplicate and non-text keys,
tags, documents after the first, recursive aliases, and texts that expand without limit.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import yaml

from rl_core.config.diagnostics import KeyPath, Node, Problems, SourceLocation, show

MAX_DEPTH = 50
MAX_VALUES = 10_000

_FLOAT = re.compile(
    r"""^(?:
     [-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*[eE][-+]?[0-9]+
    |\.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?::[0-5]?[0-9])+\.[0-9_]*
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str", "map", "seq")}
MARKS = ("_override_", "_default_")
"""Keys of a mapping that say how it is merged: see `Node.replaces` and `Node.is_default`."""


class _Loader(yaml.SafeLoader):
    """The pure Python loader: the C loader overflows its stack on deeply nested texts, which kills the process."""


_Loader.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+0123456789."))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != f"{_TAG}timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def read_yaml(text: str, *, location: SourceLocation, problems: Problems) -> Node | None:
    """The values of a YAML text.

    Args:
        text: One document.
        location: Start of the text: line 1 of a file, or an override, where all values have the same location.
        problems: Receives the errors.

    Returns:
        The root value, or None if the text is not valid YAML or is empty.
    """
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        return _Reader(loader, location=location, problems=problems).read(node)
    except yaml.MarkedYAMLError as error:
        _report(error, location=location, problems=problems)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - (text.rfind("\n", 0, error.position) + 1) + 1
        code = error.character if isinstance(error.character, int) else ord(error.character)
        problems.add(
            f"The character U+{code:04X} is not allowed in YAML: remove it.",
            location=_at(location, line, column),
        )
    except RecursionError:
        problems.add(f"The text is nested more than {MAX_DEPTH} levels deep.", location=location)
    finally:
        if loader is not None:
            loader.dispose()
    return None


class _Reader:
    """Turns the nodes of one document into `Node` values."""

    def __init__(self, loader: _Loader, *, location: SourceLocation, problems: Problems) -> None:
        self._loader = loader
        self._location = location
        self._problems = problems
        self._count = 0

    def read(self, node: yaml.Node) -> Node:
        return self._value(node, path=(), key_node=node)

    def _value(self, node: yaml.Node, *, path: KeyPath, key_node: yaml.Node) -> Node:
        self._count += 1
        if self._count > MAX_VALUES:
            raise _error(f"more than {MAX_VALUES} values, counting each use of an alias", node)
        if len(path) > MAX_DEPTH:
            raise _error(f"nested more than {MAX_DEPTH} levels deep (or an alias that contains itself)", node)
        location, key_location = self._at(node), self._at(key_node)
        if isinstance(node, yaml.ScalarNode):
            return Node(self._scalar(node), location=location, key_location=key_location, text=node.value)
        if node.tag not in _PLAIN_TAGS:
            raise _error(f"the tag {node.tag.removeprefix(_TAG)!r} is not supported: write the value without it", node)
        if isinstance(node, yaml.MappingNode):
            mapping = self._mapping(node, path=path)
            replaces, is_default = (self._pop_mark(mapping, mark, path=path) for mark in MARKS)
            return Node(mapping, location=location, key_location=key_location, replaces=replaces, is_default=is_default)
        items = [self._value(item, path=(*path, index), key_node=item) for index, item in enumerate(node.value)]
        return Node(items, location=location, key_location=key_location)

    def _mapping(self, node: yaml.MappingNode, *, path: KeyPath) -> dict[str, Node]:
        direct: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            if key_node.tag == f"{_TAG}merge":
                merged = {**self._merge_key(value_node, path=path), **merged}
                continue
            key = self._key(key_node, path=path)
            if key is None:
                continue
            if key in direct:
                first = direct[key].key_location
                self._problems.add(
                    f"This key is already set at {first}: remove one of the two.",
                    location=self._at(key_node),
                    path=(*path, key),
                )
                continue
            direct[key] = self._value(value_node, path=(*path, key), key_node=key_node)
        return {**{key: item for key, item in merged.items() if key not in direct}, **direct}

    def _merge_key(self, node: yaml.Node, *, path: KeyPath) -> dict[str, Node]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, Node] = {}
        for source in sources:
            if not isinstance(source, yaml.MappingNode):
                raise _error("`<<` takes a mapping, or a list of mappings", source)
            # Counted as one level deeper, so that a mapping merged into itself hits the depth limit.
            for key, item in self._value(source, path=(*path, "<<"), key_node=source).value.items():
                merged.setdefault(key, item)
        return merged

    def _key(self, node: yaml.Node, *, path: KeyPath) -> str | None:
        if isinstance(node, yaml.ScalarNode):
            value = self._scalar(node)
            if isinstance(value, str):
                return value
            message = f"YAML reads the key {node.value!r} as {show(value)}: quote it."
        else:
            message = "A key must be text, not a list or a mapping. Is a pair of braces missing its quotes?"
        self._problems.add(message, location=self._at(node), path=path)
        return None

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        if node.tag == f"{_TAG}value":  # a bare `=`
            return node.value
        if node.tag not in _PLAIN_TAGS:
            raise _error(f"the tag {node.tag.removeprefix(_TAG)!r} is not supported: write the value without it", node)
        try:
            value = self._loader.construct_object(node)
            if isinstance(value, int):
                str(value)  # raises if a hexadecimal integer is too long to be printed
            return value
        except (ValueError, KeyError) as error:  # a number too long for int(), or text under an explicit tag
            kind = node.tag.removeprefix(_TAG)
            raise _error(f"{show(node.value)} is not a valid YAML {kind}", node) from error

    def _pop_mark(self, mapping: dict[str, Node], name: str, *, path: KeyPath) -> bool:
        mark = mapping.pop(name, None)
        if mark is None:
            return False
        if not isinstance(mark.value, bool):
            self._problems.add("must be true or false.", location=mark.location, path=(*path, name))
        return mark.value is True

    def _at(self, node: yaml.Node) -> SourceLocation:
        return _at(self._location, node.start_mark.line + 1, node.start_mark.column + 1)


def _at(begin: SourceLocation, line: int, column: int) -> SourceLocation:
    return begin if begin.line is None else replace(begin, line=line, column=column)


def _error(message: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=message, problem_mark=node.start_mark)


def _report(error: yaml.MarkedYAMLError, *, location: SourceLocation, problems: Problems) -> None:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
    what = (error.problem or error.context or "").strip()
    message = f"Invalid YAML: {what}."
    if error.context and error.context_mark is not None and error.problem:
        message = f"Invalid YAML: {error.context}, {what}."
    hint = _hint(what)
    problems.add(message if hint is None else f"{message} {hint}", location=_at(location, line, column))


def _hint(what: str) -> str | None:
    if r"'\t'" in what:
        return "Indent with spaces, not tabs."
    if "mapping values are not allowed" in what:
        return "Quote values that contain `: `, and indent all keys of a section equally."
    if "expected a single document" in what or "another document" in what:
        return "A config must have one document: remove the second `---`."
    if "undefined alias" in what:
        return "Text that starts with `*` must be quoted."
    return None
