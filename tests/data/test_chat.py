"""The labels of a conversation are what the model would have had to sample in it, and nothing else."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllm.errors import ConfigError
from rllm.trainer.chat_rows import (
    Chat,
    ChatEncoder,
    chat_of,
    chats_of,
    encode_all,
    read_chats,
    with_fetched_images,
)
from rllm.types.episode import Step
from rllm.types.sample import NOT_SAMPLED

MakeEncoder = Callable[..., ChatEncoder]
NO_THOUGHTS = ("chatml", "llama3", "mistral", "builtin")

FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Look it up.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
    },
}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def says(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(what: str, call_id: str = "call00001") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "find", "arguments": {"what": what}}}


def result(content: str, call_id: str = "call00001") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "name": "find", "content": content}


def read_and_written(encoder: ChatEncoder, row: dict[str, Any]) -> list[tuple[str, str]]:
    """(what the model reads, what it has to write) turn by turn, as text with special tokens."""
    text = encoder.renderer.tokenizer.text  # pyright: ignore[reportAttributeAccessIssue]
    return [(text(step.prompt_ids), text(step.response_ids)) for step in steps_of(encoder, row)]


def steps_of(encoder: ChatEncoder, row: dict[str, Any]) -> list[Step]:
    return encoder.steps(chat_of(row, "row 0"))


TWO_TURNS = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        user("Red?"),
        says("No."),
        user("Blue?"),
        says("Yes."),
    ]
}
EXPECTED_TWO_TURNS = {
    "chatml": [
        (
            "<|im_start|>system\nBe brief.<|im_end|>\n"
            "<|im_start|>user\nRed?<|im_end|>\n<|im_start|>assistant\n",
            "No.<|im_end|>",
        ),
        ("\n<|im_start|>user\nBlue?<|im_end|>\n<|im_start|>assistant\n", "Yes.<|im_end|>"),
    ],
    "llama3": [
        (
            "<|begin_of_text|><|header|>system<|/header|>\n\nBe brief.<|eot_id|>"
            "<|header|>user<|/header|>\n\nRed?<|eot_id|><|header|>assistant<|/header|>\n\n",
            "No.<|eot_id|>",
        ),
        (
            "<|header|>user<|/header|>\n\nBlue?<|eot_id|><|header|>assistant<|/header|>\n\n",
            "Yes.<|eot_id|>",
        ),
    ],
    "mistral": [
        ("<s>[INST] Be brief.\n\nRed?[/INST]", "No.</s>"),
        ("[INST] Blue?[/INST]", "Yes.</s>"),
    ],
    "builtin": [
        ("<|system|>Be brief.<|end|><|user|>Red?<|end|><|assistant|>", "No.<|end|>"),
        ("<|user|>Blue?<|end|><|assistant|>", "Yes.<|end|>"),
    ],
}
"""Written by hand: what each turn adds to what was read and written before."""


@pytest.mark.parametrize("family", NO_THOUGHTS)
def test_answers_are_labelled_up_to_their_end_token_and_prompts_go_on_behind_them(
    encoder: MakeEncoder, family: str
) -> None:
    (first_read, first), (second_added, second) = EXPECTED_TWO_TURNS[family]
    assert read_and_written(encoder(family), TWO_TURNS) == [
        (first_read, first),
        (first_read + first + second_added, second),
    ]


def test_a_template_that_deletes_earlier_thoughts_has_each_turn_read_what_it_would_have_been_sent(
    encoder: MakeEncoder,
) -> None:
    row = {
        "messages": [
            user("Red?"),
            says("No.", reasoning_content="It is green."),
            user("Blue?"),
            says("Yes.", reasoning_content="Sure."),
        ]
    }
    asked = "<|im_start|>user\nRed?<|im_end|>\n<|im_start|>assistant\n"
    assert read_and_written(encoder("qwen_thinking"), row) == [
        (asked, "<think>\nIt is green.\n</think>\n\nNo.<|im_end|>"),
        (
            f"{asked}No.<|im_end|>\n<|im_start|>user\nBlue?<|im_end|>\n<|im_start|>assistant\n",
            "<think>\nSure.\n</think>\n\nYes.<|im_end|>",
        ),
    ]


WITH_A_CALL = {
    "tools": [FIND],
    "messages": [user("Where?"), says("", tool_calls=[call("it")]), result("here"), says("Here.")],
}
EXPECTED_CALL = {
    "chatml": '<tool_call>\n{"name": "find", "arguments": {"what": "it"}}\n</tool_call><|im_end|>',
    "llama3": '{"name": "find", "parameters": {"what": "it"}}<|eot_id|>',
    "qwen_thinking": "<think>\n\n</think>\n\n\n"
    '<tool_call>\n{"name": "find", "arguments": {"what": "it"}}\n</tool_call><|im_end|>',
    "mistral": '[TOOL_CALLS] [{"name": "find", "arguments": {"what": "it"}}]</s>',
    "builtin": '<tool_call>\n{"name": "find", "arguments": {"what": "it"}}\n</tool_call><|end|>',
}


@pytest.mark.parametrize("family", NO_THOUGHTS)
def test_calls_are_labelled_and_what_tools_answer_is_only_read(encoder: MakeEncoder, family: str) -> None:
    (asked, called), (read, answered) = read_and_written(encoder(family), WITH_A_CALL)
    assert called == EXPECTED_CALL[family]
    assert answered.startswith("Here.")
    assert read.startswith(asked + called)
    assert "here" in read[len(asked + called) :]
    assert '"find"' in asked or "find(what: string)" in asked


def test_thoughts_stay_while_tools_answer(encoder: MakeEncoder) -> None:
    row = {
        "tools": [FIND],
        "messages": [
            user("Where?"),
            says("", tool_calls=[call("it")], reasoning_content="Look."),
            result("here"),
            says("Here.", reasoning_content="Found."),
        ],
    }
    (asked, called), (read, answered) = read_and_written(encoder("qwen_thinking"), row)
    assert called.startswith("<think>\nLook.\n</think>\n\n")
    assert read.startswith(asked + called)
    assert answered == "<think>\nFound.\n</think>\n\nHere.<|im_end|>"


def test_parallel_calls_are_one_answer(encoder: MakeEncoder) -> None:
    calls = [call("it", "call00001"), call("that", "call00002")]
    row = {
        "tools": [FIND],
        "messages": [
            user("Where?"),
            says("Wait.", tool_calls=calls),
            result("here", "call00001"),
            result("there", "call00002"),
            says("Both."),
        ],
    }
    (_, called), _ = read_and_written(encoder("chatml"), row)
    assert called == (
        'Wait.\n<tool_call>\n{"name": "find", "arguments": {"what": "it"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "find", "arguments": {"what": "that"}}\n</tool_call><|im_end|>'
    )


def test_arguments_may_be_json_text_as_apis_send_them(encoder: MakeEncoder) -> None:
    as_text = json.loads(json.dumps(WITH_A_CALL))
    as_text["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"what": "it"}'
    make = encoder("builtin")
    assert read_and_written(make, as_text) == read_and_written(make, WITH_A_CALL)


WORDS = st.text(alphabet="abcXYZ 019.,?", min_size=1, max_size=12).map(str.strip).filter(bool)
TURNS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4)


@pytest.mark.parametrize("family", NO_THOUGHTS)
@settings(max_examples=25)
@given(turns=TURNS, rules=st.none() | WORDS)
def test_rows_are_the_rendered_conversation_and_labels_its_answers(
    encoder: MakeEncoder, family: str, turns: Sequence[tuple[str, str]], rules: str | None
) -> None:
    """Against an oracle that asks the template alone: marks around each answer show where it is printed."""
    make = encoder(family)
    template = make.renderer.tokenizer.apply_template
    before = [] if rules is None else [{"role": "system", "content": rules}]

    def rendered(mark: Callable[[str], str]) -> str:
        said = [message for asked, answer in turns for message in (user(asked), says(mark(answer)))]
        return template([*before, *said], add_generation_prompt=False)

    marked = rendered(lambda answer: f"⟦{answer}⟧")
    text, labelled, inside = "", [], False
    for piece in marked:
        if piece in "⟦⟧":
            inside = piece == "⟦"
        else:
            text += piece
            labelled.append(inside)
    assert text == rendered(lambda answer: answer)
    steps = steps_of(make, {"messages": [*before, *(m for a, b in turns for m in (user(a), says(b)))]})
    whole = steps[-1].prompt_ids + steps[-1].response_ids
    tokenizer: Any = make.renderer.tokenizer
    assert tokenizer.text(whole) == text.rstrip("\n")
    mine = [False] * len(whole)
    for step in steps:
        start = len(step.prompt_ids)
        assert whole[: start + len(step.response_ids)] == step.prompt_ids + step.response_ids
        mine[start : start + len(step.response_ids) - 1] = [True] * (len(step.response_ids) - 1)
        assert tokenizer.text(step.response_ids[-1:]) in ("<|im_end|>", "<|eot_id|>", "</s>", "<|end|>")
    letters = [label for token, label in zip(whole, mine, strict=True) for _ in tokenizer.text([token])]
    assert letters == labelled[: len(letters)]


@settings(max_examples=25)
@given(turns=st.lists(st.tuples(WORDS, WORDS, WORDS), min_size=1, max_size=4))
def test_of_a_thinking_template_each_turn_is_the_end_of_its_own_rendering(
    encoder: MakeEncoder, turns: Sequence[tuple[str, str, str]]
) -> None:
    make = encoder("qwen_thinking")
    tokenizer: Any = make.renderer.tokenizer
    messages: list[dict[str, Any]] = []
    expected: list[str] = []
    for asked, thought, answer in turns:
        messages += [user(asked), says(answer, reasoning_content=thought)]
        expected.append(tokenizer.apply_template(messages, add_generation_prompt=False).rstrip("\n"))
    steps = steps_of(make, {"messages": messages})
    assert [tokenizer.text(step.prompt_ids + step.response_ids) for step in steps] == expected
    assert [tokenizer.text(step.response_ids) for step in steps] == [
        f"<think>\n{thought}\n</think>\n\n{answer}<|im_end|>" for _, thought, answer in turns
    ]


def versions(encoder: ChatEncoder, row: dict[str, Any]) -> list[set[int]]:
    return [set(step.policy_versions) for step in steps_of(encoder, row)]


def test_an_answer_of_weight_0_is_read_and_not_learned(encoder: MakeEncoder) -> None:
    row = {"messages": [user("a"), says("wrong", weight=0), user("b"), says("right", weight=1)]}
    assert versions(encoder(), row) == [{NOT_SAMPLED}, {0}]


def test_of_prompt_and_completion_only_the_completion_is_learned(encoder: MakeEncoder) -> None:
    row = {"prompt": [user("a"), says("b"), user("c")], "completion": [says("d")]}
    assert versions(encoder(), row) == [{NOT_SAMPLED}, {0}]
    assert read_and_written(encoder("builtin"), {"prompt": "a", "completion": "b"}) == [
        ("<|user|>a<|end|><|assistant|>", "b<|end|>")
    ]


OPENED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""As DeepSeek-R1's: every answer begins inside a thought, and histories hold none."""


