"""What a workflow calls: prompts by appending, draws by what is asked, budgets, roles, retries."""

import asyncio
import gc
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllm.errors import ConfigError, InferenceError
from rllm.inference import ScriptedAnswer, ScriptedClient
from rllm.inference.call_retries import CallPatience
from rllm.inference.rollout_engine import RoleSettings, RolloutEngine
from rllm.types.budget import BudgetExceeded, TokenBudget
from rllm.types.episode import TerminationReason
from rllm.types.messages import FinishReason, Message, ModelOutput, SamplingParams

QUESTION: list[Message] = [{"role": "user", "content": "2+2?"}]
QUICK = CallPatience(first_wait_s=0.0)
RENDERER = ScriptedClient([]).renderer


def after(messages: Sequence[Message], answer: str, more: str = "Sure?") -> list[Message]:
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": more}]


class MessagesOnly:
    """A client without ids, as an API is that returns none."""

    def __init__(self, prompt_tokens: int = 10, completion_tokens: int = 5) -> None:
        self.usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
        self.samplings: list[SamplingParams] = []
        self.num_closed = 0

    def session(self, order: tuple[str, int]) -> "MessagesOnly":
        return self

    def prompt_tokens(self, messages: Sequence[Message]) -> int:
        return -1

    async def respond(self, messages: Sequence[Message], sampling: SamplingParams) -> ModelOutput:
        self.samplings.append(sampling)
        return ModelOutput(text="4", content="4", usage=dict(self.usage))

    def close(self) -> None:
        self.num_closed += 1


class Named(MessagesOnly):
    """A server that names its answers as others do."""

    async def respond(self, messages: Sequence[Message], sampling: SamplingParams) -> ModelOutput:
        output = await super().respond(messages, sampling)
        output.completion_id = "call-2"
        return output


async def test_answers_of_servers_that_name_them_alike_are_told_apart() -> None:
    engine = RolloutEngine(
        {"solver": Named(), "judge": Named()}, roles={"judge": RoleSettings(policy="judge")}
    )
    outputs = [await engine.get_model_response(QUESTION, role=role) for role in ("solver", "judge", "solver")]
    assert len({each.completion_id for each in outputs}) == 3
    assert outputs[0].completion_id == "call-2", "the name that the server gave is kept where it is free"


# ---- prompts ---------------------------------------------------------------------------------------------


async def test_where_thoughts_are_stripped_each_prompt_is_what_was_really_sent() -> None:
    said = ["<think>two and two</think>\n\n4", "<think>sure</think>\n\nYes", "No"]
    client = ScriptedClient(list(said))
    engine = RolloutEngine(client, roles={"thinker": RoleSettings(history="strip")})
    messages = QUESTION
    for text in said:
        output = await engine.get_model_response(messages, role="thinker")
        call = engine.calls[-1]
        assert "think" not in str(call.messages)
        assert output.prompt_ids == RENDERER.render(call.messages)
        assert output.text == text
        messages = after(messages, text)
    assert [message["content"] for message in call.messages] == ["2+2?", "4", "Sure?", "Yes", "Sure?"]


async def test_where_thoughts_are_kept_the_next_prompt_goes_on_behind_them() -> None:
    thought = "<think>two and two</think>\n\n4"
    engine = RolloutEngine(ScriptedClient([thought, "Yes"]))
    first = await engine.get_model_response(QUESTION)
    second = await engine.get_model_response(after(QUESTION, thought))
    whole = first.prompt_ids + first.completion_ids
    assert second.prompt_ids[: len(whole)] == whole


async def test_the_next_prompt_of_a_conversation_is_the_ids_so_far_and_what_is_new() -> None:
    odd = ScriptedAnswer(text="4", token_ids=[777, 5, 0])  # no tokenizer would encode "4" like this
    client = ScriptedClient([odd, "Yes"])
    engine = RolloutEngine(client)
    first = await engine.get_model_response(QUESTION)
    second = await engine.get_model_response(after(QUESTION, "4"))
    whole = first.prompt_ids + first.completion_ids
    assert second.prompt_ids[: len(whole)] == whole
    assert "Sure?" in client.tokenizer.decode(second.prompt_ids[len(whole) :])


