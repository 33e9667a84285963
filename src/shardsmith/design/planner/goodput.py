"""Goodput: how long a training run takes when devices fail and checkpoints are saved."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from shardsmith.errors import Code

HOURS_BETWEEN_FAILURES = 50_000.0
"""Hours of one device between interruptions: 419 in 54 days on 16,384 H100 (Dubey et al. 2024, Llama 3)."""

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
        between = self.device_hours * 3600.0 / devices
        interval = self.interval_s or max(sqrt(2.0 * self.save_s * between), self.save_s)
        lost = self.save_s / (interval + self.save_s) + (interval / 2.0 + self.restart_s) / between
        if lost >= 1.0:
            message = f"{devices} devices fail every {between / 3600:.2g} hours, which leaves nothing of the time"
            raise NEVER_ENDS.refuse(
                message,
                ("failures", f"device_hours = {self.device_hours:g}"),
                ("failures", f"restart_s = {self.restart_s:g}"),
                hint="checkpoint more often, restart faster, or train on fewer devices",
            )
        return 1.0 - lost


def days(step_time_s: float, *, tokens: float, tokens_a_step: float, devices: int, failures: Failures) -> float:
    """Days to train on `tokens`, failures and checkpoints included."""
    return tokens / tokens_a_step * step_time_s / failures.goodput(devices) / 86400.0
