import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from rllm.errors import ConfigError
from rllm.rendering.chat import ChatRenderer, SegmentReason
from rllm.rendering.conversations import MAX_ALIKE, ConversationTree, Turn
from rllm.trainer.samples import trajectory_rows
from rllm.types.episode import Step, Trajectory
from rllm.types.messages import Message

Toy = Callable[..., Any]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "ab",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
    for name in ("move", "look")
]
USER: Message = {"role": "user", "content": "ab"}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tree(toy: Toy, template: str = "qwen", **options: Any) -> tuple[ConversationTree, Any]:
    tokenizer = toy(template)
    return ConversationTree(ChatRenderer(tokenizer), **options), tokenizer


def _answered(
    tree: ConversationTree, tokenizer: Any, messages: list[Message], said: Message, tools: Any = ()
) -> list[int]:
    """Ask and record; the ids of prompt and answer. The answer is spelled letter by letter."""
    turn = tree.begin(messages, tools)
    text = said["content"] or "call"
    ids = [token for letter in text for token in tokenizer.encode(letter)] + [tokenizer.end_id]
    tree.record(turn, ids, said)
    return turn.prompt_ids + ids


# ---- law 1 -----------------------------------------------------------------------------------------------


def _completion(rng: random.Random, tokenizer: Any, written: list[str]) -> list[int]:
    """What a model may come up with: calls, twins, split pieces, special tokens anywhere, no end, no word."""
    kind = rng.randrange(8)
    if kind == 0:
        return [] if rng.random() < 0.5 else [tokenizer.end_id]
    noise = [rng.randrange(tokenizer.num_ids) for _ in range(rng.randrange(1, 7))]
    ids = list(noise)
    if kind in (1, 2, 3, 4):
        ids = tokenizer.encode(rng.choice(written))
        ids = [token + tokenizer.num_ids // 2 * (rng.random() < 0.3) for token in ids]  # twins decode alike
        if kind == 2:
            ids = noise + ids
        if kind == 3:
            ids = tokenizer.encode("<think>ab\n</think>\n") + ids
        if kind == 4:
            ids = ids[: rng.randrange(len(ids))]
    return ids if rng.random() < 0.2 else [*ids, tokenizer.end_id]


def _as_client_gets_it(renderer: ChatRenderer, ids: list[int], rng: random.Random) -> Message:
    text = renderer.tokenizer.decode(ids)
    parsed = renderer.tool_format.parse(text) if renderer.tool_format else renderer.plain_format.parse(text)
    calls = getattr(parsed, "calls", [])
    message: Message = {"role": "assistant", "content": parsed.content or (None if calls else "")}
    if calls:
        message["tool_calls"] = [_call(f"call_{rng.random()}", call.name, call.arguments) for call in calls]
    return message


def _echoed(message: Message, rng: random.Random) -> Message:
    """The same message as some client sends it back."""
    echo: Message = json.loads(json.dumps(message))
    content = echo["content"]
    if not content:
        echo["content"] = rng.choice(["", None])
        if echo.get("tool_calls") and rng.random() < 0.3:
            del echo["content"]
    elif rng.random() < 0.3:
        half = len(content) // 2
        echo["content"] = [{"type": "text", "text": part} for part in (content[:half], content[half:])]
    for call in echo.get("tool_calls", []):
        try:
            arguments = json.loads(call["function"]["arguments"])
        except ValueError:
            continue
        if isinstance(arguments, dict) and rng.random() < 0.5:
            reordered = dict(sorted(arguments.items(), reverse=True))
            call["function"]["arguments"] = json.dumps(reordered, indent=rng.choice([None, 2]))
    if rng.random() < 0.3:
        echo |= {"refusal": None, "annotations": [], "provider_specific_fields": {"x": 1}}
    return echo


class _Talk:
    """One conversation of a session and the steps that came of it."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self.rng = rng
        self.messages: list[Message] = [{"role": "user", "content": f"ab {number}"}]
        if rng.random() < 0.5:
            self.messages.insert(0, {"role": "system", "content": "aba rules"})
        self.trajectory = Trajectory()
        self.emitted: list[int] = []
        self.turns: list[Turn] = []

    def step(self, tree: ConversationTree, written: list[str]) -> None:
        rng, renderer = self.rng, tree.renderer
        turn = tree.begin(self.messages, TOOLS)
        if rng.random() < 0.2:  # a retry of a request that failed
            assert tree.begin(self.messages, TOOLS).prompt_ids == turn.prompt_ids
        if rng.random() < 0.2:  # another sample, which nobody goes on from
            tree.record(turn, renderer.tokenizer.encode("never"), {"role": "assistant", "content": "never"})
        ids = _completion(rng, renderer.tokenizer, written)
        message = _as_client_gets_it(renderer, ids, rng)
        tree.record(turn, ids, message)
        self.turns.append(turn)
        self.emitted += ids
        self.trajectory.steps.append(
            Step(
                prompt_ids=turn.prompt_ids,
                response_ids=ids,
                logprobs=[-0.5] * len(ids),
                policy_versions=[1] * len(ids),
            )
        )
        self.messages = [*self.messages, _echoed(message, rng)]
        for call in message.get("tool_calls", []):
            self.messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": rng.choice(["", "b"])}
            )
        if not message.get("tool_calls") or rng.random() < 0.2:
            said = "".join(rng.choice(["ab", "a", "b", " ", "<|im_end|>"]) for _ in range(4))
            self.messages.append({"role": "user", "content": said})

    def trained(self) -> tuple[list[int], int]:
        rows = trajectory_rows(self.trajectory, "task", 0, 0, 1.0)
        return [int(token) for row in rows for token in row.token_ids_T[row.trainable_T]], len(rows)


def _session(
    renderer: ChatRenderer, seed: str, rewrite: Callable[[list[Message]], list[Message]] | None = None
) -> list[_Talk]:
    rng = random.Random(seed)
    tree = ConversationTree(renderer)
    arguments = ['{"a": 1, "b": "x"}', "{}", '{"a": ']
    assert renderer.tool_format is not None
    key = "parameters" if renderer.tool_format.name == "llama" else "arguments"
    calls = [f'{{"name": "{name}", "{key}": {text}}}' for name in ("move", "look") for text in arguments]
    written = {
        "hermes": [f"<tool_call>\n{call}\n</tool_call>" for call in calls],
        "mistral": [f"[TOOL_CALLS][{', '.join(calls[:2])}]", f"[TOOL_CALLS][{calls[2]}]"],
        "llama": calls,
    }[renderer.tool_format.name]
    talks = [_Talk(number, rng) for number in range(rng.randrange(1, 4))]
    for _ in range(rng.randrange(2, 8)):
        talk = rng.choice(talks)
        talk.step(tree, [*written, "\n".join(written[:2])] if len(written) > 2 else written)
        if rewrite is not None:
            talk.messages = rewrite(talk.messages)
    return talks


TEMPLATES = {
    "builtin": True,
    "qwen": True,
    "llama_tools": True,
    "mistral_tools": False,  # its tools move to the last user message
    "qwen_thinking": False,  # its thoughts go when a user speaks again
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_with_tools_and_interleaved_conversations_the_ids_trained_on_are_the_ids_emitted(
    toy: Toy, template: str
) -> None:
    renderer = ChatRenderer(toy(template))
    for seed in range(100):
        talks = [talk for talk in _session(renderer, f"{template} {seed}") if talk.turns]
        for talk in talks:
            trained, num_rows = talk.trained()
            assert trained == talk.emitted
            assert len({turn.conversation for turn in talk.turns}) == 1
            reasons = {turn.reason for turn in talk.turns}
            if TEMPLATES[template]:
                assert num_rows <= 1
                assert reasons == {SegmentReason.FIRST}
            else:
                assert reasons <= {SegmentReason.FIRST, SegmentReason.TEMPLATE_NOT_INCREMENTAL}
        assert len({talk.turns[0].conversation for talk in talks}) == len(talks)


def _forget_the_oldest(messages: list[Message]) -> list[Message]:
    return [messages[0], *messages[3:]] if len(messages) > 5 else messages


def _tidy_answers(messages: list[Message]) -> list[Message]:
    return [
        {**message, "content": f"{message.get('content')} ok"} if message["role"] == "assistant" else message
        for message in messages
    ]


@pytest.mark.parametrize("rewrite", [_forget_the_oldest, _tidy_answers])
@pytest.mark.parametrize("template", ["builtin", "qwen"])
def test_a_rewrite_loses_no_sampled_token_and_is_named(toy: Toy, template: str, rewrite: Any) -> None:
    renderer = ChatRenderer(toy(template))
    reasons: set[SegmentReason] = set()
    for seed in range(50):
        for talk in _session(renderer, f"{template} {seed}", rewrite):
            assert talk.trained()[0] == talk.emitted
            reasons |= {turn.reason for turn in talk.turns}
    assert reasons == {SegmentReason.FIRST, SegmentReason.HISTORY_REWRITTEN}


# ---- where a prompt belongs --------------------------------------------------------------------------------


def test_a_prompt_goes_on_from_the_ids_of_the_answer_and_says_how_many_are_kept(toy: Toy) -> None:
    tree, tokenizer = _tree(toy)
    known = _answered(tree, tokenizer, [USER], {"role": "assistant", "content": "ab"})
    turn = tree.begin([USER, {"role": "assistant", "content": "ab"}, USER])
    assert turn.prompt_ids[: len(known)] == known
    assert turn.num_kept == len(known)
    new_text = "\n<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    assert turn.prompt_ids[len(known) :] == tokenizer.encode(new_text)
    assert (turn.conversation, turn.segment, turn.reason) == (0, 0, SegmentReason.FIRST)


@pytest.mark.parametrize(
    "echo",
    [
        {"role": "assistant", "content": "", "tool_calls": [_call("c", "move", '{"a":1000,"b":2}')]},
        {"role": "assistant", "tool_calls": [_call("c", "move", '{ "b": 2, "a": 1000 }')]},
        {"role": "assistant", "content": [], "tool_calls": [_call("c", "move", '{"a": 1000.0, "b": 2}')]},
        {"role": "assistant", "content": None, "name": "solver", "refusal": None, "function_call": None}
        | {"tool_calls": [{**_call("other", "move", '{"a": 1000, "b": 2}'), "index": 0}]},
    ],
)
def test_an_answer_is_known_again_in_every_shape_that_clients_echo_it_in(toy: Toy, echo: Message) -> None:
    tree, tokenizer = _tree(toy)
    said: Message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [_call("c", "move", '{"a": 1000, "b": 2}')],
    }
    known = _answered(tree, tokenizer, [USER], said, TOOLS)
    turn = tree.begin([USER, echo, {"role": "tool", "tool_call_id": "c", "content": "done"}], TOOLS)
    assert turn.num_kept == len(known)
    assert tree.num_conversations == 1


@pytest.mark.parametrize(
    "echo",
    [
        {"role": "assistant", "content": "ab"},
        {"role": "assistant", "content": " ab ", "tool_calls": [_call("c", "move", "{}")]},
        {"role": "user", "content": " ab "},
    ],
)
def test_text_that_a_client_changed_is_a_rewrite(toy: Toy, echo: Message) -> None:
    tree, tokenizer = _tree(toy)
    _answered(tree, tokenizer, [USER], {"role": "assistant", "content": " ab "})
    turn = tree.begin([USER, echo, USER])
    assert (turn.num_kept, turn.segment) == (0, 1)
    assert turn.reason is SegmentReason.HISTORY_REWRITTEN
    assert turn.prompt_ids == tree.renderer.render([USER, echo, USER])


def test_reasoning_that_a_client_does_not_echo_stays_in_the_ids(toy: Toy) -> None:
    tree, tokenizer = _tree(toy, "qwen_thinking")
    turn = tree.begin([USER], TOOLS)
    thought = tokenizer.encode("<think>\naba\n</think>\n\n")
    tree.record(
        turn,
        [*thought, tokenizer.end_id],
        {"role": "assistant", "content": None, "tool_calls": [_call("c", "move", "{}")]},
    )
    asked = [USER, {"role": "assistant", "tool_calls": [_call("c", "move", "{}")]}]
    asked.append({"role": "tool", "tool_call_id": "c", "content": "done"})
    kept = tree.begin(asked, TOOLS)
    assert kept.prompt_ids[: kept.num_kept] == [*turn.prompt_ids, *thought, tokenizer.end_id]
    tree.record(kept, [tokenizer.end_id], {"role": "assistant", "content": ""})
    later = tree.begin([*asked, {"role": "assistant", "content": ""}, USER], TOOLS)
    assert later.reason is SegmentReason.TEMPLATE_NOT_INCREMENTAL
    assert (later.segment, later.num_kept, later.conversation) == (1, 0, 0)


def test_sub_agents_with_the_same_rules_are_conversations_of_their_own(toy: Toy) -> None:
    tree, tokenizer = _tree(toy)
    rules: Message = {"role": "system", "content": "rules"}
    starts = [[rules, {"role": "user", "content": text}] for text in ("a", "b", "ab")]
    for start in starts:
        _answered(tree, tokenizer, start, {"role": "assistant", "content": "Up"})
    said: Message = {"role": "assistant", "content": "Up"}
    turns = [tree.begin([*start, said, USER]) for start in reversed(starts)]
    assert [turn.conversation for turn in turns] == [2, 1, 0]
    assert all(turn.num_kept for turn in turns)


def test_forks_of_one_answer_share_its_ids(toy: Toy) -> None:
    tree, tokenizer = _tree(toy)
    said: Message = {"role": "assistant", "content": "Up"}
    known = _answered(tree, tokenizer, [USER], said)
    forks = [tree.begin([USER, said, {"role": "user", "content": text}]) for text in ("a", "b")]
    assert [fork.num_kept for fork in forks] == [len(known)] * 2
    assert [fork.conversation for fork in forks] == [0, 0]
    tree.record(forks[0], [tokenizer.end_id], {"role": "assistant", "content": ""})
    again = tree.begin([USER, said, {"role": "user", "content": "b"}])
    assert again.prompt_ids == forks[1].prompt_ids


def test_of_several_samples_the_one_that_is_echoed_goes_on(toy: Toy) -> None:
    tree, tokenizer = _tree(toy)
    turn = tree.begin([USER], TOOLS)
    for text in ("a", "b"):
        tree.record(turn, tokenizer.encode(text), {"role": "assistant", "content": text})
    for call_id, text in (("c1", "Up"), ("c2", "Down")):  # alike but for the ids of their calls
        said: Message = {"role": "assistant", "content": None, "tool_calls": [_call(call_id, "move", "{}")]}
        tree.record(turn, tokenizer.encode(text), said)
    after = tree.begin([USER, {"role": "assistant", "content": "a"}, USER], TOOLS)
    assert after.prompt_ids[: after.num_kept] == turn.prompt_ids + tokenizer.encode("a")
    for call_id, text in (("c1", "Up"), ("c2", "Down")):
        echo: Message = {"role": "assistant", "tool_calls": [_call(call_id, "move", "{}")]}
        result: Message = {"role": "tool", "tool_call_id": call_id, "content": "b"}
        after = tree.begin([USER, echo, result], TOOLS)
        assert after.prompt_ids[: after.num_kept] == turn.prompt_ids + tokenizer.encode(text)


def test_other_tools_begin_a_segment_and_their_order_of_keys_does_not(toy: Toy) -> None:
    tree, tokenizer = _tree(toy)
    said: Message = {"role": "assistant", "content": "Up"}
    known = _answered(tree, tokenizer, [USER], said, TOOLS)
    same = [{key: tool[key] for key in reversed(tool)} for tool in TOOLS]
    assert tree.begin([USER, said, USER], same).num_kept == len(known)
    for tools in ((), TOOLS[:1]):
        turn = tree.begin([USER, said, USER], tools)
        assert (turn.conversation, turn.reason) == (0, SegmentReason.TOOLS_CHANGED)
        assert turn.prompt_ids == tree.renderer.render([USER, said, USER], tools)
    assert tree.begin([USER], TOOLS[:1]).reason is SegmentReason.TOOLS_CHANGED


def test_tools_that_are_changed_in_place_are_other_tools(toy: Toy) -> None:
    tree, _ = _tree(toy)
    tools = json.loads(json.dumps(TOOLS))
    before = tree.begin([USER], tools).prompt_ids
    tools[0]["function"]["description"] = "ba"
    assert tree.begin([USER], tools).prompt_ids != before


def test_a_conversation_whose_beginning_was_cut_off_is_known_by_its_answers(toy: Toy) -> None:
    tree, tokenizer = _tree(toy)
    said: Message = {"role": "assistant", "content": "look Up"}
    _answered(tree, tokenizer, [USER], said)
    turn = tree.begin([{"role": "user", "content": "summary"}, said, USER])
    assert (turn.conversation, turn.segment) == (0, 1)
    assert turn.reason is SegmentReason.HISTORY_REWRITTEN
    assert tree.begin([{"role": "user", "content": "summary"}]).conversation == 0
    assert tree.begin([{"role": "user", "content": "other"}]).conversation == 1


def test_an_answer_may_be_asked_to_go_on_without_a_word(toy: Toy) -> None:
    tree, tokenizer = _tree(toy)
    known = _answered(tree, tokenizer, [USER], {"role": "assistant", "content": "ab"})
    turn = tree.begin([USER, {"role": "assistant", "content": "ab"}])
    assert turn.prompt_ids == known + tokenizer.encode("\n<|im_start|>assistant\n")


def test_memory_is_bounded_and_what_is_forgotten_begins_anew(toy: Toy) -> None:
    tree, tokenizer = _tree(toy, max_turns=6)
    said: Message = {"role": "assistant", "content": "Up"}
    starts: list[list[Message]] = [[{"role": "user", "content": f"go {number}"}] for number in range(50)]
    for start in starts:
        _answered(tree, tokenizer, start, said)
        assert len(tree) <= 6
    assert tree.begin([*starts[-1], said, USER]).num_kept
    assert not tree.begin([*starts[0], said, USER]).num_kept
    turn = tree.begin([USER])
    for number in range(100):
        tree.record(turn, [number], said)
    assert len(tree) <= 6
    assert tree.begin([USER, said, USER]).num_kept, "the newest of answers that read alike is left"
    assert ConversationTree(tree.renderer, max_turns=1).begin([USER]).prompt_ids == turn.prompt_ids
    with pytest.raises(ValueError, match="`max_turns` is 0"):
        ConversationTree(tree.renderer, max_turns=0)


def test_an_answer_that_comes_twice_is_kept_once_and_another_one_beside_it(toy: Toy) -> None:
    tree, _ = _tree(toy)
    turn = tree.begin([USER])
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said: Message = {"role": "assistant", "content": "Up", "tool_calls": [call]}
    with_other_id: Message = {**said, "tool_calls": [{**call, "id": "b"}]}
    for ids, message, num_kept in (([1], said, 2), ([1], said, 2), ([2], said, 3), ([1], with_other_id, 4)):
        tree.record(turn, ids, message)
        assert len(tree) == num_kept


def test_of_answers_that_read_alike_the_one_with_the_same_tools_goes_on(toy: Toy) -> None:
    tree, _ = _tree(toy)
    said: Message = {"role": "assistant", "content": "a"}
    turns = [tree.begin([USER], tools) for tools in (TOOLS, TOOLS[:1])]
    for number, turn in enumerate(turns):
        tree.record(turn, [number], said)
    for number, (turn, tools) in enumerate(zip(turns, (TOOLS, TOOLS[:1]), strict=True)):
        after = tree.begin([USER, said, USER], tools)
        assert after.prompt_ids[: after.num_kept] == [*turn.prompt_ids, number]


def test_of_too_many_answers_that_read_alike_the_oldest_is_forgotten(toy: Toy) -> None:
    tree, _ = _tree(toy)
    turn = tree.begin([USER], TOOLS)

    def answer(number: int) -> Message:
        return {"role": "assistant", "content": None, "tool_calls": [_call(f"c{number}", "move", "{}")]}

    for number in range(MAX_ALIKE + 1):
        tree.record(turn, [number], answer(number))
    for number in range(MAX_ALIKE + 1):
        result: Message = {"role": "tool", "tool_call_id": f"c{number}", "content": "b"}
        after = tree.begin([USER, answer(number), result], TOOLS)
        is_kept = after.prompt_ids[: after.num_kept] == [*turn.prompt_ids, number]
        assert is_kept == (number > 0)


def test_prompts_that_nobody_answered_are_forgotten_too(toy: Toy) -> None:
    tree, _ = _tree(toy, max_turns=3)
    starts: list[list[Message]] = [[{"role": "user", "content": f"go {number}"}] for number in range(9)]
    first = [tree.begin(start) for start in starts]
    assert len(tree) == 3
    assert tree.begin(starts[-1]).segment == first[-1].segment, "the same prompt"
    assert tree.begin(starts[0]).prompt is not first[0].prompt


def test_a_thousand_turns_keep_their_ids_once(toy: Toy) -> None:
    tree, tokenizer = _tree(toy)
    messages: list[Message] = []
    for number in range(300):
        messages.append({"role": "user", "content": f"go {number}"})
        turn = tree.begin(messages)
        said: Message = {"role": "assistant", "content": f"ab{number}"}
        tree.record(turn, [*tokenizer.encode(said["content"]), tokenizer.end_id], said)
        messages.append(said)
    assert turn.segment == 0
    assert turn.prompt_ids == tree.renderer.render(messages[:-1])


def test_content_that_is_no_text_is_refused_with_its_kind(toy: Toy) -> None:
    tree, _ = _tree(toy)
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    with pytest.raises(ConfigError, match="a part of type `image_url`"):
        tree.begin([picture])
    assert len(tree) == 0


def test_a_conversation_that_the_template_refuses_leaves_no_trace(toy: Toy) -> None:
    tree, _ = _tree(toy, "gemma")
    with pytest.raises(ConfigError, match="System role not supported"):
        tree.begin([{"role": "system", "content": "rules"}, USER])
    assert len(tree) == 0
    assert tree.begin([USER]).conversation == 0
