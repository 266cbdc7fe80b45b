import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rllm.inference.scripted import ScriptedAnswer, ScriptedClient, ScriptedSession
from rllm.rendering.chat import ChatRenderer, Conversation, SegmentReason
from rllm.rendering.conversations import ConversationTree
from rllm.trainer.samples import trajectory_rows
from rllm.types.episode import Step, Trajectory
from rllm.types.messages import Message, SamplingParams
from rllm.types.sample import TrainingSample

Toy = Callable[..., Any]
Rewrite = Callable[[list[Message]], list[Message]]


def _adversarial_ids(rng: random.Random, tokenizer: Any) -> list[int]:
    """What a model may come up with: twins, split pieces, special tokens anywhere, no end, no word."""
    kind = rng.randrange(6)
    if kind == 0:
        return []
    if kind == 1:
        return [tokenizer.end_id]
    ids = [rng.randrange(tokenizer.num_ids) for _ in range(rng.randrange(1, 9))]
    if kind == 2:
        ids = tokenizer.encode("<think>abab</think>") + ids
    return ids if kind == 3 else [*ids, tokenizer.end_id]


def _script(rng: random.Random, tokenizer: Any, num_turns: int) -> list[ScriptedAnswer]:
    answers = [_adversarial_ids(rng, tokenizer) for _ in range(num_turns)]
    return [
        ScriptedAnswer(
            text=tokenizer.decode(ids),
            token_ids=ids,
            logprobs=[float(np.float32(-rng.random())) for _ in ids],
        )
        for ids in answers
    ]


async def _talk(
    tokenizer: Any, script: list[ScriptedAnswer], rng: random.Random, rewrite: Rewrite | None = None
) -> tuple[Trajectory, ScriptedSession]:
    client = ScriptedClient(script, tokenizer=tokenizer, policy_version=5)
    session = client.session(("task", 0))
    messages: list[Message] = [{"role": "user", "content": "ab start"}]
    if rng.random() < 0.5:
        messages.insert(0, {"role": "system", "content": "aba rules"})
    trajectory = Trajectory()
    for _ in script:
        output = await session.respond(messages, SamplingParams())
        step = Step(model_response=output.text)
        step.record_output(output)
        trajectory.steps.append(step)
        messages = [*messages, {"role": "assistant", "content": output.text}]
        for _ in range(rng.randrange(1, 3)):
            said = "".join(rng.choice(["ab", "a", "b", " ", "\n", "<|im_end|>"]) for _ in range(4))
            messages.append({"role": rng.choice(["user", "tool"]), "content": said})
        if rewrite is not None:
            messages = rewrite(messages)
    return trajectory, session


def _emitted(script: list[ScriptedAnswer]) -> tuple[list[int], list[float]]:
    return (
        [token for answer in script for token in answer.token_ids or []],
        [logprob for answer in script for logprob in answer.logprobs or []],
    )


def _trained(rows: list[TrainingSample]) -> tuple[list[int], list[float]]:
    return (
        [int(token) for row in rows for token in row.token_ids_T[row.trainable_T]],
        [float(logprob) for row in rows for logprob in row.logprobs_T[row.trainable_T]],
    )


@pytest.mark.parametrize("template", ["chatml", "llama", "mistral"])
async def test_the_ids_trained_on_are_the_ids_emitted_bit_for_bit_and_no_others(
    toy: Toy, template: str
) -> None:
    tokenizer = toy(template)
    for seed in range(200):
        rng = random.Random(f"{template} {seed}")
        script = _script(rng, tokenizer, rng.randrange(1, 7))
        trajectory, session = await _talk(tokenizer, script, rng)

        (row,) = trajectory_rows(trajectory, "task", 0, 0, 1.5)

        assert _trained([row]) == _emitted(script)
        last = trajectory.steps[-1]
        assert row.token_ids_T.tolist() == last.prompt_ids + last.response_ids == session.conversation.ids
        assert (row.advantages_T == np.where(row.trainable_T, 1.5, 0.0)).all()
        assert (row.logprobs_T[~row.trainable_T] == 0.0).all()
        assert (row.policy_versions_T == np.where(row.trainable_T, 5, -1)).all()
        assert session.conversation.num_segments == 1


