"""Error messages of every kind of failed component look-up."""

import pytest


def test_a_registered_name_gives_its_component(site):
    site.install("acme-rl")
    assert site.look_up("policy", "acme") == "acme_rl.policy:Policy"


def test_a_misspelt_name_lists_what_is_installed_and_suggests_the_nearest(site):
    site.install("acme-rl")
    assert site.look_up("policy", "acne") == (
        "UnknownComponentError: No policy backend named 'acne'. Installed: acme, hf. Did you mean 'acme'?"
    )


def test_a_misspelt_name_may_resemble_one_that_is_not_installed(site):
    assert site.look_up("policy", "megatorn") == (
        "UnknownComponentError: No policy backend named 'megatorn'. Installed: hf. Did you mean 'megatron'? "
        "It is not installed: rl-backends-megatron is not published; in a checkout of the repository, "
        "pip install ./rl_backends_megatron."
    )


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (
            "policy",
            "megatron",
            "Policy backend 'megatron' is not installed: rl-backends-megatron is not published; in a checkout "
            "of the repository, pip install ./rl_backends_megatron.",
        ),
        (
            "generation",
            "vllm",
            "Generation backend 'vllm' is not installed: rl-backends-vllm is not published; in a checkout of "
            "the repository, pip install ./rl_backends_vllm.",
        ),
        (
            "command",
            "serve",
            "Command 'serve' is not installed: rl-serve is not published; in a checkout of the repository, "
            "pip install ./rl_serve.",
        ),
        (
            "generation",
            "openai",
            "Generation backend 'openai' is not installed: rl-backends-openai is not published; in a checkout of the "
            "repository, pip install ./rl_backends_openai.",
        ),
    ],
)
def test_a_known_component_that_is_not_installed_says_what_to_install(site, kind, name, words):
    assert site.look_up(kind, name) == f"ComponentNotInstalledError: {words}"


def test_a_component_of_a_plugin_that_cannot_be_imported_says_so(site):
    site.install("acme-rl", version="2.1", source="import acme_kernels")
    assert site.look_up("policy", "acme") == (
        "BrokenPluginError: Policy backend 'acme' comes from acme-rl 2.1, which failed to load: "
        "ModuleNotFoundError: No module named 'acme_kernels'. Run: rlcore doctor acme"
    )


def test_a_component_whose_requirement_is_missing_says_which(site):
    site.install("acme-rl", requires=["acme-kernels>=2"])
    assert site.look_up("policy", "acme") == (
        "BrokenPluginError: Policy backend 'acme' comes from acme-rl 1.0, which cannot be used: "
        "acme-kernels>=2 is not installed. Run: rlcore doctor acme"
    )


def test_a_component_of_a_disabled_plugin_says_so(site):
    site.install("acme-rl")
    site.environment["RLCORE_DISABLE_PLUGINS"] = "acme"
    assert site.look_up("policy", "acme") == (
        "BrokenPluginError: Policy backend 'acme': the plugin 'acme' (acme-rl 1.0) is disabled by "
        "RLCORE_DISABLE_PLUGINS. Take it out of that list."
    )


def test_a_disabled_built_in_component_is_not_reported_as_missing(site):
    site.environment["RLCORE_DISABLE_PLUGINS"] = "envs"
    assert site.look_up("environment", "math").startswith("BrokenPluginError: Environment 'math': the plugin 'envs'")


def test_an_unknown_name_mentions_the_plugins_that_could_have_registered_it(site):
    site.install("acme-rl", source="import acme_kernels")
    assert site.look_up("weight_transport", "sparkle") == (
        "UnknownComponentError: No weight transport named 'sparkle'. Installed: by_reference, collective, disk, shared_memory. "
        "Plugins that failed to load: acme (acme-rl 1.0)."
    )


def test_a_name_registered_twice_names_both_and_how_to_disable_one(site):
    site.install("acme-rl", source=_policies("star"))
    site.install("zeta-rl", source=_policies("star"))
    assert site.look_up("policy", "star") == (
        "DuplicateComponentError: 2 plugins register the policy backend 'star': acme-rl 1.0 and zeta-rl 1.0. "
        "Disable one: RLCORE_DISABLE_PLUGINS=acme or RLCORE_DISABLE_PLUGINS=zeta"
    )


