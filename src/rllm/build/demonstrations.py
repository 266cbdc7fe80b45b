"""Demonstrations ──► token rows: what an expert answered, in the very conversations that the agent will have.

The agent class itself plays each demonstration with the expert's answers, so prompts, template and history
are those of the rollouts to come. The labels are the tokens the model would have had to sample, end token
included. Of several ranks each makes the rows of its share of the tasks, and all of them get every row.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import numpy as np

from rllm.agents.base import BaseAgent
from rllm.distributed import ALONE, RankGroup
from rllm.errors import ConfigError
from rllm.inference.reading import as_it_may_come_back, parsed_text, read_into
from rllm.rendering.chat import ChatRenderer, Conversation
from rllm.rendering.writing import AnswerWriter
from rllm.trainer.samples import trajectory_rows
from rllm.types.draws import draw_seed
from rllm.types.episode import Step, Trajectory
from rllm.types.messages import Message, ModelOutput
from rllm.types.sample import TrainingSample
from rllm.types.task import Task, row_of, task_id_of

Turns = Sequence[tuple[Any, str | Message]]
"""(observation, answer) turn by turn; an answer is text, or an assistant message that makes calls."""
Demonstrate = Callable[[dict[str, Any], float, np.random.Generator], Turns]
"""(task, noise, generator) -> what the expert saw and said."""
RoleTurns = tuple[str, Sequence[tuple[Sequence[Message], str]]]
"""One conversation of a workflow: its role; turn by turn, all messages before an answer, and it."""
DemonstrateRoles = Callable[[dict[str, Any], float, np.random.Generator], Sequence[RoleTurns]]
"""(task, noise, generator) -> the conversations of one attempt at it."""

DEMONSTRATED = 0
"""Policy version of demonstrated tokens: they are to be learned, as if the policy had sampled them before any
update."""


def demonstration_samples(
    tasks: Sequence[Task | Mapping[str, Any]],
    demonstrate: Demonstrate,
    make_agent: Callable[[], BaseAgent],
    renderer: ChatRenderer,
    end_token_id: int,
    *,
    noise: float,
    key: tuple[str | int, ...],
    num_experts: int,
    ranks: RankGroup = ALONE,
) -> list[TrainingSample]:
    """Rows of one demonstration of each task; `key` seeds the expert's ties and noise. `num_experts`
    demonstrate at the same time, each in a thread. All `ranks` have to be here."""

    def turns_at(position: int) -> Turns:
        task, rng = tasks[position], np.random.default_rng(draw_seed(*key, position, "demonstration"))
        return demonstrate(row_of(task), noise, rng)

    positions = ranks.share(range(len(tasks)))
    if num_experts == 1:
        demonstrations = [turns_at(position) for position in positions]
    else:
        with ThreadPoolExecutor(num_experts) as threads:
            demonstrations = list(threads.map(turns_at, positions))
    samples: list[TrainingSample] = []
    for position, turns in zip(positions, demonstrations, strict=True):
        agent = play_demonstration(turns, make_agent(), renderer, end_token_id)
        task_id = task_id_of(tasks[position], position)
        samples.extend(trajectory_rows(agent.trajectory, task_id, position, 0, 1.0))
    return _of_all_ranks(samples, ranks)


def _of_all_ranks(samples: list[TrainingSample], ranks: RankGroup) -> list[TrainingSample]:
    """The rows of every rank, task by task; a row's attempt is the position of its task."""
    return sorted(chain.from_iterable(ranks.gather(samples)), key=lambda each: each.order_key[1])


def require_answers_fit(
    samples: Sequence[TrainingSample], limit_of: Callable[[str], int]
) -> list[TrainingSample]:
    """The samples, each of whose answers the policy of its role could sample.

    `limit_of`: role -> tokens that an answer may have, its end token included; 0 is no limit. Raises
    ConfigError for a longer one: reinforcement would never see the end of what was imitated, so nothing of it
    could be paid.
    """
    for sample in samples:
        limit, length = limit_of(sample.group_key[1]), _longest_answer(sample)
        if limit and length > limit:
            raise ConfigError(
                f"The expert answers task `{sample.group_key[0]}` with {length} tokens, and "
                f"`rollout.max_tokens_per_turn` allows {limit}; set it to {length} or more."
            )
    return list(samples)


