"""A broken distribution is listed with its reason and does not affect others."""

import json
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from rl_core.plugins.requirements import version_of

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "grpo_addition.yaml")
OURS = {"core", "train", "rlcore", "hf", "envs"}


@pytest.fixture(autouse=True)
def our_plugins_stay_ready(site):
    """Built-in plugins must stay ready whatever a test installs, except disabled ones."""
    yield
    if "RLCORE_STRICT_PLUGINS" not in site.environment:
        for plugins in site.listings or [site.plugins()]:
            assert {name for name in OURS if plugins[name]["status"] == "ready"} == OURS


def test_a_healthy_third_party_plugin_is_ready(site):
    site.install("acme-rl", requires=["rl-core~=0.1.0", "pluggy"])
    acme = site.plugins()["acme"]
    assert (acme["status"], acme["reason"], acme["distribution"], acme["version"]) == ("ready", None, "acme-rl", "1.0")
    assert acme["components"] == [{"kind": "policy", "name": "acme"}]


def test_a_missing_requirement_is_named_and_the_components_stay_listed(site):
    site.install("acme-rl", requires=["acme-kernels>=2"])
    acme = site.plugins()["acme"]
    assert (acme["status"], acme["reason"]) == ("missing", "acme-kernels>=2 is not installed")
    assert acme["components"] == [{"kind": "policy", "name": "acme"}]


def test_a_release_newer_than_the_tested_ones_works_with_one_warning_of_each_command_that_shows_plugins(site):
    site.write_metadata("acme-kernels", version="2.7.1")
    requires = ["acme-kernels>=2,<3", "acme-kernels<2.7; extra == 'tested'", "pluggy", "pluggy<9; extra == 'tested'"]
    for name in ("acme-rl", "other-rl"):
        site.install(name, requires=requires, provides_extras=["tested"])
    assert site.plugins()["acme"]["status"] == "ready"
    warning = "acme-kernels 2.7.1 is not among the tested releases (acme-kernels<2.7)."
    for command in (("list-plugins",), ("doctor", "acme")):
        done = site.rlcore(*command)
        assert done.returncode == 0
        assert done.stdout.count("not among the tested") == done.stdout.count(f"warning: {warning}") == 1


@pytest.mark.parametrize(
    ("library", "release", "allowed"),
    [
        ("transformers", "5.15.1", "transformers<5.26,>=5.16.1"),
        ("transformers", "5.26.0", "transformers<5.26,>=5.16.1"),
        ("torch", "2.12.1", "torch<2.17,>=2.13"),
        ("torch", "2.17.0", "torch<2.17,>=2.13"),
        ("ray", "2.49.0", "ray<3,>=2.50"),
        ("ray", "3.0.0", "ray<3,>=2.50"),
    ],
)
def test_a_release_outside_of_the_range_is_an_error_with_both_versions(site, library, release, allowed):
    site.write_metadata(library, version=release)
    checked = site.rlcore("validate", EXAMPLE)
    assert checked.returncode == 2
    assert f"{allowed} is required, {release} is installed. Run: rlcore doctor" in checked.stderr
    assert "Traceback" not in checked.stderr
    site.listings.append(
        {name: {"status": "ready"} for name in OURS}
    )  # `our_plugins_stay_ready` would expect it of this release


@pytest.mark.slow
def test_a_run_warns_once_of_a_release_newer_than_the_tested_ones(site, tmp_path):
    site.write_metadata("transformers", version="5.25.9")
    settings = (
        "grpo.max_num_steps=1",
        "grpo.val_period=0",
        f"logger.log_dir={tmp_path / 'runs'}",
        "cluster.backend=in_process",
    )
    trained = site.rlcore("train", EXAMPLE, *settings)
    assert trained.returncode == 0
    [log] = (tmp_path / "runs").rglob("driver.log")
    warning = "transformers 5.25.9 is not among the tested releases (transformers<5.25)."
    assert f"{trained.stdout}{trained.stderr}".count(warning) == log.read_text().count(warning) == 1


def test_a_requirement_in_a_version_that_does_not_fit_is_named_with_both_versions(site):
    site.write_metadata("acme-kernels", version="1.5")
    site.install("acme-rl", requires=["acme-kernels>=2"])
    acme = site.plugins()["acme"]
    assert (acme["status"], acme["reason"]) == ("missing", "acme-kernels>=2 is required, 1.5 is installed")


def test_a_local_or_preliminary_version_of_a_requirement_fits_its_range(site):
    site.write_metadata("acme-kernels", version="2.1rc1+cpu")
    site.install("acme-rl", requires=["acme-kernels>=2,<3"])
    assert site.plugins()["acme"]["status"] == "ready"


def test_requirements_of_own_extras_and_of_other_platforms_do_not_count(site):
    site.install(
        "acme-rl",
        requires=["acme-gpu; extra == 'gpu'", "acme-windows; sys_platform == 'win32'"],
        provides_extras=["gpu"],
    )
    assert site.plugins()["acme"]["status"] == "ready"