def test_disabling_one_of_two_lets_the_other_be_found(site):
    site.install("acme-rl", source=_policies("star"))
    site.install("zeta-rl", source=_policies("star"))
    site.environment["RLCORE_DISABLE_PLUGINS"] = "zeta"
    assert site.look_up("policy", "star") == "acme_rl.policy:Policy"


def test_plugins_with_the_same_name_are_distinguished_by_distribution(site):
    site.install("acme-rl", plugin="star")
    site.install("zeta-rl", plugin="star")
    assert site.look_up("policy", "star") == (
        "DuplicateComponentError: 2 plugins register the policy backend 'star': acme-rl 1.0 and zeta-rl 1.0. "
        "Disable one: RLCORE_DISABLE_PLUGINS=acme-rl or RLCORE_DISABLE_PLUGINS=zeta-rl"
    )


def test_one_name_for_two_kinds_is_not_a_duplicate(site):
    assert site.look_up("policy", "hf") == "rl_backends_hf.policy:HuggingFacePolicy"
    assert site.look_up("generation", "hf") == "rl_backends_hf.generation:HuggingFaceGeneration"


def test_a_name_of_another_kind_is_an_error_that_names_the_kind(site):
    assert site.look_up("policy", "math") == (
        "WrongKindError: 'math' is an environment (rl-envs 0.1.0), not a policy backend. Installed: hf."
    )


def test_a_missing_capability_is_an_error_that_lists_capable_backends(site):
    site.install("acme-rl")
    assert site.look_up("policy", "acme", requires=["shared_memory"]) == "acme_rl.policy:Policy"
    assert site.look_up("policy", "acme", requires=["collective"]) == (
        "MissingCapabilityError: Policy backend 'acme' (acme-rl 1.0) lacks the capability 'collective'. "
        "Its capabilities: shared_memory. Policy backends with it: hf."
    )


@pytest.mark.parametrize("path", ["my_package.envs.Mine", "my_package.envs:Mine"])
def test_a_path_is_accepted_wherever_a_name_is_and_imports_nothing(site, path):
    package = site.folder / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "envs.py").write_text("class Mine:\n    pass\n\nraise RuntimeError('imported')")
    assert site.look_up("environment", path) == "my_package.envs:Mine"


def test_a_path_to_a_class_that_its_module_lacks_says_so_and_imports_nothing(site):
    package = site.folder / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "envs.py").write_text("class Mine:\n    pass\n\nraise RuntimeError('imported')")
    assert site.look_up("environment", "my_package.envs.Mina") == (
        "ComponentImportError: Environment 'my_package.envs.Mina' cannot be imported: my_package.envs has no 'Mina'. "
        "Did you mean 'Mine'?"
    )


def test_a_path_into_a_package_that_does_not_exist_says_so(site):
    assert site.look_up("environment", "my_pakage.envs.Mine") == (
        "ComponentImportError: Environment 'my_pakage.envs.Mine' cannot be imported: there is no package 'my_pakage'. "
        "Install it, or put its folder on PYTHONPATH."
    )


@pytest.mark.parametrize("path", ["my package.Mine", ".Mine", "a:b:c", "a..b"])
def test_a_malformed_import_path_is_an_error(site, path):
    assert site.look_up("environment", path).startswith(f"InvalidComponentError: {path!r} is not a path to a class")


def test_the_capabilities_of_a_path_are_those_of_its_class(site):
    (site.folder / "mine.py").write_text("class Engine:\n    capabilities = ('shared_memory',)\n")
    assert site.look_up("generation", "mine.Engine", requires=["shared_memory"]) == "mine:Engine"
    assert site.look_up("generation", "mine.Engine", requires=["collective"]) == (
        "MissingCapabilityError: Generation backend 'mine.Engine' lacks the capability 'collective': its class "
        "attribute `capabilities` does not name it."
    )


def _policies(name: str) -> str:
    return f"""
        from rl_core.plugins import Component, hookimpl

        @hookimpl
        def rlcore_policies():
            return [Component("{name}", target="{{package}}.policy:Policy", summary="Trains on nothing")]
    """
