"""A weight transport of a plugin, which no backend names, refits the engine of a run."""

import pytest
from acme_transport import AcmeFiles
from e2e_runs import metrics_of

from rl_core.errors import MissingCapabilityError
from rl_train.weight_sync.transports import CollectiveTransport, usable_transports


def test_a_run_refits_hf_from_hf_over_a_transport_of_a_plugin(train_here, tmp_path):
    code, output = train_here(
        {"cluster": {"backend": "in_process"}, "grpo": {"max_num_steps": 2}},
        "policy.generation.refit_transport=acme_transport.AcmeFiles",
    )
    assert code == 0, output
    metrics = metrics_of(tmp_path)
    assert [metrics[step]["refit/weight_version"] for step in (1, 2)] == [0, 2]  # two optimizer steps a step
    assert all(metrics[step]["refit/bytes"] > 0 for step in (1, 2))


def test_an_engine_of_another_precision_is_refitted_by_the_next_transport(train_here, tmp_path):
    change = {"cluster": {"backend": "in_process"}, "grpo": {"max_num_steps": 1}}
    engine = "policy.generation.hf_cfg.precision=bfloat16"
    code, output = train_here(change, engine)
    assert code == 0, output
    assert output.count("the engine declines weights by_reference, so shared_memory is used: Weight 'model.embed") == 1
    assert metrics_of(tmp_path)[1]["refit/bytes"] > 0
    code, output = train_here(change, engine, "policy.generation.refit_transport=by_reference", "logger.run_name=configured")
    assert code == 2
    assert "policy.generation.refit_transport: the engine declines weights by_reference: Weight 'model.embed" in output
    assert "Traceback" not in output


def test_a_transport_of_a_plugin_is_chosen_after_ours_by_what_it_requires():
    transports = [CollectiveTransport, AcmeFiles]
    both, files = ("collective", "disk"), ("disk",)
    assert usable_transports(transports, policy_supports=both, generation_supports=both) == transports
    assert usable_transports(transports, policy_supports=both, generation_supports=files) == [AcmeFiles]
    with pytest.raises(MissingCapabilityError, match=r"'acme_files'.*The policy backend supports collective,"):
        usable_transports(transports, policy_supports=["collective"], generation_supports=both, name="acme_files")


def test_a_transport_that_requires_an_unknown_capability_is_refused():
    class Misspelt(AcmeFiles):
        requires = ("disc",)

    with pytest.raises(MissingCapabilityError, match=r"there is no capability 'disc'\. Did you mean 'disk'"):
        usable_transports([Misspelt], policy_supports=["disk"], generation_supports=["disk"])