def _longest_answer(sample: TrainingSample) -> int:
    """Tokens of the longest run of labels."""
    edges_E = np.flatnonzero(np.diff(sample.trainable_T.astype(np.int8), prepend=0, append=0))
    return int((edges_E[1::2] - edges_E[::2]).max(initial=0))


def role_demonstration_samples(
    tasks: Sequence[Task | Mapping[str, Any]],
    demonstrate: DemonstrateRoles,
    voice_of: Callable[[str], tuple[ChatRenderer, int]],
    *,
    noise: float,
    key: tuple[str | int, ...],
    ranks: RankGroup = ALONE,
) -> list[TrainingSample]:
    """Rows of one demonstration of each task by all roles of a workflow.

    `voice_of`: role -> the renderer of its policy, and the token that ends its answers. All `ranks` have to
    be here.
    """
    samples: list[TrainingSample] = []
    for position in ranks.share(range(len(tasks))):
        task = tasks[position]
        rng = np.random.default_rng(draw_seed(*key, position, "demonstration"))
        row = row_of(task)
        for index, (role, turns) in enumerate(demonstrate(row, noise, rng)):
            steps = _role_steps(turns, *voice_of(role))
            trajectory = Trajectory(name=role, steps=steps)
            samples.extend(trajectory_rows(trajectory, task_id_of(task, position), position, index, 1.0))
    return _of_all_ranks(samples, ranks)


def _role_steps(
    turns: Sequence[tuple[Sequence[Message], str]], renderer: ChatRenderer, end_token_id: int
) -> list[Step]:
    conversation = Conversation(renderer=renderer)
    steps: list[Step] = []
    for messages, answer in turns:
        step = Step(prompt_ids=conversation.prompt(messages), model_response=answer)
        _say(step, answer, conversation, renderer, end_token_id)
        steps.append(step)
    return steps


def _say(
    step: Step, answer: str, conversation: Conversation, renderer: ChatRenderer, end_token_id: int
) -> None:
    """Make `answer` what the policy would have sampled."""
    completion_ids = [*renderer.tokenizer.encode(answer), end_token_id]
    conversation.record(completion_ids, answer)
    _mark_as_sampled(step, completion_ids)


def _mark_as_sampled(step: Step, completion_ids: list[int]) -> None:
    step.response_ids = completion_ids
    step.logprobs = [0.0] * len(completion_ids)
    step.policy_versions = [DEMONSTRATED] * len(completion_ids)


def play_demonstration(
    turns: Turns, agent: BaseAgent, renderer: ChatRenderer, end_token_id: int
) -> BaseAgent:
    """The agent after it "said" every answer; its steps carry the ids that a policy would have read and
    written, calls in the form of the model's own chat template."""
    conversation = Conversation(renderer=renderer)
    writer = AnswerWriter(renderer, (end_token_id,), end_token_id)
    for observation, answer in turns:
        agent.update_from_env(observation, 0.0, False, {})
        messages, tools = agent.chat_completions, agent.tool_schemas
        prompt_ids = conversation.prompt(messages, tools)
        if isinstance(answer, str):
            completion_ids = [*renderer.tokenizer.encode(answer), end_token_id]
        else:
            completion_ids = writer.ids(messages, answer, tools)
            answer = renderer.tokenizer.decode(completion_ids)
        output = ModelOutput(text=answer, content=answer)
        if tools:
            read_into(output, parsed_text(answer, renderer, tools))
        agent.update_from_model(answer, **({"output": output} if tools else {}))
        conversation.record(completion_ids, *as_it_may_come_back(output))
        step = agent.trajectory.steps[-1]
        step.prompt_ids = prompt_ids
        _mark_as_sampled(step, completion_ids)
    return agent
