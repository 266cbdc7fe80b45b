"""A verdict from a model: asked, checked, asked again where it is none, remembered by its content.

    messages ──► in memory or on disk? ──no──► model ──► JSON ──► check ──► verdict ──► remembered
                        │ yes                    ▲                  │ malformed, out of range
                        └──► verdict             └── another seed ◄─┘ `retries` times, then RewardError

A judge that cannot be reached or makes no sense is an infrastructure failure: never a score.
"""

import asyncio
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rllm.errors import ConfigError, RewardError
from rllm.files.atomic import write_atomic
from rllm.inference.call_retries import CallPatience, answer_of
from rllm.inference.client import ModelClient
from rllm.inference.rollout_engine import RolloutEngine
from rllm.rewards.extraction import final_text
from rllm.rewards.schema import json_text, strict_json
from rllm.types.messages import FinishReason, Message, ModelOutput, SamplingParams

T = TypeVar("T")

ROLE = "judge"
"""The role of its calls for a rollout engine."""
_REMEMBERED = 65_536


@dataclass(kw_only=True, slots=True)
class JudgeVerdict:
    """A judge's verdict, checked, and its cost."""

    reply: dict[str, Any]
    calls: int = 0
    """Model calls; 0 for a verdict that was remembered."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(kw_only=True, slots=True, frozen=True)
class Price:
    """Price of a judge's tokens, per million."""

    prompt: float = 0.0
    completion: float = 0.0

    def of(self, verdict: JudgeVerdict) -> float:
        return (verdict.prompt_tokens * self.prompt + verdict.completion_tokens * self.completion) / 1_000_000


class MalformedVerdictError(ValueError):
    """The model said something else than a verdict."""


@dataclass(slots=True)
class Judge:
    """Asks a `ModelClient`, or the `RolloutEngine` of an attempt, for verdicts; from any thread.

    `cache`: a directory in which verdicts are kept for other runs, one file each; without one they are kept
    in memory. `name` says which model it is: a verdict is of a model, a prompt and a temperature.
    """

    client: ModelClient | RolloutEngine
    name: str = field(default="", kw_only=True)
    temperature: float = field(default=0.0, kw_only=True)
    max_tokens: int = field(default=1024, kw_only=True)
    retries: int = field(default=3, kw_only=True)
    patience: CallPatience = field(default_factory=CallPatience, kw_only=True)
    cache: Path | None = field(default=None, kw_only=True)
    _memory: OrderedDict[str, dict[str, Any]] = field(default_factory=OrderedDict, init=False, repr=False)
    _lock: Any = field(default_factory=threading.Lock, init=False, repr=False)
    _loop: "_LoopThread | None" = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ConfigError(f"`retries` is {self.retries}; it must be 0 or more.")

    def verdict(self, messages: Sequence[Message], check: Callable[[Any], dict[str, Any]]) -> JudgeVerdict:
        """`ask`, for callers that are not async. Never from the event loop that the client belongs to."""
        return self.run(self.ask(messages, check))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of something async, in the judge's own event loop."""
        with self._lock:
            loop = self._loop = self._loop or _LoopThread()
        return loop.run(work)

    async def ask(self, messages: Sequence[Message], check: Callable[[Any], dict[str, Any]]) -> JudgeVerdict:
        """The verdict that `check` accepts: it is given parsed JSON and raises MalformedVerdictError.

        Raises RewardError after the last try, and InferenceError or OSError where the model is not reached.
        """
        key = self._key(messages)
        if (stored_reply := self._stored_reply(key)) is not None:
            try:
                return JudgeVerdict(reply=check(stored_reply))
            except MalformedVerdictError as error:
                raise RewardError(f"A remembered verdict is none ({error}); empty {self.cache}.") from error
        verdict = JudgeVerdict(reply={})
        why = ""
        for number in range(self.retries + 1):
            output = await self._output(messages, number)
            verdict.calls += 1
            prompt_tokens, completion_tokens = _tokens_of(output)
            verdict.prompt_tokens += prompt_tokens
            verdict.completion_tokens += completion_tokens
            try:
                reply = _parse(output)
                verdict.reply = check(reply)
            except MalformedVerdictError as error:
                why = str(error)
                continue
            # Only what `check` has accepted: a malformed reply would be found again at every later asking.
            self._remember(key, reply)
            return verdict
        raise RewardError(
            f"The judge {self.name or 'model'} gave no verdict in {self.retries + 1} tries: {why}. Raise "
            "`retries` or `max_tokens`, or take a model that keeps to a JSON form."
        )

    def close(self) -> None:
        """Ends the thread; the client is its owner's to close."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    async def _output(self, messages: Sequence[Message], number: int) -> ModelOutput:
        # A greedy model says the same again, so tries after the first are drawn.
        temperature = self.temperature if number == 0 else max(self.temperature, 0.3)
        if isinstance(self.client, RolloutEngine):
            return await self.client.get_model_response(
                list(messages), role=ROLE, temperature=temperature, max_tokens=self.max_tokens
            )
        client = self.client
        sampling = SamplingParams(temperature=temperature, max_tokens=self.max_tokens, seed=number)
        return await answer_of(
            lambda: client.get_model_response(list(messages), sampling), self.patience, seed=number
        )

    def _key(self, messages: Sequence[Message]) -> str:
        request = [self.name, self.temperature, self.max_tokens, list(messages)]
        return hashlib.blake2b(json.dumps(request).encode(), digest_size=20).hexdigest()

    def _stored_reply(self, key: str) -> dict[str, Any] | None:
        with self._lock:
            if key in self._memory:
                self._memory.move_to_end(key)
                return self._memory[key]
        if self.cache is None:
            return None
        path = self._path(key)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise RewardError(f"The judge's cache file {path} is no JSON; delete it.") from error
        self._remember_here(key, content)
        return content

    def _remember(self, key: str, reply: dict[str, Any]) -> None:
        self._remember_here(key, reply)
        if self.cache is not None:
            path = self._path(key)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(reply))

    def _remember_here(self, key: str, reply: dict[str, Any]) -> None:
        with self._lock:
            self._memory[key] = reply
            if len(self._memory) > _REMEMBERED:
                self._memory.popitem(last=False)

    def _path(self, key: str) -> Path:
        assert self.cache is not None, "only asked where there is one"
        return self.cache / key[:2] / f"{key}.json"


def _parse(output: ModelOutput) -> dict[str, Any]:
    if output.finish_reason is FinishReason.LENGTH:
        raise MalformedVerdictError("it ran into `max_tokens`")
    text = final_text(output.content or output.text)
    if text is None:
        raise MalformedVerdictError("its thinking never ends")
    try:
        reply = strict_json(json_text(text))
    except ValueError as error:
        raise MalformedVerdictError(f"it said {text!r:.200}, which is no JSON ({error})") from error
    if not isinstance(reply, dict):
        raise MalformedVerdictError(f"it said {text!r:.200}, which is no JSON object")
    return reply


def _tokens_of(output: ModelOutput) -> tuple[int, int]:
    usage = output.usage
    return (
        usage.get("prompt_tokens", len(output.prompt_ids)),
        usage.get("completion_tokens", len(output.completion_ids)),
    )


def costs(verdict: JudgeVerdict, price: Price) -> dict[str, Any]:
    """The cost of a verdict, for a grade's metadata."""
    fields = asdict(verdict)
    fields.pop("reply")
    return {**fields, "cost": price.of(verdict), "cached": verdict.calls == 0}


class _LoopThread:
    """An event loop in a thread of its own, so that clients live in one loop whoever asks."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judge", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
