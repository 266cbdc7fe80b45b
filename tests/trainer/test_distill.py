"""Distillation: what a token is paid, whose gradient that is, and a student that becomes like its teacher."""

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from numpy.typing import NDArray

from rllm.config.loader import load_config
from rllm.errors import ConfigError, InferenceError
from rllm.models.builtin import TinyModel, create_model
from rllm.models.directory import LoadedModel, load_model, parameters_sha256
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.trainer.distill import AgentDistillTrainer
from rllm.trainer.reference import ModelScorer
from rllm.trainer.schedules import temperature
from rllm.trainer.teacher import Teacher, require_same_vocabulary
from rllm.trainer.teacher_server import ServerScorer
from rllm.types.sample import NOT_SAMPLED, TrainingSample


class KnownScores:
    """A scorer that says what it was given, by row."""

    def __init__(self, scores: Sequence[Sequence[float]]) -> None:
        self.scores = [np.array(each, dtype=np.float32) for each in scores]

    def score(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
        assert len(samples) == len(self.scores)
        return self.scores


def _row(
    logprobs: Sequence[float | None], attempt: int = 0, segment: int = 0, role: str = "agent", task: str = "t"
) -> TrainingSample:
    """None where nobody sampled; the first token is a prompt."""
    sampled = [each is not None for each in logprobs]
    return TrainingSample(
        token_ids_T=np.arange(len(logprobs)),
        policy_versions_T=np.where(sampled, 0, NOT_SAMPLED),
        logprobs_T=np.array([each or 0.0 for each in logprobs], dtype=np.float32),
        advantages_T=np.array(sampled, dtype=np.float32),
        group_key=(task, role),
        order_key=(task, attempt, 0, segment),
    )


def _teacher(scores: Sequence[Sequence[float]], *changes: str) -> Teacher:
    base = [
        "algorithm.estimator=teacher",
        "distill.teacher=somewhere",
        "warm_start.steps=0",
        "warm_start.noise=0",
    ]
    return Teacher(config=load_config([*base, *changes]), scorer=KnownScores(scores))


def test_a_token_is_paid_by_how_much_likelier_the_teacher_finds_it() -> None:
    rows = [_row([None, -1.0, None, -2.0]), _row([None, -1.0], attempt=1)]
    scores = [[0.0, -0.5, 0.0, -4.0], [0.0, -1.0]]
    (one, other), seen = _teacher(scores, "distill.baseline=none").teach(rows)
    assert one.advantages_T.tolist() == [0.0, 0.5, 0.0, -2.0]
    assert other.advantages_T.tolist() == [0.0, 0.0]
    assert seen["reverse_kl"] == pytest.approx((-0.5 + 2.0 + 0.0) / 3)
    (one, other), _ = _teacher(scores).teach(rows)
    assert one.advantages_T.tolist() == [0.0, 1.0, 0.0, -1.5]
    assert other.advantages_T.tolist() == [0.0, 0.5]


def test_later_tokens_count_by_gamma_over_all_rows_of_a_trajectory_and_no_further() -> None:
    rows = [_row([None, 0.0, None, 0.0]), _row([None, 0.0], segment=1), _row([None, 0.0], attempt=1)]
    scores = [[0.0, -1.0, 0.0, -2.0], [0.0, -4.0], [0.0, -8.0]]
    taught, _ = _teacher(scores, "distill.gamma=0.5", "distill.baseline=none").teach(rows)
    assert [row.advantages_T[row.trainable_T].tolist() for row in taught] == [[-3.0, -4.0], [-4.0], [-8.0]]


def test_later_tokens_count_in_the_order_of_turns_where_two_conversations_alternate() -> None:
    """The first row has turns 1 and 3, the second turns 2 and 4."""
    rows = [_row([None, 0.0, None, 0.0]), _row([None, 0.0, None, 0.0], segment=1)]
    rows[0].advantages_T[:] = [0.0, 1.0, 0.0, 3.0]
    rows[1].advantages_T[:] = [0.0, 2.0, 0.0, 4.0]
    scores = [[0.0, -1.0, 0.0, -4.0], [0.0, -2.0, 0.0, -8.0]]
    taught, _ = _teacher(scores, "distill.gamma=1", "distill.baseline=none").teach(rows)
    credits = [row.advantages_T[row.trainable_T].tolist() for row in taught]
    assert credits == [[-15.0, -12.0], [-14.0, -8.0]]


def test_one_impossible_token_does_not_outweigh_the_others_where_it_is_clipped() -> None:
    rows, scores = [_row([None, -1.0, -1.0])], [[0.0, -101.0, -0.5]]
    (row,), seen = _teacher(scores, "distill.clip=3", "distill.baseline=none").teach(rows)
    assert row.advantages_T.tolist() == [0.0, -3.0, 0.5]
    assert seen["teacher_clipped_frac"] == 0.5
    assert seen["reverse_kl"] == pytest.approx((100.0 - 0.5) / 2), "what is reported is not clipped"


def test_roles_with_another_estimator_keep_their_advantages_and_weights_count() -> None:
    rows = [_row([None, -1.0], role="judge"), _row([None, -1.0], role="solver", attempt=1)]
    teacher = _teacher(
        [[0.0, -3.0]],
        "roles.judge.estimator=reinforce",
        "roles.solver.reward_weight=0.5",
        "distill.baseline=none",
    )
    (judge, solver), _ = teacher.teach(rows)
    assert judge.advantages_T.tolist() == [0.0, 1.0]
    assert solver.advantages_T.tolist() == [0.0, -1.0]


def test_a_teacher_that_finds_a_token_impossible_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"token 1 \(id 1\).* -inf"):
        _teacher([[0.0, -np.inf]]).teach([_row([None, -1.0])])


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_the_gradient_is_that_of_the_reverse_divergence(gamma: float) -> None:
    """A tabular student over two tokens of three: all nine answers, each as often as it is sampled."""
    rng = np.random.default_rng(0)
    student, teacher = (
        rng.normal(size=(4, 3)),
        rng.normal(size=(4, 3)),
    )  # state: nothing yet, or the first token

    def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))

    def divergence(logits: NDArray[np.float64], visits: NDArray[np.float64] | None = None) -> float:
        """KL of whole answers; with `visits` fixed, the sum of each token's own divergence."""
        mine, theirs = log_softmax(logits), log_softmax(teacher)
        each = (np.exp(mine) * (mine - theirs)).sum(axis=1)
        weights = np.r_[1.0, np.exp(mine[0])] if visits is None else visits
        return float(weights @ each)

    mine, theirs = log_softmax(student), log_softmax(teacher)
    answers = list(itertools.product(range(3), repeat=2))
    visits = np.r_[1.0, np.exp(mine[0])]

    rows, scores = [], []
    for number, (one, two) in enumerate(answers):
        rows.append(_row([None, mine[0, one], mine[1 + one, two]], attempt=number))
        scores.append([0.0, theirs[0, one], theirs[1 + one, two]])
    taught, _ = _teacher(scores, f"distill.gamma={gamma}", "distill.baseline=none").teach(rows)
    ours = np.zeros_like(student)
    for (one, two), row in zip(answers, taught, strict=True):
        weight = np.exp(mine[0, one] + mine[1 + one, two])
        for state, token, advantage in ((0, one, row.advantages_T[1]), (1 + one, two, row.advantages_T[2])):
            score = np.eye(3)[token] - np.exp(mine[state])
            ours[state] += weight * advantage * score

    wanted = np.zeros_like(student)
    for place in np.ndindex(*student.shape):
        step = np.zeros_like(student)
        step[place] = 1e-6
        held = visits if gamma == 0.0 else None
        wanted[place] = (divergence(student - step, held) - divergence(student + step, held)) / 2e-6
    assert np.abs(ours - wanted).max() < 1e-6


