"""What a Tinker service is sent, and what it is never asked for; `make test-tinker` has a real one.

The oracle of the translation is the service's own documentation (and the source of SkyRL's server), written
out by hand: a loss of each token, and how they are added up.
"""

import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rllm.agents.frozenlake import FrozenLakeAgent
from rllm.algorithms.losses import FixedLength, ImitationLoss, Loss, PolicyLoss, token_weights
from rllm.algorithms.surrogates import (
    ClippedRatio,
    ClippedWeight,
    ImportanceRatio,
    PolicyGradient,
    SequenceRatio,
    Surrogate,
)
from rllm.algorithms.tokens import TokenInputs
from rllm.config.loader import load_config
from rllm.environments.frozenlake import FrozenLakeEnv
from rllm.errors import ConfigError, InferenceError, MissingExtraError
from rllm.integrations.tinker.requirements import require_supported
from rllm.integrations.tinker.service import Service, require_client
from rllm.integrations.tinker.tokenizers import require_same_tokenizer
from rllm.integrations.tinker.translation import Arrays, ServiceLoss, service_loss, update_arrays
from rllm.models.builtin import create_model
from rllm.models.directory import describe_model
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.trainer.replay import replay
from rllm.types.sample import NOT_SAMPLED, TrainingSample
from rllm.workflows.workflow import Workflow

POSSIBLE = ("backend=tinker", "model.path=models/lake", "lora.rank=8")
REFUSED = {
    "lora.rank": ("lora.rank=0",),
    "lora.alpha": ("lora.alpha=16",),
    "model.path": ("model.path=builtin:tiny",),
    "model.dtype": ("model.dtype=bfloat16",),
    "optimizer.name": ("optimizer.name=muon",),
    "optimizer.on_bad_update": ("optimizer.on_bad_update=skip",),
    "inference.num_slots": ("inference.num_slots=8",),
    "algorithm.loss": ("algorithm.loss=gspo",),
    "algorithm.dual_clip": ("algorithm.dual_clip=3",),
    "algorithm.entropy_coef": ("algorithm.entropy_coef=0.01",),
    "algorithm.kl_coef": ("algorithm.kl_coef=0.1",),
    "algorithm.correction": ("algorithm.correction=mask", "algorithm.old_logprobs=trainer"),
    "algorithm.estimator": ("algorithm.estimator=gae", "critic.trunk=separate"),
    "rollout.temperature": ("rollout.temperature=0.7",),
    "rollout.final_temperature": ("rollout.final_temperature=1.2",),
    "distill.teacher": (
        "distill.teacher=models/other",
        "algorithm.estimator=teacher",
        "warm_start.noise=0",
    ),
    "policies": ("policies.a.path=x", "policies.b.path=y"),
}


def test_what_the_service_cannot_do_is_refused_by_key(subtests: pytest.Subtests) -> None:
    for key in REFUSED:
        with subtests.test(key=key), pytest.raises(ConfigError, match=rf"`{key}` is .*(honour)"):
            require_supported(load_config((*POSSIBLE, *REFUSED[key])))


def test_a_plain_run_of_an_adapter_is_accepted() -> None:
    for loss in ("ppo", "cispo", "importance_sampling", "policy_gradient"):
        require_supported(
            load_config((*POSSIBLE, f"algorithm.loss={loss}", "algorithm.old_logprobs=trainer"))
        )


# ---- translation ---------------------------------------------------------------------------------------

SURROGATES: dict[str, Surrogate] = {
    "ppo": ClippedRatio(clip_low=0.1, clip_high=0.3),
    "cispo": ClippedWeight(clip_low=0.2, clip_high=0.5),
    "importance_sampling": ImportanceRatio(),
    "policy_gradient": PolicyGradient(),
}
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "group_mean", FixedLength(num_tokens=7))


def rows() -> list[TrainingSample]:
    """Of unequal length, with tokens between that nobody sampled, in groups of unequal size."""
    draws = np.random.default_rng(3)
    samples: list[TrainingSample] = []
    for number, length in enumerate((5, 9, 12, 6)):
        sampled_T = draws.random(length) < 0.7
        sampled_T[:2], sampled_T[-1] = False, True
        samples.append(
            TrainingSample(
                token_ids_T=draws.integers(0, 50, length),
                policy_versions_T=np.where(sampled_T, 0, NOT_SAMPLED),
                logprobs_T=np.where(sampled_T, -3 * draws.random(length), 0).astype(np.float32),
                advantages_T=np.where(sampled_T, draws.normal(size=length), 0).astype(np.float32),
                group_key=("a" if number < 3 else "b", "agent"),
                order_key=("a", number, 0, 0),
            )
        )
    return samples


