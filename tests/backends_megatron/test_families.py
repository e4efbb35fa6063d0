"""The tables of model families: the documentation page is current, and activations match the models."""

import json
import re
import shutil
from pathlib import Path

import megatron_cases as cases
import pytest
import torch

from rl_backends_megatron import families

pytestmark = pytest.mark.megatron

PAGE = (Path(__file__).parents[2] / "docs" / "adding_a_model.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def words(text):
    return " ".join(text.split())


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: words(block)[:20])
def test_the_page_on_adding_a_model_shows_the_current_table_rows(block):
    assert len(BLOCKS) == 4
    assert words(block) in words(Path(families.__file__).read_text(encoding="utf-8"))


def test_the_page_names_every_field_of_a_row_and_every_layout():
    for name in families.Family.__dataclass_fields__:
        assert f"`{name}`" in PAGE
    used = {type(weight.layout).__name__ for family in families.FAMILIES.values() for weight in family.weights}
    for name in used:
        assert name in PAGE


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh"])
def test_either_kind_of_gelu_gives_the_scores_of_transformers(models, tmp_path, activation):
    from rl_backends_megatron import MegatronPolicy

    folder = tmp_path / "model"
    shutil.copytree(models / "gemma", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": activation}))
    rows = cases.make_rows()
    policy = MegatronPolicy(str(folder))
    try:
        found = policy.get_logprobs(rows)["logprobs"]
    finally:
        policy.shutdown()
    with torch.no_grad():
        expected = cases.plain_logprobs(cases.plain_model(folder), rows)
        other = cases.plain_logprobs(cases.plain_model(models / "llama-tied"), rows)
    assert float((found - expected).abs().max()) < 5e-6
    assert float((found - other).abs().max()) > 0.1