def test_requirements_of_extras_are_checked_too(site):
    site.write_metadata(
        "acme-kernels", requires=["acme-fast>=3; extra == 'fast'", "acme-slow; extra == 'slow'"], provides_extras=["fast"]
    )
    site.install("acme-rl", requires=["acme-kernels[fast]"])
    assert site.plugins()["acme"]["reason"] == "acme-fast>=3 is not installed"


def test_an_invalid_requirement_in_metadata_fails_only_that_plugin(site):
    site.install("acme-rl", requires=["not a requirement"])
    acme = site.plugins()["acme"]
    assert acme["status"] == "failed"
    assert "its metadata has an invalid requirement" in acme["reason"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import acme_kernels", "ModuleNotFoundError: No module named 'acme_kernels'"),
        ("raise RuntimeError('no\\nlicence')", "RuntimeError: no"),
        ("import sys; sys.exit('goodbye')", "SystemExit: goodbye"),
        ("import os; os._exit(0)", "SystemExit: it calls os._exit(0)"),
        ("def broken(:", "SyntaxError"),
    ],
)
def test_a_plugin_that_raises_at_import_has_failed_with_that_reason(site, source, reason):
    site.install("acme-rl", source=source)
    acme = site.plugins()["acme"]
    assert acme["status"] == "failed"
    assert acme["reason"].startswith(reason)


def test_a_plugin_that_raises_in_one_hook_keeps_the_components_of_the_others_listed_as_failed(site):
    site.install(
        "acme-rl",
        source="""
            from rl_core.plugins import Component, hookimpl

            @hookimpl
            def rlcore_policies():
                raise ValueError("no such thing")

            @hookimpl
            def rlcore_losses():
                return [Component("acme", target="acme_rl.loss:Loss", summary="A loss")]
        """,
    )
    acme = site.plugins()["acme"]
    assert (acme["status"], acme["reason"]) == ("failed", "rlcore_policies() raised ValueError: no such thing")
    assert acme["components"] == [{"kind": "loss", "name": "acme"}]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "@hookimpl\ndef rlcore_polices(): return []",
            "unknown hook 'rlcore_polices'. Did you mean 'rlcore_policies'?",
        ),
        ("def rlcore_policies(): return []", "rlcore_policies has no @hookimpl, so it is not a hook"),
        (
            "@hookimpl(wrapper=True)\ndef rlcore_policies(): return (yield)",
            "rlcore_policies is a wrapper; the hooks of rl_core are called one by one",
        ),
        (
            "@hookimpl\ndef rlcore_policies(): return ['acme']",
            "rlcore_policies() returned 'acme', which is not a Component",
        ),
        (
            "@hookimpl\ndef rlcore_policies(): return [Component('a', target='a:B', summary='s')] * 2",
            "rlcore_policies() returned 'a' twice",
        ),
        (
            "@hookimpl\ndef rlcore_policies(): return [Component('Acme', target='a:B', summary='s')]",
            "rlcore_policies() raised InvalidComponentError: A component cannot be named 'Acme'",
        ),
    ],
)
def test_a_hook_that_breaks_the_contract_is_named(site, body, reason):
    site.install("acme-rl", source=f"from rl_core.plugins import Component, hookimpl\n{body}\n")
    acme = site.plugins()["acme"]
    assert acme["status"] == "failed"
    assert acme["reason"].startswith(reason)


def test_a_hook_with_an_argument_that_the_specification_lacks_has_failed(site):
    site.install(
        "acme-rl",
        source="from rl_core.plugins import hookimpl\n@hookimpl\ndef rlcore_step_finished(loss): pass\n",
    )
    acme = site.plugins()["acme"]
    assert acme["status"] == "failed"
    assert "{'loss'} are declared in the hookimpl but can not be found in the hookspec" in acme["reason"]


def test_a_hook_of_a_later_version_may_be_marked_optional(site):
    site.install(
        "acme-rl",
        source="from rl_core.plugins import hookimpl\n@hookimpl(optionalhook=True)\ndef rlcore_dreams(): return []\n",
    )
    assert site.plugins()["acme"]["status"] == "ready"


def test_two_versions_of_the_metadata_in_one_folder_are_reported(site):
    site.install("acme-rl", version="2.0")
    site.write_metadata("acme-rl", version="1.0", entry_points={"acme": "acme_rl.plugin"})
    acme = site.plugins()["acme"]
    assert acme["status"] == "failed"
    assert "contains metadata of acme-rl" in acme["reason"]
    assert "1.0" in acme["reason"]
    assert "2.0" in acme["reason"]


def test_the_same_folder_twice_on_the_path_counts_once(site):
    site.install("acme-rl")
    site.environment["PYTHONPATH"] = f"{site.folder}:{site.folder}/"
    assert site.plugins()["acme"]["status"] == "ready"


def test_metadata_without_a_name_is_ignored(site):
    site.install("acme-rl")
    nameless = site.folder / "nameless-1.0.dist-info"
    nameless.mkdir()
    (nameless / "entry_points.txt").write_text("[rl_core.plugins]\nnameless = nameless.plugin\n")
    plugins = site.plugins()
    assert plugins["acme"]["status"] == "ready"
    assert plugins["nameless"]["reason"] == "ModuleNotFoundError: No module named 'nameless'"


