"""A vLLM or SGLang server that is given ids and gives ids: the rendering stays here, the sampling is there.

    prompt ids ──POST /v1/completions──► token ids, log-probabilities ──tokenizer──► text, pieces
                   every sampling field is sent, so nothing is left to the server's generation_config.json

Needs a server that returns token ids when asked for `return_token_ids`: vLLM from 0.10.2 on, SGLang in
versions that know the field. Log-probabilities of vLLM are those of the model itself, unless it was started
with `--logprobs-mode processed_logprobs`; those of SGLang are of logits divided by the temperature.

With a grammar, the server does not tell which tokens it left no choice about: all of them count as sampled.
"""

import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rllm.errors import ConfigError, ContextLengthError, InferenceError
from rllm.inference.client import ModelClient, TokenPiece
from rllm.inference.local.text import StopTexts, TextStream
from rllm.inference.openai_http import AskedOnce, error_text
from rllm.inference.publish_gate import Gate
from rllm.inference.token_session import TokenSession
from rllm.inference.vllm_http import VLLMHttp, VLLMServerFacts
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.rendering.chat import ChatRenderer
from rllm.types.messages import FinishReason, ModelOutput, SamplingParams, TopLogprobs

OnPiece = Callable[[TokenPiece], None]

NO_IDS = (
    "The server at {url} returned no {what}. vLLM from 0.10.2 on returns them for `return_token_ids: true` "
    "and `logprobs`, which this client sends; update the server, or serve the model with one that does."
)
PROBE_TEXT = "The answer is 1234.5, or `x_1 += 67`?\n\tNaïve 漢字"
"""Servers and models of one tokenizer split it alike, and others hardly do."""
_GRAMMAR_FROM = (0, 12)
"""The vLLM version from which `structured_outputs` is the field's one name; older ones drop it silently."""
_TOKEN_ID_NAME = re.compile(r"token_id:(\d+)")
_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_SEEDS = 2**63
_ADAPTERS_KEPT = 2
_ANSWERS_WITHIN_S = 30.0
"""To say what it serves; a server that is at work on a batch answers at once."""
_UNKNOWN_CONTEXT = 2**31 - 1


