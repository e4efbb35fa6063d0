"""A subclass of another distribution that defines a private name of our base classes is refused."""

import pytest

from rl_backends_base import DistributedGeneration, PolicyWorkerBase
from rl_core.backend import WeightSink
from rl_core.environments import ScorerEnvironment
from rl_core.errors import ComponentImportError, InvalidComponentError
from rl_core.plugins.component import Component


@pytest.mark.parametrize(
    ("base", "name", "owner"),
    [
        (PolicyWorkerBase, "_score", "rl_backends_base.policy_worker.PolicyWorkerBase"),
        (PolicyWorkerBase, "_open_refit", "rl_core.weights.source.WeightSource"),
        (WeightSink, "_segments", "rl_core.weights.receiver.WeightReceiver"),
        (DistributedGeneration, "_completions", "rl_core.dispatch.text_generation.TextGeneration"),
        (ScorerEnvironment, "_score_row", "rl_core.environments.scorer.ScorerEnvironment"),
    ],
)
def test_a_private_name_of_a_base_class_cannot_be_overridden_by_accident(base, name, owner):
    with pytest.raises(InvalidComponentError) as raised:
        type("Acme", (base,), {name: lambda self: None, "__module__": "acme.worker"})
    assert str(raised.value) == (
        f"acme.worker.Acme defines `{name}`, a private name of its base class {owner}, which would then use it. Rename it."
    )


def test_other_private_names_and_public_methods_are_allowed():
    class Acme(PolicyWorkerBase):
        def _scores(self):
            return None

        def collect_scores(self, column):
            return column

    class Further(Acme):
        def _scores(self):  # of a class of the plugin's own
            return 1

    assert Further._scores is not Acme._scores


def test_the_import_of_a_component_names_both_classes(tmp_path, monkeypatch):
    (tmp_path / "acme_private.py").write_text(
        "from rl_core.backend import PolicyWorkerBase\nclass Worker(PolicyWorkerBase):\n    def _score(self): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ComponentImportError) as raised:
        Component("acme", target="acme_private:Worker", summary="Trains").load()
    assert "acme_private.Worker defines `_score`" in str(raised.value)
    assert "rl_backends_base.policy_worker.PolicyWorkerBase" in str(raised.value)
