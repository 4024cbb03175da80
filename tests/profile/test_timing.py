"""Statistics, and the order in which samples are taken."""

import pytest

from zf_profile import timing
from zf_profile.timing import Timed, host_us, interleave, quantile, summary


def test_quantiles():
    assert quantile([3.0], 0.5) == quantile([3.0], 0.1) == 3
    assert quantile([4, 1, 3, 2], 0.5) == 2.5
    assert quantile([5, 1, 3], 0.5) == 3
    samples = list(range(101))
    assert [quantile(samples, q) for q in (0, 0.1, 0.5, 0.9, 1)] == [0, 10, 50, 90, 100]
    assert quantile([0, 10], 0.1) == pytest.approx(1)


def test_summary():
    assert summary([]) is None
    assert summary([2.00049, 1, 3]) == {
        "median": 2.0,
        "p10": 1.2,
        "p90": 2.8,
        "n": 3,
        "samples": [2.0, 1, 3],
    }
    assert "samples" not in summary([1.0], keep=False)


class Log:
    """A stopwatch whose clock is a counter, and which writes down what it was asked to do."""

    def __init__(self, late=()):
        self.now, self.events, self.late, self.asked = 0, [], set(late), 0

    def flush(self):
        self.events.append("flush")

    def lead(self):
        self.events.append("lead")

    def synchronize(self):
        self.events.append("wait")

    def mark(self):
        self.now += 1
        return self.now

    def passed(self, mark):
        self.asked += 1
        return self.asked - 1 in self.late

    def microseconds(self, start, end):
        return float(end - start)

    def capture(self, work):
        return work

    def task(self, name):
        return Timed(
            lambda: self.events.append(f"prepare {name}"), lambda: self.events.append(name)
        )


def test_a_sample_is_prepare_flush_run():
    watch = Log()
    task = watch.task("a")
    interleave(watch, [task], 2)
    warm = ["prepare a", "a"] * timing.WARM_UP
    sample = ["prepare a", "flush", "a"]
    assert watch.events == [*warm, "wait", "lead", *sample, *sample, "wait"]
    assert (task.samples, task.late) == ([1.0, 1.0], 0)


def test_tasks_take_turns_and_neighbours_change():
    watch = Log()
    tasks = [watch.task(name) for name in "abc"]
    interleave(watch, tasks, timing.ROUND + 3)
    runs = [event for event in watch.events if event in "abc"][3 * timing.WARM_UP :]
    rounds = ["".join(runs[i : i + 3]) for i in range(0, len(runs), 3)]
    assert len(rounds) == timing.ROUND + 3
    assert all(sorted(some) == list("abc") for some in rounds)
    assert set(rounds) == {"abc", "bca", "cab"}
    assert [len(task.samples) for task in tasks] == [timing.ROUND + 3] * 3
    assert watch.events.count("lead") == 2  # rounds: the GPU's queue stays bounded


def test_late_samples_are_taken_again():
    watch = Log(late=[0, 2])
    task = watch.task("a")
    interleave(watch, [task], 4)
    assert (len(task.samples), task.late) == (4, 2)


def test_a_host_that_never_keeps_up_ends():
    watch = Log(late=range(1000))
    slow, told = watch.task("a"), []
    interleave(watch, [slow], 5, told.append)
    assert (slow.samples, slow.late) == ([], 5 * timing.ATTEMPTS)
    assert sum(told) == 5


def test_advance_counts_samples_of_all():
    watch, told = Log(late=[1]), []
    interleave(watch, [watch.task("a"), watch.task("b")], 25, told.append)
    assert sum(told) == 25
    assert len(told) > 1


def test_no_tasks():
    told = []
    interleave(Log(), [], 5, told.append)
    assert told == []


def test_host_time_cycles_calls_and_waits_only_around_them(monkeypatch):
    monkeypatch.setattr(timing, "HOST_CALLS", 5)
    watch, called = Log(), []
    calls = [lambda: called.append("a"), lambda: called.append("b")]
    assert host_us(watch, calls) > 0
    assert called == ["a", "b", *"ababa"]
    assert watch.events == ["wait", "wait"]
