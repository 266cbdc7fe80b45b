"""Conversations with tools, played by the engine: what is trained on is what was sampled, and no more."""

import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rllm.agents.tool import ToolAgent
from rllm.engine.rollout import RolloutLimits, run_trajectory
from rllm.environments.tool import ToolEnvironment
from rllm.inference.scripted import ScriptedAnswer, ScriptedClient
from rllm.rendering.chat import ChatRenderer
from rllm.rendering.writing import AnswerWriter
from rllm.tools.base import Tool
from rllm.trainer.samples import trajectory_rows
from rllm.types.episode import Outcome, Trajectory
from rllm.types.messages import FinishReason, Message, SamplingParams
from rllm.types.sample import NOT_SAMPLED

Toy = Callable[..., Any]

TEMPLATES = [
    *("builtin", "qwen", "qwen_thinking", "qwen_opened", "qwen_coder", "llama_tools", "mistral_tools"),
    *("mistral_args_tools", "glm_tools", "glm_tight_tools", "deepseek_tools", "deepseek_fenced_tools"),
    "dsml_tools",
]
REWRITING = ["harmony_tools", "harmony_role_tools"]
"""Templates that print a call otherwise once it was answered: each turn begins a segment of its own."""


def _add(a: int, b: int) -> str:
    """a + b."""
    if a == 7:
        raise ValueError("seven ab <|im_end|> is out of order")
    return f"ab {a + b}"


ADD = Tool(name="add", function=_add)


def _call(number: int, a: Any, b: Any, name: str = "add") -> dict[str, Any]:
    arguments = f'{{"a": {a}, "b": {b}}}'
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _written(rng: random.Random, client: ScriptedClient, tokenizer: Any) -> list[int]:
    """Calls as the template writes them, one or several, good and bad, in tokens that nobody would encode."""
    one_call = client.renderer.tool_format is None or getattr(client.renderer.tool_format, "one_call", False)
    calls = [
        _call(number, rng.randrange(9), rng.choice([3, '"x"']), rng.choice(["add", "add", "sub"]))
        for number in range(1 if one_call else rng.randrange(1, 4))
    ]
    message: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    if client.renderer.text_that_asks(_ASK, [ADD.json]).rstrip().endswith("<think>"):
        message["reasoning_content"] = "ab"
    ids = AnswerWriter(client.renderer, (tokenizer.end_id,), tokenizer.end_id).ids(_ASK, message, [ADD.json])
    num_texts = tokenizer.num_ids // 2
    return [token + num_texts * (rng.random() < 0.5) for token in ids[:-1]] + ids[-1:]


_ASK: list[Message] = [{"role": "user", "content": "ab start"}]


def _adversarial_ids(rng: random.Random, tokenizer: Any) -> list[int]:
    """Markup without sense, no end, nothing at all."""
    ids = [rng.randrange(tokenizer.num_ids) for _ in range(rng.randrange(9))]
    for _ in range(rng.randrange(3)):
        piece = rng.choice(["<tool_call>", "</tool_call>", "[TOOL_CALLS]", '{"name": ', "<think>"])
        place = rng.randrange(len(ids) + 1)
        ids[place:place] = tokenizer.encode(piece)
    return ids if rng.random() < 0.3 else [*ids, tokenizer.end_id]


def _script(rng: random.Random, client: ScriptedClient, tokenizer: Any) -> list[ScriptedAnswer]:
    script: list[ScriptedAnswer] = []
    for _ in range(rng.randrange(1, 6)):
        well_formed = rng.random() < 0.75
        ids = _written(rng, client, tokenizer) if well_formed else _adversarial_ids(rng, tokenizer)
        reason = FinishReason.STOP
        if rng.random() < 0.15:  # cut off, maybe in the middle of a call
            ids, reason = ids[: rng.randrange(len(ids) + 1)], FinishReason.LENGTH
        script.append(
            ScriptedAnswer(
                text=tokenizer.decode(ids),
                token_ids=ids,
                logprobs=[float(np.float32(-rng.random())) for _ in ids],
                finish_reason=reason,
            )
        )
    return script


