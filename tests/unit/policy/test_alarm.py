import pytest

from h3kv.policy.alarm import AlarmConfig, AlarmReading, judge


@pytest.mark.parametrize(
    ("r_await_us", "hbm_used_fraction", "rings"),
    [
        (151.0, 0.96, True),
        (150.0, 0.96, False),
        (151.0, 0.95, False),
        (40.0, 0.99, False),
        (900.0, 0.10, False),
        (None, 0.99, False),
        (900.0, None, False),
        (None, None, False),
    ],
)
def test_the_alarm_rings_when_reads_are_slow_and_the_device_is_full(
    r_await_us: float | None, hbm_used_fraction: float | None, rings: bool
) -> None:
    assert judge(AlarmReading(r_await_us, hbm_used_fraction), AlarmConfig()).rings is rings


def test_each_half_of_the_alarm_is_told_apart() -> None:
    alarm = judge(AlarmReading(r_await_us=200.0, hbm_used_fraction=0.5), AlarmConfig())
    assert (alarm.is_storage_slow, alarm.is_device_full) == (True, False)


def test_thresholds_come_from_the_configuration() -> None:
    reading = AlarmReading(r_await_us=100.0, hbm_used_fraction=0.6)
    assert judge(reading, AlarmConfig(r_await_us_max=50.0, hbm_used_fraction_max=0.5)).rings
