"""Sandboxes that break a promise of sandboxes; all run the local sandbox, with sessions whose calls can be replaced."""

from dataclasses import replace

from rl_sandbox import LocalSandbox, Outcome, SandboxError, SandboxInterface, SessionInterface


class Session(SessionInterface):
    def __init__(self, local):
        self.local = local

    def run(self, code, *, timeout_s=None):
        return self.local.run(code, timeout_s=timeout_s)

    def run_program(self, code, *, stdin="", timeout_s=None, link=None):
        return self.local.run_program(code, stdin=stdin, timeout_s=timeout_s, link=link)

    def close(self):
        self.local.close()


class SandboxOf(SandboxInterface):
    """A sandbox of `session`, which a subclass sets."""

    session = Session

    def __init__(self, config):
        self.local = LocalSandbox(config.model_copy(update={"backend": "local"}))

    def open_session(self):
        return self.session(self.local.open_session())

    def close(self):
        self.local.close()


class Silent(Session):
    def run_program(self, code, **options):
        return replace(super().run_program(code, **options), truncated=False)


class CutsOutputSilently(SandboxOf):
    """Discards what is beyond the limit without saying so."""

    session = Silent


class Shared(Session):
    closed = False

    def run(self, code, *, timeout_s=None):
        self.refuse_if_closed()
        return super().run(code, timeout_s=timeout_s)

    def refuse_if_closed(self):
        if self.closed:
            raise SandboxError("the session is closed")

    def close(self):
        self.closed = True


class GivesEveryRolloutOneSession(SandboxOf):
    """Opens one session and returns it to everyone, to save the time of a start."""

    common = None

    def open_session(self):
        self.common = self.common or self.local.open_session()
        return Shared(self.common)


class Joined(Session):
    def run_program(self, code, **options):
        result = super().run_program(code, **options)
        return replace(result, stdout=result.stdout + result.stderr)


class JoinsBothOutputs(SandboxOf):
    """Returns what was printed to stderr at the end of stdout."""

    session = Joined


def renamed(result):
    return replace(result, outcome=Outcome.ERROR) if result.outcome is Outcome.TIMEOUT else result


class Renaming(Session):
    def run(self, code, **options):
        return renamed(super().run(code, **options))

    def run_program(self, code, **options):
        return renamed(super().run_program(code, **options))


class ReportsATimeoutAsAnError(SandboxOf):
    """Reports a call that reached its limit as one that failed."""

    session = Renaming


class Reopening(Session):
    def __init__(self, local, sandbox):
        super().__init__(local)
        self.sandbox = sandbox

    def run(self, code, **options):
        try:
            return super().run(code, **options)
        except SandboxError:
            self.local = self.sandbox.open_session()
            return super().run(code, **options)


class RunsCodeAfterClose(SandboxOf):
    """Opens another session if a closed one is used."""

    def open_session(self):
        return Reopening(self.local.open_session(), self.local)


class Stateless(Session):
    def run(self, code, *, timeout_s=None):
        return replace(super().run_program(code, timeout_s=timeout_s), state_lost=True)


class StartsANewInterpreterForEachCall(SandboxOf):
    """Runs every call as a program, so that variables are lost."""

    session = Stateless


class Stripped(Session):
    def run_program(self, code, **options):
        result = super().run_program(code, **options)
        return replace(result, stdout=result.stdout.strip())


class StripsTheOutput(SandboxOf):
    """Removes spaces and line ends around the output of a program."""

    session = Stripped
