"""Conformance kit: each promise of an interface is a test. One class for each component, collected by plain pytest.

    from rl_core.testing import EnvironmentConformance

    class TestBrevity(EnvironmentConformance):
        component = "brevity"

`rlcore check plugin` runs the same tests without a test file. See docs/conformance.md.
"""

from rl_core.first_use import import_on_first_use

__all__ = [
    "CommandConformance",
    "EnvironmentConformance",
    "GenerationConformance",
    "LossConformance",
    "PackagingConformance",
    "PictureModel",
    "PolicyConformance",
    "ReferenceModel",
    "SandboxConformance",
    "WeightTransportConformance",
    "xfail",
]

__getattr__ = import_on_first_use(
    __name__,
    {
        ".command": "CommandConformance",
        ".environments.conformance": "EnvironmentConformance",
        ".generation": "GenerationConformance",
        ".images": "PictureModel",
        ".loss": "LossConformance",
        ".packaging": "PackagingConformance",
        ".policies": "PolicyConformance",
        ".promises": "xfail",
        ".reference": "ReferenceModel",
        ".sandbox": "SandboxConformance",
        ".weight_transport": "WeightTransportConformance",
    },
)
