"""Requirements of plugins, checked in the metadata of installed distributions; nothing is imported or installed here."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email import message_from_string

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


@dataclass(frozen=True, kw_only=True)
class RequirementCheck:
    """One requirement of a distribution and what is installed.

    Attributes:
        requirement: As the metadata states it, without its marker: 'ray[default]>=2.50'.
        installed: The installed version; None if not installed.
        fits: Whether the installed version satisfies the requirement.
        install: Command that fixes it, if `pip install` of the requirement itself does not.
    """

    requirement: str
    installed: str | None
    fits: bool
    install: str | None = None

    @property
    def problem(self) -> str | None:
        """The problem in one clause; None if the requirement is met."""
        if self.fits:
            return None
        if self.installed is None:
            return f"{self.requirement} is not installed" + (f" ({self.install})" if self.install else "")
        return f"{self.requirement} is required, {self.installed} is installed"


def version_of(distribution: importlib.metadata.Distribution) -> str:
    """Its version, read from the headers: `distribution.version` parses the description too, which takes milliseconds."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    return message_from_string(text.partition("\n\n")[0])["Version"] or "unknown"


def check_requirements(distribution: importlib.metadata.Distribution) -> tuple[RequirementCheck, ...]:
    """Every requirement that applies to this interpreter and platform, in the order of the metadata.

    Requirements of the distribution's own extras are ignored, because it is unknown which were installed. Those of a
    requirement's extras are included: `ray[default]` needs what `ray` names for `default`.

    Raises:
        packaging.requirements.InvalidRequirement: A line of the metadata is not a valid requirement.
    """
    own = [
        requirement
        for requirement in map(Requirement, distribution.requires or ())
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]
    seen: set[tuple[str, str]] = set()
    return tuple(check for requirement in own for check in _check(requirement, seen))


def check_one_of(requirements: Sequence[str], *, install: str | None = None) -> RequirementCheck:
    """Combine alternative requirements into one: the first that fits, or how each fails."""
    checks = [check for text in requirements for check in _check(Requirement(text), set())]
    chosen = next((check for check in checks if check.fits), None)
    if chosen is not None:
        return chosen
    installed = ", ".join(f"{check.requirement}: {check.installed}" for check in checks if check.installed) or None
    return RequirementCheck(requirement=" or ".join(requirements), installed=installed, fits=False, install=install)


def unmet_needs(needs: Sequence[str]) -> str | None:
    """What is wrong with the requirements of one component, as one clause; None if all are installed."""
    checks = [check for text in needs for check in _check(Requirement(text), set())]
    return "; ".join(check.problem for check in checks if check.problem is not None) or None


def _check(requirement: Requirement, seen: set[tuple[str, str]]) -> Iterator[RequirementCheck]:
    wanted = _without_marker(requirement)
    try:
        installed = importlib.metadata.distribution(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        yield RequirementCheck(requirement=wanted, installed=None, fits=False)
        return
    version = version_of(installed)
    fits = requirement.specifier.contains(version, prereleases=True)
    yield RequirementCheck(requirement=wanted, installed=version, fits=fits)
    for extra in sorted(requirement.extras):
        key = (canonicalize_name(requirement.name), canonicalize_name(extra))
        if key not in seen:
            seen.add(key)
            for needed in _requirements_of_extra(installed, extra):
                yield from _check(needed, seen)


def _requirements_of_extra(distribution: importlib.metadata.Distribution, extra: str) -> Iterator[Requirement]:
    for requirement in map(Requirement, distribution.requires or ()):
        marker = requirement.marker
        if marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            yield requirement


def _without_marker(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    source = f" @ {requirement.url}" if requirement.url else str(requirement.specifier)
    return f"{requirement.name}{extras}{source}"
