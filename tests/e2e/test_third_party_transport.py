"""A weight transport of a plugin, which no backend names, refits the engine of a run."""

import pytest
from acme_transport import AcmeFiles
from e2e_runs import metrics_of

from rl_core.errors import MissingCapabilityError
from rl_train.weight_sync.transports import CollectiveTransport, choose_transport


def test_a_run_refits_hf_from_hf_over_a_transport_of_a_plugin(train_here, tmp_path):
    code, output = train_here(
        {"cluster": {"backend": "in_process"}, "grpo": {"max_num_steps": 2}},
        "policy.generation.refit_transport=acme_transport.AcmeFiles",
    )
    assert code == 0, output
    metrics = metrics_of(tmp_path)
    assert [metrics[step]["refit/weight_version"] for step in (1, 2)] == [0, 2]  # two optimizer steps a step
    assert all(metrics[step]["refit/bytes"] > 0 for step in (1, 2))


def test_a_transport_of_a_plugin_is_chosen_after_ours_by_what_it_requires():
    transports = [CollectiveTransport, AcmeFiles]
    both, files = ("collective", "disk"), ("disk",)
    assert choose_transport(transports, policy_supports=both, generation_supports=both) is CollectiveTransport
    assert choose_transport(transports, policy_supports=both, generation_supports=files) is AcmeFiles
    with pytest.raises(MissingCapabilityError, match=r"'acme_files'.*The policy backend supports collective,"):
        choose_transport(transports, policy_supports=["collective"], generation_supports=both, name="acme_files")


def test_a_transport_that_requires_an_unknown_capability_is_refused():
    class Misspelt(AcmeFiles):
        requires = ("disc",)

    with pytest.raises(MissingCapabilityError, match=r"there is no capability 'disc'\. Did you mean 'disk'"):
        choose_transport([Misspelt], policy_supports=["disk"], generation_supports=["disk"])
