"""docs/compatibility.md lists every private name of another library that is used, and where."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from private_names import ROOT, uses

ELSEWHERE = {"rl_backends_hf.sampling.packed_linears", "rl_backends_megatron.planned_memory"}
"""Modules of these packages with names of torch."""
IN_ONE_MODULE = {
    "rl_backends_hf": {"rl_backends_hf.torch_internals", "rl_backends_hf.transformers_internals"},
    "rl_backends_megatron": {"rl_backends_megatron.megatron_internals"},
    "rl_core.cluster": {"rl_core.cluster.ray_internals"},
}


def test_the_page_names_every_private_name_and_no_other():
    section = (ROOT / "docs" / "compatibility.md").read_text().partition("## Names that are not public")[2]
    named = {name for line in section.splitlines() for name in re.findall(r"`(_\w+)`", line)}
    assert named == {use.name for use in uses()}


@pytest.mark.parametrize("package", IN_ONE_MODULE)
def test_names_of_transformers_megatron_and_ray_are_in_one_module_each(package):
    modules = {use.module.partition("/src/")[2].removesuffix(".py").replace("/", ".") for use in uses()}
    assert {module for module in modules if module.startswith(f"{package}.")} - ELSEWHERE == IN_ONE_MODULE[package]


def test_each_name_of_megatron_is_checked_at_start():
    from rl_backends_megatron import megatron_internals

    checked = {value.name for value in vars(megatron_internals).values() if isinstance(value, megatron_internals.Internal)}
    assert {use.name for use in uses() if use.module.endswith("/megatron_internals.py")} <= checked


def test_private_names_are_used_in_at_most_42_places():
    assert len(uses()) <= 42


def test_each_form_of_use_is_found(tmp_path):
    lines = (
        "import ray._private.worker",
        "from torch._dynamo.exc import Error",
        "from ray.experimental.internal_kv import _internal_kv_put, internal_kv_get_gcs_client",
        "model.config._attn_implementation",
        "getattr(torch.ops.mkldnn, '_linear_pointwise')",
        "NAMES = ('DistributedOptimizer._set_state',)",
        "QUEUE = Internal('megatron.core.strategies', '_results_queue')",
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
        (7, "_results_queue"),
    ]
