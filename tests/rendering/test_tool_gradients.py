"""What tools say is read and never learned from: longer answers of tools move no loss, no advantage and no
gradient, and where a tool's token would be predicted the gradient is exactly 0."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rllm.agents.tool import ToolAgent
from rllm.algorithms.grouping import group_advantages, group_episodes
from rllm.algorithms.losses import ImitationLoss, Loss, PolicyLoss
from rllm.config.optimizer import OptimizerConfig
from rllm.engine.rollout import RolloutLimits, run_trajectory
from rllm.environments.tool import ToolEnvironment
from rllm.inference.scripted import ScriptedAnswer, ScriptedClient
from rllm.models.decoder import Decoder, DecoderShape
from rllm.rendering.chat import ChatRenderer
from rllm.rendering.writing import AnswerWriter
from rllm.tools.base import Tool
from rllm.trainer.backends.torch import TorchBackend
from rllm.trainer.samples import training_batch
from rllm.types.episode import Episode, Outcome, Trajectory
from rllm.types.messages import FinishReason, Message, SamplingParams
from rllm.types.sample import TrainingSample

Toy = Callable[..., Any]

FORMATS = [
    "qwen",
    "qwen_coder",
    "llama_tools",
    "mistral_tools",
    "glm_tools",
    "deepseek_tools",
    "harmony_tools",
]
TURNS = {
    "a tool, then parallel ones": ("call", "calls", "answer"),
    "cut off in a call": ("call", "cut"),
    "cut off, and again": ("cut", "call", "answer"),
    "an empty turn": ("call", "empty"),
    "markup without sense": ("noise", "call", "answer"),
}
ASK: list[Message] = [{"role": "user", "content": "ab start"}]


def _tool(num_words: int) -> Tool:
    def add(a: int, b: int) -> str:
        """a + b."""
        return " ".join(["ab"] * num_words) + f" {a + b}"

    return Tool(name="add", function=add)


@cache
def _renderer(toy: Toy, template: str) -> ChatRenderer:
    return ChatRenderer(toy(template))


def _ids(client: ScriptedClient, kind: str, number: int) -> list[int]:
    """What the model samples in one turn, in its own format."""
    tokenizer: Any = client.tokenizer
    end: int = tokenizer.end_id
    if kind == "empty":
        return [end]
    if kind == "answer":
        return [*tokenizer.encode(f"ab is {number}"), end]
    if kind == "noise":
        return [*tokenizer.encode('<tool_call>[TOOL_CALLS]{"name": '), end]
    one_call = client.renderer.tool_format is None or getattr(client.renderer.tool_format, "one_call", False)
    calls = [
        {
            "id": f"call_{each}",
            "type": "function",
            "function": {"name": "add", "arguments": f'{{"a": {number}, "b": {each}}}'},
        }
        for each in range(2 if kind == "calls" and not one_call else 1)
    ]
    message: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    ids = AnswerWriter(client.renderer, (end,), end).ids(ASK, message, [_tool(1).json])
    return ids[: len(ids) // 2] if kind == "cut" else ids


async def _played(toy: Toy, template: str, kinds: Sequence[str], attempt: int, num_words: int) -> Trajectory:
    renderer = _renderer(toy, template)
    client = ScriptedClient([], tokenizer=renderer.tokenizer, policy_version=3)
    client.renderer = renderer
    rng = np.random.default_rng(attempt)
    script: list[ScriptedAnswer] = []
    for kind in kinds:
        ids = _ids(client, kind, attempt)
        script.append(
            ScriptedAnswer(
                text=renderer.tokenizer.decode(ids),
                token_ids=ids,
                logprobs=rng.normal(-5.3, 0.2, len(ids)).astype(np.float32).tolist(),
                finish_reason=FinishReason.LENGTH if kind == "cut" else FinishReason.STOP,
            )
        )
    client.script = script
    env = ToolEnvironment({"question": "ab start"}, tools=[_tool(num_words)])
    limits, sampling = RolloutLimits(max_turns=len(script)), SamplingParams(max_tokens=4096)
    trajectory = await run_trajectory(
        ToolAgent(system_prompt=""), env, client, limits=limits, sampling=sampling
    )
    trajectory.uid, trajectory.reward = str(attempt), float(attempt % 2)
    return trajectory


async def _rows(toy: Toy, template: str, kinds: Sequence[str], num_words: int) -> list[TrainingSample]:
    """The rows of two attempts, one of them right, as the trainer builds them."""
    episodes = [
        Episode(
            task_id="t",
            rollout_idx=attempt,
            trajectories=[await _played(toy, template, kinds, attempt, num_words)],
            outcome=Outcome.SCORED,
        )
        for attempt in (1, 2)
    ]
    groups, counts = group_episodes(episodes)
    return training_batch(episodes, group_advantages(groups, lambda role: "grpo", counts)).samples


def _model(num_ids: int) -> Decoder:
    """A small model that expects the same wherever it is: every token is embedded alike."""
    shape = DecoderShape(
        vocab_size=num_ids,
        hidden_size=8,
        intermediate_size=8,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        norm_eps=1e-6,
        rope_theta=100.0,
        max_positions=4096,
        tied=False,
        qkv_bias=False,
        out_bias=False,
        qk_norm=False,
    )
    model = Decoder(shape).double()
    model.initialize(torch.Generator().manual_seed(1), scale=2.0)
    with torch.no_grad():
        (embedding,) = (each for name, each in model.named_parameters() if "embed" in name)
        embedding.copy_(embedding[:1].expand_as(embedding).clone())
    return model


def _learned(
    model: Decoder, samples: Sequence[TrainingSample], loss: Loss, **how: Any
) -> tuple[float, dict[str, Tensor]]:
    config = OptimizerConfig(max_grad_norm=1e12)
    learner = TorchBackend(model, publish=lambda version: None, config=config, **how)
    found = learner.update(samples, loss, 0.0)["loss"]
    return found, {
        name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
    }


def _trained(samples: Sequence[TrainingSample], column: str) -> list[Any]:
    return [each for row in samples for each in getattr(row, column)[row.trainable_T].tolist()]


@pytest.mark.parametrize("template", FORMATS)
async def test_what_tools_say_changes_no_advantage_no_loss_and_no_gradient(toy: Toy, template: str) -> None:
    model = _model(_renderer(toy, template).tokenizer.num_ids)  # pyright: ignore[reportAttributeAccessIssue]
    for name, kinds in TURNS.items():
        short = await _rows(toy, template, kinds, num_words=1)
        long = await _rows(toy, template, kinds, num_words=40)
        more = sum(row.num_tokens for row in long) - sum(row.num_tokens for row in short)
        assert more > 40 or name == "markup without sense", name  # to some formats that is an answer
        for column in ("token_ids_T", "advantages_T", "logprobs_T", "policy_versions_T"):
            assert _trained(long, column) == _trained(short, column)
        loss, gradient = _learned(model, short, PolicyLoss())
        other_loss, other = _learned(model, long, PolicyLoss())
        assert other_loss == pytest.approx(loss, abs=1e-10)
        assert gradient.keys() == other.keys()
        for key in gradient:
            if "embed" in key:  # whose token it is that was read differs, and not what is learned of all
                assert (gradient[key].sum(0) - other[key].sum(0)).abs().max() <= 1e-10, (name, key)
            else:
                assert (gradient[key] - other[key]).abs().max() <= 1e-10, (name, key)
        assert max(float(each.abs().max()) for each in gradient.values()) > 0


@pytest.mark.parametrize("template", FORMATS)
async def test_where_a_tool_s_token_would_be_predicted_the_gradient_is_exactly_zero(
    toy: Toy, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(_renderer(toy, template).tokenizer.num_ids)  # pyright: ignore[reportAttributeAccessIssue]
    computed, pushed = model.hidden, []

    def hidden(tokens_N: Tensor, positions_N: Tensor, attend: Any, places_M: Tensor) -> Tensor:
        """As it is, plus nothing: the gradient of that nothing is the one at each place's prediction."""
        pushed.append(torch.zeros(len(tokens_N), 8, dtype=torch.float64, requires_grad=True))
        return (computed(tokens_N, positions_N, attend) + pushed[-1])[places_M]

    monkeypatch.setattr(model, "hidden", hidden)
    num_unlearned = 0
    for name, kinds in TURNS.items():
        for row in await _rows(toy, template, kinds, num_words=3):
            pushed.clear()
            _learned(model, [row], ImitationLoss(), share_prefixes=False)  # it clips none
            (push,) = pushed
            assert push.grad is not None
            is_learned = push.grad.abs().amax(-1) > 0
            followed_by_sampled = torch.from_numpy(row.trainable_T)[1:][: len(is_learned)]
            assert is_learned[: len(followed_by_sampled)].tolist() == followed_by_sampled.tolist(), name
            assert not is_learned[len(followed_by_sampled) :].any()
            num_unlearned += int((~followed_by_sampled).sum())
    assert num_unlearned > 100
