"""Removes spaces and line ends around the output of a program."""

from dataclasses import replace

from wrong_plugins.sandboxes.base import SandboxOf, Session


class Stripped(Session):
    def run_program(self, code, **options):
        result = super().run_program(code, **options)
        return replace(result, stdout=result.stdout.strip())


class Sandbox(SandboxOf):
    session = Stripped
