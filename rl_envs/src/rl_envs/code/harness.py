"""The source of the two programs that run inside the sandboxes: one with a program, the other with its tests."""

from __future__ import annotations

import base64
import functools
import marshal
import sys
import zlib
from pathlib import Path
from typing import Any

from rl_envs.code.suites import Suite

_MODULES = ("values", "proxies", "link", "inside")
_BOOT = """
import binascii, marshal, sys, zlib
matches = sys.version_info[:4] == {version} and sys.implementation.name == {implementation!r}
for name in ("rl_envs", "rl_envs.code"):
    sys.modules[name] = type(sys)(name)
for name, code in marshal.loads(zlib.decompress(binascii.a2b_base64({compiled!r} if matches else {sources!r}))):
    module = type(sys)(name)
    sys.modules[name] = module
    setattr(sys.modules["rl_envs.code"], name.rpartition(".")[2], module)
    exec(code if matches else compile(code, "<tests>", "exec"), module.__dict__)
"""
_MAIN = 'import sys\nsys.modules["rl_envs.code.inside"].'


def program_source(code: str) -> str:
    """The program that runs a completion's code."""
    return f"{modules_source()}{_MAIN}run_program({code!r})\n"


def tests_source(suite: Suite) -> str:
    """The program that runs the tests, if `modules_source` is preloaded or precedes it."""
    sets = set(suite.unreachable), set(suite.required), set(suite.tested)
    arguments = (suite.statements, dict(suite.owners), *sets, suite.total)
    return f"{_MAIN}run_tests(*{arguments!r})\n"


@functools.cache
def modules_source() -> str:
    """Source that loads the modules of this package; they are compiled here if the interpreter inside has this version."""
    folder = Path(__file__).parent
    sources = [(f"rl_envs.code.{name}", (folder / f"{name}.py").read_text(encoding="utf-8")) for name in _MODULES]
    compiled = [(name, compile(source, "<tests>", "exec", dont_inherit=True, optimize=2)) for name, source in sources]
    version, implementation = tuple(sys.version_info[:4]), sys.implementation.name
    return _BOOT.format(version=version, implementation=implementation, compiled=_packed(compiled), sources=_packed(sources))


def _packed(modules: list[tuple[str, Any]]) -> str:
    """Compressed, because a short source is read much faster."""
    return base64.b64encode(zlib.compress(marshal.dumps(modules, 2), 9)).decode()
