"""The distribution is light, registered, and its README is right."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rl_sandbox
from rl_core.plugins import Kind
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_sandbox.config import SandboxConfig
from rl_sandbox.interface import SandboxInterface

from .conftest import open_sandbox

README = Path(__file__).parents[2] / "rl_sandbox" / "README.md"


def test_the_whole_distribution_imports_neither_torch_nor_ray_nor_numpy():
    modules = [f"rl_sandbox.{path.stem}" for path in Path(rl_sandbox.__file__).parent.glob("[a-z]*.py")]
    code = f"import sys, {', '.join(modules)}; print({{'torch', 'ray', 'numpy', 'transformers'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_the_launcher_needs_only_the_standard_library():
    code = (
        f"import sys; sys.path.insert(0, {str(Path(rl_sandbox.__file__).parents[1])!r}); import rl_sandbox.launcher; "
        "print(*{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names - {'__main__'})"
    )
    found = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True).stdout
    assert found == "rl_sandbox\n"


def test_all_exported_names_exist():
    assert [getattr(rl_sandbox, name).__name__ for name in rl_sandbox.__all__] == rl_sandbox.__all__


def test_the_local_sandbox_is_a_registered_component():
    component = Registry(discover()).find(Kind.SANDBOX, "local")
    assert component.load(expect=SandboxInterface) is rl_sandbox.LocalSandbox


def test_options_of_another_backend_are_refused_for_the_local_one():
    assert SandboxConfig(backend="acme", options={"image": "x"}).options == {"image": "x"}
    with pytest.raises(ValueError, match="options has image, but the backend `local` has no options"):
        SandboxConfig(options={"image": "x"})


def test_the_example_of_the_readme_prints_what_its_comments_say():
    open_sandbox().close()
    [example] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "README.md", "exec"), {})
    promised = re.findall(r"^ *print\(.*\)  # (.*)$", example, re.MULTILINE)
    assert [line for line in printed.getvalue().splitlines() if line] == promised
