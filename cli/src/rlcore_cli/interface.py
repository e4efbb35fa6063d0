"""`rlcore explain interface KIND`, and docs/plugin_interfaces.md: what the author of a component implements.

Methods, attributes, facts and capabilities are read from the code, with the first paragraph of their docstrings.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_type_hints

from rl_core.errors import UnknownComponentError
from rl_core.plugins import hookspecs
from rl_core.plugins.component import Capability, Kind, did_you_mean
from rl_core.plugins.import_path import missing_target, resolve

_CLASSES: Mapping[Kind, tuple[str, ...]] = {
    Kind.POLICY: (
        "rl_backends_base.TorchPolicyWorker",
        "rl_backends_base.PolicyWorkerBase",
        "rl_core.interfaces.policy.ColocatablePolicyInterface",
    ),
    Kind.GENERATION: (
        "rl_backends_base.TokenwiseWorker",
        "rl_core.backend.WeightSink, rl_core.backend.GenerationWorker",
        "rl_core.interfaces.generation.GenerationInterface",
    ),
}
"""Of workers, and of backends without workers. Components of other kinds derive from the class that their hook names."""
_RAY_ARGUMENT = "_ray_trace_ctx"
"""Ray adds it to the methods of a class, and of its bases, that was an actor in this process."""
_SECTION = re.compile(r"\n\n(?:Args|Attributes|Raises):\n")
_ROLES = {Kind.POLICY: "Policies", Kind.GENERATION: "Engines"}
"""The words with which the docstrings of capabilities begin."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A method, an attribute or a fact."""

    name: str
    """Its name; of a method with its arguments."""
    meaning: str
    """The first paragraph of its docstring."""
    status: str
    """`required` of the author, `default` for a method that the class has, `optional` for a fact, or `attribute`."""


@dataclass(frozen=True, kw_only=True)
class BaseClass:
    """A class that a component derives from."""

    path: str
    """Its import path."""
    meaning: str
    """Its docstring, without the sections of arguments, attributes and errors."""
    members: list[Entry]
    """Abstract methods, class attributes with a docstring, and the other public methods and properties."""


