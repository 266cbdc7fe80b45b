"""A model behind any server that speaks OpenAI's chat protocol: hosted ones, vLLM, SGLang, the rLLM gateway.

    messages ──POST /v1/chat/completions──► text, calls; ids and log-probabilities where the server tells them
                 ▲                     │
                 └─ without a field ◄──┘ that the server refuses and that says nothing (`top_k` off, …)

The server renders: each turn it is sent the whole conversation. Engines that are known to return token ids
(vLLM, SGLang, `rllm serve model`) are asked for them, and for every sampling field, so that nothing is left
to a default of theirs. Others are sent OpenAI's own fields. Nothing is ever tried again here: a failed call
is an InferenceError, and the engine that plays the rollout asks again with the same seed.
"""

import itertools
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllm.errors import ConfigError, ContextLengthError, InferenceError
from rllm.inference.client import ModelSession, Tools
from rllm.inference.openai_http import AskedOnce, HttpRefusal, ServerHttp, error_text
from rllm.inference.openai_replies import fields_refused, read_answer, room_told
from rllm.rendering.chat import ChatRenderer, Conversation
from rllm.rendering.tokens import TextTokenizer
from rllm.types.addresses import require_base_url
from rllm.types.messages import LogprobMeaning, Message, ModelOutput, SamplingParams

_log = logging.getLogger(__name__)

_ENGINES_WITH_IDS = ("vllm", "sglang", "rllm")
_SEEDS = 2**63
_SAYS_NOTHING: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logprobs": True,
    "return_token_ids": True,
}
"""A server that does not know one of these samples the same without it; without the last two, only no ids
come back."""


@dataclass(kw_only=True, slots=True)
class _Server:
    """The facts that a server gives about itself."""

    model: str
    engine: str = ""
    """`vllm`, `sglang`, `rllm`, or nothing known."""
    max_context: int = 0
    """0 where it does not tell."""


