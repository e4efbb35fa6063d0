"""The commands of rl_serve keep the promises of commands."""

from rl_core.testing import CommandConformance


class TestServe(CommandConformance):
    component = "serve"


class TestChat(CommandConformance):
    component = "chat"