@dataclass(frozen=True, kw_only=True)
class CapabilityEntry:
    """What a capability means to the run and to the author."""

    name: str
    """Its name."""
    brings: str
    """What a run can do with it."""
    needs: str
    """What the author has to write."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """What the author of a kind of component implements."""

    kind: str
    """The kind."""
    meaning: str
    """What a component of this kind is, and what it derives from."""
    hook: str
    """The hook that registers it."""
    by_path: str
    """How a config names a class without a plugin, and what that class declares; empty if it cannot."""
    classes: list[BaseClass]
    """The classes that it derives from."""
    facts: list[Entry]
    """What its worker returns from `setup`."""
    capabilities: list[CapabilityEntry]
    """Optional features that it can declare."""


def interface_of(kind: Kind) -> Interface:
    """The interface of a kind of component."""
    hook = next(name for name, each in hookspecs.KIND_OF_HOOK.items() if each is kind)
    meaning = _paragraphs(getattr(hookspecs, hook))[0]
    paths = _CLASSES.get(kind) or re.findall(r"`(rl_\w+(?:\.\w+)+)`", meaning)
    classes = [each for path in paths for each in _classes_at(path)]
    return Interface(
        kind=kind.value,
        meaning=meaning,
        hook=hook,
        by_path=_by_path(kind),
        classes=[_base_class(path, each) for path, each in classes],
        facts=next((_facts(each) for _, each in classes if hasattr(each, "setup")), []),
        capabilities=list(_capabilities(kind)),
    )


def print_interface(name: str, *, as_json: bool) -> None:
    """Print the interface of the kind of this name, with `-` or `_`.

    Raises:
        UnknownComponentError: There is no such kind.
    """
    kinds = [kind.value for kind in Kind]
    if name.replace("-", "_") not in kinds:
        raise UnknownComponentError(f"There is no kind {name!r}.{did_you_mean(name, kinds)} Kinds: {', '.join(kinds)}.")
    interface = interface_of(Kind(name.replace("-", "_")))
    if as_json:
        print(json.dumps(asdict(interface), indent=2, ensure_ascii=False))
        return
    print("\n".join(_wrapped(f"{interface.kind}: {interface.meaning}")))
    print(f"Registered by the hook {interface.hook}.")
    for title, _, rows in _tables(interface):
        print()
        for paragraph in title.split("\n\n"):
            print(paragraph if paragraph.startswith("- ") else "\n".join(_wrapped(paragraph)))
        print("\n".join(_indented(rows)))
    if interface.by_path:
        print("\n" + "\n".join(_wrapped(interface.by_path)))


def as_markdown(interface: Interface) -> Iterator[str]:
    """The lines of its section of docs/plugin_interfaces.md."""
    yield f"## {Kind(interface.kind).label.capitalize()}\n"
    yield f"{interface.meaning} Hook: [`{interface.hook}`](hooks.md#component-hooks).\n"
    for title, columns, rows in _tables(interface):
        yield f"{title}\n"
        yield f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
        for name, *cells in rows:
            yield f"| {' | '.join(cell.replace(' | ', ' or ') for cell in (f'`{name}`', *cells))} |"
        yield ""
    if interface.by_path:
        yield f"{interface.by_path}\n"


def _tables(interface: Interface) -> Iterator[tuple[str, tuple[str, ...], list[list[str]]]]:
    """The title, the names of the columns and the rows of each table of an interface."""
    for base in interface.classes:
        yield f"`{base.path}`: {base.meaning}", ("name", "", "meaning"), _rows(base.members)
    if interface.facts:
        yield "Facts, which `setup` of the worker returns:", ("fact", "", "meaning"), _rows(interface.facts)
    if interface.capabilities:
        rows = [[each.name, each.brings, each.needs] for each in interface.capabilities]
        yield "Capabilities:", ("capability", "what it brings to a run", "what it needs"), rows


def _rows(entries: Iterable[Entry]) -> list[list[str]]:
    return [[entry.name, entry.status, entry.meaning] for entry in entries]


def _classes_at(path: str) -> Iterator[tuple[str, type | None]]:
    """The class at a path, or what derives from several, or the abstract classes of a module; None if it is not installed."""
    paths = path.split(", ")
    if missing_target(paths[0]) is not None:
        yield path, None
        return
    first, *others = (resolve(each, key="interface") for each in paths)
    if others:
        yield path, type("Worker", (first, *others), {"__doc__": first.__doc__})
    elif isinstance(first, type):
        yield path, first
    else:
        for name, each in vars(first).items():
            if inspect.isclass(each) and inspect.isabstract(each) and each.__module__ == path:
                yield f"{path}.{name}", each


def _base_class(path: str, owner: Any) -> BaseClass:
    if owner is None:
        distribution = path.partition(".")[0].replace("_", "-")
        return BaseClass(path=path, meaning=f"Not installed: pip install {distribution}.", members=[])
    ours = [each for each in owner.__mro__ if each.__module__.startswith("rl_")]
    documented = {name: text for each in reversed(ours) for name, text in attribute_docs(each).items()}
    entries = [Entry(name=name, meaning=text, status="attribute") for name, text in documented.items() if name[0] != "_"]
    for name in dict.fromkeys(
        name for each in ours for name in vars(each) if name[0] != "_" or name in owner.__abstractmethods__
    ):
        value = inspect.getattr_static(owner, name)
        if inspect.isfunction(getattr(value, "__func__", value)) or isinstance(value, property):
            status = "required" if name in owner.__abstractmethods__ else "default"
            entries.append(Entry(name=_signature(name, value), meaning=_paragraphs(getattr(owner, name))[0], status=status))
    entries.sort(key=lambda entry: entry.status != "required")
    return BaseClass(path=path, meaning=_SECTION.split(inspect.getdoc(owner) or "")[0], members=entries)


def _signature(name: str, value: Any) -> str:
    """A method with the names and defaults of its arguments; a property is only its name."""
    if isinstance(value, property):
        return name
    signature = inspect.signature(getattr(value, "__func__", value))
    own = [
        each.replace(annotation=inspect.Parameter.empty)
        for key, each in signature.parameters.items()
        if key not in ("self", _RAY_ARGUMENT)
    ]
    return f"{name}{signature.replace(parameters=own, return_annotation=inspect.Signature.empty)}"


def _facts(worker: Any) -> list[Entry]:
    """The keys of the TypedDict that `setup` of a worker returns."""
    facts = get_type_hints(worker.setup)["return"]
    types = {name: annotation.__forward_arg__ for name, annotation in facts.__annotations__.items()}
    return [
        Entry(
            name=f"{name}: {types[name].removeprefix('NotRequired[').removesuffix(']')}",
            meaning=text,
            status="optional" if types[name].startswith("NotRequired[") else "required",
        )
        for name, text in attribute_docs(facts).items()
    ]


def _capabilities(kind: Kind) -> Iterator[CapabilityEntry]:
    docs = attribute_docs(Capability)
    for capability in Capability:
        brings, needs = docs[capability.name].split("\n\n")
        kinds, _, brings = brings.partition(": ")
        if kind in _ROLES and _ROLES[kind].lower() in kinds.lower():
            yield CapabilityEntry(name=capability.value, brings=brings, needs=needs.removeprefix("Needs: "))


def _by_path(kind: Kind) -> str:
    """How a config names a component of this kind by its import path."""
    from rl_train.config.schema import BASES
    from rl_train.config.slots import slots_of

    keys = [".".join((*map(str, slot.path), slot.path_selector or slot.selector or "")) for slot in slots_of(kind)[:1]]
    if kind not in BASES or not keys or keys[0].endswith("."):
        return ""
    declared = ' It declares its capabilities in a class attribute: `capabilities = ("in_process", "shared_memory")`.'
    return (
        f"Without a plugin, a config names the class by its import path: `{keys[0]}: my_module.MyClass`."
        f"{declared if kind in _ROLES else ''} Its section may have keys beyond those of `{BASES[kind][0].__name__}`, which "
        "`rlcore validate` does not check."
    )


def attribute_docs(owner: type) -> dict[str, str]:
    """The docstrings below the attributes of a class, and those that its own docstring lists, with line breaks removed."""
    text = inspect.cleandoc(vars(owner).get("__doc__") or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    listed = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", text, flags=re.MULTILINE)
    docs = {name: " ".join(meaning.split()) for name, meaning in listed}
    [node] = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(node, ast.ClassDef)
    for statement, following in zip(node.body, node.body[1:], strict=False):
        match statement, following:
            case (
                ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(doc))),
            ):
                docs[name] = "\n\n".join(" ".join(each.split()) for each in inspect.cleandoc(doc).split("\n\n"))
    return docs


def _paragraphs(documented: Any) -> list[str]:
    """The paragraphs of a docstring, its own or an inherited one, each in one line; one empty paragraph if there is none."""
    return [" ".join(each.split()) for each in (inspect.getdoc(documented) or "").split("\n\n")]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 110, break_long_words=False, break_on_hyphens=False)


def _indented(rows: Iterable[list[str]]) -> Iterator[str]:
    """Each row as its name and status in one line, and its longer texts below."""
    for name, *cells in rows:
        status = [cell for cell in cells if " " not in cell]
        yield "  ".join(["", name, *filter(None, status)])
        for cell in filter(None, cells):
            yield from () if cell in status else textwrap.wrap(cell, 110, initial_indent="      ", subsequent_indent="      ")
