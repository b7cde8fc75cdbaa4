"""What a driver's start consists of."""

from tidewheel.elastic.start_times import PARTS, RESTORED, STEPPED, StartTimes


def test_the_parts_of_a_start_sum_to_it():
    times = StartTimes(called=100.0, owned=101.5)
    for second, moment in enumerate(list(PARTS)[1:-1], start=102):
        assert times.reach(moment, float(second)) is None
    detail = times.reach(STEPPED, 110.0)
    assert detail is not None
    assert detail["seconds"] == sum(detail["parts"].values()) == 10.0
    assert list(detail["parts"]) == list(PARTS.values())
    assert detail["parts"]["ownership"] == 1.5
    assert times.reach(STEPPED, 111.0) is None  # only the first step


def test_a_moment_that_nobody_reports_belongs_to_the_next_part():
    times = StartTimes(called=100.0, owned=101.0)
    times.reach(RESTORED, 104.0)
    times.reach(RESTORED, 106.0)  # the first generation failed before its first step
    detail = times.reach(STEPPED, 105.5)  # a clock that is behind
    assert detail is not None
    assert (detail["parts"]["imports"], detail["parts"]["state"], detail["parts"]["first_step"]) == (0.0, 5.0, 0.0)


def test_a_coordinator_without_a_driver_measures_nothing():
    assert StartTimes(0.0, 0.0).reach(STEPPED, 5.0) is None
