"""Event hooks reach every plugin, and a plugin that raises is named."""

import types

import pytest

from rl_core.interfaces.policy import PolicyInterface
from rl_core.plugins import Control, hookimpl
from rl_core.plugins.manager import PluginManager
from rl_train.control import RunControl, call_event
from rl_train.errors import PluginHookError


def manager_with(**plugins):
    """A manager of plugins whose `rlcore_step_finished` are the given functions."""
    manager = PluginManager()
    for name, hook in plugins.items():
        module = types.ModuleType(name)
        module.rlcore_step_finished = hookimpl(hook)
        manager.add(name, lambda module=module: module, distribution=f"{name}-rl", version="2.1")
    return manager


def test_a_hook_gets_the_arguments_that_it_names():
    seen = []
    manager = manager_with(acme=lambda metrics, step: seen.append((step, metrics)), zeta=lambda: seen.append("called"))
    call_event(manager, "rlcore_step_finished", run=None, step=3, metrics={"reward/mean": 0.5})
    assert seen == ["called", (3, {"reward/mean": 0.5})]


def test_what_hooks_return_is_attributed_to_their_plugins():
    manager = manager_with(acme=lambda: Control(save=True), quiet=lambda: None, zeta=lambda: "text")
    returned = call_event(manager, "rlcore_step_finished", run=None, step=1, metrics={})
    assert [(plugin.name, value) for plugin, value in returned] == [("zeta", "text"), ("acme", Control(save=True))]


def test_plugins_that_contradict_each_other_are_both_named():
    manager = manager_with(acme=lambda: Control(lr_factor=0.5), zeta=lambda: Control(lr_factor=0.1))
    returned = call_event(manager, "rlcore_step_finished", run=None, step=1, metrics={})
    with pytest.raises(PluginHookError) as raised:
        RunControl().apply(None, 7, returned)
    assert str(raised.value) == (
        "After step 7, the plugin 'zeta' (zeta-rl 2.1) set lr_factor to 0.1 and the plugin 'acme' (acme-rl 2.1) to 0.5. "
        "Remove one of them."
    )


def test_a_policy_that_cannot_change_its_learning_rate_is_named_with_the_plugin_that_asks():
    class Fixed(PolicyInterface):
        def train(self, data, loss_fn, **options):
            return {}

    manager = manager_with(acme=lambda: Control(lr_factor=0.5))
    returned = call_event(manager, "rlcore_step_finished", run=None, step=1, metrics={})
    with pytest.raises(PluginHookError, match=r"'acme' .* set lr_factor to 0.5, .*: Fixed does not implement `set_lr_factor`"):
        RunControl().apply(types.SimpleNamespace(policy=Fixed()), 1, returned)


def test_a_raising_hook_is_attributed_after_all_hooks_ran():
    seen = []

    def failing(step):
        raise ValueError(f"no step {step}")

    manager = manager_with(quiet=lambda: seen.append("quiet"), acme=failing, zeta=lambda: seen.append("zeta"))
    with pytest.raises(PluginHookError) as raised:
        call_event(manager, "rlcore_step_finished", run=None, step=3, metrics={})
    assert seen == ["zeta", "quiet"]
    assert str(raised.value) == (
        "rlcore_step_finished of the plugin 'acme' (acme-rl 2.1) raised ValueError: no step 3.\n"
        "To run without it: RLCORE_DISABLE_PLUGINS=acme"
    )
    assert isinstance(raised.value.__cause__, ValueError)
    assert raised.value.exit_code == 1


def test_several_raising_hooks_are_all_named():
    def failing():
        raise ValueError("no")

    with pytest.raises(PluginHookError, match="RLCORE_DISABLE_PLUGINS=zeta,acme"):
        call_event(manager_with(acme=failing, zeta=failing), "rlcore_step_finished", run=None, step=1, metrics={})


def test_hooks_of_failed_plugins_are_not_called():
    seen = []
    module = types.ModuleType("acme")
    module.rlcore_step_finished = hookimpl(lambda: seen.append("called"))
    module.rlcore_polices = hookimpl(lambda: [])
    manager = PluginManager()
    manager.add("acme", lambda: module, distribution="acme-rl", version="2.1")
    call_event(manager, "rlcore_step_finished", run=None, step=1, metrics={})
    assert seen == []


@pytest.mark.parametrize(
    ("event", "arguments"),
    [
        ("rlcore_step_ended", {}),
        ("rlcore_policies", {}),
        ("rlcore_step_finished", {"step": 1}),
        ("rlcore_run_started", {"run": None, "step": 1}),
    ],
)
def test_unknown_events_and_missing_arguments_raise(event, arguments):
    with pytest.raises(ValueError, match=event):
        call_event(PluginManager(), event, **arguments)
