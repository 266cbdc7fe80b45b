import json
import shutil
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from rllm.agents.frozenlake import FrozenLakeAgent
from rllm.build.demonstrations import (
    RoleTurns,
    demonstration_samples,
    play_demonstration,
    require_answers_fit,
    role_demonstration_samples,
)
from rllm.distributed import ALONE, RankGroup
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.environments.frozenlake import FrozenLakeEnv, demonstration, lake_tasks
from rllm.errors import ConfigError
from rllm.inference.scripted import ScriptedClient
from rllm.models.builtin import END_OF_TURN
from rllm.models.directory import LoadedModel, load_model
from rllm.rendering.chat import ChatRenderer
from rllm.trainer.policies import answer_end
from rllm.types.messages import Message
from rllm.types.sample import TrainingSample


def _demonstrate(task: dict[str, Any], noise: float, rng: np.random.Generator) -> list[tuple[str, str]]:
    return demonstration(task, noise=noise, rng=rng)


@pytest.fixture
def renderer(tiny: LoadedModel) -> ChatRenderer:
    return ChatRenderer(tiny.tokenizer)


def _samples(tiny: LoadedModel, renderer: ChatRenderer, count: int = 12, **how: Any) -> list[TrainingSample]:
    return demonstration_samples(
        lake_tasks("train", count),
        _demonstrate,
        FrozenLakeAgent,
        renderer,
        tiny.end_token_ids[0],
        **{"noise": 0.3, "key": (0, "warm_start", 0), "num_experts": 1, **how},
    )


def _answers(sample: TrainingSample) -> list[list[int]]:
    """Runs of labels, one for each answer."""
    answers: list[list[int]] = []
    for place in np.flatnonzero(sample.trainable_T).tolist():
        if not sample.trainable_T[place - 1]:
            answers.append([])
        answers[-1].append(int(sample.token_ids_T[place]))
    return answers


def test_the_labels_are_the_expert_words_each_with_its_terminator(
    tiny: LoadedModel, renderer: ChatRenderer
) -> None:
    (end,) = tiny.end_token_ids
    for sample, task in zip(_samples(tiny, renderer), lake_tasks("train", 12), strict=True):
        answers = _answers(sample)
        assert all(answer[-1] == end and end not in answer[:-1] and len(answer) > 1 for answer in answers)
        words = [tiny.tokenizer.decode(answer[:-1]) for answer in answers]
        env = FrozenLakeEnv.from_dict(task)
        env.reset(0)
        endings = [env.step(word)[2] for word in words]
        assert endings == [False] * (len(words) - 1) + [True]
        assert sample.order_key[0] == task["task_id"]


def test_experts_side_by_side_demonstrate_what_one_does(tiny: LoadedModel, renderer: ChatRenderer) -> None:
    one, four = (_samples(tiny, renderer, num_experts=num_experts) for num_experts in (1, 4))
    assert [each.order_key for each in one] == [each.order_key for each in four]
    for alone, beside in zip(one, four, strict=True):
        assert np.array_equal(alone.token_ids_T, beside.token_ids_T)


def test_ranks_share_the_demonstrations_and_get_the_rows_of_one_process(
    tiny: LoadedModel, renderer: ChatRenderer, on_two_ranks: Callable[..., list[Any]]
) -> None:
    agents: list[FrozenLakeAgent] = []

    def make_agent() -> FrozenLakeAgent:
        agents.append(FrozenLakeAgent())
        return agents[-1]

    def rows(ranks: RankGroup) -> list[TrainingSample]:
        return demonstration_samples(
            lake_tasks("train", 7),
            _demonstrate,
            make_agent,
            renderer,
            tiny.end_token_ids[0],
            noise=0.3,
            key=(0, "warm_start", 0),
            num_experts=1,
            ranks=ranks,
        )

    alone = rows(ALONE)
    for of_rank in on_two_ranks(rows):
        assert [repr(each) for each in of_rank] == [repr(each) for each in alone]
    assert len(agents) == 7 + 7


def test_ranks_share_the_conversations_of_all_roles(
    tiny: LoadedModel, renderer: ChatRenderer, on_two_ranks: Callable[..., list[Any]]
) -> None:
    def both_roles(task: dict[str, Any], noise: float, rng: np.random.Generator) -> list[RoleTurns]:
        answer = str(rng.integers(1000))
        question: Message = {"role": "user", "content": task["task_id"]}
        return [(role, [([question], f"{role} {answer}")]) for role in ("solver", "judge")]

    def rows(ranks: RankGroup) -> list[TrainingSample]:
        return role_demonstration_samples(
            lake_tasks("train", 5),
            both_roles,
            lambda role: (renderer, tiny.end_token_ids[0]),
            noise=0.0,
            key=(0, "warm_start", 0),
            ranks=ranks,
        )

    alone = rows(ALONE)
    assert [each.group_key[1] for each in alone] == ["solver", "judge"] * 5
    for of_rank in on_two_ranks(rows):
        assert [repr(each) for each in of_rank] == [repr(each) for each in alone]


