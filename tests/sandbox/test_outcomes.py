"""Which word stands for which end of a program."""

import pytest

from rllm.errors import ConfigError
from rllm.sandbox import Limits, Status
from rllm.sandbox.outcomes import status_of

LIMITS = Limits(cpu_s=2, memory_mb=100)


def test_each_end_has_one_word(subtests: pytest.Subtests) -> None:
    for why, code, facts, status in [
        ("exit", 0, {}, Status.OK),
        ("exit", 1, {}, Status.ERROR),
        ("exit", 1, {"stderr": b"Traceback\nMemoryError\n"}, Status.OUT_OF_MEMORY),
        ("exit", 0, {"stderr": b"MemoryError\n"}, Status.OK),
        ("exit", 1, {"stderr": b"MemoryError\nValueError: 3\n"}, Status.ERROR),
        ("exit", -24, {}, Status.TIMEOUT),
        ("exit", -9, {"cpu_s": 2.5}, Status.TIMEOUT),
        ("exit", -9, {"cpu_s": 1.5}, Status.KILLED),
        ("exit", -15, {}, Status.KILLED),
        ("exit", -11, {}, Status.CRASHED),
        ("exit", -11, {"max_rss_kb": 99 * 1024}, Status.OUT_OF_MEMORY),
        ("exit", -6, {}, Status.CRASHED),
        ("timeout", -9, {}, Status.TIMEOUT),
        ("cpu", -9, {}, Status.TIMEOUT),
        ("memory", -9, {}, Status.OUT_OF_MEMORY),
        ("output", -9, {}, Status.OUTPUT_LIMIT),
        ("processes", -9, {}, Status.KILLED),
    ]:
        with subtests.test(why=why, code=code, facts=facts, status=status):
            known = {"cpu_s": 0.0, "max_rss_kb": 0, "stderr": b""} | facts
            assert status_of(why, code, limits=LIMITS, **known) is status  # pyright: ignore[reportArgumentType]


def test_a_limit_that_limits_nothing_is_refused(subtests: pytest.Subtests) -> None:
    for name in ("wall_s", "cpu_s", "memory_mb", "output_kb", "disk_mb", "processes"):
        for value in (0, -1, float("inf"), float("nan")):
            with subtests.test(name=name, value=value), pytest.raises(ConfigError, match=name):
                Limits(**{name: value})  # pyright: ignore[reportArgumentType]
