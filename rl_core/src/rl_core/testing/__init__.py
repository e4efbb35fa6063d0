"""Conformance kit: each promise of an interface is a test. One class for each component, collected by plain pytest.

    from rl_core.testing import EnvironmentConformance

    class TestBrevity(EnvironmentConformance):
        component = "brevity"

`rlcore check plugin brevity` runs the same tests without a test file. See docs/conformance.md.
"""

from rl_core.first_use import import_on_first_use

__all__ = [
    "EnvironmentConformance",
    "LossConformance",
    "PackagingConformance",
    "xfail",
]

__getattr__ = import_on_first_use(
    __name__,
    {
        ".environments.conformance": "EnvironmentConformance",
        ".loss": "LossConformance",
        ".packaging": "PackagingConformance",
        ".promises": "xfail",
    },
)