@pytest.mark.parametrize("switch", ["acme", "acme-rl", "Acme_RL", "other, acme"])
def test_a_disabled_plugin_is_not_imported(site, switch):
    package = site.install("acme-rl", source="import pathlib; pathlib.Path(__file__ + '.imported').touch()")
    site.environment["RLCORE_DISABLE_PLUGINS"] = switch
    acme = site.plugins()["acme"]
    assert (acme["status"], acme["reason"]) == ("disabled", "disabled by RLCORE_DISABLE_PLUGINS")
    assert not (package / "plugin.py.imported").exists()


def test_disabling_what_does_not_exist_is_a_warning_with_a_suggestion(site):
    site.install("acme-rl")
    site.environment["RLCORE_DISABLE_PLUGINS"] = "acne"
    result = site.rlcore("list-backends")
    assert result.returncode == 0
    assert "warning: RLCORE_DISABLE_PLUGINS names 'acne', which is not a plugin. Did you mean 'acme'?" in result.stdout


def test_strict_makes_every_failure_fatal_and_lists_them_all(site):
    site.install("acme-rl", source="import acme_kernels")
    site.install("zeta-rl", requires=["zeta-kernels"])
    site.environment["RLCORE_STRICT_PLUGINS"] = "1"
    result = site.rlcore("list-backends")
    assert result.returncode == 2
    assert "acme (acme-rl 1.0): ModuleNotFoundError" in result.stderr
    assert "zeta (zeta-rl 1.0): zeta-kernels is not installed" in result.stderr
    assert "Traceback" not in result.stderr


def test_strict_passes_where_everything_is_ready(site):
    site.install("acme-rl")
    site.environment["RLCORE_STRICT_PLUGINS"] = "1"
    assert site.rlcore("list-backends").returncode == 0


def test_a_strictness_that_is_neither_true_nor_false_is_refused(site):
    site.environment["RLCORE_STRICT_PLUGINS"] = "maybe"
    result = site.rlcore("list-backends")
    assert result.returncode == 2
    assert "RLCORE_STRICT_PLUGINS=maybe is neither true nor false: use 1 or 0." in result.stderr


def test_a_heavy_import_at_registration_is_attributed_and_timed(site):
    source = "import numpy, time\ntime.sleep(0.05)\n"
    site.install("acme-rl", source=source)
    acme = site.plugins()["acme"]
    assert acme["heavy_modules"] == ["numpy"]
    assert acme["import_ms"] >= 50
    assert "heavy: numpy" in site.rlcore("list-backends", "--timings").stdout


def test_list_backends_shows_the_broken_the_ready_and_the_absent_together(site):
    site.install("acme-rl", source="import acme_kernels")
    site.install("zeta-rl")
    rows = json.loads(site.rlcore("list-backends", "--json").stdout)
    states = {(row["kind"], row["name"]): row["status"] for row in rows}
    assert states[None, "acme"] == "failed"
    assert states["policy", "zeta"] == "ready"
    assert states["policy", "megatron"] == "not installed"
    table = site.rlcore("list-backends").stdout
    assert "1 plugin does not work. To see why: rlcore doctor acme" in table


ENGINE = """
    from rl_core.plugins import Component, hookimpl

    @hookimpl
    def rlcore_generations():
        return [
            Component(
                "acme",
                target="acme_rl.engine:Engine",
                summary="Samples from one of two builds of an engine",
                one_of=("acme-engine>=2,<3", "acme-engine-cpu>=2,<3"),
                install="pip install 'acme-rl[cuda]'",
            )
        ]
"""


def test_a_plugin_that_needs_one_of_two_distributions_shows_the_install_command_without_either(site):
    site.install("acme-rl", source=ENGINE)
    plugin = site.plugins()["acme"]
    assert plugin["status"] == "missing"
    assert plugin["reason"] == ("acme-engine>=2,<3 or acme-engine-cpu>=2,<3 is not installed (pip install 'acme-rl[cuda]')")
    doctor = site.rlcore("doctor", "acme")
    assert "try     pip install 'acme-rl[cuda]'" in doctor.stdout


def test_a_plugin_that_needs_one_of_two_distributions_is_ready_with_a_matching_second_one(site):
    site.install("acme-rl", source=ENGINE)
    site.write_metadata("acme-engine", version="1.9")
    assert "or acme-engine-cpu>=2,<3 is required, acme-engine<3,>=2: 1.9 is installed" in site.plugins()["acme"]["reason"]
    site.write_metadata("acme-engine-cpu", version="2.4")
    assert site.plugins()["acme"]["status"] == "ready"


@pytest.mark.parametrize("file", ["METADATA", "PKG-INFO"])
def test_a_version_is_read_from_the_headers_and_not_from_the_description(tmp_path, file):
    folder = tmp_path / "acme.dist-info"
    folder.mkdir()
    (folder / file).write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.5\n\nHistory\n\nVersion: 9\n")
    assert version_of(PathDistribution(folder)) == "1.5"
