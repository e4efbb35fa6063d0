"""`rlcore doctor` shows each requirement, the import, and the traceback of what is broken."""

from importlib.metadata import version

import pytest

BUILT_IN = ("core", "train", "rlcore", "hf", "envs")
CONFIG_HOOK = """
    from rl_core.plugins import Component, hookimpl

    @hookimpl
    def rlcore_environments():
        target, config = "riddling_rl.riddles:Riddles", "riddling_rl.config:Settings"
        return [Component("riddles", target=target, config=config, summary="Riddles")]
"""


@pytest.fixture(scope="module")
def imported(site_of_the_module):
    """Exit code and output of the commands that import targets, in one process, because the imports take most of the time."""
    site = site_of_the_module
    (site.folder / "mine.py").write_text("class Engine: pass\n")
    (site.install("broken-rl") / "policy.py").write_text("import acme_kernels\nclass Policy: pass\n")
    (site.install("baseless-rl") / "policy.py").write_text("class Policy: pass\n")
    (site.install("sound-rl") / "policy.py").write_text("from rl_backends_hf.policy import HuggingFacePolicy as Policy\n")
    riddling = site.install("riddling-rl", source=CONFIG_HOOK)
    (riddling / "riddles.py").write_text("class Riddles: pass\n")
    (riddling / "config.py").write_text("from rl_core.config.section import Section as Settings\n")
    commands = [("doctor", "broken"), ("doctor", "mine.Engine"), ("doctor", "mine.Engin")]
    commands += [("doctor", plugin, "--deep") for plugin in ("broken", "baseless", "sound", "riddling", *BUILT_IN)]
    return dict(zip(commands, site.rlcore_in_one_process(*commands), strict=True))


def test_a_healthy_plugin_passes_with_its_requirements_and_their_versions(site, words):
    site.write_metadata("acme-kernels", version="2.3")
    site.install("acme-rl", requires=["acme-kernels>=2"])
    result = site.rlcore("doctor", "acme")
    assert result.returncode == 0
    for line in ("acme acme-rl 1.0 ready", "ok acme-kernels>=2 2.3", "hook rlcore_policies"):
        assert line in words(result.stdout)


def test_a_missing_requirement_fails_it_and_the_remedy_is_shown(site, words):
    site.install("acme-rl", requires=["acme-kernels[fast]>=2,<3"])
    result = site.rlcore("doctor", "acme-rl")
    assert result.returncode == 1
    assert "UNMET acme-kernels[fast]<3,>=2 not installed" in words(result.stdout)
    assert "try pip install 'acme-kernels[fast]<3,>=2'" in words(result.stdout)


@pytest.mark.parametrize("requirement", ["{}<1", "acme-kernels"])
@pytest.mark.parametrize(
    ("package", "distribution", "remedy"),
    [
        ("torch", "rl-core", "Another environment does not help, because workers need rl-core too."),
        ("rich", "rl-train", "Install the library of the plugin in another environment, and name its interpreter in `policy."),
    ],
)
def test_a_requirement_that_conflicts_with_ours_is_shown_with_both_sides_and_what_to_do(
    site, words, requirement, package, distribution, remedy
):
    site.write_metadata("acme-kernels", version="2.3", requires=[f"{package}==0.13.*", "acme-extras"])
    site.install("acme-rl", requires=[requirement.format(package)])
    result = site.rlcore("doctor", "acme")
    is_direct = requirement != "acme-kernels"
    assert result.returncode == is_direct  # a library may work with other versions than it names
    [line] = (words(line).strip() for line in result.stdout.splitlines() if "CONFLICT" in line)
    owner = f"acme-rl 1.0 requires {package}<1" if is_direct else f"acme-kernels 2.3 requires {package}==0.13.*"
    assert line.startswith(f"CONFLICT {owner}, but {version(package)} is installed, because ")
    assert f"{distribution} 0.1.0 requires {package}" in line
    assert remedy in line
    assert line.endswith(": docs/dependencies_that_conflict.md.")
    assert "try pip install" not in words(result.stdout)


@pytest.mark.parametrize("requirement", ["torch>=1", "acme-kernels", "acme-kernels<2", "torch>2.0,<99"])
def test_requirements_that_have_a_common_version_do_not_conflict(site, words, requirement):
    site.write_metadata("acme-kernels", version="2.3", requires=["torch!=2.13.0", "missing-library<3"])
    site.install("acme-rl", requires=[requirement])
    assert "CONFLICT" not in site.rlcore("doctor", "acme").stdout