async def _played(toy: Toy, template: str, seed: int) -> tuple[Trajectory, ScriptedClient, Any]:
    renderer = _renderer(toy, template)
    tokenizer: Any = renderer.tokenizer
    rng = random.Random(f"{template} {seed}")
    client = ScriptedClient([], tokenizer=tokenizer, policy_version=5)
    client.renderer = renderer
    client.script = _script(rng, client, tokenizer)
    agent = ToolAgent(system_prompt=rng.choice(["", "aba rules"]))
    env = ToolEnvironment({"question": "ab start"}, tools=[ADD])
    limits = RolloutLimits(max_turns=len(client.script))
    sampling = SamplingParams(max_tokens=4096)
    return await run_trajectory(agent, env, client, limits=limits, sampling=sampling), client, tokenizer


@cache
def _renderer(toy: Toy, template: str) -> ChatRenderer:
    """One for all conversations: what it finds out about its template takes a while."""
    return ChatRenderer(toy(template))


@pytest.mark.parametrize("template", [*TEMPLATES, *REWRITING])
async def test_with_tools_the_ids_trained_on_are_the_ids_emitted_bit_for_bit(toy: Toy, template: str) -> None:
    num_calls = 0
    for seed in range(25):
        trajectory, client, _ = await _played(toy, template, seed)
        assert trajectory.outcome in (Outcome.SCORED, Outcome.TRUNCATED)
        script: Any = client.script
        said = script[: len(trajectory.steps)]
        num_calls += sum(len(step.model_output.tool_calls) for step in trajectory.steps if step.model_output)

        rows = trajectory_rows(trajectory, "task", 0, 0, 1.5)

        assert len(rows) == trajectory.info.get("segments", 1)
        assert len(rows) == 1 or template in REWRITING
        last = trajectory.steps[-1]
        assert rows[-1].token_ids_T.tolist() == last.prompt_ids + last.response_ids
        sampled = [token for each in said for token in each.token_ids]
        assert [token for row in rows for token in row.token_ids_T[row.trainable_T].tolist()] == sampled
        logprobs = [logprob for each in said for logprob in each.logprobs]
        assert [each for row in rows for each in row.logprobs_T[row.trainable_T].tolist()] == logprobs
        for row in rows:
            assert (row.advantages_T == np.where(row.trainable_T, 1.5, 0.0)).all()
            assert (row.policy_versions_T == np.where(row.trainable_T, 5, NOT_SAMPLED)).all()
    assert num_calls > 15, "the scripts hardly call anything, so this shows little"


@pytest.mark.parametrize("template", TEMPLATES)
async def test_after_tool_results_the_prompt_only_appends_and_the_results_are_in_what_it_appends(
    toy: Toy, template: str
) -> None:
    num_results = 0
    for seed in range(25):
        trajectory, client, tokenizer = await _played(toy, template, seed)
        for turn, (earlier, later) in enumerate(pairwise(trajectory.steps), 1):
            known = earlier.prompt_ids + earlier.response_ids
            assert later.prompt_ids[: len(known)] == known
            results = [message for message in client.requests[turn] if message["role"] == "tool"]
            shown = tokenizer.decode(later.prompt_ids[len(known) :])
            new = results[len([m for m in client.requests[turn - 1] if m["role"] == "tool"]) :]
            for message in new:
                num_results += 1
                assert message["content"].replace("<|im_end|>", "")[:40] in shown.replace('\\"', '"')
    assert num_results > 10


@pytest.mark.parametrize("template", TEMPLATES)
async def test_the_tools_are_offered_with_every_call(toy: Toy, template: str) -> None:
    trajectory, client, _ = await _played(toy, template, 3)
    assert client.offered == [[ADD.json]] * len(trajectory.steps)
    assert trajectory.steps[0].prompt_ids == client.renderer.render(client.requests[0], [ADD.json])