async def test_every_prompt_begins_with_all_that_was_sent_and_sampled_before(toy: Toy) -> None:
    tokenizer = toy("chatml")
    rng = random.Random(7)
    trajectory, _ = await _talk(tokenizer, _script(rng, tokenizer, 12), rng)
    assert len(trajectory.steps) == 12
    for earlier, later in pairwise(trajectory.steps):
        known = earlier.prompt_ids + earlier.response_ids
        assert later.prompt_ids[: len(known)] == known


def _forget_the_oldest(messages: list[Message]) -> list[Message]:
    return messages[2:] if len(messages) > 5 else messages


def _tidy_answers(messages: list[Message]) -> list[Message]:
    return [
        {**message, "content": message["content"].strip() + "."}
        if message["role"] == "assistant"
        else message
        for message in messages
    ]


def _summarise(messages: list[Message]) -> list[Message]:
    return [{"role": "user", "content": f"summary of {len(messages)}"}]


@pytest.mark.parametrize("rewrite", [_forget_the_oldest, _tidy_answers, _summarise])
async def test_an_agent_that_rewrites_its_history_gets_more_segments_and_loses_no_sampled_token(
    toy: Toy, rewrite: Rewrite
) -> None:
    tokenizer = toy("chatml")
    for seed in range(100):
        rng = random.Random(seed)
        script = _script(rng, tokenizer, 6)
        trajectory, session = await _talk(tokenizer, script, rng, rewrite)

        rows = trajectory_rows(trajectory, "task", 0, 0, 1.0)

        assert 2 <= len(rows) <= session.conversation.num_segments
        assert session.conversation.segment_reason is SegmentReason.HISTORY_REWRITTEN
        # Each token with its own log-probability, once: an answer may go on from any earlier row.
        assert Counter(zip(*_trained(rows), strict=True)) == Counter(zip(*_emitted(script), strict=True))
        assert [row.order_key for row in rows] == [("task", 0, 0, index) for index in range(len(rows))]


async def test_a_template_that_strips_thoughts_gives_each_turn_its_own_segment_with_the_prompt_that_was_sent(
    toy: Toy,
) -> None:
    tokenizer = toy("thinking")
    renderer = ChatRenderer(tokenizer)
    conversation = Conversation(renderer=renderer)
    messages: list[Message] = [{"role": "user", "content": "go"}]
    trajectory = Trajectory()
    for turn in range(3):
        prompt_ids = conversation.prompt(messages)
        assert prompt_ids == renderer.render(messages)
        assert tokenizer.encode("<think>")[0] not in prompt_ids, "earlier thoughts were not sent"
        text = f"<think>ab{turn}</think>\nUp"
        ids = [*tokenizer.encode(text), tokenizer.end_id]
        conversation.record(ids, text)
        trajectory.steps.append(
            Step(
                prompt_ids=prompt_ids,
                response_ids=ids,
                logprobs=[-1.0] * len(ids),
                policy_versions=[0] * len(ids),
            )
        )
        messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "on"}]

    rows = trajectory_rows(trajectory, "task", 0, 0, 1.0)

    assert not renderer.incremental
    assert len(rows) == conversation.num_segments == 3
    assert conversation.segment_reason is SegmentReason.TEMPLATE_NOT_INCREMENTAL
    assert [row.token_ids_T[row.trainable_T].tolist() for row in rows] == [
        step.response_ids for step in trajectory.steps
    ]


