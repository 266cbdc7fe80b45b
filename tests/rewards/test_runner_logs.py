"""Logs that real runners wrote (Node 20.20, Jest 29.7, Vitest 2.1, Go 1.19, cargo 1.9x; of each two or three
tests, one of which fails and prints that it passes), and which runner a command calls."""

import re
from pathlib import Path

import pytest

from rllm.errors import ConfigError
from rllm.rewards.runner_logs import (
    RESULTS,
    Runner,
    canary_of,
    reporting_words,
    results_of,
    runner_of,
    with_short_names,
)
from rllm.rewards.swebench import CaseStatus


def statuses_of(runner: Runner, log: str, root: str = "") -> dict[str, CaseStatus] | None:
    results = results_of(runner, log, root)
    return None if results is None else with_short_names(results)


LOGS = Path(__file__).parent / "runner_logs"
P, F, S, X, E = CaseStatus.PASSED, CaseStatus.FAILED, CaseStatus.SKIPPED, CaseStatus.XFAIL, CaseStatus.ERROR
READ = {
    "node.tap": {
        "adds wrongly": F,
        "later": S,
        "someday": X,
        "numbers": P,
        "numbers > adds zero": P,
        "adds zero": P,
        "numbers > below zero": P,
        "below zero": P,
        "numbers > below zero > adds": P,
        "adds": P,
    },
    "jest.json": {
        "sum.test.js > adds": P,
        "adds": P,
        "sum.test.js > numbers > adds wrongly": F,
        "numbers > adds wrongly": F,
        "numbers adds wrongly": F,
        "adds wrongly": F,
        "sum.test.js > numbers > later": S,
        "numbers > later": S,
        "numbers later": S,
        "later": S,
        "sum.test.js > numbers > someday": S,
        "numbers > someday": S,
        "numbers someday": S,
        "someday": S,
        "broken.test.js": E,
    },
    "go.jsonl": {
        "example.com/sum/TestAdds": P,
        "TestAdds": P,
        "example.com/sum/TestNumbers": F,
        "TestNumbers": F,
        "example.com/sum/TestNumbers/below_zero": P,
        "TestNumbers/below_zero": P,
        "example.com/sum/TestNumbers/wrongly": F,
        "TestNumbers/wrongly": F,
        "example.com/sum/TestLater": S,
        "TestLater": S,
        "example.com/sum": E,
    },
    "cargo.txt": {
        "tests::adds": P,
        "tests::later": S,
        "tests::panics": P,
        "tests::adds_wrongly": F,
        "adds_below_zero": P,
        "src/lib.rs - add (line 1)": P,
    },
}
READ["vitest.json"] = READ["jest.json"]
RUNNERS = {
    "node.tap": Runner.NODE,
    "jest.json": Runner.JEST,
    "vitest.json": Runner.VITEST,
    "go.jsonl": Runner.GO,
    "cargo.txt": Runner.CARGO,
}


@pytest.mark.parametrize("name", RUNNERS)
def test_every_test_of_a_real_log_has_its_status_under_each_of_its_names(name: str) -> None:
    log = (LOGS / name).read_text()
    assert statuses_of(RUNNERS[name], log, "/testbed") == READ[name]


@pytest.mark.parametrize("name", RUNNERS)
def test_a_log_that_was_cut_off_is_none(name: str) -> None:
    """At any place before the last result: what is missing may have failed."""
    lines = (LOGS / name).read_text().splitlines(keepends=True)
    cut = {"node.tap": 60, "jest.json": -2, "vitest.json": -2, "go.jsonl": -1, "cargo.txt": 7}[name]
    assert statuses_of(RUNNERS[name], "".join(lines[:cut]), "/testbed") is None
    assert statuses_of(RUNNERS[name], "", "/testbed") is None


def test_tap_of_any_runner_is_read() -> None:
    log = "TAP version 13\n1..3\nok 1 - one\nnot ok 2 two\nok 3 # SKIP no network\n"
    assert statuses_of(Runner.TAP, log) == {"one": P, "two": F, "3": S}
    assert statuses_of(Runner.TAP, log.replace("1..3", "1..4")) is None
    assert statuses_of(Runner.TAP, log + "Bail out! no disk\n") is None