async def test_an_answer_may_come_back_without_its_reasoning() -> None:
    engine = RolloutEngine(ScriptedClient(["<think>two and two</think>4", "Yes"]))
    first = await engine.get_model_response(QUESTION)
    assert (first.content.strip(), first.reasoning) == ("4", "two and two")
    second = await engine.get_model_response(after(QUESTION, first.content))
    whole = first.prompt_ids + first.completion_ids
    assert second.prompt_ids[: len(whole)] == whole


async def test_parallel_conversations_that_read_alike_each_go_on_with_their_own_tokens() -> None:
    """Whichever is answered first: the ids of a conversation are its own."""
    for slow in (0, 1):
        gate = asyncio.Event()
        alike = [
            ScriptedAnswer(
                text="4", token_ids=[700 + number, 0], wait_for=gate.wait if number == slow else None
            )
            for number in range(2)
        ]
        client = ScriptedClient([*alike, "Yes", "Yes"])
        engine = RolloutEngine(client)

        async def ask_twice(engine: RolloutEngine = engine) -> tuple[ModelOutput, ModelOutput]:
            first = await engine.get_model_response(QUESTION)
            return first, await engine.get_model_response(after(QUESTION, first.text))

        both = asyncio.gather(ask_twice(), ask_twice())
        while len(client.prompts) < 3:  # the conversation that need not wait has asked twice
            await asyncio.sleep(0)
        gate.set()
        for first, second in await both:
            assert second.prompt_ids[: len(first.prompt_ids) + 2] == first.prompt_ids + first.completion_ids


async def test_conversations_that_are_asked_in_turns_each_go_on_with_their_own_tokens() -> None:
    """A new asyncio task for every call, as `gather` over model calls makes them."""
    alike = [ScriptedAnswer(text="4", token_ids=[700 + number, 0]) for number in range(3)]
    engine = RolloutEngine(ScriptedClient([*alike, "Yes", "Yes", "Yes"]))
    firsts = await asyncio.gather(*(engine.get_model_response(QUESTION) for _ in range(3)))
    nexts = await asyncio.gather(*(engine.get_model_response(after(QUESTION, "4")) for _ in range(3)))
    for first, second in zip(firsts, nexts, strict=True):
        assert second.prompt_ids[: len(first.prompt_ids) + 2] == first.prompt_ids + first.completion_ids


async def test_two_policies_share_no_conversation() -> None:
    one, other = ScriptedClient(["4"]), ScriptedClient(["Yes"])
    engine = RolloutEngine(
        {"one": one, "other": other},
        roles={"solver": RoleSettings(policy="one"), "judge": RoleSettings(policy="other")},
    )
    await engine.get_model_response(QUESTION, role="solver")
    output = await engine.get_model_response(after(QUESTION, "4"), role="judge")
    assert output.prompt_ids == other.renderer.render(after(QUESTION, "4"))
    assert [call.policy for call in engine.calls] == ["one", "other"]


async def test_tools_are_offered_and_calls_of_them_are_read() -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    said = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    engine = RolloutEngine(ScriptedClient([said, "4"]))
    output = await engine.get_model_response(QUESTION, tools=[tool])
    assert [(call.name, call.arguments) for call in output.tool_calls] == [("add", {"a": 2})]
    assert output.finish_reason is FinishReason.TOOL_CALLS
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    said_again: list[Message] = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "4"},
    ]
    second = await engine.get_model_response(said_again, tools=[tool])
    whole = output.prompt_ids + output.completion_ids
    assert second.prompt_ids[: len(whole)] == whole


# ---- draws -----------------------------------------------------------------------------------------------


async def dawdle(order: random.Random) -> None:
    for _ in range(order.randrange(6)):
        await asyncio.sleep(0)


