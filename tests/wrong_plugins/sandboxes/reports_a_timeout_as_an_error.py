"""Reports a call that reached its limit as one that failed."""

from dataclasses import replace

from wrong_plugins.sandboxes.base import SandboxOf, Session

from rl_sandbox import Outcome


def renamed(result):
    return replace(result, outcome=Outcome.ERROR) if result.outcome is Outcome.TIMEOUT else result


class Renaming(Session):
    def run(self, code, **options):
        return renamed(super().run(code, **options))

    def run_program(self, code, **options):
        return renamed(super().run_program(code, **options))


class Sandbox(SandboxOf):
    session = Renaming
