"""Schedules against their closed forms."""

import math

import pytest

from flatshard import schedule

pytestmark = pytest.mark.quick


def test_warm_up_reaches_the_rate_at_its_last_step():
    for make in (schedule.linear, schedule.cosine):
        rate = make(0.5, warmup=10, total=100)
        assert [rate(s) for s in range(10)] == [pytest.approx(0.05 * (s + 1)) for s in range(10)]
    rate = schedule.constant(0.5, warmup=4)
    assert [rate(s) for s in (0, 3, 4, 1000)] == [0.125, 0.5, 0.5, 0.5]


def test_linear_and_cosine_at_every_step():
    linear = schedule.linear(2.0, warmup=5, total=25, final=0.5)
    cosine = schedule.cosine(2.0, warmup=5, total=25, final=0.5)
    for s in range(5, 40):
        done = min(1.0, (s - 5) / 20)
        assert linear(s) == pytest.approx(2.0 - 1.5 * done, abs=1e-15)
        assert cosine(s) == pytest.approx(0.5 + 0.75 * (1 + math.cos(math.pi * done)), abs=1e-15)


@pytest.mark.parametrize(
    "arguments",
    [
        {"lr": -1.0, "total": 10},
        {"lr": math.nan, "total": 10},
        {"lr": 1.0, "warmup": -1, "total": 10},
        {"lr": 1.0, "warmup": 11, "total": 10},
        {"lr": 1.0, "total": 0},
    ],
)
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match="expected"):
        schedule.cosine(**arguments)
    with pytest.raises(ValueError, match="expected"):
        schedule.linear(1.0, total=10)(-1)
