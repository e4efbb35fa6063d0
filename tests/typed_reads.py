"""Every read of an attribute in the source of the distributions, with the class that declares it, as mypy infers it."""

import ast
import os
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mypy.build import build
from mypy.modulefinder import BuildSource
from mypy.options import Options
from mypy.plugin import Plugin

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Read:
    """A read of an attribute or a call of a method.

    Attributes:
        file: Relative to the folder of the repository.
        line: Its line.
        scopes: The definitions around it, outermost first: classes and functions.
    """

    file: str
    line: int
    scopes: tuple[ast.AST, ...]

    @property
    def is_in_class_body(self) -> bool:
        """Whether it is outside functions, such as the declaration of an attribute."""
        return bool(self.scopes) and isinstance(self.scopes[-1], ast.ClassDef)

    @property
    def within(self) -> str:
        """The full name of the innermost definition around it."""
        return ".".join([_module(Path(self.file)), *(scope.name for scope in self.scopes)])


@cache
def attribute_reads() -> dict[str, set[Read]]:
    """The reads of each attribute, by its full name: `rl_core.config.schema.ClusterConfig.backend`.

    An attribute that mypy cannot type, for example of a parameter annotated as `Any`, is not found.
    """
    options = Options()
    options.cache_dir, options.incremental = os.devnull, False
    # Only our own source is analyzed: classes of other libraries have type `Any`, which makes this fast.
    options.python_executable, options.ignore_missing_imports = None, True
    options.explicit_package_bases = options.namespace_packages = options.check_untyped_defs = True
    options.mypy_path = [str(folder) for folder in ROOT.glob("*/src")]
    reads = defaultdict(set)

    class Recorder(Plugin):
        def get_attribute_hook(self, fullname):
            return lambda context: record(fullname, context) or context.default_attr_type

        def get_method_hook(self, fullname):
            return lambda context: record(fullname, context) or context.default_return_type

    def record(fullname, context):
        file = os.path.relpath(context.api.path, ROOT)
        line = context.context.line
        reads[fullname].add(Read(file, line, tuple(s for s in _scopes(file) if s.lineno <= line <= s.end_lineno)))

    sources = [BuildSource(str(file), _module(file)) for file in ROOT.glob("*/src/**/*.py")]
    build(sources, options, extra_plugins=[Recorder(options)])
    return reads


def _module(file):
    *_, inside = str(file).removesuffix(".py").rpartition("/src/")
    return inside.replace("/", ".").removesuffix(".__init__")


@cache
def _scopes(file):
    """All classes and functions of a file, outer ones before inner ones."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return sorted((node for node in ast.walk(tree) if isinstance(node, definitions)), key=lambda node: node.lineno)