class Crowd:
    """Answers in an order of its own; the answer is a function of prompt and seed alone, as a model's is."""

    max_context = 100_000
    policy_version = 0

    def __init__(self, order: random.Random) -> None:
        self.order = order
        self.renderer = RENDERER

    async def generate_ids(
        self, prompt_ids: list[int], sampling: SamplingParams, *, on_piece: Any = None
    ) -> ModelOutput:
        await dawdle(self.order)
        draw = random.Random(f"{prompt_ids} {sampling.seed}")
        text = draw.choice("ab")  # two answers only: parallel conversations often read alike
        ids = [draw.randrange(1000, 2000), 0]
        return ModelOutput(
            text=text, prompt_ids=prompt_ids, completion_ids=ids, logprobs=[0.0] * 2, policy_versions=[0] * 2
        )

    async def close(self) -> None: ...


async def _debate(order: random.Random) -> list[list[list[int]]]:
    """Three agents, three turns each, with a while between them; a judge reads what they said."""
    engine = RolloutEngine(Crowd(order), key=(1, "train/3", "task", 0))  # type: ignore[arg-type]

    async def agent(messages: list[Message]) -> list[ModelOutput]:
        outputs: list[ModelOutput] = []
        for _ in range(3):
            outputs.append(await engine.get_model_response(messages, role="debater"))
            messages = after(messages, outputs[-1].text)
            await dawdle(order)
        return outputs

    said = await asyncio.gather(*(agent(QUESTION) for _ in range(3)))
    transcript = "/".join(output.text for outputs in said for output in outputs)
    judged = await engine.get_model_response([{"role": "user", "content": transcript}], role="judge")
    return [[output.completion_ids for output in outputs] for outputs in [*said, [judged]]]


@settings(max_examples=8)
@given(orders=st.lists(st.integers(0, 1_000_000), min_size=2, max_size=2))
async def test_what_is_sampled_does_not_depend_on_the_order_of_answers(orders: list[int]) -> None:
    results = [await _debate(random.Random(order)) for order in orders]
    assert all(result == results[0] for result in results)


async def test_every_part_of_the_key_and_every_call_has_draws_of_its_own() -> None:
    seeds: set[int] = set()
    for key in [(0, "a", "t", 0), (1, "a", "t", 0), (0, "b", "t", 0), (0, "a", "u", 0), (0, "a", "t", 1)]:
        client = ScriptedClient(lambda messages: "4")
        engine = RolloutEngine(client, key=key)
        await engine.get_model_response(QUESTION)
        await engine.get_model_response(QUESTION)
        await engine.get_model_response(QUESTION, role="judge")
        await asyncio.gather(*(engine.get_model_response(QUESTION) for _ in range(2)))
        seeds |= {sampling.seed for sampling in client.samplings}
    assert len(seeds) == 25


# ---- how a call samples ----------------------------------------------------------------------------------


async def test_a_call_wins_over_its_role_and_the_role_over_the_run() -> None:
    client = ScriptedClient(lambda messages: "4")
    engine = RolloutEngine(
        client,
        sampling=SamplingParams(temperature=0.9, max_tokens=50),
        roles={"solver": RoleSettings(temperature=0.5, max_tokens=20)},
    )
    await engine.get_model_response(QUESTION)
    await engine.get_model_response(QUESTION, role="solver")
    await engine.get_model_response(QUESTION, role="solver", temperature=0.1, stop=["x"])
    assert [(each.temperature, each.max_tokens, each.stop) for each in client.samplings] == [
        (0.9, 50, ()),
        (0.5, 20, ()),
        (0.1, 20, ("x",)),
    ]


async def test_a_greedy_run_stays_greedy_whatever_the_temperature_of_a_role() -> None:
    client = ScriptedClient(["4"])
    engine = RolloutEngine(
        client, sampling=SamplingParams(temperature=0.0), roles={"solver": RoleSettings(temperature=0.5)}
    )
    await engine.get_model_response(QUESTION, role="solver")
    assert client.samplings[0].temperature == 0.0


