"""Published classes and functions in the forms in which published programs call them."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rllm
from rllm.agents.tool import ToolAgent
from rllm.errors import ConfigError
from rllm.files.named_places import AGENT_PLACES, EVALUATOR_PLACES
from rllm.published.browsing import BrowserTaskEnv
from rllm.published.frozenlake import NumberedLakeEnv
from rllm.published.programs import DataTask, load_agent
from rllm.published.reward_fns import evaluate_calls
from rllm.published.rewards import rllm_reward_fn_code, rllm_reward_fn_math
from rllm.published.sdk import CallSession, get_chat_client, session, trajectory
from rllm.published.store import InMemoryStore, SharedStore
from rllm.rewards.evaluator import as_evaluator, load_evaluator
from rllm.rewards.reward_functions import RewardConfig, RewardOutput, RewardSearchFn
from rllm.store.encoding import require_storable
from rllm.types.episode import Episode, Step, Trajectory
from rllm.types.evaluation import EvalOutput
from rllm.types.task import Task


def episode_of(answer: str) -> Episode:
    return Episode(trajectories=[Trajectory(steps=[Step(model_response=answer)])])


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def test_a_published_evaluator_reads_published_rows(subtests: pytest.Subtests) -> None:
    for name, row, answer in [
        ("math_reward_fn", {"ground_truth": ["4", "four"]}, r"\boxed{4}"),
        ("mcq_reward_fn", {"ground_truth": "B", "choices": ["x", "y"]}, "The answer is B"),
        ("f1_reward_fn", {"ground_truth": "red dog"}, "red dog"),
        ("countdown_reward_fn", {"target": 24, "nums": [4, 6]}, "<answer>4 * 6</answer>"),
        ("translation_reward_fn", {"ground_truth": "Guten Tag"}, "Guten Tag"),
        (
            "bfcl_reward_fn",
            {"ground_truth": [{"name": "f", "arguments": {"a": 1}}]},
            '{"name":"f","arguments":{"a":1}}',
        ),
    ]:
        with subtests.test(name=name, row=row, answer=answer):
            judge = load_evaluator(name)
            right, wrong = judge.evaluate(row, episode_of(answer)), judge.evaluate(row, episode_of("no"))
            assert isinstance(right, EvalOutput)
            assert isinstance(wrong, EvalOutput)
            assert (right.is_correct, wrong.is_correct) == (True, False)


def test_an_evaluator_without_its_benchmark_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"`widesearch_reward_fn`, .*benchmark"):
        load_evaluator("widesearch_reward_fn")


def test_calls_are_judged_by_their_arguments() -> None:
    row = {"ground_truth": [{"name": "area", "arguments": {"base": 3}}]}
    for base, is_correct in ((3, True), (4, False)):
        answer = json.dumps({"name": "area", "arguments": {"base": base}})
        assert evaluate_calls(row, episode_of(answer)).is_correct is is_correct


def test_an_evaluator_that_wants_a_task_gets_one() -> None:
    def of_task(task: Task, episode: Episode) -> float:
        return float(task.metadata["ground_truth"] == "4" and task.id == "sum-1")

    def of_row(task: dict[str, Any], episode: Episode) -> float:
        return float(task["ground_truth"] == "4")

    def of_either(task: "Task | dict[str, Any]", episode: Episode) -> bool:
        return isinstance(task, dict)

    row = {"task_id": "sum-1", "ground_truth": "4"}
    for function in (of_task, of_row, of_either):
        output = as_evaluator(function).evaluate(row, episode_of("4"))
        assert isinstance(output, EvalOutput)
        assert output.reward == 1.0


def test_a_reward_output_may_come_in_both_orders() -> None:
    published, own = RewardOutput(1.0, {"a": 1}, True), RewardOutput(1.0, True, {"a": 1})  # pyright: ignore
    assert published == own
    assert RewardOutput(0.0, {}) == RewardOutput(0.0)  # pyright: ignore


def test_what_is_partly_right_is_paid_in_proportion() -> None:
    row, action = {"ground_truth": "the red dog"}, "red cat"
    assert RewardSearchFn(RewardConfig())(row, action).reward == RewardSearchFn()(row, action).reward == 0.5
    paid = RewardSearchFn(RewardConfig(correct_reward=2.0, incorrect_reward=-1.0))(row, action).reward
    assert paid == pytest.approx(0.5)


@pytest.mark.usefixtures("bubblewrap")
def test_reward_functions_for_verl_take_four_arguments() -> None:
    assert rllm_reward_fn_math("aime", r"\boxed{4}", ["4"], {"level": 1}).reward == 1.0
    tests = json.dumps([{"input": "1 2", "output": "3"}])
    program = "```python\nprint(sum(map(int, input().split())))\n```"
    assert rllm_reward_fn_code("codeforces", program, tests).reward == 1.0


@pytest.mark.usefixtures("own_home")
def test_a_decorated_function_is_found_by_the_name_that_it_registers(tmp_path: Path) -> None:
    Path("mine.py").write_text(
        "import rllm\n\n"
        "@rllm.rollout(name='solver', register='my-solver')\ndef solve(task, config): ...\n\n"
        "@rllm.evaluator(register='my-judge')\ndef judge(task, episode): return 0.5\n"
    )
    load_evaluator("mine.py:judge")
    assert AGENT_PLACES.all() == {"my-solver": f"{tmp_path}/mine.py:solve"}
    assert EVALUATOR_PLACES.all() == {"my-judge": f"{tmp_path}/mine.py:judge"}
    assert load_agent("my-solver").name == "solver"
    output = load_evaluator("my-judge").evaluate({}, episode_of("x"))
    assert isinstance(output, EvalOutput)
    assert output.reward == 0.5
    with pytest.raises(ConfigError, match="top of"):

        @rllm.rollout(register="inner")
        def inside(task: Task, config: Any) -> None: ...  # pyright: ignore[reportUnusedFunction]


@pytest.mark.parametrize(
    ("name", "successor"),
    [
        ("react", "--agent react"),
        ("claude_code", "`harness:claude-code`"),
        ("harbor:openhands", "`harness:openhands`"),
        ("harbor:terminus_2", "`harness:terminus-2`"),
        ("terminus2", "`harness:terminus-2`"),
        ("harbor:aider", "harness:FILE.toml"),
        ("oracle", "rllm doctor tasks"),
        ("search", "docs/search.md"),
    ],
)
@pytest.mark.usefixtures("own_home")
def test_a_published_agent_that_is_no_program_names_its_successor(name: str, successor: str) -> None:
    with pytest.raises(ConfigError, match=successor):
        load_agent(name)


def test_a_task_of_spring_2026_is_made_of_its_row() -> None:
    task = DataTask(data={"id": "a", "question": "2 + 2?"}, spec=None)
    assert (task.id, task.instruction, task.data["question"]) == ("a", "2 + 2?", "2 + 2?")


def test_steps_keep_what_a_program_says_that_it_was_asked_and_answered() -> None:
    step = Step(input={"question": "2 + 2?"}, output=r"\boxed{4}")
    assert Step.from_dict(step.to_dict()) == step
    episode = Episode(task_id="a", trajectories=[Trajectory(steps=[step])])
    require_storable(episode)
    output = load_evaluator("math").evaluate({"answer": "4"}, episode)
    assert isinstance(output, EvalOutput)
    assert output.is_correct


@pytest.mark.usefixtures("bubblewrap")
def test_tools_have_one_name_in_all_its_spellings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERPER_API_KEY", "key")
    monkeypatch.setenv("TAVILY_API_KEY", "key")
    agent = ToolAgent(tools=["google_search", "tavily-extract", "python"])
    assert len(agent.tools.json) == 3


def test_rows_of_lakes_and_of_sites_have_names_beside_their_arguments() -> None:
    row = {"seed": 1, "size": 4, "p": 0.8, "idx": 3, "uid": "a", "data_source": "frozenlake"}
    assert isinstance(NumberedLakeEnv.from_dict(row).reset()[0], str)
    site = BrowserTaskEnv.from_dict({"env_id": "browsergym/miniwob.click-test", "seed": 2, "idx": 1})
    assert (site.name, site.seed) == ("miniwob.click-test", 2)
    with pytest.raises(ConfigError, match="needs `env_id`"):
        BrowserTaskEnv.from_dict({"seed": 2})


def test_a_store_remembers_across_attempts() -> None:
    async def use() -> list[Any]:
        store = InMemoryStore()
        assert isinstance(store, SharedStore)
        await store.set("a", 1)
        values = [await store.get("a"), await store.get("b", 2), await store.has("a"), await store.keys()]
        values += [await store.delete("a"), await store.delete("a")]
        await store.set("c", None)
        await store.clear()
        return [*values, await store.keys()]

    assert asyncio.run(use()) == [1, 2, True, ["a"], True, False, []]


class _Answer:
    def model_dump_json(self) -> str:
        return '{"id": "c1", "choices": [{"message": {"role": "assistant", "content": "4"}}]}'


class _Resource:
    def create(self, **_: Any) -> _Answer:
        return _Answer()


class _Client:
    """Stands for `openai.OpenAI`."""

    def __init__(self, **_: Any) -> None:
        self.completions = _Resource()
        self.chat = SimpleNamespace(completions=_Resource())

    def copy(self, **_: Any) -> "_Client":
        return _Client()

    with_options = copy


def test_calls_of_a_client_that_another_made_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllm.published.sdk._openai", lambda _: SimpleNamespace(OpenAI=_Client))
    client = get_chat_client(base_url="http://127.0.0.1:1/v1")
    with session() as calls:
        client.with_options(timeout=3).chat.completions.create(messages=[])
        client.copy().copy().chat.completions.create(messages=[])
    assert isinstance(calls, CallSession)
    assert len(calls) == 2


def test_a_trajectory_has_the_keywords_of_its_decorator() -> None:
    @trajectory(name="solver", version=1)
    def solve(question: str) -> str:
        return question

    result = solve("a")
    assert (result.name, result.input, result.output) == ("solver", {"question": "a"}, "a")
    assert result.info == {"version": 1}


def test_an_argument_of_the_published_trainer_names_its_successor(subtests: pytest.Subtests) -> None:
    for argument, successor in [
        ("agent_run_func", "`agent_flow`"),
        ("hooks", "`evaluator`"),
        ("sandbox_backend", "docs/sandbox.md"),
        ("sandbox_concurrency", "`rollout.num_parallel`"),
        ("store", "`workflow_args`"),
        ("traj_grouping_hook", "`name`"),
    ]:
        with (
            subtests.test(argument=argument, successor=successor),
            pytest.raises(ConfigError, match=f"AgentTrainer does not take `{argument}`: .*{successor}"),
        ):
            rllm.AgentTrainer(**{argument: print})
