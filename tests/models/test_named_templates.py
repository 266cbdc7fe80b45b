"""Base models, which have no chat template: they continue texts, and conversations need a named template."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rllm.cli.main import rllm as front_door
from rllm.errors import ConfigError, ModelDirectoryError, RequestRefused
from rllm.gateway.local import LocalPolicy
from rllm.inference.local.client import LocalClient
from rllm.models.builtin import create_model
from rllm.models.directory import load_model, save_model
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.rendering.chat import ChatRenderer, Conversation
from rllm.types.chat_forms import ChatForm
from rllm.types.messages import FinishReason, Message, SamplingParams
from rllm.types.wire import CallRequest, Dialect

SYSTEM: Message = {"role": "system", "content": "Be brief."}
ASK: Message = {"role": "user", "content": "2 + 2?"}
ANSWER: Message = {"role": "assistant", "content": " 4"}
MORE: Message = {"role": "user", "content": "And 3?"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a chat template, whose tokenizer begins every text with a token."""
    directory = tmp_path_factory.mktemp("base") / "model"
    create_model(directory, "tiny", 0)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    settings["bos_token"] = "<|system|>"
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    begin = {"id": "<|system|>", "type_id": 0}
    token_id = next(each["id"] for each in tokenizer["added_tokens"] if each["content"] == "<|system|>")
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": begin}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|system|>": {"id": "<|system|>", "ids": [token_id], "tokens": ["<|system|>"]}},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def test_a_plain_conversation_reads_like_a_transcript_and_only_grows(base: Path) -> None:
    tokenizer = HuggingFaceTokenizer(base, form=ChatForm(chat_template="plain"))
    renderer = ChatRenderer(tokenizer)
    assert renderer.text([SYSTEM, ASK, ANSWER, MORE]) == (
        "<|system|>Be brief.\n\nUser: 2 + 2?\nAssistant: 4<|end|>\nUser: And 3?\n"
    )
    assert renderer.incremental
    assert renderer.with_stops(SamplingParams(stop=("x",))).stop == ("x", "\nUser:")
    conversation = Conversation(renderer=renderer)
    first = list(conversation.prompt([ASK]))
    conversation.record(tokenizer.encode(" 4"), ANSWER)
    second = list(conversation.prompt([ASK, ANSWER, MORE]))
    assert conversation.num_segments == 1
    assert second[: len(first)] == first
    assert second == renderer.render([ASK, ANSWER, MORE])


def test_chatml_ends_an_answer_by_its_token_or_by_that_text(base: Path, tmp_path: Path) -> None:
    renderer = ChatRenderer(HuggingFaceTokenizer(base, form=ChatForm(chat_template="chatml")))
    text = renderer.text_that_asks([ASK])
    assert text == "<|system|><|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.stop_texts == ("<|im_end|>",)
    knows = tmp_path / "knows"
    knows.mkdir()
    for path in base.iterdir():
        (knows / path.name).write_bytes(path.read_bytes().replace(b"<|tool|>", b"<|im_end|>"))
    model = load_model(knows, form=ChatForm(chat_template="chatml"))
    assert model.tokenizer.stop_texts == ()
    assert model.tokenizer.end_of_turn_id in model.end_token_ids


def test_a_template_may_be_a_file_and_a_wrong_name_is_told(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for message in messages %}[{{ message['content'] }}]{% endfor %}")
    renderer = ChatRenderer(HuggingFaceTokenizer(base, form=ChatForm(chat_template=str(file))))
    assert renderer.text([ASK, ANSWER]) == "[2 + 2?][ 4]"
    with pytest.raises(ConfigError, match=r"planin.*plain.*chatml"):
        HuggingFaceTokenizer(base, form=ChatForm(chat_template="planin"))


def test_a_saved_model_keeps_the_template_that_it_was_trained_with(base: Path, tmp_path: Path) -> None:
    save_model(load_model(base, form=ChatForm(chat_template="plain")), tmp_path / "saved")
    again, chosen = (
        HuggingFaceTokenizer(tmp_path / "saved"),
        HuggingFaceTokenizer(base, form=ChatForm(chat_template="plain")),
    )
    texts = {each.apply_template([ASK], add_generation_prompt=True) for each in (again, chosen)}
    assert texts == {"<|system|>User: 2 + 2?\nAssistant:"}
    assert again.stop_texts == ("\nUser:",)


async def test_a_base_model_completes_texts_and_refuses_conversations(base: Path) -> None:
    client = LocalClient(load_model(base), num_slots=2, max_context=64)
    policy = LocalPolicy(client, "base")
    request: dict[str, Any] = {"body": {}, "max_tokens": 3}
    completed = await policy.answer(
        CallRequest(dialect=Dialect.COMPLETIONS, messages=[], prompt="SFFH", **request), _Session()
    )
    begin = client.loaded_model.tokenizer.begin_token_id
    assert completed.choices[0].prompt_ids == [begin, *client.loaded_model.tokenizer.encode("SFFH")]
    assert len(completed.choices[0].completion_ids) == 3
    with pytest.raises(RequestRefused, match=r"--chat-template plain\|chatml\|FILE"):
        await policy.answer(CallRequest(dialect=Dialect.CHAT, messages=[ASK], **request), _Session())
    await client.close()


async def test_an_answer_of_a_base_model_ends_where_the_user_would_speak(base: Path) -> None:
    model = load_model(base, form=ChatForm(chat_template="plain"))
    client = LocalClient(model, num_slots=2, max_context=128)
    client.renderer.stop_texts = ("e",)  # a letter that the untrained model is sure to write
    output = await client.get_model_response([ASK], SamplingParams(max_tokens=100, seed=1))
    assert output.finish_reason is FinishReason.STOP
    assert "e" not in output.text
    await client.close()


def test_without_a_template_conversations_are_refused_with_the_flag(base: Path) -> None:
    tokenizer = HuggingFaceTokenizer(base)
    assert tokenizer.encode("SFFH")
    with pytest.raises(ModelDirectoryError, match=r"no chat template.*--chat-template plain\|chatml\|FILE"):
        ChatRenderer(tokenizer).render([ASK])


def test_a_base_model_is_trained_with_a_named_template_and_keeps_it(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))

    def rllm(*words: str) -> Any:
        return CliRunner().invoke(front_door, list(words), prog_name="rllm", catch_exceptions=False)

    settings = (
        *("steps=1", "warm_start.steps=0", "threads=1", "evaluation.num_tasks=2", "evaluation.every_steps=0"),
        *("rollout.tasks_per_step=2", "rollout.group_size=2", "rollout.max_turns=2"),
        *("rollout.max_tokens_per_turn=4", "inference.max_context=512", "inference.num_slots=4"),
    )
    words = ["train", "frozenlake", "--model", str(base), "--recipe", "scratch", "--output", "run"]
    for setting in settings:
        words += ["--set", setting]
    refused = rllm(*words)
    assert refused.exit_code == 2
    assert "--chat-template" in refused.output
    assert rllm(*words, "--chat-template", "plain").exit_code == 0
    assert "Assistant:" in (tmp_path / "run" / "model" / "chat_template.jinja").read_text()
    measured = rllm("eval", "frozenlake", "--model", "run", "--max-examples", "2", "--json")
    assert measured.exit_code == 0, measured.output


class _Session:
    """A session that has not asked before."""

    def __init__(self) -> None:
        self.id, self.seed = "s", 0
        self.sampling: dict[str, Any] = {}
        self.state: dict[str, Any] = {}

    def history(self) -> list[Any]:
        return []
