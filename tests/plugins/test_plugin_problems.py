"""Problems of plugins that load are reported by `list-plugins` and `doctor`, and corrupt no output."""

from rl_core.plugins.manager import PluginManager
from rlcore_cli.listing import plugin_findings

MISSPELT = """
    from rl_core.plugins import Component, hookimpl

    @hookimpl
    def rlcore_policies():
        return [Component("acme", target="acme_rl.policy:Polycy", config="acme_rl.confg:AcmeConfig", summary="Trains")]
"""
MISSPELT_CAPABILITY = """
    from rl_core.plugins import Component, hookimpl

    @hookimpl
    def rlcore_policies():
        return [Component("acme", target="acme_rl.policy:Policy", summary="Trains", capabilities=("topk_logprob", "acme:own"))]
"""


def test_text_that_a_plugin_prints_at_import_is_reported_and_does_not_corrupt_json(site):
    package = site.install("acme-rl")
    source = (package / "plugin.py").read_text()
    (package / "plugin.py").write_text(f"print('Welcome to acme')\n{source}")
    acme = site.plugins()["acme"]  # reads the output as JSON
    assert acme["status"] == "ready"
    assert acme["problems"] == ["It prints when it is imported, which is not shown: 'Welcome to acme'. Remove the print."]
    shown = site.rlcore("list-plugins").stdout
    assert "warning: acme (acme-rl 1.0): It prints when it is imported" in shown
    assert site.rlcore("doctor", "acme").returncode == 0  # it works


def test_targets_that_do_not_exist_are_found_without_an_import(site):
    site.install("acme-rl", source=MISSPELT)
    first, second = site.plugins()["acme"]["problems"]
    assert first.startswith("Policy backend 'acme': acme_rl.policy:Polycy does not exist: acme_rl.policy has no 'Polycy'.")
    assert "Did you mean 'Policy'?" in first
    assert "acme_rl.confg:AcmeConfig does not exist: acme_rl has no module 'confg'." in second
    doctor = site.rlcore("doctor", "acme")
    assert doctor.returncode == 1
    assert "ERROR   Policy backend 'acme': acme_rl.policy:Polycy does not exist" in doctor.stdout


def test_two_plugins_with_one_component_name_are_reported_at_both(site):
    site.install("acme-rl")
    (zeta := site.install("zeta-rl")).joinpath("plugin.py").write_text(
        (site.folder / "acme_rl" / "plugin.py").read_text().replace("acme_rl", zeta.name)
    )
    plugins = site.plugins()
    for name in ("acme", "zeta"):
        [problem] = plugins[name]["problems"]
        assert problem.startswith("2 plugins register the policy backend 'acme': acme-rl 1.0 and zeta-rl 1.0.")
    assert site.rlcore("doctor", "zeta").returncode == 1


def test_a_plugin_that_ends_the_interpreter_is_named_and_the_command_continues(site):
    site.install("acme-rl", source="import os; os._exit(3)")
    site.install("zeta-rl")
    result = site.rlcore("list-plugins")
    assert result.returncode == 0
    assert "acme" in result.stdout
    assert "it calls os._exit(3)" in result.stdout
    assert "zeta" in result.stdout


def test_a_misspelt_capability_fails_the_plugin_with_a_suggestion(site):
    site.install("acme-rl", source=MISSPELT_CAPABILITY)
    acme = site.plugins()["acme"]
    assert acme["status"] == "failed"
    assert "there is no capability 'topk_logprob'. Did you mean 'topk_logprobs'?" in acme["reason"]
    (site.folder / "acme_rl" / "plugin.py").write_text(
        (site.folder / "acme_rl" / "plugin.py").read_text().replace("topk_logprob", "topk_logprobs")
    )
    assert site.plugins()["acme"]["status"] == "ready"


def test_an_import_of_more_than_200_ms_is_reported():
    manager = PluginManager()
    plugin = manager.add("acme", lambda: object(), distribution="acme-rl", version="1.0", module="acme_rl.plugin")
    plugin.import_ms = 199.0
    assert list(plugin_findings(plugin, manager)) == []
    plugin.import_ms = 201.0
    [problem] = plugin_findings(plugin, manager)
    assert problem.text.startswith("Importing acme_rl.plugin took 201 ms, which every command waits for.")
    assert problem.status == "warning"
