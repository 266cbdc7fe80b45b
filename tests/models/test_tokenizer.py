import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer

from rllm.environments.frozenlake import FrozenLakeEnv
from rllm.environments.lake_maps import SPLITS
from rllm.errors import ConfigError, ModelDirectoryError
from rllm.models.builtin import END_OF_TURN, SPECIAL_TOKENS, create_tokenizer
from rllm.models.directory import load_model
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.models.tokenizer_file import tokenizer_file
from rllm.rendering.chat import ChatRenderer, Conversation
from rllm.types.messages import Message

TOKENIZER = create_tokenizer()
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"])).filter(
    lambda text: not any(token in text for token in SPECIAL_TOKENS)
)


def _pieces(text: str) -> list[str]:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    return [TOKENIZER.decode([token], skip_special_tokens=False) for token in ids]


@given(ANY_TEXT)
def test_any_text_comes_back_as_it_was(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids) == text


def test_spaces_and_signs_come_back_as_they_were(subtests: pytest.Subtests) -> None:
    for text in (" leading", "trailing ", "\n\n", "a\tb", "\r\n", "🙂é漢", "  two  spaces  ", "'s ' .", ""):
        with subtests.test(text=text):
            assert "".join(_pieces(text)) == text or TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


def test_a_move_is_one_token(subtests: pytest.Subtests) -> None:
    for move in ("Up", "Down", "Left", "Right", " Up", " Down", " Left", " Right"):
        with subtests.test(move=move):
            assert _pieces(move) == [move]


@pytest.mark.parametrize("split", SPLITS)
@given(index=st.integers(0, 10_000), p=st.floats(0.4, 0.95), random_start=st.booleans())
def test_a_row_of_a_lake_as_it_is_shown_is_one_token(
    split: str, index: int, p: float, random_start: bool
) -> None:
    shown, _ = FrozenLakeEnv(seed=index, split=split, p=p, random_start=random_start).reset()
    rows = shown.split("\n")
    assert [piece for piece in _pieces(shown) if piece != "\n"] == rows


@given(st.integers(5, 8), st.integers(0, 1_000))
def test_a_wider_row_is_read_four_cells_at_a_time_from_its_left(size: int, index: int) -> None:
    shown, _ = FrozenLakeEnv(seed=index, size=size, max_steps=2 * size).reset()
    for row in shown.split("\n"):
        assert _pieces(row)[0] == row[:4]
        assert len(_pieces(row)) <= 1 + max(1, size - 4)


@given(st.lists(st.text(alphabet="SAIUDLRTXO0123456789", min_size=1, max_size=8), min_size=1, max_size=8))
def test_digits_and_the_capitals_of_other_grids_never_merge(rows: list[str]) -> None:
    grid = "\n".join(rows)
    assert _pieces(grid) == list(grid)


@given(st.text(alphabet="SFHG", min_size=1, max_size=8))
def test_cells_with_spaces_between_them_do_not_merge_either(row: str) -> None:
    spaced = " ".join(row)
    assert [piece for piece in _pieces(spaced) if piece != " "] == list(row)


def test_special_tokens_are_one_id_each_and_leave_no_trace_in_text() -> None:
    ids = [TOKENIZER.encode(token, add_special_tokens=False).ids for token in SPECIAL_TOKENS]
    assert {len(each) for each in ids} == {1}
    assert TOKENIZER.decode([each[0] for each in ids]) == ""


@given(st.lists(st.tuples(ANY_TEXT, ANY_TEXT), min_size=1, max_size=4))
def test_the_built_in_template_only_appends(builtin: Path, turns: list[tuple[str, str]]) -> None:
    tokenizer = _loaded(builtin)
    renderer = ChatRenderer(tokenizer)
    conversation = Conversation(renderer=renderer)
    messages: list[Message] = [{"role": "system", "content": "Reach the goal."}]
    for said, answer in turns:
        messages = [*messages, {"role": "user", "content": said}]
        assert conversation.prompt(messages) == renderer.render(messages)
        conversation.record([*tokenizer.encode(answer), tokenizer.end_token_id or 0], answer)
        messages = [*messages, {"role": "assistant", "content": answer}]
    assert renderer.incremental


