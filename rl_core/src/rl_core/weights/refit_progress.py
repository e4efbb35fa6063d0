"""The receiver's progress of one refit: which tensors were announced, have arrived or are missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rl_core.errors import WeightSyncError
from rl_core.interfaces.policy import RefitManifest


class RefitProgress:
    """Accepts every tensor of a manifest exactly once, all from one refit of one weight version; then the next refit."""

    def __init__(self, manifest: RefitManifest, receiver_dtypes: Mapping[str, str] | None = None) -> None:
        """Progress of a refit that has not begun.

        Args:
            manifest: the announced tensors.
            receiver_dtypes: name to the receiver's own dtype, which a tensor may have instead of the announced one.
        """
        self.manifest = manifest
        self.receiver_dtypes = receiver_dtypes or {}
        self._refit: str | None = None
        self._version = -1
        self._arrived: set[str] = set()

    @property
    def missing(self) -> list[str]:
        """Names that have not arrived, in the manifest's order."""
        return [name for name in self.manifest if name not in self._arrived]

    @property
    def complete_version(self) -> int | None:
        """The weight version of the refit once all has arrived, None before."""
        return None if self.missing else self._version

    def admit(self, refit: str, version: int, forms: Mapping[str, tuple[tuple[int, ...], str]]) -> bool:
        """Check one bucket before any of it is loaded.

        Args:
            refit: the refit that the bucket belongs to, according to the sender.
            version: its weight version, according to the sender.
            forms: name to (shape, dtype name) of each tensor in it.

        Returns:
            Whether it is the first bucket of its refit.

        Raises:
            WeightSyncError: it belongs to another refit or version, or a tensor is unknown, repeated or of the wrong form.
        """
        if not self.missing and refit != self._refit:
            self._refit, self._arrived = None, set()
        is_first = self._refit is None
        self._admit_refit(refit, version, forms)
        problems = [f"{name!r} is not in the manifest" for name in forms if name not in self.manifest]
        problems += [f"{name!r} arrived twice" for name in forms if name in self._arrived]
        problems += [
            f"{name!r} arrived as {_described(form)}, but the manifest says {_described(self.manifest[name])}"
            for name, form in forms.items()
            if name in self.manifest and not self._fits(name, form)
        ]
        if problems:
            raise WeightSyncError(
                f"Weights are rejected in the refit to version {version}: {'; '.join(problems[:5])}"
                + (f"; and {len(problems) - 5} more." if len(problems) > 5 else ".")
            )
        return is_first

    def _fits(self, name: str, form: tuple[tuple[int, ...], str]) -> bool:
        shape, dtype = self.manifest[name]
        return tuple(form[0]) == tuple(shape) and form[1] in (dtype, self.receiver_dtypes.get(name))

    def note(self, names: Iterable[str]) -> None:
        """Record that the tensors with these names have been loaded."""
        self._arrived.update(names)

    def refuse_if_incomplete(self) -> None:
        """Raise WeightSyncError, naming the missing tensors, unless all have arrived."""
        missing = self.missing
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise WeightSyncError(
                f"{len(missing)} of {len(self.manifest)} weights have not arrived in this refit: {shown}. "
                "The engine has a mixture of versions and must not sample."
            )

    def _admit_refit(self, refit: str, version: int, names: Iterable[str]) -> None:
        if self._refit is None:
            self._refit, self._version = refit, version
        if refit != self._refit:
            raise WeightSyncError(
                f"A bucket of refit {refit} (version {version}: {', '.join(list(names)[:3])}, ...) arrived during "
                f"refit {self._refit} (version {self._version}). Begin each refit with prepare_refit_info."
            )
        if version != self._version:
            raise WeightSyncError(
                f"Weights {', '.join(list(names)[:3])}, ... arrived as version {version} in a refit to version {self._version}."
            )


def _described(form: tuple[tuple[int, ...], str]) -> str:
    return f"{form[1]} {list(form[0])}"
