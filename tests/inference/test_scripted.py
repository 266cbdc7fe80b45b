import asyncio
import base64

import pytest

from rllm.errors import ContextLengthError, InferenceError
from rllm.inference import ScriptedAnswer, ScriptedClient
from rllm.inference.scripted import CodepointTokenizer
from rllm.types.messages import FinishReason, LogprobMeaning, Message, SamplingParams

ASK: list[Message] = [{"role": "user", "content": "Where to?"}]


async def test_each_conversation_gets_the_answers_from_the_first_to_the_last() -> None:
    client = ScriptedClient(["Right", "Down"])
    for _ in range(2):
        async with client.session(("task", 0)) as session:
            first = await session.respond(ASK, SamplingParams())
            more: list[Message] = [
                *ASK,
                {"role": "assistant", "content": "Right"},
                {"role": "user", "content": "?"},
            ]
            second = await session.respond(more, SamplingParams())
        assert [first.text, second.text] == ["Right", "Down"]
        assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids


async def test_an_answer_is_a_whole_model_output() -> None:
    client = ScriptedClient(["Right"], policy_version=7)
    output = await client.get_model_response(ASK, SamplingParams(temperature=0.5))
    assert client.tokenizer.decode(output.completion_ids) == output.text == output.content == "Right"
    assert output.completion_ids[-1] == 0
    assert len(output.logprobs) == len(output.policy_versions) == len(output.completion_ids) == 6
    assert output.policy_versions == [7] * 6
    assert output.logprobs == [0.0] * 6
    assert (await ScriptedClient(["Right"]).get_model_response(ASK)).weight_version == 0
    assert (output.weight_version, output.finish_reason) == (7, FinishReason.STOP)
    assert (output.logprob_meaning, output.temperature) == (LogprobMeaning.TEMPERATURE, 0.5)
    assert output.usage == {
        "prompt_tokens": len(output.prompt_ids),
        "completion_tokens": 6,
        "cached_tokens": 0,
    }


async def test_everything_about_an_answer_can_be_set_by_hand() -> None:
    answer = ScriptedAnswer(
        text="hm", token_ids=[5, 5, 9], logprobs=[-1.0, -2.0, -3.0], finish_reason=FinishReason.LENGTH
    )
    output = await ScriptedClient([answer]).get_model_response(ASK)
    assert output.text == "hm"
    assert output.completion_ids == [5, 5, 9]
    assert output.logprobs == [-1.0, -2.0, -3.0]
    assert output.finish_reason is FinishReason.LENGTH


async def test_an_answer_is_cut_off_at_the_tokens_that_were_asked_for() -> None:
    async with ScriptedClient(["Right", "Right"]).session(("task", 0)) as session:
        output = await session.respond(ASK, SamplingParams(max_tokens=3))
        assert (output.text, output.finish_reason) == ("Rig", FinishReason.LENGTH)
        assert len(output.completion_ids) == len(output.logprobs) == 3
        whole = await session.respond(ASK, SamplingParams(max_tokens=6))
        assert (whole.text, whole.finish_reason) == ("Right", FinishReason.STOP)


async def test_an_exception_in_the_script_is_raised_and_the_next_answer_follows_it() -> None:
    client = ScriptedClient([InferenceError("the server died"), "Right"])
    async with client.session(("task", 0)) as session:
        with pytest.raises(InferenceError, match="the server died"):
            await session.respond(ASK, SamplingParams())
        assert (await session.respond(ASK, SamplingParams())).text == "Right"


async def test_a_script_that_is_over_says_how_long_it_was() -> None:
    async with ScriptedClient(["Right"]).session(("task", 0)) as session:
        await session.respond(ASK, SamplingParams())
        with pytest.raises(InferenceError, match=r"1 answers .*turn 2 "):
            await session.respond(ASK, SamplingParams())


async def test_a_function_answers_what_was_asked_and_its_exceptions_fly() -> None:
    def answer(messages: list[Message]) -> str:
        if messages[-1]["content"] == "fail":
            raise ValueError("asked to")
        return str(messages[-1]["content"]).upper()

    client = ScriptedClient(answer)
    assert (await client.get_model_response([{"role": "user", "content": "left"}])).text == "LEFT"
    with pytest.raises(ValueError, match="asked to"):
        await client.get_model_response([{"role": "user", "content": "fail"}])


async def test_an_answer_is_not_given_before_what_it_waits_for() -> None:
    gate = asyncio.Event()
    client = ScriptedClient([ScriptedAnswer(text="late", wait_for=gate.wait)])
    answer = asyncio.create_task(client.get_model_response(ASK))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not answer.done()
    gate.set()
    assert (await answer).text == "late"


