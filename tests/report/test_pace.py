"""Cases a second over time."""

from pagefault.pace import MOST_POINTS, MOST_SAMPLES, Chart, Pace


class Clock:
    """A clock that is moved by hand."""

    now = 100.0

    def __call__(self):
        return self.now


def paced(seconds, per_second, step=0.2):
    """Return the pace of a run that has been watched several times a second."""
    clock = Clock()
    pace = Pace(clock)
    for i in range(round(seconds / step)):
        clock.now = 100.0 + (i + 1) * step
        pace.take(int((i + 1) * step * per_second))
    pace.take(int(seconds * per_second), is_over=True)
    return pace


def test_a_steady_run_has_one_rate():
    rates = paced(60, 50).rates()
    assert len(rates) == 11
    assert all(abs(rate - 50) < 2 for _, rate in rates)


def test_a_long_run_keeps_few_samples_and_its_last_one():
    pace = paced(7 * 3600, 10, step=7.0)
    assert len(pace.samples) <= MOST_SAMPLES
    assert pace.samples[-1] == (7 * 3600, 7 * 3600 * 10)
    assert 2 <= len(pace.rates()) <= MOST_POINTS + 1


def test_the_end_is_no_point_of_its_own():
    pace = Pace(Clock(), samples=[(0.0, 0), (5.0, 50), (10.0, 100), (10.1, 200)])
    assert [now for now, _ in pace.rates()] == [5.0, 10.1]


def test_a_run_that_goes_on_counts_from_where_it_was():
    pace = Pace(Clock(), samples=[(0.0, 1000), (10.0, 1100)])
    assert pace.rates() == [(10.0, 10.0)]


def test_a_chart_fills_its_box():
    chart = Chart.of(Pace(Clock(), samples=[(0.0, 0), (10.0, 100), (20.0, 300)]))
    assert chart == Chart("0.0,105.0 500.0,105.0 1000.0,10.0", 20.0, 20.0, 15.0)


def test_a_moment_has_no_chart():
    assert Chart.of(Pace(Clock())) is None


def test_a_run_without_cases_has_a_flat_chart():
    chart = Chart.of(Pace(Clock(), samples=[(0.0, 0), (10.0, 0), (20.0, 0)]))
    assert chart is not None
    assert chart.line == "0.0,200.0 500.0,200.0 1000.0,200.0"
