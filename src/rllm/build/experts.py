"""The expert of a warm start, as a run has it: rows that policies learn from, and its play.

demonstrate(task, noise, generator) ──► Expert.demonstrations ──► token rows
                                    ──► Expert.play ──► its success in the environment of the run
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rllm.agents.conversation import ConversationAgent
from rllm.build.agent_player import AgentPlayer
from rllm.build.demonstrations import (
    Demonstrate,
    DemonstrateRoles,
    demonstration_samples,
    require_answers_fit,
    role_demonstration_samples,
)
from rllm.config.schema import TrainConfig
from rllm.distributed import ALONE, RankGroup
from rllm.environments.world import World
from rllm.eval.evaluate import EvaluationReport, evaluate
from rllm.inference.scripted import ScriptedClient, ScriptedSession, message_text
from rllm.trainer.imitation import PlayExpert
from rllm.trainer.run import Expert
from rllm.types.draws import draw_seed
from rllm.types.task import Task, row_of, task_id_of

if TYPE_CHECKING:
    from rllm.trainer.learning import Demonstrations
    from rllm.trainer.policies import Policies

NUM_WAITING_EXPERTS = 8
"""Experts that wait for another process and demonstrate at the same time."""


def agent_expert(
    config: TrainConfig,
    demonstrate: Demonstrate,
    player: AgentPlayer | None = None,
    world: World | None = None,
) -> Expert:
    """An expert in the place of the one policy, in the conversations of the agent of `player`, or in plain
    ones."""
    make_agent = ConversationAgent if player is None else player.make_agent
    num_experts = NUM_WAITING_EXPERTS if world is not None and world.expert_waits else 1

    def demonstrations(policies: "Policies", ranks: RankGroup) -> "Demonstrations":
        (policy,) = policies.values()
        return lambda tasks, key: require_answers_fit(
            demonstration_samples(
                tasks,
                demonstrate,
                make_agent,
                policy.renderer,
                policy.end_token_id,
                noise=config.warm_start.noise,
                key=key,
                num_experts=num_experts,
                ranks=_sharing(policies, ranks),
            ),
            config.max_tokens_of,
        )

    play = None if player is None else expert_player(config, demonstrate, player)
    return Expert(demonstrations=demonstrations, play=play)


def role_expert(config: TrainConfig, demonstrate: DemonstrateRoles) -> Expert:
    """An expert in the places of all roles of a workflow."""

    def demonstrations(policies: "Policies", ranks: RankGroup) -> "Demonstrations":
        return lambda tasks, key: require_answers_fit(
            role_demonstration_samples(
                tasks,
                demonstrate,
                policies.voice_of,
                noise=config.warm_start.noise,
                key=key,
                ranks=_sharing(policies, ranks),
            ),
            config.max_tokens_of,
        )

    return Expert(demonstrations=demonstrations)


def _sharing(policies: "Policies", ranks: RankGroup) -> RankGroup:
    """Rows with images come with bytes that each process keeps for itself, so each makes all of them."""
    return ALONE if any(each.renderer.tokenizer.images for each in policies.values()) else ranks


class ExpertClient(ScriptedClient):
    """Gives the answers of one demonstration of each task, as a model would; the last one again where the
    environment goes on."""

    def __init__(self, answers: Mapping[str, list[str]], max_turns: int) -> None:
        super().__init__([])
        self._answers = answers
        self._max_turns = max_turns

    def session(self, order: tuple[str, int]) -> ScriptedSession:
        answers = self._answers[order[0]]
        return ScriptedClient([*answers, *answers[-1:] * self._max_turns]).session(order)


def expert_player(config: TrainConfig, demonstrate: Demonstrate, player: AgentPlayer) -> PlayExpert:
    """Plays the expert of the warm start in the environment that the run trains in."""

    async def play(tasks: Sequence[Any]) -> EvaluationReport:
        answers = {
            task_id_of(task, position): _answers(config, demonstrate, task, position)
            for position, task in enumerate(tasks)
        }
        tasks_with_answers = [
            task for position, task in enumerate(tasks) if answers[task_id_of(task, position)]
        ]
        client = ExpertClient(answers, config.rollout.max_turns)
        report, _ = await evaluate(player.engine(config, client), tasks_with_answers, None, "expert")
        return report

    return play


def _answers(
    config: TrainConfig, demonstrate: Demonstrate, task: Task | Mapping[str, Any], position: int
) -> list[str]:
    rng = np.random.default_rng(draw_seed(config.seed, "expert", position))
    row = row_of(task)
    answers = [answer for _, answer in demonstrate(row, config.warm_start.noise, rng)]
    return [answer if isinstance(answer, str) else message_text(answer) for answer in answers]
