"""Discards what is beyond the limit without saying so."""

from dataclasses import replace

from wrong_plugins.sandboxes.base import SandboxOf, Session


class Silent(Session):
    def run_program(self, code, **options):
        return replace(super().run_program(code, **options), truncated=False)


class Sandbox(SandboxOf):
    session = Silent