PROVE = """\
t/w.t ..
1..2
    ok 1 - in
    1..1
ok 1 - sub
ok 2 - c
ok
t/x.t ..
1..2
ok 1 - a
not ok 2 - c
Dubious, test returned 1 (wstat 256, 0x100)
Failed 1/2 subtests
t/z.t ..
1..3
ok 1 - q
Failed 2/3 subtests

Test Summary Report
-------------------
t/x.t (Wstat: 256 (exited 1) Tests: 2 Failed: 1)
  Failed test:  2
  Non-zero exit status: 1
t/z.t (Wstat: 0 Tests: 1 Failed: 0)
  Parse errors: Bad plan.  You planned 3 tests but ran 1.
Files=3, Tests=5,  1 wallclock secs ( 0.05 usr +  0.01 sys =  0.06 CPU)
Result: FAIL
"""
"""Of prove 3.44."""


def test_every_file_of_prove_is_a_document_of_its_own() -> None:
    assert statuses_of(Runner.TAP, PROVE) == {
        "t/w.t > sub > in": P,
        "sub > in": P,
        "in": P,
        "t/w.t > sub": P,
        "sub": P,
        "t/w.t > c": P,
        "t/x.t > a": P,
        "a": P,
        "t/x.t > c": F,
        "t/z.t": E,
    }
    assert statuses_of(Runner.TAP, PROVE.partition("t/z.t ..")[0]) is None, "cut off"


def test_a_log_that_says_both_says_failed() -> None:
    log = "1..2\nnot ok 1 - one\nok 2 - one\n"
    assert statuses_of(Runner.TAP, log) == {"one": F}
    assert statuses_of(Runner.TAP, log.replace("not ok 1", "ok 1").replace("ok 2", "not ok 2")) == {"one": F}


def test_the_runner_is_that_of_the_command(subtests: pytest.Subtests) -> None:
    for command, runner in [
        ("python -m pytest -q", Runner.PYTEST),
        ("python3 -m unittest -v tests.test_a", Runner.UNITTEST),
        ("./tests/runtests.py --settings=test_sqlite admin_views", Runner.DJANGO),
        ("python manage.py test shop", Runner.DJANGO),
        ("node --test", Runner.NODE),
        ("npx jest src", Runner.JEST),
        ("node_modules/.bin/vitest run", Runner.VITEST),
        ("go test ./...", Runner.GO),
        ("cargo test --workspace", Runner.CARGO),
        ("prove -v t", Runner.TAP),
    ]:
        with subtests.test(command=command, runner=runner):
            assert runner_of(command.split(), "a__b-1") is runner


@pytest.mark.parametrize("command", ["npm test", "tox", "make check", "node test.js", "go vet"])
def test_another_runner_is_refused_by_name(command: str) -> None:
    with pytest.raises(ConfigError, match=f"a__b-1: .*`test_command` is '{command}'.*vitest, go, cargo, tap"):
        runner_of(command.split(), "a__b-1")


def test_a_command_is_made_to_report_and_to_run_one_test_more(subtests: pytest.Subtests) -> None:
    for command, canary, words in [
        ("python -m unittest", "tests/test_x.py", "unittest"),
        ("python -m unittest -v tests.test_a", "tests/test_x.py", "unittest -v tests.test_a tests.test_x"),
        ("python -m unittest discover -s tests", "tests/test_x.py", "unittest discover -s tests"),
        (
            "./tests/runtests.py --parallel 1 admin_views",
            "tests/admin_views/test_x.py",
            "./tests/runtests.py --parallel 1 admin_views admin_views.test_x",
        ),
        ("tests/runtests.py --parallel 1", "tests/a/test_x.py", "tests/runtests.py --parallel 1"),
        ("python manage.py test shop", "shop/test_x.py", "manage.py test shop shop.test_x"),
        ("python manage.py test", "shop/test_x.py", "manage.py test"),
        ("go test ./...", "x_test.go", "go test -json ./..."),
        ("cargo test --test a", "tests/x.rs", "cargo test --no-fail-fast --test x --test a"),
        ("npx jest", "x.test.js", f"npx jest --ci --json --outputFile={RESULTS}"),
        ("npx jest src", "x.test.js", f"npx jest src --ci --json --outputFile={RESULTS} x.test.js"),
    ]:
        with subtests.test(command=command, canary=canary, words=words):
            assert reporting_words(runner_of(command.split(), "a"), command.split(), canary) == words.split()


def test_the_test_that_must_fail_is_one_for_go() -> None:
    """`go test` runs functions `TestXxx` where Xxx does not begin with a small letter (go help testfunc)."""
    canary = canary_of(Runner.GO, ["sum_test.go"])
    assert canary is not None
    (name,) = re.findall(r"^func (\w+)\(", canary.text, re.MULTILINE)
    assert re.fullmatch(r"Test(?![a-z])\w+", name)
    assert canary.is_named(name)