def test_the_traceback_begins_in_the_plugin(site):
    site.install("acme-rl", source="def start():\n    return 1 / 0\n\nstart()\n")
    result = site.rlcore("doctor", "acme")
    assert result.returncode == 1
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert lines[lines.index("Traceback (most recent call last):") + 1].endswith('acme_rl/plugin.py", line 4, in <module>')
    assert "ZeroDivisionError: division by zero" in lines


@pytest.mark.slow
def test_targets_are_imported_only_when_asked_deep(imported):
    assert imported["doctor", "broken"][0] == 0
    code, output = imported["doctor", "broken", "--deep"]
    assert code == 1
    assert "acme_kernels" in output


def test_a_target_must_have_the_base_class_of_its_kind(imported):
    code, output = imported["doctor", "baseless", "--deep"]
    assert code == 1
    assert "baseless_rl.policy.Policy (baseless-rl 1.0)" in output
    assert "is not a subclass of rl_core.interfaces.policy.PolicyInterface" in output
    assert imported["doctor", "sound", "--deep"][0] == 0


def test_a_config_model_without_the_base_class_of_its_kind_fails_the_deep_check(imported):
    code, output = imported["doctor", "riddling", "--deep"]
    assert code == 1
    assert "is not a subclass of rl_core.config.schema.EnvironmentConfig" in output


def test_a_component_name_leads_to_its_plugin(site):
    site.install("acme-rl", source=_environment("riddles"))
    result = site.rlcore("doctor", "riddles")
    assert result.returncode == 0
    assert result.stdout.startswith("acme  acme-rl 1.0  ready")


def test_a_path_is_imported_and_its_traceback_shown(imported):
    assert imported["doctor", "mine.Engine"][0] == 0
    code, output = imported["doctor", "mine.Engin"]
    assert code == 1
    assert "mine has no 'Engin'. Did you mean 'Engine'?" in output


def test_without_a_name_all_plugins_are_checked_and_one_failure_sets_the_exit_code(site):
    site.install("acme-rl", source="import acme_kernels")
    result = site.rlcore("doctor")
    assert result.returncode == 1
    for plugin in ("acme  acme-rl 1.0  failed", "core  rl-core", "hf  rl-backends-hf", "envs  rl-envs"):
        assert plugin in result.stdout


def test_doctor_lists_network_ports_reachable_from_other_machines(site):
    site.environment.pop("RAY_ADDRESS", None)
    site.environment["GLOO_SOCKET_IFNAME"] = "eth7"
    local = site.rlcore("doctor").stdout.partition("\nnetwork\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in local] == ["ok", "open", "open"]
    assert "GLOO_SOCKET_IFNAME=eth7" in local[1]
    assert "vLLM" in local[2]
    site.environment["RAY_ADDRESS"] = "10.0.0.1:6379"
    assert "open    RAY_ADDRESS=10.0.0.1:6379" in site.rlcore("doctor").stdout


def test_a_plugin_that_imports_heavily_at_registration_is_unhealthy(site):
    site.install("acme-rl", source="import numpy")
    result = site.rlcore("doctor", "acme")
    assert result.returncode == 1
    assert "its import loads numpy" in result.stdout


def test_the_doctor_answers_in_strict_mode_too(site):
    site.install("acme-rl", source="import acme_kernels")
    site.environment["RLCORE_STRICT_PLUGINS"] = "1"
    result = site.rlcore("doctor", "acme")
    assert result.returncode == 1
    assert "acme_kernels" in result.stdout


@pytest.mark.parametrize(
    ("name", "words_of_error"),
    [
        (
            "megatron",
            "is not installed: rl-backends-megatron is not published; in a checkout "
            "of the repository, pip install ./rl_backends_megatron.",
        ),
        ("enws", "No plugin, distribution or component is named 'enws'. Did you mean 'envs'?"),
    ],
)
def test_an_unknown_name_is_a_user_error(site, name, words_of_error):
    result = site.rlcore("doctor", name)
    assert result.returncode == 2
    assert words_of_error in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("plugin", BUILT_IN)
def test_every_built_in_target_and_config_can_be_imported(imported, plugin):
    code, output = imported["doctor", plugin, "--deep"]
    assert code == 0, output


def _environment(name: str) -> str:
    return f"""
        from rl_core.plugins import Component, hookimpl

        @hookimpl
        def rlcore_environments():
            return [Component("{name}", target="{{package}}.environment:Environment", summary="Asks riddles")]
    """
