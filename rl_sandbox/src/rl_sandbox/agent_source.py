"""The agent as one piece of source code, because the package is not visible inside a sandbox."""

from __future__ import annotations

import functools
import importlib.util
import marshal
from pathlib import Path

from rl_sandbox.programs import OWN_FILE

_MODULES = ("wire", "programs", "agent")
_BOOT = """
import marshal, sys
sys.modules["rl_sandbox"] = type(sys)("rl_sandbox")
for name, code in {modules}:
    module = type(sys)(name)
    sys.modules[name] = module
    exec(code if type(code) is not str else compile(code, {file!r}, "exec"), module.__dict__)
sys.modules["rl_sandbox.agent"].main(sys.argv[1:])
"""


@functools.cache
def agent_source(magic: str) -> str:
    """Source that defines the agent's modules and serves a session; its arguments are those of `rl_sandbox.agent.main`.

    Args:
        magic: The bytecode version of the interpreter inside, in hexadecimal. If it is this interpreter's, the modules are
            compiled here, which saves a quarter of the start time.
    """
    folder = Path(__file__).parent
    sources = [(f"rl_sandbox.{name}", (folder / f"{name}.py").read_text()) for name in _MODULES]
    if magic != importlib.util.MAGIC_NUMBER.hex():
        return _BOOT.format(modules=repr(sources), file=OWN_FILE)
    compiled = marshal.dumps([(name, compile(source, OWN_FILE, "exec")) for name, source in sources])
    return _BOOT.format(modules=f'marshal.loads(bytes.fromhex("{compiled.hex()}"))', file=OWN_FILE)