_TOKENIZERS: dict[Path, HuggingFaceTokenizer] = {}


def _loaded(directory: Path) -> HuggingFaceTokenizer:
    return _TOKENIZERS.setdefault(directory, HuggingFaceTokenizer(directory))


def test_a_tokenizer_file_that_asks_for_truncation_does_not_cut_prompts(copied: Path) -> None:
    path = copied / "tokenizer.json"
    changes = {
        "truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": {"Fixed": 16},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        },
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    tokenizer = HuggingFaceTokenizer(copied)
    assert len(tokenizer.encode("1" * 100)) == 100
    assert len(tokenizer.encode("1")) == 1


def test_a_token_is_shown_with_its_special_form(builtin: Path) -> None:
    loaded = load_model(builtin)
    assert loaded.tokenizer.token_text(loaded.end_token_ids[0]) == END_OF_TURN


@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ raise_exception('no') }}", "{{ messages[0].content + 1 | nope }}"]
)
def test_a_chat_template_that_does_not_work_is_an_error_that_says_so(copied: Path, template: str) -> None:
    path = copied / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    with pytest.raises(ConfigError, match="chat template"):
        ChatRenderer(HuggingFaceTokenizer(copied))


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"added_tokens": []}', '{"added_tokens": [], "model": {"type": "None"}}']
)
def test_a_broken_tokenizer_file_is_named(copied: Path, content: str) -> None:
    (copied / "tokenizer.json").write_text(content)
    with pytest.raises(ModelDirectoryError, match=f"tokenizer in {copied}"):
        HuggingFaceTokenizer(copied)


TOOL = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "One step.\nNever two.",
        "parameters": {
            "type": "object",
            "properties": {"to": {"type": "string"}, "far": {"type": ["integer", "null"]}, "why": {}},
        },
    },
}
TOOL_TALK: list[Message] = [
    {"role": "system", "content": "Rules."},
    {"role": "user", "content": "go"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "move", "arguments": '{"to":"Up"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": "done"},
]


def test_the_built_in_template_lists_tools_briefly_and_writes_calls_as_hermes_does(builtin: Path) -> None:
    renderer = ChatRenderer(_loaded(builtin))
    ids = renderer.render(TOOL_TALK, [TOOL])
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == (
        "<|system|>Rules.\nTools:\nmove(to: string, far: integer|null, why: any) One step.<|end|>"
        "<|user|>go<|end|>"
        '<|assistant|><tool_call>\n{"name": "move", "arguments": {"to": "Up"}}\n</tool_call><|end|>'
        "<|tool|>done<|end|><|assistant|>"
    )
    assert renderer.tool_format is not None
    assert renderer.tool_format.name == "hermes"
    assert renderer.appends(TOOL_TALK[3:], [TOOL])
    assert renderer.appends(TOOL_TALK[1:2], [TOOL])


def test_tools_without_a_system_message_make_one(builtin: Path) -> None:
    bare = {"type": "function", "function": {"name": "now"}}
    ids = ChatRenderer(_loaded(builtin)).render(TOOL_TALK[1:2], [bare])
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    assert text == "<|system|>Tools:\nnow()<|end|><|user|>go<|end|><|assistant|>"


@given(
    st.lists(
        st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), ANY_TEXT), min_size=1, max_size=5
    )
)
def test_without_tools_the_built_in_template_is_one_token_before_and_one_behind_each_message(
    builtin: Path, said: list[tuple[str, str]]
) -> None:
    messages: list[Message] = [{"role": role, "content": content} for role, content in said]
    expected = "".join(f"<|{role}|>{content}<|end|>" for role, content in said)
    tokenizer = _loaded(builtin)
    assert tokenizer.apply_template(messages, add_generation_prompt=False) == expected
    assert tokenizer.apply_template(messages, add_generation_prompt=True) == f"{expected}<|assistant|>"


