import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Rllm = Callable[..., Result]

MINE = '''
import torch
from rllm.algorithms.advantages import ByToken
from rllm.algorithms.losses import TokenInputs


def my_loss(tokens: TokenInputs):
    ratio = (tokens.new_M - tokens.old_M).exp()
    return -torch.minimum(ratio * tokens.advantages_M, ratio.clamp(0.8, 1.28) * tokens.advantages_M)


def mean_of_all(tokens):
    return -tokens.new_M * (tokens.advantages_M - tokens.advantages_M.mean())


class Weighted:
    """A loss as an object."""

    def terms(self, tokens):
        return -2.0 * tokens.advantages_M * tokens.new_M


def held(tokens):
    return my_loss(tokens) + 0.1 * (tokens.new_M - tokens.ref_M) - 0.1 * tokens.entropy_M


def valued(tokens):
    return my_loss(tokens) + (tokens.new_values_M - tokens.returns_M) ** 2


def with_step(tokens, context):
    return my_loss(tokens) * (1.0 + context.step)


def by_token(attempts, context):
    mean = sum(each.reward for each in attempts) / len(attempts)
    return ByToken([torch.full((each.num_tokens,), each.reward - mean).numpy() for each in attempts])


def of_batch(tokens):
    return -tokens.new_M * tokens.advantages_M / 1.0 if tokens.advantages_M.any() else 1 / 0


def my_advantages(rewards_G):
    return rewards_G - rewards_G.mean()


def mystery(values):
    return values - values.mean()


number = 3
'''


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """A user's file; the command is run beside it."""
    (tmp_path / "mine.py").write_text(MINE)
    return "mine.py"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("my_loss", "loss"),
        ("held", "loss"),
        ("my_advantages", "estimator"),
        *(pytest.param(name, "loss", marks=pytest.mark.slow) for name in ("Weighted", "valued", "with_step")),
        pytest.param("by_token", "estimator", marks=pytest.mark.slow),
    ],
)
def test_a_sound_algorithm_gets_a_clear_table_and_what_to_type_next(
    rllm: Rllm, mine: str, name: str, kind: str
) -> None:
    result = rllm("doctor", "algorithm", f"{mine}:{name}")
    assert result.exit_code == 0, result.stderr
    assert f"{mine}:{name}, a" in result.stdout
    assert "failed" not in result.stdout
    assert f"--set algorithm.{kind}={mine}:{name}" in result.stdout
    words = shlex.split(next(line for line in result.stdout.splitlines() if "rllm train" in line))
    typed = words[1 : words.index("train", 2)]  # what it does stands behind it: "train with it"
    assert rllm(*typed, "--dry-run").exit_code == 0


def test_what_goes_wrong_only_on_some_batches_is_a_verdict(rllm: Rllm, mine: str) -> None:
    report = json.loads(rllm("doctor", "algorithm", f"{mine}:of_batch", "--json").stdout)
    (broken,) = [each for each in report["checks"] if each["verdict"] == "failed"]
    assert "ZeroDivisionError" in broken["detail"]


@pytest.mark.parametrize(("name", "expected"), [("rloo", "unbiased"), ("gpg", "1.22 times as long")])
def test_the_doctor_applies_an_estimator_from_episodes_to_gradient(
    rllm: Rllm, mine: str, name: str, expected: str
) -> None:
    checks = {
        each["name"]: each
        for each in json.loads(rllm("doctor", "algorithm", name, "--json").stdout)["checks"]
    }
    assert checks["tied groups"]["verdict"] == checks["applied in micro-batches"]["verdict"] == "passed"
    assert expected in checks["expected update"]["detail"]


def test_a_broken_law_ends_with_exit_code_1_and_says_how_to_mend_it(rllm: Rllm, mine: str) -> None:
    result = rllm("doctor", "algorithm", f"{mine}:mean_of_all", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert (report["kind"], report["sound"]) == ("loss", False)
    (broken,) = [each for each in report["checks"] if each["verdict"] == "failed"]
    assert broken["name"] == "micro-batches"
    assert "over all tokens" in broken["detail"]


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_what_is_built_in_can_be_looked_at_too(rllm: Rllm, name: str) -> None:
    report = json.loads(rllm("doctor", "algorithm", name, "--json").stdout)
    assert report["sound"] is True


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine.py:my_los", "did you mean `my_loss`?"),
        ("mine.py:number", "is 3 (a int), no algorithm"),
        ("mine.py:mystery", "say it with --kind"),
        ("nowhere.py:loss", "There is no file nowhere.py"),
        ("gropo", "did you mean `grpo`?"),
        ("gae", "token by token"),
    ],
)
def test_a_name_that_leads_nowhere_ends_with_exit_code_2(rllm: Rllm, mine: str, name: str, said: str) -> None:
    result = rllm("doctor", "algorithm", name)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_kind_that_the_signature_does_not_tell_can_be_said(rllm: Rllm, mine: str) -> None:
    result = rllm("doctor", "algorithm", f"{mine}:mystery", "--kind", "estimator", "--json")
    assert (result.exit_code, json.loads(result.stdout)["kind"]) == (0, "estimator")