def test_a_thought_that_the_template_opens_is_written_from_there_on(encoder: MakeEncoder) -> None:
    make = encoder(template=OPENED)
    kept = says("No.", reasoning_content="Green.")
    raw = says("<think>\nGreen.\n</think>\n\nNo.")
    for answer in (kept, raw):
        ((read, written),) = read_and_written(make, {"messages": [user("Red?"), answer]})
        assert read.endswith("assistant\n<think>\n")
        assert written == "Green.\n</think>\n\nNo.<|im_end|>"


def test_an_answer_without_a_thought_is_refused_where_the_template_opens_one(encoder: MakeEncoder) -> None:
    with pytest.raises(ConfigError, match=r"message 1: .*thought.*`reasoning_con"):
        steps_of(encoder(template=OPENED), {"messages": [user("Red?"), says("No.")]})


def test_a_template_that_prints_no_end_gets_the_models_own(encoder: MakeEncoder) -> None:
    bare = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    bare += "{% if add_generation_prompt %}assistant: {% endif %}"
    ((_, written),) = read_and_written(encoder(template=bare), {"messages": [user("a"), says("b")]})
    assert written == "b<|im_end|>"


# ---- what is refused ---------------------------------------------------------------------------------------

REFUSED = {
    "no completion": ({"prompt": "x"}, r"no `messages`, but prompt; give `messages`, or `prompt` and"),
    "no prompt": ({"completion": "x"}, r"no `messages`, but completion; give `messages`, or `prompt` and"),
    "no messages": ({"text": "x"}, r"no `messages`, but text; give `messages`, or `prompt` and `completion`"),
    "other format": ({"conversations": []}, r'turn each \{"from", "value"\} into \{"role", "content"\}'),
    "functions": ({"functions": [], "messages": [user("a"), says("b")]}, r"write them as `tools`"),
    "empty list": ({"messages": []}, r"`messages` is \[\]; it must be a list of messages"),
    "no role": ({"messages": [{"content": "x"}]}, r"`messages\[0\]` is .* an object with a `role`"),
    "unknown role": (
        {"messages": [{"role": "bot", "content": "x"}]},
        r"the role 'bot'; choose one of system",
    ),
    "no answer": ({"messages": [user("a")]}, r"no label: no message of the assistant is to be learned"),
    "weights of 0": ({"messages": [user("a"), says("b", weight=0)]}, r"no label"),
    "answer first": ({"messages": [says("b"), user("a")]}, r"an answer comes first"),
    "empty answer": ({"messages": [user("a"), says(" ")]}, r"message 1 \(assistant\): the answer is empty"),
    "odd weight": ({"messages": [user("a"), says("b", weight=0.5)]}, r"its weight is 0\.5; it must be 1"),
    "weight of a question": (
        {"messages": [{**user("a"), "weight": 0}, says("b")]},
        r"only answers are learned",
    ),
    "number": ({"messages": [user(3), says("b")]}, r"its content is 3; it must be text"),  # pyright: ignore[reportArgumentType]
    "unlisted tool": ({"messages": [user("a"), says("", tool_calls=[call("x")])]}, r"the row has no `tools`"),
    "answer to no call": (
        {"messages": [user("a"), result("x"), says("b")]},
        r"it answers the call 'call00001', which nobody made",
    ),
    "broken arguments": (
        {
            "tools": [FIND],
            "messages": [
                user("a"),
                says("", tool_calls=[{"function": {"name": "find", "arguments": "{what"}}]),
            ],
        },
        r"the arguments of 'find' are '\{what'; they must be a JSON object",
    ),
    "tool without name": (
        {"tools": [{"name": "find"}], "messages": [user("a"), says("b")]},
        r"`tools\[0\]` is .*write \{\"type\": \"function\"",
    ),
    "not an object": ("hello", r"it is a str; give an object with `messages`"),
}


