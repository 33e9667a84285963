"""Goodput: how long a training run takes when devices fail and checkpoints are saved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

from shardsmith.errors import Code
from shardsmith.units import counted

HOURS_BETWEEN_FAILURES = 50_000.0
"""Hours of one device between interruptions: 419 in 54 days on 16,384 H100 (Dubey et al. 2024, Llama 3)."""
SHORTEST_S = 1e-3
"""Seconds between failures that stand for all shorter times: none of them leaves any time."""

NEVER_ENDS = Code(
    code="L301",
    title="failures come faster than the run gets on",
    because="what is lost since the last checkpoint, and starting again, takes longer than the time between failures",
)


@dataclass(frozen=True, kw_only=True)
class Failures:
    """How a run fails and recovers: `save_s` a checkpoint stops training, `restart_s` until it trains again.

    `interval_s` between checkpoints None takes the one that loses least, sqrt(2 x save x time between failures)
    (Young 1974; Daly 2006).
    """

    device_hours: float = HOURS_BETWEEN_FAILURES
    save_s: float = 15.0
    restart_s: float = 600.0
    interval_s: float | None = None

    def goodput(self, devices: int) -> float:
        """Share of the time in which a run on `devices` gets on. Raises `Refused` (L301) where it never ends."""
        lost = self.lost(devices)
        if lost < 1.0:
            return 1.0 - lost
        every = self.device_hours / devices
        values = [("--mtbf-hours", f"mtbf_hours = {self.device_hours:g}")]
        if self.interval_s is not None:
            values.append(("--checkpoint-minutes", f"checkpoint_minutes = {self.interval_s / 60:g}"))
        raise NEVER_ENDS.refuse(
            f"one of {devices:,} devices fails every {every:.2g} hours, which leaves nothing of the time",
            *values,
            ("restart", f"{self.restart_s / 60:g} minutes"),
            hint=self._cure(devices),
        )

    def lost(self, devices: int) -> float:
        """Share of the time that failures and checkpoints take on `devices`: from 1 on a run gets nowhere."""
        between = max(self.device_hours * 3600.0 / devices, SHORTEST_S)
        interval = self.interval_s or self._best_interval(devices)
        return self.save_s / (interval + self.save_s) + (interval / 2.0 + self.restart_s) / between

    def _best_interval(self, devices: int) -> float:
        between = max(self.device_hours * 3600.0 / devices, SHORTEST_S)
        return max(sqrt(2.0 * self.save_s * between), self.save_s)

    def _cure(self, devices: int) -> str:
        """What makes the run end: another time between checkpoints, or fewer devices."""
        if replace(self, interval_s=None).lost(devices) < 1.0:
            return f"checkpoint_minutes = {self._best_interval(devices) / 60:.3g}, which loses least"
        most = devices
        while most and self.lost(most) >= 1.0:
            most //= 2
        some = f"{counted(most, 'device')} or fewer, or " if most else ""
        return some + "devices that fail less often"


def days(step_time_s: float, *, tokens: float, tokens_a_step: float, devices: int, failures: Failures) -> float:
    """Days to train on `tokens`, failures and checkpoints included."""
    return tokens / tokens_a_step * step_time_s / failures.goodput(devices) / 86400.0
