"""docs/compatibility.md lists every private name of another library that is used, and where."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from private_names import ROOT, uses

ELSEWHERE = {"rl_backends_hf.sampling.packed_linears"}


def test_the_page_names_every_private_name_and_no_other():
    section = (ROOT / "docs" / "compatibility.md").read_text().partition("## Names that are not public")[2]
    named = {name for line in section.splitlines() for name in re.findall(r"`(_\w+)`", line)}
    assert named == {use.name for use in uses()}


def test_the_backend_of_transformers_has_them_in_one_module_per_library():
    modules = {use.module.partition("/src/")[2].removesuffix(".py").replace("/", ".") for use in uses()}
    backend = {module for module in modules if module.startswith("rl_backends_hf.")}
    assert backend - ELSEWHERE == {"rl_backends_hf.torch_internals", "rl_backends_hf.transformers_internals"}


def test_each_form_of_use_is_found(tmp_path):
    lines = (
        "import ray._private.worker",
        "from torch._dynamo.exc import Error",
        "from ray.experimental.internal_kv import _internal_kv_put",
        "model.config._attn_implementation",
        "getattr(torch.ops.mkldnn, '_linear_pointwise')",
        "NAMES = ('DistributedOptimizer._set_state',)",
        "self._mine = 1; self._mine; __name__; os._exit(1); from_text('_not_a_name')",
    )
    (tmp_path / "package" / "src").mkdir(parents=True)
    (tmp_path / "package" / "src" / "module.py").write_text("\n".join(lines))
    found = [(use.line, use.name) for use in uses(tmp_path)]
    assert found == [
        (1, "_private"),
        (2, "_dynamo"),
        (3, "_internal_kv_put"),
        (4, "_attn_implementation"),
        (5, "_linear_pointwise"),
        (6, "_set_state"),
    ]