def test_the_first_token_that_differs_is_named() -> None:
    with pytest.raises(ConfigError, match=r"token 1 is 'b' .*student .*'c' .*teacher"):
        require_same_vocabulary({0: "a", 1: "b", 2: "x"}, {0: "a", 1: "c", 2: "y"}, "big")
    with pytest.raises(ConfigError, match=r"token 1 is 'b' .*student .*no token .*teacher"):
        require_same_vocabulary({0: "a", 1: "b"}, {0: "a"}, "big")
    require_same_vocabulary({0: "a"}, {0: "a"}, "big")


TAUGHT = ["algorithm.estimator=teacher", "distill.teacher=DIR", "warm_start.noise=0"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["algorithm.estimator=teacher"], "there is none; set `distill.teacher`"),
        (["distill.teacher=DIR", "warm_start.steps=0"], "nobody asks it"),
        (["distill.clip=1"], r"`distill.clip`.*1.0.*nothing.*no teacher"),
        (
            [
                "distill.teacher=http://x",
                "algorithm.estimator=teacher",
                "warm_start.steps=0",
                "rollout.temperature=0.7",
            ],
            "a server scores prompts at temperature 1",
        ),
        (["distill.teacher=DIR", "algorithm.estimator=teacher"], "`warm_start.noise` is 0.3"),
        (["distill.teacher=DIR", "distill.teacher_model=x"], "the teacher is no server"),
        (["distill.gamma=2"], "must lie between 0 and 1"),
        (["distill.baseline=median"], "one of mean, none"),
        (["distill.divergence=jsd"], r"`distill.divergence`.*'jsd'.*nothing"),
        ([*TAUGHT, "distill.divergence=kl"], "choose one of sampled, forward_kl, reverse_kl, jsd"),
        ([*TAUGHT, "distill.jsd_beta=0.3"], "the divergence is `sampled`"),
        ([*TAUGHT, "distill.divergence=jsd", "distill.jsd_beta=1"], "must lie between 0 and 1"),
        ([*TAUGHT, "distill.divergence=jsd", "distill.gamma=1"], "no token is paid"),
        (
            [*TAUGHT, "distill.divergence=jsd", "algorithm.loss=gspo"],
            "`distill.divergence` jsd is the loss",
        ),
        ([*TAUGHT, "distill.divergence=jsd", "distill.teacher=http://x"], "a server tells of single tokens"),
        (
            [*TAUGHT, "distill.divergence=jsd", "roles.a.estimator=rloo"],
            "some role learns from rewards by rloo",
        ),
    ],
)
def test_what_a_distillation_cannot_honour_is_refused(changes: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(changes)


# Whole runs


@pytest.fixture(scope="module")
def teacher_run(tmp_path_factory: pytest.TempPathFactory, letters: ModuleType) -> Path:
    """A finished run whose model says the letter that it is shown, mostly."""
    path = tmp_path_factory.mktemp("teacher") / "run"
    changes = {
        "steps": 0,
        "seed": 1,
        "warm_start": {"steps": 12, "episodes_per_step": 16, "learning_rate": 1e-2, "noise": 0.1},
        "evaluation": {"num_tasks": 1, "every_steps": 0},
        "checkpoint": {"every_steps": 100},
    }
    AgentTrainer(
        {**letters.SETTINGS, **changes},
        letters.TASKS,
        agent_class=letters.LetterAgent,
        env_class=letters.LetterEnv,
        demonstrate=letters.demonstrate,
        output=path,
    ).train()
    return path


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student with a third of the teacher's parameters."""
    path = tmp_path_factory.mktemp("student") / "small"
    create_model(path, TinyModel(hidden_size=48, num_layers=1, num_heads=2, intermediate_size=96), seed=3)
    return path


@pytest.fixture
def distill(letters: ModuleType, teacher_run: Path, small_model: Path) -> Callable[..., AgentDistillTrainer]:
    def make(output: Path, changes: dict[str, Any] | None = None, **more: Any) -> AgentDistillTrainer:
        settings: dict[str, Any] = {
            **letters.SETTINGS,
            "warm_start": {"steps": 0},
            "rollout": {**letters.SETTINGS["rollout"], "tasks_per_step": 8, "group_size": 2},
            "inference": {"num_slots": 16, "max_context": 64},
            "evaluation": {"num_tasks": 8, "every_steps": 0},
            "optimizer": {"learning_rate": 5e-3},
            "model": {"path": str(small_model)},
            "distill": {"teacher": str(teacher_run)},
        }
        return AgentDistillTrainer(
            {**settings, **(changes or {})},
            letters.TASKS,
            agent_class=letters.LetterAgent,
            env_class=letters.LetterEnv,
            output=output,
            **more,
        )

    return make


def test_a_small_student_gets_close_to_its_teacher(
    distill: Callable[..., AgentDistillTrainer], tmp_path: Path
) -> None:
    changes = {
        "warm_start": {"steps": 8, "episodes_per_step": 16, "learning_rate": 1e-2},
        "steps": 12,
        "checkpoint": {"every_steps": 100},
        "optimizer": {"learning_rate": 5e-3},
    }
    result = distill(tmp_path / "run", changes).train()
    kl = {name: result.summary[name]["reverse_kl"] for name in ("untrained", "before", "after")}
    print(kl)
    assert kl["untrained"] > 3.0
    assert kl["before"] < 0.7 * kl["untrained"], "it learned from what the teacher wrote"
    assert kl["after"] < 0.8 * kl["before"], "and then from what the teacher said of its own"
    assert {"success", "greedy", "reverse_kl_error"} <= result.summary["after"].keys()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all("reverse_kl" in line for line in lines if line["phase"] == "train")
    assert (tmp_path / "run" / "curve.png").is_file()


@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
def test_whole_distributions_bring_it_there_as_well(
    distill: Callable[..., AgentDistillTrainer], teacher_run: Path, tmp_path: Path, divergence: str
) -> None:
    taught = {"distill": {"teacher": str(teacher_run), "divergence": divergence}, "steps": 8}
    summary = distill(tmp_path / "run", {**taught, "algorithm": {"entropy_coef": 0.001}}).train().summary
    assert summary["after"]["reverse_kl"] < 0.8 * summary["before"]["reverse_kl"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["phase"] == "train"]
    assert trained[-1]["teacher_divergence"] < trained[0]["teacher_divergence"]
    assert all("reverse_kl" in line for line in trained)
    assert trained[0]["entropy"] > 0.0


def test_a_run_that_was_killed_ends_as_one_that_was_not(
    ask: Callable[..., dict[str, Any]], tiny_directory: Path, small_model: Path, tmp_path: Path
) -> None:
    changes = {
        "steps": 3,
        "checkpoint": {"every_steps": 1},
        "warm_start": {"steps": 0, "noise": 0.0},
        "model": {"path": str(small_model)},
        "algorithm": {"estimator": "teacher"},
        "distill": {"teacher": str(tiny_directory)},
    }
    whole, killed = ((tmp_path / name) for name in ("whole", "killed"))
    assert ask(whole, changes=changes)["signal"] == 0
    assert ask(killed, changes=changes, die_at_line=("train", 1))["signal"] == 9
    assert ask(killed, changes=changes)["signal"] == 0
    hashes = {parameters_sha256(load_model(run / "model").model.state_dict_hf()) for run in (whole, killed)}
    assert len(hashes) == 1
    reports = [json.loads((run / "summary.json").read_text())["after"] for run in (whole, killed)]
    assert reports[0] == reports[1]
    assert reports[0]["reverse_kl"] > 0.0


def test_prompts_without_rewards_are_distilled_and_nothing_is_said_of_success(
    teacher_run: Path, small_model: Path, tmp_path: Path
) -> None:
    prompts = [{"prompt": f"{letter} 1"} for letter in "ABCD"]
    settings = {
        "steps": 1,
        "model": {"path": str(small_model)},
        "rollout": {"tasks_per_step": 2, "max_tokens_per_turn": 3},
        "inference": {"num_slots": 4, "max_context": 64},
    }
    trainer = AgentDistillTrainer(settings, prompts, teacher=teacher_run, output=tmp_path / "run")
    summary = trainer.train().summary
    assert summary["after"]["reverse_kl"] > 0.0
    assert "success" not in summary["after"]
    assert (tmp_path / "run" / "curve.png").is_file()


def test_a_distillation_samples_at_one_temperature_throughout(small_model: Path) -> None:
    settings = {"rollout": {"temperature": 0.5}, "steps": 3}
    trainer = AgentDistillTrainer(settings, [{"prompt": "a"}], teacher=small_model)
    assert [temperature(trainer.config, step) for step in range(3)] == [0.5, 0.5, 0.5]


def test_a_dataset_row_without_a_prompt_is_named() -> None:
    with pytest.raises(ConfigError, match=r"`train_dataset`: row 1 .*prompt"):
        AgentDistillTrainer({}, [{"prompt": "a"}, {"answer": "b"}], teacher="somewhere")


def test_no_teacher_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"set `distill.teacher`"):
        AgentDistillTrainer({}, [{"prompt": "a"}])


