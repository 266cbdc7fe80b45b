"""Several steps that are played at one time, by actors that are none: what they share of a pool and of a
worker's servers. Starts no cluster."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rllm.config.cluster import ClusterConfig
from rllm.config.schedule import ScheduleConfig
from rllm.config.schema import TrainConfig
from rllm.engine.attempts import EpisodeCounts
from rllm.errors import ClusterError, InferenceError
from rllm.integrations.ray.engine import RayEngine
from rllm.integrations.ray.pool import Broadcast, ClusterWorker, Pool
from rllm.integrations.ray.remote import RemoteClient, Servers
from rllm.integrations.ray.weights import weight_state
from rllm.integrations.ray.worker import PlayedLease
from rllm.store.encoding import encode_episode
from rllm.trainer.cluster import RolloutJob
from rllm.types.episode import Episode, Outcome
from rllm.types.messages import ModelOutput, SamplingParams
from rllm.types.sample import NOT_SAMPLED


def actor(**methods: Callable[..., Any]) -> Any:
    """One whose methods are these coroutine functions."""

    def remote(method: Callable[..., Any]) -> Any:
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(method(*args)))

    return SimpleNamespace(**{name: remote(method) for name, method in methods.items()})


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not holds():
            await asyncio.sleep(0.001)


def ready(name: str, its_actor: Any, *, serves: int, is_server: bool = False) -> ClusterWorker:
    return ClusterWorker(name=name, actor=its_actor, starting=None, serves=serves, is_server=is_server)


def pool_of(*members: ClusterWorker, model_servers: int = 0) -> Pool:
    config = TrainConfig(
        cluster=ClusterConfig(kind="ray", workers=1, model_servers=model_servers),
        schedule=ScheduleConfig(kind="async"),
    )
    versions, models = {"policy": 1}, {"policy": torch.nn.Linear(2, 2)}
    job = SimpleNamespace(
        config=config,
        learning_models=lambda: models,
        policy_versions=lambda: {**versions},
        between_publishes=nullcontext,
    )
    pool = Pool(job=cast("RolloutJob", job), members=[*members])
    pool.broadcast = Broadcast(
        number=1, state=weight_state(models), policy_versions={**versions}, ref="the first weights"
    )
    return pool


def publish(pool: Pool) -> None:
    """An update of the trainer."""
    with torch.no_grad():
        pool.job.learning_models()["policy"].weight.add_(1.0)


def remote_client(versions: list[int], meanwhile: Callable[[], None] = lambda: None) -> RemoteClient:
    """One whose server answers with these, when `meanwhile` has happened."""

    async def generate_ids(policy: str, prompt_ids: list[int], sampling: SamplingParams) -> ModelOutput:
        meanwhile()
        return ModelOutput(completion_ids=[5] * len(versions), policy_versions=versions)

    servers = Servers(timeout_s=5.0, policy_versions={"policy": 1}, follow=True)
    servers.set({"server-0": actor(generate_ids=generate_ids)})
    return RemoteClient(policy="policy", renderer=cast("Any", None), max_context=64, servers=servers)


async def test_an_answer_that_began_before_the_lease_of_a_later_step_keeps_its_weights() -> None:
    def begin_later_lease() -> None:
        client.servers.policy_versions = {"policy": 2}

    client = remote_client([1, 1, 2], begin_later_lease)
    assert (await client.generate_ids([3, 4], SamplingParams())).policy_versions == [1, 1, 2]
    with pytest.raises(InferenceError, match=r"\[1, 2\]"):
        await client.generate_ids([3, 4], SamplingParams())


async def test_tokens_that_a_grammar_forced_are_of_no_weights_and_refuse_no_answer() -> None:
    answer = await remote_client([NOT_SAMPLED, 1]).generate_ids([3, 4], SamplingParams())
    assert answer.policy_versions == [NOT_SAMPLED, 1]


async def test_workers_are_sent_to_no_server_that_has_begun_and_has_no_weights_yet() -> None:
    """It begins while others are given theirs, and another step takes it in."""
    asked, loaded, strangers, begun = set[str](), set[str](), set[str](), asyncio.Event()

    def server(name: str, wait: Callable[[], Any]) -> Any:
        async def load(versions: Mapping[str, int], ref: Any) -> None:
            asked.add(name)
            await wait()
            loaded.add(name)

        async def live() -> None:
            await asyncio.Event().wait()

        return actor(load=load, live=live)

    async def use_servers(actors: Mapping[str, Any]) -> None:
        strangers.update({*actors} - loaded)

    async def machine() -> Any:
        return SimpleNamespace(host="here")

    first = ready("server-0", server("server-0", begun.wait), serves=0, is_server=True)
    late = ClusterWorker(
        name="server-1",
        actor=server("server-1", lambda: asyncio.sleep(0.05)),
        starting=None,
        is_server=True,
    )
    player = ready("worker-0", actor(use_servers=use_servers), serves=0)
    pool = pool_of(first, player, model_servers=2)
    one_step = asyncio.ensure_future(pool.settle_starts())
    await until(lambda: "server-0" in asked)
    late.starting = asyncio.ensure_future(machine())
    await late.starting
    pool.members.append(late)
    another_step = asyncio.ensure_future(pool.settle_starts())
    await until(lambda: late.starting is None)
    begun.set()
    await asyncio.gather(one_step, another_step)
    assert loaded == {"server-0", "server-1"} == {*player.knows}
    assert not strangers


async def test_after_weights_that_no_store_had_room_for_a_worker_that_begins_gets_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step that sent them has failed; another goes on."""
    loads = list[Any]()

    async def load(versions: Mapping[str, int], ref: Any) -> None:
        loads.append(ref)

    def refuse(pool: Pool, block: Any) -> Any:
        raise ClusterError("full")

    pool = pool_of(ready("worker-0", actor(load=load), serves=1))
    publish(pool)
    monkeypatch.setattr(Pool, "_put", refuse)
    with pytest.raises(ClusterError, match="full"):
        await pool.refresh_weights()
    pool.members.append(ready("worker-1", actor(load=load), serves=0))
    with pytest.raises(ClusterError, match="full"):
        await pool.settle_starts()
    monkeypatch.setattr(Pool, "_put", lambda pool, block: "the next weights")
    await pool.settle_starts()
    assert loads == ["the next weights"] * 2
    assert {each.serves for each in pool.members} == {2}


