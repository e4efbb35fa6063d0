"""A component checks its fields, and loads its target or explains why it cannot."""

from abc import ABC, abstractmethod

import pytest

from rl_core.errors import ComponentImportError, InvalidComponentError, WrongKindError
from rl_core.plugins import Component, Kind


class Interface(ABC):
    @abstractmethod
    def step(self): ...

    @abstractmethod
    def reset(self): ...


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("name", "Acme", "A component cannot be named 'Acme'"),
        ("name", "", "A component cannot be named ''"),
        ("name", "a b", "A component cannot be named 'a b'"),
        ("name", 3, "name of a Component must be a string, not 3"),
        ("target", "acme.policy", "target of component 'acme' must be 'module:Attribute', not 'acme.policy'"),
        ("target", "acme policy:P", "target of component 'acme' must be 'module:Attribute'"),
        ("config", "acme", "config of component 'acme' must be 'module:Attribute', not 'acme'"),
        ("summary", " ", "summary of component 'acme' must be one line"),
        ("summary", "a\nb", "summary of component 'acme' must be one line"),
        ("summary", "x" * 121, "summary of component 'acme' must be one line"),
        ("capabilities", "fast", "capabilities of component 'acme' must be a tuple"),
        ("capabilities", ("Fast",), "Component 'acme': there is no capability 'Fast'."),
        ("capabilities", ("top_p", "topp_k"), "Component 'acme': there is no capability 'topp_k'. Did you mean 'top_k'?"),
        ("capabilities", ("acme:",), "Component 'acme': there is no capability 'acme:'."),
    ],
)
def test_an_invalid_component_field_is_named(field, value, words):
    fields = {"name": "acme", "target": "acme.policy:Policy", "summary": "Trains"}
    with pytest.raises(InvalidComponentError) as raised:
        Component(**{**fields, field: value})
    assert str(raised.value).startswith(words)


def test_a_component_cannot_be_changed():
    component = Component("acme", target="json:loads", summary="Reads JSON")
    with pytest.raises(AttributeError):
        component.target = "json:dumps"


def test_loading_gives_the_target_and_its_config():
    component = Component("acme", target="json:JSONDecoder.decode", config="json:JSONEncoder", summary="Reads JSON")
    import json

    assert component.load() is json.JSONDecoder.decode
    assert component.load_config() is json.JSONEncoder


def test_a_component_without_config_has_none():
    assert Component("acme", target="json:loads", summary="Reads JSON").load_config() is None


def test_a_config_that_is_not_a_class_is_rejected():
    with pytest.raises(ComponentImportError, match="config model of 'acme', is <function loads"):
        Component("acme", target="json:loads", config="json:loads", summary="Reads JSON").load_config()


def test_a_missing_module_error_includes_its_cause():
    component = Component("acme", target="acme_absent.policy:Policy", summary="Trains")
    with pytest.raises(ComponentImportError, match="No module named 'acme_absent'") as raised:
        component.load()
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)


def test_a_misspelt_attribute_gets_a_suggestion():
    with pytest.raises(ComponentImportError, match=r"json has no 'laods'\. Did you mean 'loads'\?"):
        Component("acme", target="json:laods", summary="Reads JSON").load()


def test_a_target_without_its_interface_names_the_missing_methods():
    component = Component("acme", target="json:JSONDecoder", summary="Reads JSON")
    with pytest.raises(WrongKindError, match=r"json:JSONDecoder is not a Interface. It has no reset, step."):
        component.load(expect=Interface)


def test_every_kind_has_the_word_that_calls_use():
    assert {kind.value for kind in Kind} == {
        "policy",
        "generation",
        "environment",
        "algorithm",
        "loss",
        "dataset",
        "logger",
        "weight_transport",
        "sandbox",
        "command",
        "model_server",
    }
