"""Rollout sources for tests of the caller or of the collector."""

from rl_train.rollouts.schedule import Schedule
from rl_train.rollouts.scheduled_source import ScheduledSource


def scheduled_source(
    collector, loader, *, weight_version=lambda: 3, demand=0, max_staleness=0, ahead=0, exact=False, **options
):
    """A source whose steps all have the same demand; without staleness, a step may take any number of groups."""
    schedule = Schedule(max_staleness=max_staleness, ahead=ahead, demand=lambda step: demand, exact=exact)
    return ScheduledSource(collector, loader, schedule=schedule, weight_version=weight_version, **options)
