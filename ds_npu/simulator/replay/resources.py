"""Jobs that run at the same time, and how they slow each other down.

Each job uses a share of some resources while it runs alone. Where the shares of a resource's jobs add up to more than
1, all of them slow down by that sum; a job runs as fast as its scarcest resource lets it. Jobs are fluid: whenever one
begins or ends, the others go on at their new rate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

Resource = Hashable


@dataclass(eq=False)
class FluidJob:
    """A task that would take ``remaining`` nanoseconds alone from ``since`` on, and runs at ``rate`` of that speed."""

    number: int
    remaining: float
    shares: Mapping[Resource, float]
    done: Callable[[int], None]
    """Called with the time of its end."""
    since: int = 0
    rate: float = 1.0
    version: int = 0
    """Counts how often its end has moved with its rate."""


class Resources:
    """The jobs that run, and their rates. ``schedule(time, job, version)`` is told when a job will end."""

    def __init__(self, schedule: Callable[[int, FluidJob, int], None]) -> None:
        self._schedule = schedule
        self._users: dict[Resource, dict[int, FluidJob]] = defaultdict(dict)

    def begin(self, job: FluidJob, now: int) -> None:
        """Run ``job`` from ``now`` on."""
        job.since = now
        for resource in job.shares:
            self._users[resource][job.number] = job
        job.rate = self._rate(job)
        self._schedule(now + round(job.remaining / job.rate), job, job.version)
        self._adjust(job, now)

    def end(self, job: FluidJob, now: int) -> None:
        """Free the resources of ``job``, which has ended."""
        for resource in job.shares:
            del self._users[resource][job.number]
        self._adjust(job, now)

    def _rate(self, job: FluidJob) -> float:
        loads = (sum(user.shares[resource] for user in self._users[resource].values()) for resource in job.shares)
        return 1.0 / max(1.0, *loads, 1.0)

    def _adjust(self, changed: FluidJob, now: int) -> None:
        affected = {user.number: user for resource in changed.shares for user in self._users[resource].values()}
        affected.pop(changed.number, None)
        for job in affected.values():
            rate = self._rate(job)
            if rate == job.rate:
                continue
            job.remaining = max(0.0, job.remaining - (now - job.since) * job.rate)
            job.since = now
            job.rate = rate
            job.version = job.version + 1
            self._schedule(now + round(job.remaining / rate), job, job.version)