class VLLMClient(ModelClient):
    """A `TokenClient` and a `ModelClient`.

    What the server serves is asked with the first call; `connect` asks at once. `base_url` ends in `/v1`;
    `tokenizer` is the model's own, or its directory; `model` may be left out where one is served.
    `sends_seeds=False` leaves the draws to the server, so that they cannot be repeated: the engine of vLLM
    0.32 ends with the first seed it is sent on a CPU.
    """

    def __init__(
        self,
        base_url: str,
        tokenizer: Path | HuggingFaceTokenizer,
        *,
        model: str = "",
        processed_logprobs: bool = False,
        sends_seeds: bool = True,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 30.0,
        max_connections: int = 0,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.model = model
        self._processed_logprobs = processed_logprobs
        self._sends_seeds = sends_seeds
        self._facts = AskedOnce(self._find_out)
        self.tokenizer = HuggingFaceTokenizer(tokenizer) if isinstance(tokenizer, Path) else tokenizer
        self.renderer = ChatRenderer(self.tokenizer)
        self._policy_version = 0
        self._has_given_weights = False
        self._tells_version = False
        """Whether an answer has named the version of the weights that it was given."""
        self._adapters: list[str] = []
        """Names of the adapters that the server has; the last one answers."""
        self._old_adapters: list[str] = []
        """Names of those that it may still have, and nobody asks."""
        self._gate = Gate()
        self._http = VLLMHttp(
            self.base_url,
            api_key=api_key,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            max_connections=max_connections,
        )
        # Not behind the calls: they may have all connections, and wait for long.
        self._checks = VLLMHttp(
            self.base_url,
            api_key=api_key,
            timeout_s=min(timeout_s, _ANSWERS_WITHIN_S),
            connect_timeout_s=min(connect_timeout_s, _ANSWERS_WITHIN_S),
            max_connections=1,
        )
        self._is_special: dict[int, bool] = {}

    @classmethod
    async def connect(
        cls,
        base_url: str,
        tokenizer: Path | HuggingFaceTokenizer,
        *,
        model: str = "",
        processed_logprobs: bool = False,
        sends_seeds: bool = True,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 30.0,
        max_connections: int = 0,
    ) -> Self:
        """A client that knows its server. Raises InferenceError."""
        client = cls(
            base_url,
            tokenizer,
            model=model,
            processed_logprobs=processed_logprobs,
            sends_seeds=sends_seeds,
            api_key=api_key,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            max_connections=max_connections,
        )
        try:
            await client._facts()
        except BaseException:
            await client.close()
            raise
        return client

    async def _find_out(self) -> VLLMServerFacts:
        facts = await self._http.facts(self.model)
        facts.processed_logprobs = self._processed_logprobs
        return facts

    @property
    def facts(self) -> VLLMServerFacts:
        """What the server says of itself; only once a call, or `connect`, has asked it."""
        assert self._facts.found is not None, "a call asks the server before it needs this"
        return self._facts.found

    def session(self, order: tuple[str, int]) -> TokenSession:
        return TokenSession(self)

    @property
    def policy_version(self) -> int:
        return self._policy_version

    def set_policy_version(self, policy_version: int) -> None:
        """Of the weights that answer calls from now on."""
        self._policy_version = policy_version

    async def update_weights(self, directory: Path, policy_version: int) -> None:
        """Let the server read the weights of a model directory, in a place that it can see itself.

        No call is lost: what is being answered is answered to its end by the old weights, what comes
        meanwhile waits for the new ones. Needs vLLM with VLLM_SERVER_DEV_MODE=1 in its environment. Raises
        ConfigError where it is not, or where the directory holds no weights (an engine of vLLM that is
        told to read such a one ends), and InferenceError when the server could not read them.
        """
        for pattern in ("config.json", "*.safetensors"):
            if not any(directory.glob(pattern)):
                raise ConfigError(f"{directory} is no model directory: it has no {pattern}.")
        async with self._gate.closed():
            await self._http.tell("/pause?mode=wait", {})  # for whoever else asks this server
            try:
                where = {"weights_path": str(directory.resolve())}
                await self._http.tell("/collective_rpc", {"method": "reload_weights", "kwargs": where})
                reset_reply = await self._http.tell("/reset_prefix_cache", {})
                if not (isinstance(reset_reply, dict) and reset_reply.get("success")):
                    raise InferenceError(
                        f"The server at {self.base_url} has new weights, but keeps what the old ones have "
                        f"read ({reset_reply}); publish again."
                    )
                await self._http.tell("/update_weight_version", {"new_version": str(policy_version)})
            finally:
                await self._checks.tell("/resume", {})  # one that hangs is not waited for
            self._policy_version = policy_version
            self._has_given_weights = True

    async def load_adapter(self, directory: Path, policy_version: int) -> None:
        """Let the server answer by an adapter in peft's format, in a place that it can see itself.

        Nobody waits: calls under way go on with the adapter that they began with, for which the one before
        stays. Needs vLLM with
        `--enable-lora`, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment. Raises ConfigError where
        that is not so, and InferenceError when the server could not read the adapter.
        """
        # No name comes twice: servers refuse one that they have, of another run or from before a failure.
        name = f"adapter-{policy_version}-{secrets.token_hex(4)}"
        needs = "`--enable-lora`, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
        where = {"lora_name": name, "lora_path": str(directory.resolve())}
        await self._http.tell("/v1/load_lora_adapter", where, needs)
        self._adapters.append(name)
        self._policy_version = policy_version
        if len(self._adapters) > _ADAPTERS_KEPT:
            self._old_adapters.append(self._adapters.pop(0))
        await self._unload_old_adapters()

    def forget_adapters(self) -> None:
        """The server may have begun anew, without any."""
        self._old_adapters += self._adapters
        self._adapters = []

    async def unload_adapters(self) -> None:
        """Leave none of ours in the server."""
        self.forget_adapters()
        await self._unload_old_adapters()

    async def _unload_old_adapters(self) -> None:
        while self._old_adapters:
            name = {"lora_name": self._old_adapters.pop(0)}
            with suppress(ConfigError, InferenceError):  # one that began anew has not got it
                await self._http.tell("/v1/unload_lora_adapter", name)

    @property
    def max_context(self) -> int:
        """Before the server was asked, a number that limits nothing; `generate_ids` knows better."""
        return _UNKNOWN_CONTEXT if self._facts.found is None else self._facts.found.max_context

    async def generate_ids(
        self, prompt_ids: list[int], sampling: SamplingParams, *, on_piece: OnPiece | None = None
    ) -> ModelOutput:
        """See `TokenClient`. Raises ValueError for what the server cannot honour."""
        facts = await self._facts()
        room = facts.max_context - len(prompt_ids)
        if room < 1:
            raise ContextLengthError(
                f"The prompt has {len(prompt_ids)} tokens and the context of {facts.model} holds "
                f"{facts.max_context}, so no token fits behind it."
            )
        async with self._gate.passing():
            return await self._generate(facts, room, prompt_ids, sampling, on_piece)

    async def _generate(
        self,
        facts: VLLMServerFacts,
        room: int,
        prompt_ids: list[int],
        sampling: SamplingParams,
        on_piece: OnPiece | None,
    ) -> ModelOutput:
        start_s = time.perf_counter()
        version = self._policy_version
        body = self._body(prompt_ids, sampling, room, stream=on_piece is not None)
        collected = _Said(
            client=self,
            text_stream=TextStream(self.tokenizer.decode, self._is_hidden),
            stops=StopTexts(sampling.stop),
            with_top=sampling.top_logprobs > 0,
        )
        async with aclosing(self._http.complete(body)) as chunks:
            async for chunk in chunks:
                piece = collected.hear(chunk)
                if on_piece is not None and (piece.text or piece.token_ids):
                    on_piece(piece)
        rest = collected.finish(prompt_ids)
        if collected.finish_reason is FinishReason.LENGTH and len(collected.ids) < body["max_tokens"]:
            raise InferenceError(
                f"The server at {self.base_url} ended an answer at {len(collected.ids)} tokens, where "
                f"{body['max_tokens']} were allowed: it has a limit of its own. Start vLLM with "
                "`--generation-config vllm`."
            )
        server_policy_version = collected.policy_version
        if self._has_given_weights:
            self._require_given_weights(version, server_policy_version)
        if on_piece is not None and rest:
            on_piece(TokenPiece(text=rest))
        text = "".join(collected.text)
        return ModelOutput(
            text=text,
            content=text,
            prompt_ids=prompt_ids,
            completion_ids=collected.ids,
            logprobs=collected.logprobs,
            logprob_meaning=self.facts.logprob_meaning(sampling),
            temperature=sampling.temperature,
            # With an adapter, what the server tells is the version of the weights beneath it.
            policy_versions=[
                version if self._adapters or server_policy_version is None else server_policy_version
            ]
            * len(collected.ids),
            top_logprobs=[each[: sampling.top_logprobs] for each in collected.top_logprobs],
            stop_sequence=collected.stops.matched or collected.stop_reason,
            completion_id=collected.id,
            finish_reason=collected.finish_reason or FinishReason.STOP,
            usage={
                "prompt_tokens": len(prompt_ids),
                "completion_tokens": len(collected.ids),
                "cached_tokens": collected.cached_tokens,
            },
            latency_s=time.perf_counter() - start_s,
        )

    def _require_given_weights(self, policy_version: int, server_policy_version: int | None) -> None:
        """Raises InferenceError for an answer of other weights: a server that began anew while nobody asked
        it has those of its first start."""
        if server_policy_version == policy_version:
            self._tells_version = True
        elif server_policy_version is not None or self._tells_version:
            raise InferenceError(
                f"The server at {self.base_url} was given policy version {policy_version} and answers by "
                f"{'others' if server_policy_version is None else server_policy_version}: it began anew, or "
                "somebody else gave it weights."
            )

    async def check(self) -> VLLMServerFacts:
        """Ask what the server serves now. Raises InferenceError where it does not answer, within seconds."""
        return await self._checks.facts(self.model)

    async def require_tokenizer(self) -> None:
        """Raises ConfigError for a server with another tokenizer, whose ids would mean other words.

        One that does not say how it splits a text is taken to have the same.
        """
        model = (await self._facts()).model
        ids = await self._checks.tokenize({"model": model, "prompt": PROBE_TEXT, "add_special_tokens": False})
        if ids is not None and ids != (expected := self.tokenizer.encode(PROBE_TEXT)):
            raise ConfigError(
                f"The server at {self.base_url} splits a text into the ids {ids[:8]}…, and the model's own "
                f"tokenizer into {expected[:8]}…; let it serve the model that is trained."
            )

    async def score(self, ids: list[int], start: int, temperature: float = 1.0) -> list[float]:
        """Log-probabilities of `ids[start:]`, in nats, under the server's weights; see `LocalClient.score`.

        Raises ValueError for another temperature than 1: of a prompt the server says what the model does.
        """
        if temperature != 1.0:
            raise ValueError(f"`temperature` is {temperature}; the server scores prompts at 1 alone.")
        facts = await self._facts()
        body = self._body(list(ids), SamplingParams(max_tokens=1, temperature=0.0), 1, stream=False)
        body.pop("seed", None)
        async with (
            self._gate.passing(),
            aclosing(self._http.complete({**body, "prompt_logprobs": 0})) as chunks,
        ):
            (reply,) = [chunk async for chunk in chunks]
        try:
            scores = reply["choices"][0]["prompt_logprobs"][start:]
            return [
                float(each[str(token)]["logprob"]) for each, token in zip(scores, ids[start:], strict=True)
            ]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise InferenceError(
                f"The server at {self.base_url} ({facts.engine}) did not say how likely the ids of a prompt "
                "are; vLLM does, for `prompt_logprobs`."
            ) from error

    async def release(self) -> None:
        """Close the connections that nobody uses; the next call opens new ones."""
        await self._http.close()
        await self._checks.close()

    async def close(self) -> None:
        await self.release()

    def _body(
        self, prompt_ids: list[int], sampling: SamplingParams, room: int, *, stream: bool
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._adapters[-1] if self._adapters else self.facts.model,
            "prompt": list(prompt_ids),
            "max_tokens": min(sampling.max_tokens, room),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "seed": sampling.seed % _SEEDS,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "logprobs": max(sampling.top_logprobs, 1),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            # Text that ends an answer may be markup that is a special token.
            "skip_special_tokens": not sampling.stop,
        }
        if not self._sends_seeds:
            del body["seed"]
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if sampling.top_logprobs and self.facts.engine != "vllm":
            raise ValueError(
                f"`top_logprobs` is {sampling.top_logprobs}, but {self.facts.engine} names its alternatives "
                "by their text and not by ids; set it to 0, or serve the model with vLLM."
            )
        if sampling.grammar:
            body["structured_outputs"] = {"grammar": self._grammar(sampling.grammar)}
        return body

    def _grammar(self, grammar: str) -> str:
        if self.facts.engine != "vllm" or self.facts.version < _GRAMMAR_FROM:
            version = ".".join(map(str, self.facts.version)) or "of an unknown version"
            raise ValueError(
                f"The server is {self.facts.engine} {version}, which cannot follow a Lark grammar; serve the "
                "model with vLLM 0.12 or newer and `--structured-outputs-config.backend guidance`."
            )
        return grammar

    def _is_hidden(self, token: int) -> bool:
        """Whether a token is left out of text, such as an end token."""
        is_special = self._is_special.get(token)
        if is_special is None:
            shows_nothing = not self.tokenizer.decode([token]) and bool(self.tokenizer.token_text(token))
            is_special = self._is_special[token] = shows_nothing
        return is_special


@dataclass(kw_only=True, slots=True)
class _Said:
    """Everything that the server said so far, of one answer."""

    client: VLLMClient
    text_stream: TextStream
    stops: StopTexts
    with_top: bool
    id: str = ""
    text: list[str] = field(default_factory=list[str])
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top_logprobs: list[TopLogprobs] = field(default_factory=list[TopLogprobs])
    prompt_ids: list[int] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    policy_version: int | None = None
    cached_tokens: int = 0

    def hear(self, chunk: dict[str, Any]) -> TokenPiece:
        """A chunk of a stream, or a whole reply."""
        if chunk.get("error"):
            raise InferenceError(f"The server at {self.client.base_url} failed: {error_text(chunk)}")
        try:
            return self._hear(chunk)
        except (AttributeError, TypeError, ValueError) as error:
            raise InferenceError(
                f"The server at {self.client.base_url} answered in a form that cannot be read: {error}"
            ) from error

    def _hear(self, chunk: dict[str, Any]) -> TokenPiece:
        self.id = self.id or str(chunk.get("id") or "")
        weight_version = chunk.get("weight_version", (chunk.get("metadata") or {}).get("weight_version"))
        if str(weight_version).isdecimal():
            self.policy_version = int(str(weight_version))
        if (usage := chunk.get("usage")) is not None:
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        piece = TokenPiece()
        for choice in chunk.get("choices") or ():
            self._hear_choice(choice, piece)
        for token in piece.token_ids:
            if self.stops.matched is None:
                piece.text += self.stops.feed(self.text_stream.add(token))
        self.text.append(piece.text)
        self.ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.top_logprobs += piece.top_logprobs
        return piece

    def _hear_choice(self, choice: dict[str, Any], piece: TokenPiece) -> None:
        if (ids := choice.get("prompt_token_ids")) is not None:
            self.prompt_ids = ids
        if (reason := choice.get("finish_reason")) is not None:
            if reason not in _FINISH_REASONS:
                raise InferenceError(
                    f"The server at {self.client.base_url} ended the answer with `{reason}`: it was cut off."
                )
            self.finish_reason = _FINISH_REASONS[reason]
        stop_reason = choice.get("stop_reason", choice.get("matched_stop"))
        if isinstance(stop_reason, str):
            self.stop_reason = stop_reason
        piece.token_ids += [_token_id(each) for each in choice.get("token_ids") or ()]
        logprobs = choice.get("logprobs") or {}
        piece.logprobs += [float(each) for each in logprobs.get("token_logprobs") or ()]
        if self.with_top:
            piece.top_logprobs += [_by_id(each) for each in logprobs.get("top_logprobs") or ()]

    def finish(self, prompt_ids: Sequence[int]) -> str:
        """The text that was held back. Raises InferenceError for an answer that is not whole."""
        url = self.client.base_url
        if self.finish_reason is None:
            raise InferenceError(f"The server at {url} ended its answer before it was complete.")
        if not self.ids or not self.logprobs:
            raise InferenceError(
                NO_IDS.format(url=url, what="log-probabilities" if self.ids else "token ids")
            )
        if len(self.ids) != len(self.logprobs):
            raise InferenceError(
                f"The server at {url} returned {len(self.ids)} token ids and {len(self.logprobs)} "
                "log-probabilities for one answer, so neither can be trusted."
            )
        if self.prompt_ids is not None and self.prompt_ids != list(prompt_ids):
            raise InferenceError(
                f"The server at {url} read a prompt of {len(self.prompt_ids)} ids where {len(prompt_ids)} "
                "others were sent; it must take prompts as they are."
            )
        if self.stops.matched is not None:
            return ""
        rest = self.stops.feed(self.text_stream.rest())
        if self.stops.matched is None:
            rest += self.stops.rest()
        self.text.append(rest)
        return rest


def _by_id(top: dict[str, float] | None) -> TopLogprobs:
    """Alternatives that are named `token_id:17`, best first."""
    matches = [(_TOKEN_ID_NAME.fullmatch(name), value) for name, value in (top or {}).items()]
    return sorted(((int(name[1]), value) for name, value in matches if name), key=lambda each: -each[1])


def _token_id(value: object) -> int:
    if type(value) is int and value >= 0:
        return value
    raise ValueError(f"{value!r} is no token id")