async def test_a_lease_that_no_worker_has_yet_is_sent_to_none_once_its_caller_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker may be late, and play another step."""
    monkeypatch.setattr("rllm.integrations.ray.pool.ray", _no_cluster())
    monkeypatch.setattr("rllm.integrations.ray.engine.STOP_S", 0.3)
    monkeypatch.setattr(Pool, "refill", lambda pool: None)
    free, played = asyncio.Event(), list[int]()

    async def num_turns() -> int:
        await free.wait()
        return 0

    async def play(number: int, *lease: Any) -> Any:
        played.append(number)
        await asyncio.Event().wait()

    async def stop(number: int) -> None:
        """It has no such lease."""

    worker = ready("worker-0", actor(num_turns=num_turns, play=play, stop=stop), serves=1)
    pool = pool_of(worker)
    engine = RayEngine(pool, lambda group_size: 4)
    caller = asyncio.ensure_future(anext(engine.run([{"task_id": "a"}])))
    await until(lambda: worker.num_leases == 1)
    caller.cancel()
    await asyncio.sleep(0.01)
    free.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert not played
    assert pool.members == [worker]
    assert worker.num_leases == 0
    engine.counts.check()


async def test_a_worker_is_busy_while_it_has_a_lease_however_many_it_has_and_until_when(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, ended = 0.0, dict[str, asyncio.Event]()
    clock = SimpleNamespace(perf_counter=lambda: now_s, monotonic=lambda: now_s)
    for module in ("engine", "pool"):
        monkeypatch.setattr(f"rllm.integrations.ray.{module}.time", clock)
    monkeypatch.setattr(Pool, "refill", lambda pool: None)

    async def num_turns() -> int:
        return 0

    async def play(number: int, tasks: list[Any], call: Any) -> PlayedLease:
        began_s, task_id = now_s, tasks[0]["task_id"]
        ended[task_id] = asyncio.Event()
        await ended[task_id].wait()
        row, _ = encode_episode(Episode(task_id=task_id, outcome=Outcome.SCORED))
        counts = EpisodeCounts(by_outcome={Outcome.SCORED: 1})
        return PlayedLease(episodes=[(tuple(row), [])], counts=counts, busy_s=now_s - began_s, num_tokens=10)

    engine = RayEngine(
        pool_of(ready("worker-0", actor(num_turns=num_turns, play=play), serves=1)), lambda group_size: 4
    )

    def step(task_id: str) -> "asyncio.Future[Episode]":
        return asyncio.ensure_future(anext(engine.run([{"task_id": task_id}])))

    steps = [step("a"), step("b")]
    await until(lambda: len(ended) == 2)
    now_s = 10.0
    for task_id in "ab":
        ended[task_id].set()
    await asyncio.gather(*steps)
    now_s = 20.0
    assert engine.metrics()["cluster.worker-0.idle_share"] == 0.5
    slow = step("c")
    await until(lambda: "c" in ended)
    now_s = 30.0
    assert engine.metrics()["cluster.worker-0.idle_share"] == 0.0
    now_s = 40.0
    assert engine.metrics()["cluster.worker-0.idle_share"] == 0.0
    ended["c"].set()
    await slow


async def test_what_the_trainer_waits_for_goes_out_before_the_steps_that_are_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A further round of the step that is learned from next, and an evaluation, when a place is free."""
    monkeypatch.setattr(Pool, "refill", lambda pool: None)
    begun, may_end = list[str](), dict[str, asyncio.Event]()

    async def num_turns() -> int:
        return 0

    async def play(number: int, tasks: list[Any], call: Any) -> PlayedLease:
        task_id = tasks[0]["task_id"]
        begun.append(task_id)
        await may_end.setdefault(task_id, asyncio.Event()).wait()
        row, _ = encode_episode(Episode(task_id=task_id, outcome=Outcome.SCORED))
        counts = EpisodeCounts(by_outcome={Outcome.SCORED: 1})
        return PlayedLease(episodes=[(tuple(row), [])], counts=counts, busy_s=1.0, num_tokens=10)

    worker = ready("worker-0", actor(num_turns=num_turns, play=play), serves=1)
    engine = RayEngine(pool_of(worker), lambda group_size: 1)

    async def episodes(purpose: str, *task_ids: str) -> list[str]:
        run = engine.run([{"task_id": each} for each in task_ids], purpose=purpose)
        return [each.task_id async for each in run]

    runs = [asyncio.ensure_future(episodes("train/5", "a", "b", "c", "d"))]
    await until(lambda: begun == ["a", "b"])  # as many as the worker has places
    for purpose, task_id in (("train/4", "round"), ("validation", "evaluation")):
        runs.append(asyncio.ensure_future(episodes(purpose, task_id)))
        await asyncio.sleep(0.01)
    for task_id in "ab":
        may_end.setdefault(task_id, asyncio.Event()).set()
        await until(lambda: len(begun) > 2 + "ab".index(task_id))  # noqa: B023
    for task_id in ("evaluation", "round", "c", "d"):
        may_end.setdefault(task_id, asyncio.Event()).set()
    assert await asyncio.gather(*runs) == [["a", "b", "c", "d"], ["round"], ["evaluation"]]
    assert begun == ["a", "b", "evaluation", "round", "c", "d"]
    engine.counts.check()


def _no_cluster() -> Any:
    return SimpleNamespace(kill=lambda its_actor, no_restart: None, nodes=list)