class OpenAIClient:
    """A `ModelClient`.

    `base_url` ends in `/v1`; `model` may be left out where the server has one. With the model's `tokenizer`
    (rendering.tokens.TextTokenizer) a prompt is measured before it is sent; without, `prompt_tokens` is -1.
    `return_token_ids`: whether ids are asked for; None asks engines that are known to have them.
    `processed_logprobs`: the server's log-probabilities are of the distribution that it sampled from, as with
    vLLM's `--logprobs-mode processed_logprobs` and `rllm serve model`, which no server tells.
    `extra_body` is sent with every call. `follows_schema` says whether the server samples by a JSON schema,
    which no server tells; without it none is sent. At most `max_connections` calls are under way at once and
    others wait; 0 takes three quarters of the files that the process may open.
    """

    def __init__(
        self,
        base_url: str,
        model: str = "",
        api_key: str | None = None,
        *,
        tokenizer: TextTokenizer | None = None,
        return_token_ids: bool | None = None,
        processed_logprobs: bool = False,
        extra_body: Mapping[str, Any] | None = None,
        follows_schema: Callable[[Mapping[str, Any]], Awaitable[bool]] | None = None,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 30.0,
        max_connections: int = 0,
    ) -> None:
        self.base_url = require_base_url("`base_url`", base_url)
        self.model = model
        self.policy_version = 0
        """The version of the weights that answer, for servers that do not tell it themselves."""
        self.renderer = None if tokenizer is None else ChatRenderer(tokenizer)
        self._return_token_ids = return_token_ids
        self._processed_logprobs = processed_logprobs
        self._extra_body = dict(extra_body or {})
        self._follows_schema = follows_schema
        self._http = ServerHttp(
            self.base_url,
            api_key=api_key,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            max_connections=max_connections,
        )
        self._server = AskedOnce(self._find_out)
        self._left_out: set[str] = set()
        """Fields that the server does not know."""
        self._size_name = "max_tokens"
        self._name = secrets.token_hex(4)
        self._numbers = itertools.count()

    def session(self, order: tuple[str, int]) -> "OpenAISession":
        return OpenAISession(self)

    async def get_model_response(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams = SamplingParams(),
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> ModelOutput:
        async with self.session(("", 0)) as session:
            return await session.respond(messages, sampling, tools=tools)

    def set_policy_version(self, policy_version: int) -> None:
        self.policy_version = policy_version

    async def release(self) -> None:
        """Close the connections that nobody uses; the next call opens new ones."""
        await self._http.close()

    async def close(self) -> None:
        await self._http.close()

    def schema_grammar(self, schema: Mapping[str, Any]) -> str:
        """The schema itself as `SamplingParams.grammar`: the server makes a grammar of it."""
        return json.dumps(schema)

    async def can_follow(self, grammar: str) -> bool:
        """Whether answers are sampled by what `schema_grammar` gave."""
        return self._follows_schema is not None and await self._follows_schema(json.loads(grammar))

    # ---- one call --------------------------------------------------------------------------------------

    async def answer(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        session: str = "",
        num_prompt_tokens: int = -1,
    ) -> ModelOutput:
        """The output of `OpenAISession.respond`; `num_prompt_tokens` where it is known, else -1."""
        server = await self._server()
        body = self._body(server, messages, sampling, tools)
        if num_prompt_tokens >= 0 and server.max_context:
            room = server.max_context - num_prompt_tokens
            if room < 1:
                raise ContextLengthError(
                    f"The prompt has {num_prompt_tokens} tokens and the context of {server.model} holds "
                    f"{server.max_context}, so no token fits behind it."
                )
            body[self._size_name] = min(sampling.max_tokens, room)
        headers = {"X-Session-ID": session} if server.engine == "rllm" else None
        start_s, version = time.perf_counter(), self.policy_version
        reply = await self._ask(body, headers)
        if not isinstance(reply, dict):
            raise InferenceError(
                f"The server at {self.base_url} answered with something that is no JSON object."
            )
        # Some servers tell a failure with status 200; any other status was an exception before.
        if reply.get("error"):
            raise InferenceError(f"The server at {self.base_url} failed: {error_text(reply)}")
        try:
            output = read_answer(reply, version)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise InferenceError(
                f"The server at {self.base_url} answered in a form that cannot be read: {error!r}"
            ) from error
        if output.completion_ids:
            output.logprob_meaning = self._logprob_meaning(server, sampling)
        output.temperature = sampling.temperature
        output.latency_s = time.perf_counter() - start_s
        return output

    async def _find_out(self) -> _Server:
        """A server without /models is taken as it is."""
        listing = await self._http.get(f"{self.base_url}/models")
        data = listing.get("data") if isinstance(listing, dict) else None
        models = [each for each in data if isinstance(each, dict)] if isinstance(data, list) else []
        names = [str(each.get("id")) for each in models]
        name = self.model or (names[0] if len(names) == 1 else "")
        if not name:
            model_list = ", ".join(names[:8]) or "does not tell which models it serves"
            raise ConfigError(
                f"`model` is empty and the server at {self.base_url} "
                f"{f'serves {model_list}' if names else model_list}; name one."
            )
        model: dict[str, Any] = next((each for each in models if each.get("id") == name), {})
        engine = str(model.get("owned_by")).lower()
        length = model.get("max_model_len")
        return _Server(
            model=name,
            engine=engine if engine in _ENGINES_WITH_IDS else "",
            max_context=length if type(length) is int and length > 0 else 0,
        )

    def _body(
        self,
        server: _Server,
        messages: Sequence[Message],
        sampling: SamplingParams,
        tools: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:
        id_options = ("top_logprobs",) if self._follows_schema is not None else ("grammar", "top_logprobs")
        for name in id_options:
            if getattr(sampling, name):
                raise ConfigError(
                    f"`{name}` is {getattr(sampling, name)!r}, which needs a client that works with token "
                    "ids; use VLLMClient or LocalClient, or leave it out."
                )
        wants_ids = self._wants_ids(server)
        body: dict[str, Any] = {
            "model": server.model,
            "messages": messages,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            self._size_name: sampling.max_tokens,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": sampling.seed % _SEEDS,
        }
        if sampling.top_k or wants_ids:
            body["top_k"] = sampling.top_k or -1
        if wants_ids:
            body |= {"min_p": 0.0, "repetition_penalty": 1.0, "logprobs": True, "return_token_ids": True}
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.stop_token_ids:
            body["stop_token_ids"] = list(sampling.stop_token_ids)
        if sampling.grammar:
            form = {"name": "answer", "strict": True, "schema": json.loads(sampling.grammar)}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        if tools:
            body["tools"] = list(tools)
        for name in self._left_out:
            self._require_idle(name, body.pop(name, None), "it does not know the field")
        return body | self._extra_body if self._extra_body else body

    def _wants_ids(self, server: _Server) -> bool:
        if self._return_token_ids is None:
            return server.engine in _ENGINES_WITH_IDS
        return self._return_token_ids

    async def _ask(self, body: dict[str, Any], headers: Mapping[str, str] | None) -> Any:
        """The reply. What the server refuses is asked for differently where that changes nothing."""
        left_out: set[str] = set()
        size_name = self._size_name
        is_shortened = False
        while True:
            try:
                reply = await self._http.post("/chat/completions", body, headers)
                break
            except ContextLengthError as error:
                room = room_told(str(error))
                # Once alone: a server that refuses the room that it told would be asked for ever.
                if is_shortened or not 1 <= room < body.get(size_name, 0):
                    raise
                is_shortened, body = True, {**body, size_name: room}
            except HttpRefusal as error:
                pointed_at = fields_refused(error, body)
                if size_name in pointed_at and size_name == "max_tokens":
                    size_name = "max_completion_tokens"
                    body = {size_name if name == "max_tokens" else name: body[name] for name in body}
                    continue
                if not pointed_at:
                    raise self._error_of(error) from error
                for name in pointed_at:
                    self._require_idle(name, body[name], error.message)
                left_out |= pointed_at
                body = {name: value for name, value in body.items() if name not in left_out}
        # Remembered only once an answer has come: a refusal alone may have been about something else.
        if left_out or size_name != self._size_name:
            self._left_out |= left_out
            self._size_name = size_name
            _log.info("%s does not know %s", self.base_url, ", ".join(sorted(left_out)) or "max_tokens")
        return reply

    def _require_idle(self, name: str, value: Any, why: str) -> None:
        """Raises ConfigError for a field that would change the answer, or whose value the server minds."""
        if value is None or name == "seed" or (name in _SAYS_NOTHING and value == _SAYS_NOTHING[name]):
            return
        raise ConfigError(
            f"The server at {self.base_url} refuses `{name}` = {value!r}: {why}. Leave it at its default, or "
            "use a server that knows it."
        )

    def _error_of(self, error: HttpRefusal) -> Exception:
        if error.status in (401, 403):
            return ConfigError(
                f"The server at {self.base_url} refuses the key ({error}); set `api_key` to a valid one."
            )
        if error.status == 404 and error.is_json:
            return ConfigError(
                f"The server at {self.base_url} has no such model or address ({error}); set `model` to what "
                "GET /v1/models lists, and `base_url` to the address that ends in /v1."
            )
        is_final = error.is_json and error.status in (400, 413, 422)
        return InferenceError(
            f"The server at {self.base_url} refused the request: {error}", is_final=is_final
        )

    def _logprob_meaning(self, server: _Server, sampling: SamplingParams) -> LogprobMeaning:
        """Known where all meanings are the same, and otherwise of vLLM and SGLang."""
        if self._processed_logprobs:
            return sampling.logprob_meaning
        if sampling.logprob_meaning is LogprobMeaning.RAW or server.engine == "vllm":
            return LogprobMeaning.RAW
        if server.engine == "sglang":
            return LogprobMeaning.RAW if sampling.temperature == 1.0 else LogprobMeaning.TEMPERATURE
        return LogprobMeaning.UNKNOWN

    def new_session_name(self) -> str:
        return f"{self._name}-{next(self._numbers)}"


class OpenAISession(ModelSession):
    """One conversation: to the server, calls that belong together; here, how long its prompts are."""

    def __init__(self, client: OpenAIClient) -> None:
        self.client = client
        self._name = client.new_session_name()
        self._conversation = None if client.renderer is None else Conversation(renderer=client.renderer)

    async def respond(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams,
        tools: Tools = (),
    ) -> ModelOutput:
        trial = self._conversation
        length = -1 if trial is None or tools else len(trial.prompt(messages))
        output = await self.client.answer(
            messages, sampling, tools=tools, session=self._name, num_prompt_tokens=length
        )
        if trial is not None and length >= 0:
            ids = output.completion_ids or trial.renderer.tokenizer.encode(output.text)
            trial.record(ids, output.text)
        return output

    def prompt_tokens(self, messages: Sequence[Message], tools: Tools = ()) -> int:
        """By the client's own tokenizer; the server may count differently by a token or two. -1 with tools:
        how the calls of earlier answers were written is known to the server alone."""
        return -1 if self._conversation is None or tools else self._conversation.prompt_tokens(messages)
