"""Digests of the code that a config names: its file, and the files that this imports from the same folder or package.

Comments, docstrings and formatting do not count, because the digests are those of syntax trees.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import xxhash

_REFERENCE: Final = re.compile(r"[A-Za-z_]\w*([.:][A-Za-z_]\w*)+")
_OURS: Final = ("rl_core", "rl_train", "rl_backends_", "rl_envs", "rl_sandbox", "rl_serve", "rlcore_cli")
_INSTALLED: Final = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib"))


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
