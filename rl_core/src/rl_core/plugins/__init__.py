"""Discovery and description of installed plugins; imports nothing heavier than pluggy."""

from rl_core.plugins.component import Capability, Component, Kind, KnownComponent
from rl_core.plugins.hookspecs import Control, hookimpl

__all__ = ["Capability", "Component", "Control", "Kind", "KnownComponent", "hookimpl"]