def test_the_vocabulary_has_no_token_for_markup() -> None:
    """It is part of every run that is reproduced bit for bit."""
    vocabulary = TOKENIZER.get_vocab()
    assert len(vocabulary) == 604
    assert not {"<tool_call>", "</tool_call>", "<think>"} & set(vocabulary)
    assert len(TOKENIZER.encode("<tool_call>").ids) > 3


@pytest.mark.parametrize("special", [True, False])
def test_markup_stays_in_decoded_text_where_it_is_a_special_token(copied: Path, special: bool) -> None:
    path = copied / "tokenizer.json"
    tokenizer = create_tokenizer()
    tokenizer.add_tokens([AddedToken(tag, special=special) for tag in ("[TOOL_CALLS]", "[INST]")])
    if special:
        tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    tokenizer.save(str(path))
    loaded = HuggingFaceTokenizer(copied)
    ids = loaded.encode('[INST]go<|end|>[TOOL_CALLS][{"name"<|end|>')
    assert len(loaded.encode("[TOOL_CALLS]")) == 1
    assert loaded.decode(ids) == f'{"" if special else "[INST]"}go[TOOL_CALLS][{{"name"'


@pytest.mark.parametrize("template", ["{{ messages[0].content + 1 }}", "{{ messages[9].content.x }}"])
def test_whatever_fails_inside_a_template_is_a_refusal(copied: Path, template: str) -> None:
    path = copied / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    with pytest.raises(ConfigError, match="chat template"):
        HuggingFaceTokenizer(copied).apply_template(TOOL_TALK, add_generation_prompt=True)


NO_BUILTIN = {"eos_token": "<|endoftext|>", "bos_token": "<|system|>", "model_max_length": 7}


@pytest.mark.parametrize("changed", [{}, NO_BUILTIN, {"pad_token": None}])
def test_two_plain_files_are_read_as_transformers_reads_them(copied: Path, changed: dict[str, Any]) -> None:
    settings = copied / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **changed}))
    file = tokenizer_file(copied)
    assert file is not None
    theirs = AutoTokenizer.from_pretrained(str(copied))
    own, other = (json.loads(each.backend_tokenizer.to_str()) for each in (file, theirs))
    assert {**own, "post_processor": None} == {**other, "post_processor": None}  # adds what nobody asks for
    assert (file.bos_token_id, file.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert file.special_tokens_map == theirs.special_tokens_map
    assert file.get_vocab() == theirs.get_vocab()
    assert file.get_chat_template() == theirs.get_chat_template()
    assert {key: str(each) for key, each in file.added_tokens_decoder.items()} == {
        key: str(each) for key, each in theirs.added_tokens_decoder.items()
    }
    for token in file.get_vocab().values():
        for is_skipped in (True, False):
            texts = {each.decode([token], skip_special_tokens=is_skipped) for each in (file, theirs)}
            assert len(texts) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"tokenizer_class": "LlamaTokenizer"},
        {"clean_up_tokenization_spaces": True},
        {"eos_token": {"content": "<|end|>", "lstrip": True}},
        {"eos_token": "a word that is no special token"},
        {"add_bos_token": True},
        {"chat_template": [{"name": "default", "template": "{{ messages }}"}]},
        {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}},
    ],
)
def test_what_transformers_alone_knows_is_left_to_it(copied: Path, changed: dict[str, Any]) -> None:
    settings = copied / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **changed}))
    assert tokenizer_file(copied) is None


@pytest.mark.parametrize("name", ["chat_template.jinja", "special_tokens_map.json", "added_tokens.json"])
def test_another_file_with_a_say_is_left_to_transformers(copied: Path, name: str) -> None:
    (copied / name).write_text("{}")
    assert tokenizer_file(copied) is None
