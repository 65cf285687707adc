"""When to raise the alarm about storage: reads are slow while the device's memory has no room to spare."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AlarmConfig:
    """From which values on the machine is in trouble."""

    r_await_us_max: float = 150.0
    """Average time of a read on the NVMe device, queueing included."""
    hbm_used_fraction_max: float = 0.95


@dataclass(frozen=True, slots=True)
class AlarmReading:
    """What was measured over the last interval; None where it cannot be."""

    r_await_us: float | None
    """None: no reads in the interval, or no device statistics."""
    hbm_used_fraction: float | None
    """None: no device."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Both are true when the alarm rings; one alone says how near it is."""

    is_storage_slow: bool
    is_device_full: bool

    @property
    def rings(self) -> bool:
        """Whether someone should look: slow reads hurt once nothing more can be kept on the device."""
        return self.is_storage_slow and self.is_device_full


def judge(reading: AlarmReading, config: AlarmConfig) -> Alarm:
    """What a reading means. What could not be measured is no reason for alarm."""
    r_await_us, hbm = reading.r_await_us, reading.hbm_used_fraction
    return Alarm(
        is_storage_slow=r_await_us is not None and r_await_us > config.r_await_us_max,
        is_device_full=hbm is not None and hbm > config.hbm_used_fraction_max,
    )
