"""What all sandboxes here have in common: the local sandbox, and sessions whose calls can be replaced."""

from rl_sandbox import LocalSandbox, SandboxInterface, SessionInterface


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