def test_an_expert_whose_answers_the_policy_could_not_finish_is_refused(
    tiny: LoadedModel, renderer: ChatRenderer
) -> None:
    samples = _samples(tiny, renderer)
    longest = max(len(answer) for sample in samples for answer in _answers(sample))
    assert require_answers_fit(samples, lambda role: longest) == samples
    assert require_answers_fit(samples, lambda role: 0) == samples
    with pytest.raises(ConfigError, match=rf"{longest} tokens.*`rollout.max_tokens_per_turn`.*{longest} or"):
        require_answers_fit(samples, lambda role: longest - 1)


def test_a_demonstration_is_the_conversation_as_the_template_writes_it(
    tiny: LoadedModel, renderer: ChatRenderer
) -> None:
    """No second terminator, nothing between: the ids are those of the rendered messages."""
    task = lake_tasks("train", 1)[0]
    turns = _demonstrate(task, 0.0, np.random.default_rng(0))
    agent = play_demonstration(turns, FrozenLakeAgent(), renderer, tiny.end_token_ids[0])
    for step in agent.trajectory.steps:
        assert step.prompt_ids == renderer.render(step.chat_completions[:-1])
    last = agent.trajectory.steps[-1]
    again = renderer.render([*last.chat_completions, {"role": "user", "content": "x"}])
    assert again[: len(last.prompt_ids + last.response_ids)] == last.prompt_ids + last.response_ids


async def test_prompts_are_those_of_a_rollout_that_answers_the_same(
    tiny: LoadedModel, renderer: ChatRenderer
) -> None:
    tasks = lake_tasks("train", 8)
    shown = {
        task["task_id"]: _demonstrate(task, 0.3, np.random.default_rng(index))
        for index, task in enumerate(tasks)
    }
    for task in tasks:
        turns = shown[task["task_id"]]
        client = ScriptedClient([answer for _, answer in turns], tokenizer=tiny.tokenizer)
        engine = AgentExecutionEngine(FrozenLakeAgent, FrozenLakeEnv, rollout_engine=client, max_steps=8)
        async with aclosing(engine.run([task])) as running:
            (episode,) = [each async for each in running]
        agent = play_demonstration(turns, FrozenLakeAgent(), renderer, tiny.end_token_ids[0])
        played, told = episode.trajectories[0].steps, agent.trajectory.steps
        assert [step.chat_completions for step in played] == [step.chat_completions for step in told]
        assert played[0].prompt_ids == told[0].prompt_ids
        # The script ends its answers with a token of its own; everything else is the same.
        for mine, theirs in zip(played, told, strict=True):
            assert mine.response_ids[:-1] == theirs.response_ids[:-1]


def test_every_row_can_be_learned_from_and_one_task_is_one_row(
    tiny: LoadedModel, renderer: ChatRenderer
) -> None:
    samples = _samples(tiny, renderer)
    assert len(samples) == 12
    for sample in samples:
        assert sample.num_trainable > 0
        assert (sample.policy_versions_T[sample.trainable_T] == 0).all()
        assert (sample.advantages_T[sample.trainable_T] == 1.0).all()


def test_noise_and_ties_follow_from_the_key(tiny: LoadedModel, renderer: ChatRenderer) -> None:
    def ids(**how: Any) -> list[list[int]]:
        return [sample.token_ids_T.tolist() for sample in _samples(tiny, renderer, **how)]

    assert ids() == ids()
    assert ids() != ids(key=(0, "warm_start", 1))
    assert ids() != ids(noise=1.0)


def test_a_beginning_that_template_and_tokenizer_both_write_is_there_once(
    tiny: LoadedModel, tiny_directory: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_directory, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    begin, begin_id = "<|endoftext|>", tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, begin_id)])
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    settings_path = tmp_path / "model" / "tokenizer_config.json"
    settings = json.loads(settings_path.read_text())
    settings |= {
        "chat_template": begin + settings["chat_template"],
        "bos_token": begin,
        "add_bos_token": True,
    }
    settings_path.write_text(json.dumps(settings))
    loaded = load_model(tmp_path / "model")
    plain = _samples(tiny, ChatRenderer(tiny.tokenizer))
    for sample, without in zip(_samples(loaded, ChatRenderer(loaded.tokenizer)), plain, strict=True):
        assert sample.token_ids_T.tolist() == [begin_id, *without.token_ids_T.tolist()]


@pytest.mark.parametrize(
    "listed", [["<|endoftext|>", END_OF_TURN], [END_OF_TURN, "<|endoftext|>"], "<|endoftext|>"]
)
def test_of_several_end_tokens_the_one_the_template_writes_is_learned(
    tiny_directory: Path, tmp_path: Path, listed: list[str] | str
) -> None:
    shutil.copytree(tiny_directory, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    ids = (
        [tokenizer.token_to_id(each) for each in listed]
        if isinstance(listed, list)
        else tokenizer.token_to_id(listed)
    )
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    loaded = load_model(tmp_path / "model")
    assert len(loaded.end_token_ids) == 2
    end = answer_end(ChatRenderer(loaded.tokenizer), loaded.end_token_ids)
    assert loaded.tokenizer.token_text(end) == END_OF_TURN


def test_a_template_that_closes_answers_with_no_end_token_leaves_the_first_one(
    renderer: ChatRenderer,
) -> None:
    assert answer_end(renderer, (0,)) == 0
