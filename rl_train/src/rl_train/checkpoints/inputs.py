"""What decides the result of a run in addition to its config: user code, models, templates and data, as digests.

They are compared when a run is resumed, as is its config. User code is the file that the config names, and the files that it
imports from the same folder or package; digests are of their syntax trees, so comments, docstrings and formatting do not count.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import xxhash

from rl_core.config.diagnostics import KeyPath, dotted
from rl_core.config.introspection import NO_DEFAULT
from rl_core.errors import CheckpointError
from rl_train.config.slots import is_named_by_user
from rl_train.config.values import leaves_by_path

ROWS: Final = "the rows"
"""Name of the digest of a dataset's rows."""
_MOST_NAMED: Final = 3

Inputs = Mapping[str, Mapping[str, str]]
"""The digests of what the value of a config key refers to, by key and by name, such as `score in my_rewards.py`."""
FREE_TO_CHANGE = (
    "logger.",
    "checkpointing.",
    "cluster.",
    "data.validation.",
    "data.validation_sets.",
    "data.val_data_path",
    "policy.train_micro_batch_size",
    "policy.logprob_batch_size",
    "value.train_micro_batch_size",
    "value.logprob_batch_size",
    "policy.generation.max_restarts",
    "policy.generation.val_temperature",
    "rollout.retries",
    "stop.",
    "rollout.max_failed_share",
    "policy.generation.refit_canary",
    "policy.generation.canary_tolerance",
)
"""Prefixes of config keys that a resume may change without confirmation: how or how long a run continues, not what it is."""
FREE_IN_ALGORITHM = ("max_num_steps", "max_num_epochs", "max_val_samples", "val_")
"""The same, within the algorithm's section."""
FIXED = {
    "policy.optimizer.name": "the state of one optimizer cannot be loaded into another",
    "value.optimizer.name": "the state of one optimizer cannot be loaded into another",
}
"""Keys that no resume can change, and why."""
_FIXED_ROWS = "the order of the data cannot continue with other rows: some would be seen twice and others never"
_REFERENCE: Final = re.compile(r"[A-Za-z_]\w*([.:][A-Za-z_]\w*)+")
_OURS: Final = ("rl_core", "rl_train", "rl_backends_", "rl_envs", "rl_sandbox", "rl_serve", "rlcore_cli")
_INSTALLED: Final = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def inputs_in(state: Mapping[str, Any]) -> Inputs:
    """The inputs in the state of a checkpoint; empty if a version that did not record them wrote it."""
    inputs: Inputs = state.get("inputs", {})
    return inputs


def input_changes(old: Inputs, new: Inputs) -> dict[str, str]:
    """What has changed, in words, by config key; only keys that both have are compared."""
    changes = {}
    for key in sorted(old.keys() & new.keys()):
        then, now = old[key], new[key]
        names = sorted(name for name in {**then, **now} if then.get(name) != now.get(name))
        if names:
            verbs = ("was added" if name not in then else "changed" if name in now else "was removed" for name in names)
            shown = [f"{name} {verb}" for name, verb in zip(names, verbs, strict=True)]
            more = f", and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            changes[key] = ", ".join(shown[:_MOST_NAMED]) + more
    return changes


