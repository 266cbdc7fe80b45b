"""What holds for every test: one thread each, nothing fetched, no window, and the same draws every time.

The environment is set while this file is imported, before any test file brings in torch or transformers; the
subprocesses that tests start inherit it.
"""

import gc
import itertools
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

gc.disable()  # what is imported from here on stays: nothing is looked for in it until all tests are there

os.environ.update(
    OMP_NUM_THREADS="1",  # pytest runs two workers; two thread pools on two cores would wait for each other
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    MPLBACKEND="Agg",
)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.pop("COLUMNS", None)  # pytest-xdist gives its workers 80, to which sentences would be folded

# A test that fails once fails always: examples follow from the test itself; how long one takes is no verdict.
# `make test` draws 25 of them; `make test-all` takes the profile "thorough".
for name, examples in (("house", 25), ("thorough", 300)):
    settings.register_profile(
        name,
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("house")


def pytest_collection_finish() -> None:
    """A million objects of libraries and tests stay: whoever collects garbage, as runs do, skips them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # a syntax tree of the package takes a quarter of the time
    gc.enable()


def pytest_runtest_logfinish() -> None:
    """So do those that came with the last fifty tests, such as modules: whole collections, of which runs and
    programs ask for many, would go through them again and again."""
    if next(_finished) % 50 == 0:
        gc.collect()
        gc.freeze()


_finished = itertools.count(1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests were skipped, by reason, the commonest first."""
    reports = terminalreporter.stats.get("skipped", [])
    texts = [report.longrepr[2].removeprefix("Skipped: ") for report in reports]
    reasons = Counter(" ".join(text.split()) for text in texts)
    if not reasons:
        return
    terminalreporter.section(f"skipped tests: {reasons.total()}")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:5}  {reason}")


def pytest_runtest_teardown() -> None:
    """A run takes a thread of torch for every core if nobody says otherwise; the next test has one again."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _no_curve_is_drawn() -> Iterator[None]:
    """Drawing takes half as long as all else that a tiny run does, and hundreds of tests train one: here its
    file is written without a picture. tests/tracking draws, and so do commands in processes of their own."""
    from rllm.files.atomic import write_atomic

    def write(*values: object, **options: object) -> None:
        (path,) = (each for each in values if isinstance(each, Path))
        write_atomic(path, b"")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("draw_learning_curve", "draw_loss_curve"):
            patch.setattr(f"rllm.tracking.picture.{name}", write)
        yield


@pytest.fixture(scope="session")
def bubblewrap() -> str:
    """The sandbox that commands take by default; the test is skipped where it cannot be used."""
    return _usable_sandbox("bubblewrap")


@pytest.fixture(scope="session")
def unshare() -> str:
    """The sandbox of util-linux; the test is skipped where it cannot be used."""
    return _usable_sandbox("unshare")


def _usable_sandbox(name: str) -> str:
    from rllm.errors import ConfigError
    from rllm.sandbox import require_backend

    try:
        require_backend(name)
    except ConfigError as error:
        pytest.skip(str(error))
    return name


@pytest.fixture(scope="session")
def backend() -> str:
    """A sandbox backend of this machine that isolates programs; the test is skipped where there is none."""
    from rllm.errors import ConfigError  # most tests need no sandbox
    from rllm.sandbox import require_backend

    reasons: list[str] = []
    for name in ("bubblewrap", "unshare"):
        try:
            require_backend(name)
        except ConfigError as error:
            reasons.append(str(error))
        else:
            return name
    pytest.skip(" ".join(reasons))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, pulled once for all tests; the test is skipped where it cannot be had."""
    return _pulled_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M, a model without a chat template; see `smollm2`."""
    return _pulled_model("gemma-3-270m")


def _pulled_model(name: str) -> Path:
    """The directory of a model in RLLM_TEST_HOME, which stays, unlike the RLLM_HOME of a test."""
    from rllm.build.model_pull import pull_model
    from rllm.errors import ConfigError

    home = os.environ.get("RLLM_TEST_HOME") or str(Path.home() / ".cache" / "rllm-tests")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLLM_HOME", home)
        try:
            return pull_model(name)
        except ConfigError as error:
            pytest.skip(str(error))