def test_an_answer_that_was_cut_off_is_closed_by_a_token_that_nobody_trains_on(toy: Toy) -> None:
    tokenizer = toy("chatml")
    conversation = Conversation(renderer=ChatRenderer(tokenizer))
    said: list[Message] = [{"role": "user", "content": "a"}]
    for cut_off in (False, True):
        conversation.prompt(said)
        ids = tokenizer.encode("Up") + ([] if cut_off else [tokenizer.end_id])
        conversation.record(ids, "Up")
        said = [*said, {"role": "assistant", "content": "Up"}, {"role": "user", "content": "b"}]
    before = len(conversation.ids)
    assert conversation.prompt(said)[before] == tokenizer.end_id
    assert conversation.ids == ChatRenderer(tokenizer).render(said)


def test_the_end_token_that_a_model_wrote_is_not_repeated(toy: Toy) -> None:
    tokenizer = toy("chatml")
    conversation = Conversation(renderer=ChatRenderer(tokenizer))
    conversation.prompt([{"role": "user", "content": "a"}])
    conversation.record([tokenizer.end_id], "")
    ids = conversation.prompt(
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": "b"},
        ]
    )
    assert tokenizer.end_id not in [second for first, second in pairwise(ids) if first == tokenizer.end_id]


@pytest.mark.parametrize("text", ["Up", "Up\n"])  # a stop text ended it, or its length
def test_a_new_line_that_was_answered_does_not_stand_for_the_one_behind_answers(toy: Toy, text: str) -> None:
    tokenizer = toy(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    renderer, ids = ChatRenderer(tokenizer), tokenizer.encode("Up\n")
    first: Message = {"role": "user", "content": "a"}
    answer: Message = {"role": "assistant", "content": text}
    messages: list[Message] = [first, answer, {"role": "user", "content": "b"}]
    conversation = Conversation(renderer=renderer)
    conversation.prompt([first])
    conversation.record(ids, text)
    assert conversation.prompt(messages) == renderer.render(messages)
    tree = ConversationTree(renderer)
    tree.record(tree.begin([first]), ids, answer)
    turn = tree.begin(messages)
    assert turn.prompt_ids == renderer.render(messages)
    assert turn.num_kept > 0


def test_a_prompt_that_is_asked_for_again_after_a_failure_is_the_same_prompt(toy: Toy) -> None:
    tokenizer = toy("chatml")
    conversation = Conversation(renderer=ChatRenderer(tokenizer))
    first: list[Message] = [{"role": "user", "content": "a"}]
    conversation.prompt(first)
    sampled = tokenizer.encode("a") + tokenizer.encode("b")  # a whole rendering would say `ab` in one token
    conversation.record([*sampled, tokenizer.end_id], "ab")
    second = [*first, {"role": "assistant", "content": "ab"}, {"role": "user", "content": "b"}]
    asked = conversation.prompt(second)
    assert conversation.prompt(second) == asked
    assert conversation.num_segments == 1


def test_the_prompts_of_a_conversation_are_views_of_one_row_measured_before_or_not(toy: Toy) -> None:
    """A turn costs what is new in it, also in the thousandth."""
    conversation, messages = (
        Conversation(renderer=ChatRenderer(toy("chatml"))),
        [{"role": "user", "content": "0"}],
    )
    prompts: list[Any] = []
    for turn in range(6):
        if turn % 2:
            size = conversation.prompt_tokens(messages)
            assert size == conversation.prompt_tokens([*messages]) > len(conversation.ids)
        prompts.append(conversation.prompt(messages))
        assert not turn % 2 or len(prompts[-1]) == size
        conversation.record([7, 8], "go")
        messages = [*messages, {"role": "assistant", "content": "go"}, {"role": "user", "content": str(turn)}]
    assert all(prompts[0].shares_row_with(each) for each in prompts)
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(prompts))


def test_a_conversation_that_another_one_began_is_rendered_whole(toy: Toy) -> None:
    tokenizer = toy("chatml")
    renderer = ChatRenderer(tokenizer)
    conversation = Conversation(renderer=renderer)
    messages: list[Message] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "said by somebody else"},
        {"role": "user", "content": "b"},
    ]
    assert conversation.prompt(messages) == renderer.render(messages)
    assert conversation.segment_reason is SegmentReason.FIRST