async def test_others_have_their_turn_before_an_answer_is_there() -> None:
    turns: list[str] = []
    asyncio.get_running_loop().call_soon(turns.append, "other")
    await ScriptedClient(["Right"]).get_model_response(ASK)
    assert turns == ["other"]


async def test_the_next_prompt_goes_on_behind_the_ids_that_were_sampled() -> None:
    client = ScriptedClient([ScriptedAnswer(text="Right", token_ids=[5, 6, 0]), "Down"])
    async with client.session(("task", 0)) as session:
        first = await session.respond(ASK, SamplingParams())
        more: list[Message] = [
            *ASK,
            {"role": "assistant", "content": "Right"},
            {"role": "user", "content": "?"},
        ]
        num_tokens = session.prompt_tokens(more)
        second = await session.respond(more, SamplingParams())
    assert second.prompt_ids[: len(first.prompt_ids) + 3] == [*first.prompt_ids, 5, 6, 0]
    assert num_tokens == len(second.prompt_ids)


async def test_calls_of_the_tools_that_are_offered_are_read() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    text = 'Wait.\n<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'
    client = ScriptedClient([text, text])
    async with client.session(("task", 0)) as session:
        with_tools = await session.respond(ASK, SamplingParams(), [tool])
    async with client.session(("task", 1)) as session:
        without = await session.respond(ASK, SamplingParams())
    assert [(call.name, call.arguments) for call in with_tools.tool_calls] == [("look", {"at": 3})]
    assert (with_tools.content.strip(), with_tools.text) == ("Wait.", text)
    assert (without.tool_calls, without.content) == ([], text)
    assert client.offered == [[tool], []]


async def test_what_never_comes_can_be_given_up() -> None:
    client = ScriptedClient([ScriptedAnswer(text="never", wait_for=asyncio.Event().wait)])
    answer = asyncio.create_task(client.get_model_response(ASK))
    while not client.requests:
        await asyncio.sleep(0)
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    assert client.open_sessions == 0


async def test_what_was_asked_is_on_record_as_it_was_then() -> None:
    client = ScriptedClient(["a", "b"])
    messages = list(ASK)
    async with client.session(("task", 0)) as session:
        await session.respond(messages, SamplingParams(seed=1))
        messages += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "more"}]
        await session.respond(messages, SamplingParams(seed=2))
    assert [len(request) for request in client.requests] == [1, 3]
    assert [sampling.seed for sampling in client.samplings] == [1, 2]


async def test_open_sessions_are_counted_and_closing_twice_counts_once() -> None:
    client = ScriptedClient([])
    first, second = client.session(("a", 0)), client.session(("b", 0))
    assert client.open_sessions == 2
    first.close()
    first.close()
    assert client.open_sessions == 1
    async with second:
        pass
    assert client.open_sessions == 0


async def test_a_prompt_that_fills_the_context_is_refused() -> None:
    prompt_length = len((await ScriptedClient(["x"]).get_model_response(ASK)).prompt_ids)
    await ScriptedClient(["x"], max_context=prompt_length + 1).get_model_response(ASK)
    with pytest.raises(ContextLengthError, match=f"has {prompt_length} tokens"):
        await ScriptedClient(["x"], max_context=prompt_length).get_model_response(ASK)


def test_the_code_point_tokenizer_takes_any_text_and_gives_it_back() -> None:
    tokenizer = CodepointTokenizer()
    text = "añ🙂\n\x01"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("\0") == [0]
    assert tokenizer.decode([0]) == ""
    assert [tokenizer.token_text(token) for token in (0, *tokenizer.encode("a🙂"))] == ["\0", "a", "🙂"]
    assert tokenizer.max_token_chars == 1
    assert tokenizer.with_template_variables({"think": False}) is tokenizer
    assert tokenizer.images is not None
    assert tokenizer.images.with_frames("as it is") == "as it is"


async def test_images_of_messages_are_read_as_a_token_each_so_that_prompts_tell_them_apart() -> None:
    parts = [{"type": "text", "text": "see "}, None, {"type": "text", "text": " here"}]
    client = ScriptedClient(lambda _: "Right")
    prompts: list[list[int]] = []
    for data in (b"\x89PNG\r\n\x1a\none", b"\x89PNG\r\n\x1a\ntwo", b"\x89PNG\r\n\x1a\none"):
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        parts[1] = {"type": "image_url", "image_url": {"url": url}}
        async with client.session(("task", 0)) as session:
            output = await session.respond([{"role": "user", "content": list(parts)}], SamplingParams())
        prompts.append(output.prompt_ids)
    assert client.tokenizer.decode(prompts[0]) == "user:see  here\nassistant:"
    assert prompts[0] == prompts[2] != prompts[1]
    assert len(prompts[0]) == len(prompts[1]) == len("user:see  here\0\nassistant:") + 1
