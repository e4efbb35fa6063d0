"""The agent as one piece of source code, because the package is not visible inside a sandbox."""

from __future__ import annotations

import functools
from pathlib import Path

_MODULES = ("wire", "programs", "agent")
_BOOT = """
import sys, types
sys.modules["rl_sandbox"] = types.ModuleType("rl_sandbox")
for name, source in {sources!r}:
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, {file!r}, "exec"), module.__dict__)
sys.modules["rl_sandbox.agent"].main(sys.argv[1:])
"""


@functools.cache
def agent_source() -> str:
    """Source that defines the agent's modules and serves a session; its arguments are those of `rl_sandbox.agent.main`."""
    from rl_sandbox.programs import OWN_FILE

    folder = Path(__file__).parent
    sources = [(f"rl_sandbox.{name}", (folder / f"{name}.py").read_text()) for name in _MODULES]
    return _BOOT.format(sources=sources, file=OWN_FILE)