def term_of_service(loss: ServiceLoss, columns: Arrays, new_T: Tensor) -> Tensor:
    """The loss of each token, as the service's documentation has it."""
    if loss.name == "cross_entropy":
        return -torch.tensor(columns["weights"]) * new_T
    ratio_T = torch.exp(new_T - torch.tensor(columns["logprobs"]))
    advantages_T = torch.tensor(columns["advantages"])
    if loss.name == "importance_sampling":
        return -ratio_T * advantages_T
    held_T = ratio_T.clamp(loss.bounds["clip_low_threshold"], loss.bounds["clip_high_threshold"])
    if loss.name == "ppo":
        return -torch.minimum(ratio_T * advantages_T, held_T * advantages_T)
    assert loss.name == "cispo"
    return -held_T.detach() * advantages_T * new_T


def summed(terms: Sequence[Tensor]) -> Tensor:
    """The service."""
    return torch.stack([each.sum() for each in terms]).sum()


def mean_of_row_means(terms: Sequence[Tensor]) -> Tensor:
    """SkyRL's server, where every token has the weight 1."""
    return torch.stack([each.mean() for each in terms]).mean()


def gradient_here(samples: Sequence[TrainingSample], loss: Loss, new: Sequence[Tensor]) -> list[Tensor]:
    """Of Σ weight · term, with respect to all log-probabilities of each row."""
    trained = [torch.from_numpy(each.trainable_T) for each in samples]

    def column(values: Sequence[Tensor]) -> Tensor:
        return torch.cat([each[mask_T] for each, mask_T in zip(values, trained, strict=True)])

    counts = torch.tensor([each.num_trainable for each in samples])
    tokens = TokenInputs(
        new_M=column(new),
        old_M=column([torch.tensor(each.logprobs_T) for each in samples]),
        advantages_M=column([torch.tensor(each.advantages_T) for each in samples]),
        weights_M=column([torch.tensor(each) for each in token_weights(samples, loss.aggregation)]),
        row_M=torch.repeat_interleave(torch.arange(len(samples)), counts),
        group_R=torch.zeros(len(samples)),
    )
    total = (loss.terms(tokens) * tokens.weights_M).sum()
    return list(torch.autograd.grad(total, list(new)))


@pytest.mark.parametrize("row_means", [False, True])
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=str)
@pytest.mark.parametrize("name", [*SURROGATES, "imitation"])
def test_the_service_computes_the_gradient_of_our_loss_with_our_weights(
    name: str, aggregation: str | FixedLength, row_means: bool
) -> None:
    samples, draws = rows(), torch.Generator().manual_seed(5)
    loss: Loss = (
        ImitationLoss(aggregation=aggregation)
        if name == "imitation"
        else PolicyLoss(surrogate=SURROGATES[name], aggregation=aggregation)
    )
    new = [
        (-3 * torch.rand(each.num_tokens, generator=draws, dtype=torch.float64)).requires_grad_()
        for each in samples
    ]
    theirs = service_loss(loss, row_means=row_means)
    weights = token_weights(samples, aggregation)
    data = update_arrays(list(zip(samples, weights, strict=True)), theirs, row_means=row_means)
    terms = [term_of_service(theirs, each, new_T[1:]) for each, new_T in zip(data, new, strict=True)]
    add_up: Callable[[Sequence[Tensor]], Tensor] = mean_of_row_means if row_means else summed
    there = torch.autograd.grad(add_up(terms), new)
    for mine_T, their_T in zip(gradient_here(samples, loss, new), there, strict=True):
        torch.testing.assert_close(mine_T, their_T, rtol=1e-5, atol=1e-7)
    for each, sample in zip(data, samples, strict=True):
        assert each["target_tokens"].tolist() == sample.token_ids_T[1:].tolist()


def test_losses_go_by_the_names_of_the_service() -> None:
    names = {
        name: service_loss(PolicyLoss(surrogate=surrogate), row_means=False).name
        for name, surrogate in SURROGATES.items()
    }
    assert names == {
        "ppo": "ppo",
        "cispo": "cispo",
        "importance_sampling": "importance_sampling",
        "policy_gradient": "cross_entropy",
    }
    assert service_loss(ImitationLoss(), row_means=False).name == "cross_entropy"
    ppo = service_loss(PolicyLoss(surrogate=SURROGATES["ppo"]), row_means=False)
    assert ppo.bounds == {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}