def test_a_refused_teacher_leaves_the_directory_free_for_another_start(
    distill: Callable[..., AgentDistillTrainer], small_model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    create_model(
        other, TinyModel(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, vocab_size=400)
    )
    with pytest.raises(ConfigError, match="vocabulary"):
        distill(tmp_path / "run", {"distill": {"teacher": str(other)}}).train()
    assert not (tmp_path / "run" / "config.json").exists()


# A teacher behind an address


class FakeTeacher:
    """A server that scores prompts with a model, as vLLM does; in a thread of its own."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded, self.fails, self.scores, self.renamed = loaded, 0, True, dict[int, str]()
        self.max_model_len = 512
        self.fail_headers: dict[str, str] = {}
        self.prompts: list[list[int]] = []
        self.authorizations: list[str | None] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> "FakeTeacher":
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "big", "max_model_len": self.max_model_len}]})

    async def _complete(self, request: web.Request) -> web.Response:
        if self.fails:
            self.fails -= 1
            return web.Response(status=503, headers=self.fail_headers)
        asked = await request.json()
        prompt = asked["prompt"]
        self.prompts.append(prompt)
        self.authorizations.append(request.headers.get("Authorization"))
        if len(prompt) + asked["max_tokens"] > self.max_model_len:
            return web.Response(status=400, text="too long")
        choice: dict[str, Any] = {"index": 0, "text": "x"}
        if "prompt_logprobs" not in asked:
            choice |= self._said()
        elif self.scores:
            row = _row([None, *[-1.0] * (len(prompt) - 1)])
            row.token_ids_T, row.temperature = np.array(prompt), asked["temperature"]
            (scores_T,) = ModelScorer(model=self.loaded.model).score([row])
            choice["prompt_logprobs"] = [None, *map(self._entry, prompt[1:], scores_T[1:].tolist())]
        return web.json_response({"id": "1", "choices": [choice]})

    def _said(self) -> dict[str, Any]:
        """An answer of its own."""
        ids = [*self.loaded.tokenizer.encode("A"), self.loaded.end_token_ids[0]]
        return {
            "token_ids": ids,
            "logprobs": {"token_logprobs": [-0.5] * len(ids)},
            "finish_reason": "stop",
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.renamed.get(token_id, self.loaded.tokenizer.token_text(token_id))
        return {str(token_id): {"logprob": logprob, "rank": 1, "decoded_token": text}}


@pytest.fixture
def served(tiny_directory: Path) -> Iterator[FakeTeacher]:
    with FakeTeacher(load_model(tiny_directory)) as teacher:
        yield teacher


def test_a_server_says_what_the_directory_says(served: FakeTeacher) -> None:
    rows = [
        _row([None, -1.0, None, -2.0]),
        _row([None, None], attempt=1),
        _row([None, -1.0, None], attempt=2),
    ]
    expected = ModelScorer(model=served.loaded.model).score(rows)
    scorer = ServerScorer(served.url)
    scorer.require_room(500)
    scorer.require_same_vocabulary(served.loaded.tokenizer)
    served.prompts.clear()
    for mine, theirs in zip(scorer.score(rows), expected, strict=True):
        assert np.abs(mine - theirs).max() < 1e-6
    assert sorted(map(len, served.prompts)) == [2, 4], "nothing is sent behind the last trained token"


def test_a_server_is_told_the_key_of_the_call_or_of_the_environment(
    served: FakeTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-environment")
    for key in ("of-the-call", None):
        ServerScorer(served.url, api_key=key).require_room(100)
    assert served.authorizations == ["Bearer of-the-call", "Bearer of-the-environment"]


def test_a_student_learns_from_what_a_server_writes_and_from_what_it_says(
    distill: Callable[..., AgentDistillTrainer], served: FakeTeacher, tmp_path: Path
) -> None:
    changes = {
        "distill": {"teacher": served.url},
        "warm_start": {"steps": 1, "episodes_per_step": 4, "learning_rate": 1e-3},
        "steps": 1,
        "evaluation": {"num_tasks": 2, "every_steps": 0},
    }
    summary = distill(tmp_path / "run", changes).train().summary
    assert summary["after"]["reverse_kl"] == pytest.approx(summary["untrained"]["reverse_kl"], abs=2.0)


def test_a_server_that_stumbles_is_asked_again_and_one_that_is_gone_ends_the_run(served: FakeTeacher) -> None:
    scorer = ServerScorer(served.url, retry_wait_s=0.001)
    served.fails = 3
    assert scorer.score([_row([None, -1.0])])[0][1] < 0.0
    served.fails = 4
    with pytest.raises(InferenceError, match="503"):
        scorer.score([_row([None, -1.0])])


def test_each_retry_waits_twice_as_long_or_as_long_as_the_server_asks(
    served: FakeTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    for served.fail_headers, expected in (({}, [3.0, 6.0, 12.0]), ({"Retry-After": "7"}, [7.0, 7.0, 7.0])):
        waits.clear()
        served.fails = 3
        ServerScorer(served.url, retry_wait_s=3.0).score([_row([None, -1.0])])
        assert waits == expected


def test_a_server_that_cannot_score_is_refused(served: FakeTeacher) -> None:
    served.scores = False
    with pytest.raises(ConfigError, match=r"`prompt_logprobs`.*vLLM"):
        ServerScorer(served.url).require_room(100)


def test_a_server_without_room_for_a_row_is_refused(served: FakeTeacher) -> None:
    with pytest.raises(ConfigError, match="511 tokens"):
        ServerScorer(served.url).require_room(512)
    ServerScorer(served.url).require_room(511)


@pytest.mark.parametrize(("first", "other"), [(299, 300), (0, 1)])
def test_a_servers_other_vocabulary_is_found_and_its_first_token_named(
    served: FakeTeacher, first: int, other: int
) -> None:
    served.renamed = {other: "one", first: "two"}
    scorer = ServerScorer(served.url)
    scorer.require_room(100)
    tokenizer: HuggingFaceTokenizer = served.loaded.tokenizer
    with pytest.raises(ConfigError) as refused:
        scorer.require_same_vocabulary(tokenizer)
    assert f"token {first} is {tokenizer.token_text(first)!r}" in str(refused.value)
    assert "'two'" in str(refused.value)


def test_a_vocabulary_is_compared_in_prompts_that_a_server_of_short_rows_takes(served: FakeTeacher) -> None:
    served.max_model_len = 100
    scorer = ServerScorer(served.url)
    scorer.require_room(99)
    scorer.require_same_vocabulary(served.loaded.tokenizer)


def test_rows_that_a_server_cannot_score_as_they_were_sampled_are_refused(served: FakeTeacher) -> None:
    row = _row([None, -1.0])
    row.temperature = 0.7
    with pytest.raises(ConfigError, match=r"sampled at temperature 0.7"):
        ServerScorer(served.url).score([row])
