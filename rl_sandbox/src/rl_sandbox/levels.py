"""The isolation levels, and why one may not work on a machine."""

from __future__ import annotations

from enum import Enum


class Level(Enum):
    """How sessions are isolated, strongest first."""

    ISOLATED_UID = "isolated_uid"
    """Root: each session has its own user id, namespaces (bubblewrap), a system call filter, and a cgroup if writable."""
    USER_NAMESPACE = "user_namespace"
    """Any user: namespaces and a system call filter. Sessions run as that user, without access to its files."""
    RLIMITS = "rlimits"
    """Resource limits only: no isolation."""

    def at_least(self, required: Level) -> bool:
        """Whether this level is as strong as another one."""
        order = list(Level)
        return order.index(self) <= order.index(required)


INSTALL = (
    "bubblewrap is not installed: install the system package that provides the command `bwrap` "
    "(`apt-get install bubblewrap`, `dnf install bubblewrap`)"
)
NOT_ROOT = "only root can give each session its own user id"

_CAUSES = (
    (
        ("No permissions to create new namespace", "Creating new namespace failed", "setting up uid map", "RTM_NEWADDR"),
        "this system does not let users create user namespaces. As root, run `sysctl -w user.max_user_namespaces=15000`, and "
        "where they exist `sysctl -w kernel.unprivileged_userns_clone=1` and `sysctl -w "
        "kernel.apparmor_restrict_unprivileged_userns=0`; in a container, start it with `--security-opt seccomp=unconfined "
        "--security-opt apparmor=unconfined`",
    ),
    (
        ("mount proc on", "Failed to make / slave", "pivot_root"),
        "a container hides parts of /proc or forbids mounts. Start it with `--security-opt systempaths=unconfined "
        "--security-opt seccomp=unconfined --security-opt apparmor=unconfined`",
    ),
    (("Unknown option",), "this version of bubblewrap is too old: 0.6.0 or newer is needed"),
    (
        ("PermissionError", "Operation not permitted (mounting"),
        "the process is root without the capabilities SETUID, SETGID and SYS_ADMIN, as in a container: give it these, or use "
        "an interpreter that all users can read (`sandbox.python`)",
    ),
)


def explain(error: str) -> str:
    """An error of bubblewrap or of the launcher, with what to do about it if that is known."""
    text = " ".join(error.split()) or "it ended without an error message"
    for signs, advice in _CAUSES:
        if any(sign in text for sign in signs):
            return f"{text}: {advice}"
    return text