@dataclass(frozen=True, kw_only=True)
class ComparedConfig:
    """The config of a run, compared with that of the checkpoint which it resumes from.

    The state of a checkpoint has the other config as `config`, and its inputs as `inputs`.

    Attributes:
        values: the resolved config.
        algorithm: the section of the algorithm.
        inputs: what the values refer to.
        default: returns the default of a key; `NO_DEFAULT` if it has none.
        by_device: keys that were null and stand for a value that depends on the devices.
    """

    values: Mapping[str, Any]
    algorithm: str
    inputs: Inputs = field(default_factory=dict)
    default: Callable[[KeyPath], Any] = lambda _: NO_DEFAULT
    by_device: Collection[KeyPath] = ()

    def changes(self, state: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Changed keys that need confirmation, with their old and new values; None for a missing key.

        A key that was added to a section since the checkpoint was written is not a change if it has its default, because the
        run of the checkpoint behaved like that. Nor is a null that replaces a fixed default because the value now depends on
        the devices, nor another path of the same content.
        """
        old, free = state["config"], (*FREE_TO_CHANGE, *(f"{self.algorithm}.{key}" for key in FREE_IN_ALGORITHM))
        before, after = (
            {path: value for path, value in leaves_by_path(config) if path and value != {}} for config in (old, self.values)
        )
        same = {path for path in after.keys() - before.keys() if after[path] == self.default(path) and _is_new_key(path, old)}
        same |= {path for path in self.by_device if path not in before or after.get(path) is None}
        moved = {key for key, content in inputs_in(state).items() if self.inputs.get(key) == content}
        return {
            dotted(path): (before.get(path), after.get(path))
            for path in sorted(before.keys() | after.keys(), key=dotted)
            if path not in same
            and before.get(path) != after.get(path)
            and dotted(path) not in moved
            and not dotted(path).startswith(free)
        }

    def described_changes(self, state: Mapping[str, Any]) -> str:
        """One line per change of the config or of its inputs."""
        changes, inputs = self.changes(state), inputs_in(state)
        # What a new value refers to is not compared with the old one, unless they have something in common.
        of_inputs = {
            key: words
            for key, words in input_changes(inputs, self.inputs).items()
            if key not in changes or inputs[key].keys() & self.inputs[key].keys()
        }
        lines = [f"{key}: {_format(old)} then, {_format(new)} now" for key, (old, new) in changes.items()]
        return "\n".join(f"  {line}" for line in [*lines, *(f"{key}: {words}" for key, words in of_inputs.items())])

    def refuse_changes(self, checkpoint: Path, state: Mapping[str, Any], *, allow: bool) -> None:
        """Refuse to resume from a step folder if there are changes that are not allowed.

        Args:
            checkpoint: the step folder.
            state: its state.
            allow: whether the user allowed changes.

        Raises:
            CheckpointError: there are changes that are not allowed, or that a resume cannot make.
        """
        weights = f"policy.model_name={checkpoint / 'policy' / 'weights'}"
        if self.algorithm not in state["config"]:
            raise CheckpointError(
                f"{checkpoint} was written by an algorithm other than {self.algorithm}, so it cannot be resumed. "
                f"Start a new run from its weights: --resume never {weights}"
            )
        described, inputs = self.described_changes(state), inputs_in(state)
        fixed = {key: FIXED[key] for key in self.changes(state) if key in FIXED}
        data = sorted(inputs.keys() & self.inputs.keys())
        fixed |= {key: _FIXED_ROWS for key in data if inputs[key].get(ROWS) != self.inputs[key].get(ROWS)}
        remedy = None
        if fixed:
            remedy = (
                f"A resume cannot change {', '.join(fixed)}: {next(iter(fixed.values()))}. Undo the change, or start a new run "
                f"from the weights: --resume never {weights}"
            )
        elif described and not allow:
            remedy = (
                "Continue with the new config by --allow-config-change, start a new run with --resume never, or undo the "
                "changes."
            )
        if remedy is not None:
            raise CheckpointError(f"{checkpoint} was written with another config:\n{described}\n{remedy}")


def _is_new_key(path: KeyPath, old: Mapping[str, Any]) -> bool:
    """Whether the section of a key existed in an old config, without this key or a section that contains it.

    An entry that the user named, such as an environment, is not a new key, and a section that was null is a change.
    """
    section: Any = old
    for length, key in enumerate(path):
        if not isinstance(section, Mapping):
            return False
        if key not in section:
            return not any(is_named_by_user(path[:count]) for count in range(length + 1, len(path)))
        section = section[key]
    return False


def _format(value: Any) -> str:
    return "absent" if value is None else repr(value)


def source_digests(reference: str) -> dict[str, str]:
    """The digest of each definition of the files, by a name such as `score in my_rewards.py`.

    Args:
        reference: The dotted path of a function or class. Nothing is imported.

    Returns:
        Also has the reference itself. Empty if it is not a dotted path, or names an installed package.
    """
    names = re.split("[.:]", reference) if _REFERENCE.fullmatch(reference) else []
    root = _root_of(names[0]) if names else None
    if root is None:
        return {}
    lengths = range(len(names) - 1, 0, -1)
    first = next((file for length in lengths if (file := _file_of(root, names[:length])) is not None), None)
    found, files, seen = {reference: ""}, [] if first is None else [first], set[Path]()
    while files:
        file = files.pop()
        if file not in seen:
            seen.add(file)
            name, text = file.relative_to(root).as_posix(), file.read_bytes()
            try:
                tree = ast.parse(text)
            except (SyntaxError, ValueError):  # of another Python version
                found[name] = xxhash.xxh3_64(text).hexdigest()
            else:
                found |= _definitions(tree, name)
                files += _imported_files(tree, file, root)
    return found if seen else {}


def _root_of(package: str) -> Path | None:
    """The folder of a top-level module that is not installed; rlcore itself counts as installed."""
    try:
        spec = None if package.startswith(_OURS) else find_spec(package)
    except (ImportError, ValueError):  # a module without a specification, such as `__main__`
        return None
    locations = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin]
    folder = next((Path(location).parent for location in locations if location and Path(location).exists()), None)
    parents = () if folder is None else (folder.resolve(), *folder.resolve().parents)
    is_installed = any(parent in _INSTALLED or parent.name in ("site-packages", "dist-packages") for parent in parents)
    return None if is_installed else folder


def _file_of(root: Path, names: Sequence[str]) -> Path | None:
    package, module = root.joinpath(*names, "__init__.py"), root.joinpath(*names[:-1], f"{names[-1]}.py")
    return next((file for file in (package, module) if file.is_file()), None)


def _imported_files(tree: ast.AST, file: Path, root: Path) -> Iterator[Path]:
    """The files below `root` that a module imports, and those of the packages that they belong to."""
    package = file.relative_to(root).parent.parts
    for node in ast.walk(tree):
        modules: list[tuple[str, ...]] = []
        if isinstance(node, ast.Import):
            modules = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            modules = [(*module, alias.name) for alias in node.names]
        for names in modules:
            if names and (names[0] in package[:1] or _root_of(names[0]) == root):
                files = (_file_of(root, names[:length]) for length in range(1, len(names) + 1))
                yield from (each for each in files if each is not None)


def _definitions(tree: ast.Module, name: str) -> dict[str, str]:
    """The digest of each function and class of a module, and of its other statements under the module's name."""
    for node in ast.walk(tree):
        if isinstance(statements := getattr(node, "body", None), list):
            node.body = [each for each in statements if not _is_text(each)]  # type: ignore[attr-defined]
    forms: dict[str, list[str]] = {}
    imports = []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports += [
                _form(ast.ImportFrom(getattr(node, "module", None), [one], getattr(node, "level", 0))) for one in node.names
            ]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            forms.setdefault(f"{node.name} in {name}", []).append(_form(node))
        else:
            forms.setdefault(name, []).append(_form(node))
    if imports:  # whose order is a matter of formatting
        forms.setdefault(name, []).extend(sorted(imports))
    return {label: xxhash.xxh3_64("\n".join(form).encode()).hexdigest() for label, form in forms.items()}


def _is_text(statement: ast.stmt) -> bool:
    """Whether a statement is a docstring, or another text without effect."""
    return (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
    )


def _form(tree: ast.AST) -> str:
    """All nodes with their fields, level by level, without source locations. The same in every version of Python."""

    def shown(value: Any) -> str:
        if isinstance(value, list):
            return f"[{','.join(map(shown, value))}]"
        return "*" if isinstance(value, ast.AST) else repr(value)

    lines = []
    for node in ast.walk(tree):
        fields = [f"{name}={shown(value)}" for name, value in ast.iter_fields(node) if value is not None and value != []]
        lines.append(f"{type(node).__name__} {' '.join(fields)}")
    return "\n".join(lines)