async def test_what_cannot_be_honoured_is_refused() -> None:
    client = ScriptedClient(["4"])
    with pytest.raises(ConfigError, match=r"`best_of`; .*temperature"):
        await RolloutEngine(client).get_model_response(QUESTION, best_of=3)
    with pytest.raises(ConfigError, match="`temperature` is -1"):
        await RolloutEngine(client).get_model_response(QUESTION, temperature=-1.0)
    with pytest.raises(ConfigError, match=r"`judge` .*`b`; .*policy"):
        RolloutEngine(client, roles={"judge": RoleSettings(policy="b")})
    with pytest.raises(ConfigError, match="`generate_ids`"):
        RolloutEngine(object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least one"):
        RolloutEngine({})
    with pytest.raises(ConfigError, match="MessagesOnly takes none"):
        await RolloutEngine(MessagesOnly()).get_model_response(QUESTION, tools=[{"type": "function"}])


# ---- budgets ---------------------------------------------------------------------------------------------


async def test_an_answer_may_be_as_long_as_the_smallest_limit() -> None:
    client = ScriptedClient(lambda messages: "4")
    prompt_tokens = len(client.renderer.render(QUESTION))
    for budget, expected in [
        (TokenBudget(), 256),
        (TokenBudget(max_turn_tokens=9), 9),
        (TokenBudget(max_response_tokens=30), 30),
        (TokenBudget(max_model_tokens=prompt_tokens + 3), 3),
    ]:
        await RolloutEngine(client, budget=budget).get_model_response(QUESTION)
        assert client.samplings[-1].max_tokens == expected
    client.max_context = prompt_tokens + 2
    await RolloutEngine(client).get_model_response(QUESTION)
    assert client.samplings[-1].max_tokens == 2


async def test_a_request_that_cannot_fit_is_never_sent() -> None:
    client = ScriptedClient(["4", "Yes"])
    with pytest.raises(BudgetExceeded) as too_long:
        await RolloutEngine(client, budget=TokenBudget(max_prompt_tokens=3)).get_model_response(QUESTION)
    assert too_long.value.reason is TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED
    engine = RolloutEngine(client, budget=TokenBudget(max_response_tokens=8))
    await engine.get_model_response(QUESTION)
    with pytest.raises(BudgetExceeded) as used_up:
        await engine.get_model_response(after(QUESTION, "4"))
    assert used_up.value.reason is TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED
    client.max_context = 5
    with pytest.raises(BudgetExceeded, match="context holds 5"):
        await RolloutEngine(client).get_model_response(QUESTION)
    assert len(client.prompts) == 1


async def test_each_conversation_of_an_attempt_has_the_whole_budget() -> None:
    client = ScriptedClient(lambda messages: "4")
    engine = RolloutEngine(client, budget=TokenBudget(max_response_tokens=8))
    for number in range(3):
        await engine.get_model_response([{"role": "user", "content": f"question {number}"}])
    assert [sampling.max_tokens for sampling in client.samplings] == [8, 8, 8]


async def test_an_agent_that_rewrites_its_history_goes_on_using_up_the_same_budget() -> None:
    client = ScriptedClient(lambda messages: "4")
    engine = RolloutEngine(client, budget=TokenBudget(max_response_tokens=40))
    await engine.get_model_response(QUESTION)
    await engine.get_model_response([*QUESTION, {"role": "user", "content": "x" * 20}])
    assert client.samplings[1].max_tokens < 20


async def test_without_ids_the_budget_works_from_what_the_server_counted() -> None:
    client = MessagesOnly(prompt_tokens=10, completion_tokens=5)
    engine = RolloutEngine(client, budget=TokenBudget(max_response_tokens=12))
    await engine.get_model_response(QUESTION)
    client.usage = {"prompt_tokens": 20, "completion_tokens": 5}
    output = await engine.get_model_response(after(QUESTION, "4"))
    assert output.completion_ids == []
    assert client.samplings[1].max_tokens == 7
    with pytest.raises(BudgetExceeded):
        await engine.get_model_response(after(after(QUESTION, "4"), "4"))
    assert len(client.samplings) == 2
    await engine.close()
    assert client.num_closed == 1  # one session for the one conversation


# ---- failures --------------------------------------------------------------------------------------------


async def test_a_failed_call_is_asked_again_with_the_same_seed() -> None:
    client = ScriptedClient([InferenceError("away"), OSError("reset"), "4"])
    engine = RolloutEngine(client, patience=QUICK)
    assert (await engine.get_model_response(QUESTION)).text == "4"
    assert len(client.prompts) == 3
    assert len({sampling.seed for sampling in client.samplings}) == 1
    assert (engine.num_retries, engine.failure, len(engine.calls)) == (2, None, 1)


async def test_a_call_that_fails_for_good_is_remembered_until_the_same_is_answered() -> None:
    engine = RolloutEngine(
        ScriptedClient([InferenceError("away"), InferenceError("still away"), "4"]),
        patience=CallPatience(retries=1, first_wait_s=0.0),
    )
    with pytest.raises(InferenceError, match="still away"):
        await engine.get_model_response(QUESTION)
    assert str(engine.failure) == "still away"
    await engine.get_model_response(QUESTION)
    assert engine.failure is None


async def test_an_answer_that_is_not_whole_is_a_failure() -> None:
    broken = ScriptedAnswer(text="4", finish_reason=FinishReason.ERROR)
    engine = RolloutEngine(ScriptedClient([broken, "4"]), patience=QUICK)
    assert (await engine.get_model_response(QUESTION)).finish_reason is FinishReason.STOP
    assert engine.num_retries == 1


async def test_a_call_that_is_not_answered_in_time_is_a_failure() -> None:
    never = ScriptedAnswer(text="4", wait_for=asyncio.Event().wait)
    engine = RolloutEngine(ScriptedClient([never]), patience=CallPatience(retries=0, call_timeout_s=0.02))
    with pytest.raises(InferenceError, match=r"within 0\.02 s"):
        await engine.get_model_response(QUESTION)
    assert isinstance(engine.failure, InferenceError)


async def test_whatever_a_client_raises_says_nothing_about_the_policy() -> None:
    engine = RolloutEngine(ScriptedClient([KeyError("a bug of the client")]))
    with pytest.raises(KeyError):
        await engine.get_model_response(QUESTION)
    assert isinstance(engine.failure, KeyError)


async def test_an_answer_to_a_prompt_that_proves_too_long_is_on_record() -> None:
    client = MessagesOnly(prompt_tokens=10)
    engine = RolloutEngine(client, budget=TokenBudget(max_prompt_tokens=9))  # type: ignore[arg-type]
    with pytest.raises(BudgetExceeded):
        await engine.get_model_response(QUESTION)
    assert (len(engine.calls), engine.failure) == (1, None)


async def test_calls_that_nobody_awaits_end_with_the_attempt() -> None:
    never = ScriptedAnswer(text="4", wait_for=asyncio.Event().wait)
    client = ScriptedClient([never])
    engine = RolloutEngine(client)
    stray = asyncio.create_task(engine.get_model_response(QUESTION))
    async with asyncio.timeout(20):
        while client.in_flight == 0:
            await asyncio.sleep(0.001)
    await engine.close()
    assert stray.cancelled()
    assert client.in_flight == 0
    with pytest.raises(InferenceError, match="attempt is over"):
        await engine.get_model_response(QUESTION)


async def test_a_call_that_fails_while_it_is_ended_complains_to_nobody() -> None:
    entered = asyncio.Event()

    class Stubborn(MessagesOnly):
        async def respond(self, messages: Sequence[Message], sampling: SamplingParams) -> ModelOutput:
            entered.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                raise ZeroDivisionError from error
            raise AssertionError

    engine = RolloutEngine(Stubborn())
    call = asyncio.create_task(engine.get_model_response(QUESTION))
    await asyncio.wait_for(entered.wait(), 5)
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    await engine.close()
    assert call.done()
    del call, engine  # whose failures hold on to the call
    gc.collect()
    assert complaints == []