@pytest.mark.parametrize("surrogate", [SequenceRatio(), ClippedRatio(dual_clip=3.0)])
def test_a_loss_that_the_service_does_not_have_is_never_replaced_by_another(surrogate: Surrogate) -> None:
    with pytest.raises(ConfigError, match="no loss like PolicyLoss"):
        service_loss(PolicyLoss(surrogate=surrogate), row_means=False)


# ---- tokenizers ----------------------------------------------------------------------------------------


def test_another_tokenizer_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    create_model(tmp_path / "ours", "tiny")
    create_model(tmp_path / "theirs", "tiny")
    ours = describe_model(tmp_path / "ours", model=None).tokenizer
    require_same_tokenizer(
        ours, AutoTokenizer.from_pretrained(tmp_path / "theirs"), tmp_path / "ours", "lake"
    )
    path = tmp_path / "theirs" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = ours.encode("d")[0], ours.encode("e")[0]
    named = {token: name for name, token in vocabulary.items()}
    vocabulary[named[first]], vocabulary[named[second]] = second, first
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"`lake`.*place \d+ is \d+ .* \d+ "):
        require_same_tokenizer(
            ours, AutoTokenizer.from_pretrained(tmp_path / "theirs"), tmp_path / "ours", "lake"
        )


# ---- at the door ---------------------------------------------------------------------------------------


def test_a_trainer_refuses_before_any_work_what_its_backend_cannot_do() -> None:
    given = {"train_dataset": [{"task_id": "a"}], "agent_class": FrozenLakeAgent, "env_class": FrozenLakeEnv}
    with pytest.raises(ConfigError, match=r"`lora.rank` is 0, .*Tinker"):
        AgentTrainer(["model.path=models/lake", "warm_start.steps=0"], backend="tinker", **given)
    with pytest.raises(ConfigError, match=r"`backend` is 'tinkr': .*`tinker`"):
        AgentTrainer(["warm_start.steps=0"], backend="tinkr", **given)


def test_programs_and_workflows_are_refused_before_any_work() -> None:
    class Nothing(Workflow):
        async def run(self, task: dict[str, object], uid: str, **kwargs: object) -> None:
            raise AssertionError

    tasks = [{"id": "a", "instruction": "b"}]
    with pytest.raises(ConfigError, match="`local`"):
        AgentTrainer(["warm_start.steps=0"], tasks, backend="tinker", workflow_class=Nothing)
    with pytest.raises(ConfigError, match="`local`"):
        AgentTrainer(
            ["warm_start.steps=0"],
            tasks,
            backend="tinker",
            agent_flow=lambda task, config: None,
            evaluator=lambda task, episode: 0.0,
        )


def test_a_service_cannot_be_asked_for_a_replay() -> None:
    trainer = AgentTrainer(
        ["warm_start.steps=0"], [{"task_id": "a"}], agent_class=FrozenLakeAgent, env_class=FrozenLakeEnv
    )
    trainer.config.backend = "tinker"
    with pytest.raises(ConfigError, match=r"`backend` is 'tinker'.*bit for bit"):
        replay(trainer.run)


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tinker", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'rllm\[tinker\]'"):
        require_client()


@pytest.mark.parametrize("version", ["0.38.0", "0.25.0", "0.24.0"])
def test_a_client_whose_wire_could_not_be_tried_is_refused(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tinker", SimpleNamespace(__version__=version))
    with pytest.raises(ConfigError, match=rf"`tinker` is {version}; .* 0.24.1 .* 0.25.0"):
        require_client()


class _LateAnswer(Future[Any]):
    """Comes in the moment after a wait for it was over."""

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.set_result(SimpleNamespace(path="tinker://there"))
            raise TimeoutError
        return super().result(timeout)


def _service(monkeypatch: pytest.MonkeyPatch, answer: Future[Any]) -> Service:
    """One that gives this answer to whoever saves its state."""
    training = SimpleNamespace(save_state=lambda name: answer)
    client = SimpleNamespace(create_lora_training_client=lambda **settings: training)
    monkeypatch.setitem(sys.modules, "tinker", SimpleNamespace(ServiceClient=lambda base_url: client))
    monkeypatch.setattr(Service, "_trouble", lambda self: "")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    service = Service("http://127.0.0.1:9")
    service.create_adapter(8, 0)
    return service


def test_an_answer_that_comes_as_a_wait_for_it_ends_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _service(monkeypatch, _LateAnswer()).save_state("step") == "tinker://there"


def test_a_call_that_ends_with_a_timeout_of_its_own_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = Future[Any]()
    answer.set_exception(TimeoutError("the server gave up"))
    with pytest.raises(InferenceError, match="gave up"):
        _service(monkeypatch, answer).save_state("step")
