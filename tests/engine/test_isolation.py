"""A hundred rollouts at once, each with a secret of its own: nobody meets another one's.

100 tasks ──► every call waits until all 100 are asked, then answers in another order each time
    └──► what agents, environments and the model saw, what episodes hold: one secret each, no shared list
"""

import asyncio
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields, is_dataclass
from typing import Any

from rllm.agents.conversation import ConversationAgent
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.environments.base import BaseEnv
from rllm.inference.scripted import ScriptedAnswer, ScriptedClient
from rllm.types.draws import draw_seed
from rllm.types.episode import Action, Episode, Outcome
from rllm.types.messages import Message

ROLLOUTS, TURNS = 100, 4


class Together:
    """Lets callers go on when all are there, in an order that each round draws anew."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.rounds = 0
        self._here: list[tuple[int, asyncio.Future[None]]] = []

    async def wait(self, secret: str) -> None:
        future = asyncio.get_running_loop().create_future()
        self._here.append((draw_seed(self.rounds, secret), future))
        if len(self._here) == self.number:
            self.rounds += 1
            everybody, self._here = sorted(self._here, key=lambda each: each[0]), []
            for _, each in everybody:
                each.set_result(None)
        await future


def secrets_in(value: Any) -> set[str]:
    """Every secret in the text of `value`."""
    return {
        word for word in repr(value).replace("'", " ").replace("\\n", " ").split() if word[:7] == "secret-"
    }


class SecretAgent(ConversationAgent):
    """Remembers everything it meets in what it was given: `notes` are an argument of all agents alike."""

    made: "list[SecretAgent]"

    def __init__(self, notes: dict[str, list[Any]]) -> None:
        super().__init__()
        self.notes = notes
        self.made.append(self)

    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        self.notes["seen"].append(observation)
        info["read by"] = self.notes["seen"]
        super().update_from_env(observation, reward, done, info)

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        self.notes["said"].append(response)
        return super().update_from_model(response)


class SecretEnv(BaseEnv):
    """Writes into its task, and into the settings that all environments get alike."""

    made: "list[SecretEnv]"

    def __init__(self, info: dict[str, Any]) -> None:
        self.info = info
        self.turn = 0
        self.seeds: list[int | None] = []
        self.actions: list[Any] = []
        self.made.append(self)

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.seeds.append(seed)
        self.info["deep"]["list"].append(self.info["secret"])
        self.info["settings"]["seen"].append(self.info["secret"])
        return self._observation(), {}

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        self.turn += 1
        self.actions.append(action)
        self.info["deep"]["list"].append(action)
        return self._observation(), float(self.turn), self.turn == TURNS, {"secret": self.info["secret"]}

    def _observation(self) -> str:
        return f"{self.info['secret']} turn {self.turn}"

    @staticmethod
    def from_dict(info: dict[str, Any]) -> BaseEnv:
        return SecretEnv(info)


def containers_of(value: Any, found: dict[int, Any] | None = None) -> dict[int, Any]:
    """Everything that can be changed in an episode, by its identity."""
    found = {} if found is None else found
    if id(value) in found or isinstance(value, str | int | float | bool | None):
        return found
    if isinstance(value, Mapping):
        found[id(value)] = value
        for each in value.values():
            containers_of(each, found)
    elif isinstance(value, list | set | tuple):
        if not isinstance(value, tuple):
            found[id(value)] = value
        for each in value:
            containers_of(each, found)
    elif is_dataclass(value):
        found[id(value)] = value
        for field in fields(value):
            containers_of(getattr(value, field.name), found)
    return found


async def play() -> tuple[
    list[Episode], ScriptedClient, list[dict[str, Any]], dict[str, Any], dict[str, Any]
]:
    together = Together(ROLLOUTS)

    def answer(messages: Sequence[Message]) -> ScriptedAnswer:
        (secret,) = secrets_in(messages)
        return ScriptedAnswer(
            text=f"{secret} answers {len(messages)}", wait_for=lambda: together.wait(secret)
        )

    client = ScriptedClient(answer)
    notes: dict[str, Any] = {"notes": {"seen": [], "said": []}}
    settings: dict[str, Any] = {"settings": {"seen": []}}
    engine = AgentExecutionEngine(
        SecretAgent,
        SecretEnv,
        notes,
        settings,
        rollout_engine=client,
        n_parallel_agents=ROLLOUTS,
        max_steps=TURNS,
    )
    tasks = [
        {"task_id": f"t{index}", "secret": f"secret-{index:03}", "deep": {"list": []}}
        for index in range(ROLLOUTS // 2)
    ]
    async with asyncio.timeout(60.0), aclosing(engine.run(tasks, group_size=2)) as running:
        episodes = [episode async for episode in running]
    assert together.rounds == TURNS, "all of them were in the same turn at the same time, every time"
    return episodes, client, tasks, notes, settings


async def test_a_hundred_interleaved_rollouts_share_nothing() -> None:
    SecretAgent.made, SecretEnv.made = [], []
    environment_before = dict(os.environ)
    episodes, client, tasks, notes, settings = await play()

    assert len(episodes) == len(SecretAgent.made) == len(SecretEnv.made) == ROLLOUTS
    assert len({id(each) for each in (*SecretAgent.made, *SecretEnv.made)}) == 2 * ROLLOUTS
    # Everybody met one secret: their own, in as many messages as they had turns.
    for agent in SecretAgent.made:
        assert len(secrets_in(agent.notes)) == 1
        assert len(agent.notes["said"]) == TURNS
    for env in SecretEnv.made:
        assert secrets_in((env.info, env.actions)) == {env.info["secret"]}
        assert len(env.info["deep"]["list"]) == 1 + TURNS
        assert env.info["settings"]["seen"] == [env.info["secret"]]
    for episode in episodes:
        assert episode.outcome is Outcome.SCORED
        assert secrets_in(episode) == {episode.task["secret"]}
    asked = Counter(next(iter(secrets_in(messages))) for messages in client.requests)
    assert set(asked.values()) == {2 * TURNS}
    # What was handed in is as it was.
    assert tasks == [
        {"task_id": f"t{index}", "secret": f"secret-{index:03}", "deep": {"list": []}}
        for index in range(ROLLOUTS // 2)
    ]
    assert notes == {"notes": {"seen": [], "said": []}}
    assert settings == {"settings": {"seen": []}}
    assert dict(os.environ) == environment_before


async def test_no_list_dict_or_record_belongs_to_two_episodes() -> None:
    SecretAgent.made, SecretEnv.made = [], []
    episodes, *_ = await play()
    owner: dict[int, str] = {}
    held = [containers_of(episode) for episode in episodes]
    for episode, containers in zip(episodes, held, strict=True):
        for identity, value in containers.items():
            other = owner.setdefault(identity, episode.id)
            assert other == episode.id, f"{other} and {episode.id} share {value!r}"
    assert set(owner.values()) == {episode.id for episode in episodes}


async def test_no_two_attempts_draw_alike() -> None:
    SecretAgent.made, SecretEnv.made = [], []
    _, client, *_ = await play()
    assert len({sampling.seed for sampling in client.samplings}) == ROLLOUTS * TURNS
    assert len({env.seeds[0] for env in SecretEnv.made}) == ROLLOUTS
    assert all(len(env.seeds) == 1 for env in SecretEnv.made)
