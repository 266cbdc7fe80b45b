import pytest

from rllm.errors import ConfigError
from rllm.tracking import Metric, Trackers
from rllm.tracking.base import require_tracker


class _Recorder:
    def __init__(self, fails: bool = False) -> None:
        self.logged: list[tuple[int, str, dict[str, Metric]]] = []
        self.closed = False
        self._fails = fails

    def advance(self, done: int, total: int) -> None:
        self.logged.append((done, "advance", {"total": total}))

    def begin(self, phase: str) -> None:
        self.logged.append((-1, phase, {}))

    def log(self, step: int, phase: str, metrics: dict[str, Metric]) -> None:
        self.logged.append((step, phase, metrics))

    def close(self) -> None:
        self.closed = True
        if self._fails:
            raise OSError("cannot close")


def test_every_tracker_gets_every_step() -> None:
    recorders = [_Recorder(), _Recorder()]
    trackers = Trackers(recorders)
    trackers.advance(3, 8)
    trackers.log(1, "train", {"loss": 0.5})
    expected = [(3, "advance", {"total": 8}), (1, "train", {"loss": 0.5})]
    assert [each.logged for each in recorders] == [expected] * 2


def test_those_that_show_who_plays_are_told_and_the_others_left_alone() -> None:
    class Screen(_Recorder):
        def watch(self, engine: object) -> None:
            self.engine = engine

    engine, screen = object(), Screen()
    Trackers([_Recorder(), screen]).watch(engine)  # pyright: ignore[reportArgumentType]
    assert screen.engine is engine


def test_all_trackers_are_closed_also_when_one_fails() -> None:
    recorders = [_Recorder(), _Recorder(fails=True), _Recorder()]
    with pytest.raises(OSError, match="cannot close"):
        Trackers(recorders).close()
    assert all(each.closed for each in recorders)


def test_log_alone_is_enough_and_what_lacks_it_is_refused_by_its_name_before_any_work() -> None:
    class Silent: ...

    with pytest.raises(ConfigError, match=r"Silent .*`log`"):
        require_tracker(Silent())  # pyright: ignore[reportArgumentType]
    require_tracker(_Recorder())
    require_tracker(None)
