"""Published rollout engines by their constructors: one that asks a server, and two that trainers make.

OpenAIEngine(model=…, base_url=…).get_model_response(messages) ──► OpenAIClient ──► ModelOutput
AgentExecutionEngine(…, rollout_engine=OpenAIEngine(…))        ──► the same client
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rllm.engine.settings import sampling_of
from rllm.errors import ConfigError
from rllm.inference.engines import OPENAI_URL, text_tokenizer
from rllm.inference.openai import OpenAIClient
from rllm.types.messages import Message, ModelOutput

_NO_TEMPLATE = "prompts are made by the chat template of the served model; leave it out"
_ONLY_WITHOUT = {
    "chat_parser": _NO_TEMPLATE,
    "tools": "give them to each call: `get_model_response(messages, tools=…)`",
    "accumulate_reasoning": "an agent says itself what of its thoughts goes into the next prompt",
    "disable_thinking": "say so in `extra_body`, as the server wants it",
    "reasoning_effort": "say so in `extra_body`, as the server wants it",
    "config": "give the values by the names of the arguments",
}


class OpenAIEngine(OpenAIClient):
    """A model behind an OpenAI-compatible server, with the published arguments.

    `max_response_length` bounds each answer; `max_prompt_length` and `api_retries` are limits of the engine
    that plays the episodes (`AgentExecutionEngine`), and mean nothing for a call of its own.
    """

    def __init__(
        self,
        model: str = "",
        tokenizer: Any = None,
        base_url: str = OPENAI_URL,
        api_key: str | None = None,
        *,
        sampling_params: Mapping[str, Any] | None = None,
        max_response_length: int = 4096,
        max_prompt_length: int = 4096,
        api_retries: int = 3,
        extra_body: Mapping[str, Any] | None = None,
        **published: Any,
    ) -> None:
        for name, value in published.items():
            if name not in _ONLY_WITHOUT:
                raise ConfigError(f"OpenAIEngine does not know `{name}`, which is {value!r}; leave it out.")
            if value:
                raise ConfigError(f"OpenAIEngine was given `{name}`: {_ONLY_WITHOUT[name]}.")
        super().__init__(
            base_url,
            model,
            api_key,
            tokenizer=None if tokenizer is None else text_tokenizer(tokenizer),
            extra_body=extra_body,
        )
        self._call_settings = dict(sampling_params or {})
        self._max_response_length = max_response_length

    async def get_model_response(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, messages: Sequence[Message], sampling: Any = None, *, tools: Any = (), **settings: Any
    ) -> ModelOutput:
        """One answer; `settings` (temperature, max_tokens, …) win over `sampling_params`."""
        settings.pop("application_id", None)
        if sampling is None:
            sampling, _ = sampling_of({**self._call_settings, **settings}, self._max_response_length)
        return await super().get_model_response(list(messages), sampling, tools=tools)


class VerlEngine:
    """A name of published programs: verl's servers are made by the run that uses them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            "VerlEngine cannot be made alone: set `backend` to verl in AgentTrainer, or ask a vLLM server by "
            'AgentExecutionEngine(engine_name="vllm", rollout_engine_args={"base_url": …}).'
        )


class TinkerEngine:
    """A name of published programs: the client of a Tinker service is made by the run that trains there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            "TinkerEngine cannot be made alone: set `backend` to tinker in AgentTrainer; a service with an "
            "OpenAI-compatible door is asked by OpenAIEngine(base_url=…)."
        )