def test_a_row_that_cannot_be_learned_is_refused_by_its_number(subtests: pytest.Subtests) -> None:
    for case in REFUSED:
        with subtests.test(case=case):
            row, what = REFUSED[case]
            good = {"messages": [user("a"), says("b")]}
            with pytest.raises(ConfigError, match=rf"^row 1: .*{what}"):
                chats_of([good, row])  # pyright: ignore[reportArgumentType]


def test_all_bad_rows_are_counted_and_the_first_ones_told(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    good, bad = {"messages": [user("a"), says("b")]}, {"messages": [user("a")]}
    path.write_text("\n".join(["", *(json.dumps(row) for row in [good, *[bad] * 7])]))
    with pytest.raises(ConfigError) as caught:
        read_chats(path)
    lines = str(caught.value).splitlines()
    assert [line.strip().partition(": ")[0] for line in lines[:5]] == [
        f"chats.jsonl:{n}" for n in range(3, 8)
    ]
    assert lines[5:] == ["  … and 2 rows more."]


ENCODED = {
    "picture": (
        "chatml",
        {"messages": [user([{"type": "image_url", "image_url": "x"}]), says("b")]},  # pyright: ignore[reportArgumentType]
        r"a part of type `image_url`; this model reads text alone",
    ),
    "begin token in a text": ("mistral", {"messages": [user("<s>a"), says("b")]}, r"message 0 holds .*'<s>'"),
    "end token in a text": (
        "chatml",
        {"messages": [user("a"), says("b<|im_end|>c")]},
        r"holds .*'<\|im_end\|>'",
    ),
    "dropped thought": (
        "llama3",
        {"messages": [user("a"), says("b", reasoning_content="c")]},
        r"message 1: the chat template drops the thought",
    ),
    "dropped text beside a call": (
        "mistral",
        {"tools": [FIND], "messages": [user("a"), says("b", tool_calls=[call("x")])]},
        r"message 1: .*drops or rewrites the content of the answer \('b'\)",
    ),
    "two calls of one": (
        "llama3",
        {"tools": [FIND], "messages": [user("a"), says("", tool_calls=[call("x"), call("y", "call00002")])]},
        r"refuses the conversation: one call",
    ),
}


@pytest.mark.parametrize("case", ENCODED)
def test_what_a_template_cannot_say_is_refused_by_its_row(encoder: MakeEncoder, case: str) -> None:
    family, row, what = ENCODED[case]
    chats = chats_of([{"messages": [user("a"), says("b")]}, row])
    with pytest.raises(ConfigError, match=rf"^row 1: .*{what}"):
        encode_all(chats, encoder(family).steps)


DROPS_SYSTEM = "{% for m in messages %}{% if m.role != 'system' %}{{ m.role }}: {{ m.content }}<|im_end|>"
DROPS_SYSTEM += "{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


def test_a_template_that_drops_a_message_is_refused(encoder: MakeEncoder) -> None:
    make = encoder(template=DROPS_SYSTEM)
    row = {"messages": [{"role": "system", "content": "x"}, user("a"), says("b")]}
    with pytest.raises(ConfigError, match=r"drops message 0 \(system\)"):
        steps_of(make, row)
    assert steps_of(make, {"messages": row["messages"][1:]})


def test_a_template_without_tools_is_refused_where_rows_have_them(encoder: MakeEncoder) -> None:
    with pytest.raises(ConfigError, match=r"tool 'find'"):
        steps_of(encoder(template=DROPS_SYSTEM), {"tools": [FIND], "messages": [user("a"), says("b")]})


def test_a_text_that_begins_twice_is_refused(encoder: MakeEncoder) -> None:
    twice = "<s><s>{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"
    with pytest.raises(ConfigError, match=r"begins with '<s>' twice"):
        steps_of(encoder("mistral", template=twice), {"messages": [user("a"), says("b")]})


def test_chats_made_by_hand_pass_as_they_are() -> None:
    chat = Chat(where="mine", messages=[user("a"), says("b")])
    assert chats_of([chat]) == [chat]


def test_half_a_character_in_a_row_from_python_is_refused_by_its_row() -> None:
    half = {"prompt": "a\ud83d", "completion": "b"}
    with pytest.raises(ConfigError, match=r"row 1: it has \\ud83d"):
        chats_of([{"prompt": "a\U0001f600", "completion": "b"}, half])


def test_images_take_the_place_of_their_addresses_or_their_rows_are_named() -> None:
    class Fetcher:
        def inline(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
            if "gone" in messages[0]["content"]:
                raise ConfigError("no such image")
            return [{**each, "content": each["content"].upper()} for each in messages]

    fetcher: Any = Fetcher()
    chats = [Chat(where=f"row {place}", messages=[user(text)]) for place, text in enumerate("ab")]
    assert with_fetched_images(chats, None) == chats
    fetched = with_fetched_images(chats, fetcher)
    assert [(each.where, each.messages[0]["content"]) for each in fetched] == [("row 0", "A"), ("row 1", "B")]
    with pytest.raises(ConfigError, match=r"row 7.*such image"):
        with_fetched_images([*chats, Chat(where="row 7", messages=[user("gone")])], fetcher)
