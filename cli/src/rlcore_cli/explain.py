"""Commands that describe configs with the installed plugins.

`rlcore explain` prints the meaning of a key, its allowed values and default, and its value in a config, or the interface of a
kind of component. `rlcore schema` writes the JSON schema, or the reference page.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from statistics import mode
from typing import Annotated

import typer

from rl_core.config.diagnostics import KEY_CUTOFF, dotted, nearest
from rl_core.config.introspection import NO_DEFAULT, Field, all_fields
from rl_core.config.section import Devices
from rl_core.errors import ConfigError, PluginError, UserError
from rl_core.plugins.component import did_you_mean
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.config.foreign_names import INSTEAD, MEANINGS
from rl_train.config.loader import LoadedConfig, effective_values, load_config
from rl_train.config.reference import SchemaIndex, json_schema, reference, schema_index
from rl_train.config.rules.models import allowed_argument
from rl_train.config.slots import ANY, SLOTS, SectionSchema, matches
from rl_train.config.sources import refuse_missing
from rl_train.config.values import leaves
from rlcore_cli.arguments import Overrides
from rlcore_cli.listing import print_table


def _completed_key(incomplete: str) -> list[str]:
    """The keys that begin with what was typed, up to their next dot."""
    parts = incomplete.count(".") + 1
    keys = known_keys(schema_index(Registry(discover())))
    return sorted({".".join(key.split(".")[:parts]) for key in keys if key.startswith(incomplete)})


def explain(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY",
            help="A config key, such as policy.generation.temperature; or `interface`, followed by a kind of component.",
            autocompletion=_completed_key,
        ),
    ],
    overrides: Overrides = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="A config file: show the value of the key and where it comes from.")
    ] = None,
    component: Annotated[
        str | None,
        typer.Option(
            "--component", "-n", help="The component to describe, for a section such as loss_fn that several components have."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with `interface`.")] = False,
) -> None:
    """Explain a config key: meaning, type, allowed values, default and users, and with --config its value and origin.

    `rlcore explain interface KIND` prints what the author of a component implements: methods, facts and capabilities.

    Example:
        rlcore explain policy.generation.temperature
        rlcore explain policy.generation.temperature --config config.yaml
        rlcore explain grpo
        rlcore explain loss_fn --component dpo
        rlcore explain interface policy
    """
    if key == "interface":
        from rlcore_cli.interface import print_interface

        return print_interface(" ".join(overrides or ()), as_json=as_json)
    if as_json:
        raise UserError("--json needs `interface` and a kind of component, such as `rlcore explain interface policy --json`.")
    if overrides and config is None:
        raise ConfigError(f"Overrides ({', '.join(overrides)}) need a config file: give it with --config.")
    if config is not None:
        refuse_missing(config)
        explain_in(load_config(config, overrides or [], stages=()), key)
    else:
        explain_anywhere(key, component)


_LONGEST_DEFAULT = 32


def explain_in(loaded: LoadedConfig, key: str) -> None:
    """Print the value of a key of a config, where it comes from, and what the key means.

    Raises:
        ConfigError: The config has no such key.
    """
    value: object = loaded.redacted
    path = tuple(key.split("."))
    for name in path:
        if not (isinstance(value, dict) and name in value):
            raise _no_key(key, [*loaded.resolved, *loaded.source], where=f"{loaded.path}:")
        value = value[name]
    if isinstance(value, dict) and value:
        print(key)
        _print_leaves(loaded, value, key)
        return
    print(f"{key} = {_yaml(value)}")
    print(f"  {'from':<9} {loaded.source[key]}")
    if value is None and (resolved := _resolved_nulls(loaded).get(key)):
        print(f"  {'resolved':<9} {resolved}")
    section = loaded.layout.enclosing_section(path)
    field = None if section is None else section.find(path)
    if field is not None and section is not None:
        _print_field(field, [section])


def _print_leaves(loaded: LoadedConfig, section: object, key: str) -> None:
    nulls = _resolved_nulls(loaded)
    rows = ((name, _yaml(value), str(loaded.source[name])) for name, value in leaves(section, key))
    print_table(
        [
            (f"  {name.removeprefix(f'{key}.')}", text if name not in nulls else f"{text} ({nulls[name]})", origin)
            for name, text, origin in rows
        ]
    )


def _resolved_nulls(loaded: LoadedConfig) -> dict[str, str]:
    """What a run uses for keys that are null: one value, or one for CPUs and one for GPUs if the config allows both."""
    run = loaded.run
    kinds = {"CPUs": Devices(use_gpus=False)}
    kinds["GPUs"] = Devices(use_gpus=True, trains=not run.engine_has_own_resources, have_bfloat16=True)
    given = run.cluster.use_gpus
    chosen = [name for name, devices in kinds.items() if given is None or devices.use_gpus is given]
    values = {name: effective_values(run, kinds[name]) for name in chosen}
    texts: dict[str, str] = {}
    for path in dict.fromkeys(path for found in values.values() for path in found):
        by_kind = {name: _yaml(found.get(path)) for name, found in values.items()}
        several = len(set(by_kind.values())) > 1
        text = ", ".join(f"{value} on {name}" for name, value in by_kind.items()) if several else next(iter(by_kind.values()))
        texts[dotted(path)] = loaded.secrets.redact(text)
    return texts


def explain_anywhere(key: str, component: str | None) -> None:
    """Print what a key means in every section that has it, or the keys of a section.

    Args:
        key: The dotted key.
        component: The component to describe, for a section that several have.

    Raises:
        ConfigError: No installed plugin has such a key, or no such component has the section.
    """
    index = schema_index(Registry(discover()))
    path = tuple(key.split("."))
    sections = _sections_at(index, path, component)
    if sections:
        _print_sections(key, sections)
        return
    declarations = index.find(path)
    if not declarations:
        raise _no_key(key, known_keys(index), where="")
    by_declaration: dict[tuple[object, ...], list[tuple[SectionSchema, Field]]] = {}
    for section, field in declarations:
        by_declaration.setdefault((field.owner, field.name, repr(field.default)), []).append((section, field))
    for group in by_declaration.values():
        field = group[0][1]
        print(key)
        _print_field(field, [section for section, _ in group])
        if field.model is not None:
            _print_keys(list(all_fields(field.model, depth=0)))


def _sections_at(index: SchemaIndex, path: tuple[str, ...], component: str | None) -> list[SectionSchema]:
    """The sections with a key, or else those that it holds under names: `env`, `data.mix` and `logger.loggers`."""
    sections = [section for section in index.sections if matches(section.path, path)]
    if not sections and any(slot.path == (*path, ANY) for slot in SLOTS):
        sections = [section for section in index.sections if section.path[:-1] == path]
    by_name = [section for section in sections if section.component is not None and section.component.name == path[-1]]
    if component is not None:
        return _named(component, sections, ".".join(path))
    if by_name and by_name[0].path[-1] != path[-1]:
        return by_name  # `env.math`: a task without `name` uses the component that has the name of the task
    return sections


def known_keys(index: SchemaIndex) -> list[str]:
    """Every key and section that an installed component has, and the keys of mappings with defaults."""
    fields = [field for section in index.sections for field in section.fields()]
    keys = {dotted(field.path) for field in fields}
    keys |= {
        f"{dotted(field.path)}.{name}"
        for field in fields
        if field.model is None and isinstance(field.default, dict)
        for name in field.default
    }
    return [*keys, *(dotted(section.path) for section in index.sections)]


def _named(component: str, sections: list[SectionSchema], key: str) -> list[SectionSchema]:
    chosen = [section for section in sections if section.component is not None and section.component.name == component]
    if not chosen:
        names = sorted({section.component.name for section in sections if section.component is not None})
        known = f" Components: {', '.join(names)}." if names else " No component has this section."
        raise ConfigError(f"--component {component}: no such component for {key}.{did_you_mean(component, names)}{known}")
    return chosen


def _print_sections(key: str, sections: list[SectionSchema]) -> None:
    """Prints the keys of one section; for several components, their common keys and one line for each component."""
    is_child = sections[0].path[:-1] == tuple(key.split("."))
    heading = f"{key}.{'<task>' if key == 'env' else '<name>'}" if is_child else key
    if len(sections) == 1:
        print(f"{heading}: {_reader(sections[0])}")
        _print_keys(list(sections[0].fields(depth=0)))
        return
    by_section = [{field.name: field for field in section.fields(depth=0)} for section in sections]
    common = {name: [fields[name] for fields in by_section] for name in by_section[0] if all(name in f for f in by_section)}
    print(f"{heading}: section of one of {len(sections)} components")
    if common:
        print("\nCommon keys:")
        print_table([_common_row(name, fields) for name, fields in common.items()])
    print("\nComponents and their number of additional keys:")
    rows = []
    for section, fields in zip(sections, by_section, strict=True):
        assert section.component is not None
        rows.append((f"  {section.component.name}", str(len(fields) - len(common)), section.component.summary))
    print_table(rows)
    print(f"\nTo see the keys of one: rlcore explain {key} --component {rows[0][0].strip()}")


def _common_row(name: str, fields: list[Field]) -> tuple[str, str, str]:
    """A row of the table of common keys: a default only if all components have it, and the meaning that most of them share."""
    defaults = [_short_default(field) for field in fields]
    default = defaults[0] if len(set(defaults)) == 1 else "by component"
    return f"  {name}", default, mode(field.summary for field in fields)


def _print_field(field: Field, sections: list[SectionSchema]) -> None:
    argument = allowed_argument(field.path)
    has_no_default = argument is None or field.default is NO_DEFAULT
    rows = {
        "meaning": field.meaning,
        "type": field.type_name if has_no_default else type(field.default).__name__,
        "allowed": "" if field.model is not None else argument or field.allowed,
        "default": _default(field),
        "used by": "; ".join(dict.fromkeys(_reader(section) for section in sections)),
        "defined": f"{field.owner.__module__}:{field.owner.__qualname__}",
    }
    for name, text in rows.items():
        if text:
            print(f"  {name:<9} {text}")


def _default(field: Field) -> str:
    if field.default is NO_DEFAULT:
        return "none (required)"
    return "" if isinstance(field.default, dict) and field.model is not None else _yaml(field.default)


def _print_keys(fields: list[Field]) -> None:
    print_table([(f"  {field.name}", _short_default(field), field.summary) for field in fields])


def _short_default(field: Field) -> str:
    """The default for a table: `section` for a section; long values are shortened."""
    if field.default is NO_DEFAULT:
        return "required"
    if field.model is not None:
        return "null" if field.default is None else "section"
    text = _yaml(field.default)
    return text if len(text) <= _LONGEST_DEFAULT else f"{text[: _LONGEST_DEFAULT - 3]}..."


def _reader(section: SectionSchema) -> str:
    if section.component is None or section.kind is None:
        return f"the core (section {section.path[0]})"
    return f"{section.kind.label} {section.component.name} ({section.component.target})"


def _no_key(key: str, known: list[str], *, where: str) -> Exception:
    section, _, given = key.rpartition(".")
    ends = [name.rpartition(".")[2] for name in known]
    last = given if given in ends else MEANINGS.get(given, given)
    in_section = [end for name, end in zip(known, ends, strict=True) if name.rpartition(".")[0] == section]
    similar = partial(nearest, cutoff=KEY_CUTOFF)
    end = last if last in ends else similar(last, in_section) or similar(last, ends)
    top = key.partition(".")[0]

    def ending_in(end: str | None) -> list[str]:
        # Those in the same section first, then those of the most common sections.
        same_end = [name for name in known if name.rpartition(".")[2] == end]
        same_end.sort(key=lambda name: ("<" in name, name.partition(".")[0] not in ("grpo", "policy"), name.count("."), name))
        return sorted(same_end, key=lambda name: (name.rpartition(".")[0] != section, name.partition(".")[0] != top))

    same_end = ending_in(end)
    suggestion = same_end[0] if same_end else similar(key, known)
    # A key may mean something else in another library.
    others = ending_in(MEANINGS.get(given)) if last == given else []
    if not others and not section and len(set(same_end)) == 2:
        others = [name for name in same_end if name != suggestion]
    hint = f" Did you mean {' or '.join([suggestion, *others[:1]])}?" if suggestion else ""
    if given not in ends and given in INSTEAD:
        hint = f" {INSTEAD[given]}"
    return ConfigError(f"{where} unknown key {key}.{hint}" if where else f"No installed plugin has the key {key}.{hint}")


def _yaml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def schema(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Output file; standard output by default.")] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Write the config reference as Markdown instead of the JSON schema.")
    ] = False,
    plugins: Annotated[
        str | None, typer.Option(help="Include only the sections of these plugins, for example train,hf; all by default.")
    ] = None,
) -> None:
    """Write the JSON schema of config files, including the sections of all installed plugins.

    Editors with a YAML language server complete and check a config that starts with the line
    `# yaml-language-server: $schema=config.schema.json`.

    Example:
        rlcore schema --output config.schema.json
        rlcore schema --markdown --plugins train,hf
    """
    registry = Registry(discover())
    wanted = None if plugins is None else [name.strip() for name in plugins.split(",")]
    known = [plugin.name for plugin in registry.manager.plugins]
    for name in wanted or ():
        if name not in known:
            raise PluginError(f"No plugin is named {name!r}.{did_you_mean(name, known)} Plugins: {', '.join(known)}.")
    index = schema_index(registry, plugins=wanted)
    for sentence in index.unusable:
        print(f"warning: omitted: {sentence}", file=sys.stderr)
    text = (
        reference(index, plugins=plugins or ",".join(known))
        if markdown
        else json.dumps(json_schema(index), indent=2, ensure_ascii=False) + "\n"
    )
    if output is None:
        print(text, end="")
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}. Choose another file with --output.") from error
    print(f"Wrote {output}: {len(index.sections)} sections")
