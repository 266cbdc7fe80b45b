"""A vLLM or SGLang server that is given ids and gives ids: the rendering stays here, the sampling is there.

    prompt ids ──POST /v1/completions──► token ids, log-probabilities ──tokenizer──► text, pieces
                   every sampling field is sent, so nothing is left to the server's generation_config.json

Needs a server that returns token ids when asked for `return_token_ids`: vLLM from 0.10.2 on, SGLang in
versions that know the field (nobody has run this on SGLang). Log-probabilities of vLLM are those of the model
itself, unless it was started with `--logprobs-mode processed_logprobs`; those of SGLang are of logits divided
by the temperature.

With a grammar, the server does not tell which tokens it left no choice about: all of them count as sampled.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from rllm.errors import ConfigError, ContextLengthError, InferenceError
from rllm.inference.answer_parts import AnswerPart, AnswerParts, OnPiece, version_of
from rllm.inference.client import ModelClient
from rllm.inference.local.text import StopTexts, TextStream
from rllm.inference.openai_http import AskedOnce
from rllm.inference.publish_gate import Gate
from rllm.inference.token_session import TokenSession
from rllm.inference.vllm_http import VLLMHttp, VLLMServerFacts
from rllm.inference.vllm_images import NEEDS, complete_with_images, shows_images
from rllm.inference.weight_link import HoldWeights, TensorSender, WeightLink
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.rendering.chat import ChatRenderer
from rllm.types.addresses import require_base_url
from rllm.types.draws import draw_seed
from rllm.types.messages import FinishReason, ModelOutput, SamplingParams

PROBE_TEXT = "The answer is 1234.5, or `x_1 += 67`?\n\tNaïve 漢字"
"""Servers and models of one tokenizer split it alike, and others hardly do."""
_GRAMMAR_FROM = (0, 12)
"""The vLLM version from which `structured_outputs` is the field's one name; older ones drop it silently."""
_SEEDS = 2**63
_LOWEST_BIAS = -100.0
"""The lowest number that servers add to a logit; a token that has it is not drawn."""
_ADAPTERS_KEPT = 2
_ANSWERS_WITHIN_S = 30.0
"""To say what it serves; a server that is at work on a batch answers at once."""
_UNKNOWN_CONTEXT = 2**31 - 1
FINISH, RECOMPUTE, KEEP = AT_PUBLISH = "finish", "recompute", "keep"
"""Ways in which an answer under way meets new weights of its server: it ends by the old ones, or goes on by
the new ones, and what the old ones have read is read anew or kept."""


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
        at_publish: str = FINISH,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 30.0,
        max_connections: int = 0,
    ) -> None:
        """`at_publish`: one of AT_PUBLISH. An answer that follows a grammar always ends by the weights that
        it began with."""
        if at_publish not in AT_PUBLISH:
            raise ConfigError(f"`at_publish` is {at_publish!r}; it is one of {', '.join(AT_PUBLISH)}.")
        self.base_url = require_base_url("`base_url`", base_url)
        self._at_publish = at_publish
        self._parts = set[asyncio.Timeout]()
        """The requests under way that may be cut off."""
        self.model = model
        self._processed_logprobs = processed_logprobs
        self._sends_seeds = sends_seeds
        self._facts = AskedOnce(self._find_out)
        self.tokenizer = HuggingFaceTokenizer(tokenizer) if isinstance(tokenizer, Path) else tokenizer
        self.renderer = ChatRenderer(self.tokenizer)
        self._policy_version = 0
        self._has_given_weights = False
        self._weights_are_whole = True
        self._tells_version = False
        """Whether an answer has named the version of the weights that it was given."""
        self._adapters: list[str] = []
        """Names of the adapters that the server has; the last one answers."""
        self._old_adapters: list[str] = []
        """Names of those that it may still have, and nobody asks."""
        self._link: WeightLink | None = None
        """By which it was given weights over NCCL."""
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
        """The facts that the server gives about itself; only once a call, or `connect`, has asked for
        them."""
        assert self._facts.value is not None, "a call asks the server before it needs this"
        return self._facts.value

    def session(self, order: tuple[str, int]) -> TokenSession:
        return TokenSession(self)

    @property
    def policy_version(self) -> int:
        return self._policy_version

    def set_policy_version(self, policy_version: int) -> None:
        """Set the version of the weights that answer calls from now on."""
        self._policy_version = policy_version

    async def update_weights(self, directory: Path, policy_version: int) -> None:
        """Let the server read the weights of a model directory, in a place that it can see itself.

        No call is lost: what is being answered ends by the old weights or goes on by the new ones, as
        `at_publish` says, and what comes meanwhile waits for the new ones. Needs SGLang, or vLLM with
        VLLM_SERVER_DEV_MODE=1 in its environment. Raises ConfigError where it is not, or where the directory
        holds no weights (an engine of vLLM that is told to read such a one ends), and InferenceError when the
        server could not read them.
        """
        for pattern in ("config.json", "*.safetensors"):
            if not any(directory.glob(pattern)):
                raise ConfigError(f"{directory} is no model directory: it has no {pattern}.")
        where = str(directory.resolve())
        if (await self._facts()).engine == "sglang":
            await self._change_weights(partial(self._load_into_sglang, where, policy_version))
            return

        async def read() -> int:
            rpc = {"method": "reload_weights", "kwargs": {"weights_path": where}}
            await self._http.tell("/collective_rpc", rpc)
            return policy_version

        await self._change_weights(partial(self._load_into_vllm, read))

    async def receive_weights(self, sender: TensorSender, hold_weights: HoldWeights) -> None:
        """Let the server have what `sender` sends over NCCL, while `hold_weights` lets nobody change it.
        Calls meet it as they meet `update_weights`.

        Needs vLLM as `weight_link.NEEDS` says. Raises ConfigError where it is not, and InferenceError when
        the server has not got all of it.
        """
        if (await self._facts()).engine == "sglang":
            raise ConfigError(
                f"The server at {self.base_url} is SGLang, which this client gives no weights over NCCL; "
                "serve the model with vLLM, or set `inference.weight_transfer` to files."
            )
        if self._link is None:
            self._link = WeightLink(self._http, sender)
        await self._link.join()
        await self._change_weights(partial(self._load_into_vllm, partial(self._link.push, hold_weights)))

    async def _change_weights(self, load: Callable[[], Awaitable[int]]) -> None:
        """`load` returns the policy version of what the server has then. After one that failed nobody is
        answered, until one has not: the weights may be half new, or what the old ones read be kept."""
        async with self._gate.closed(self._cut):
            try:
                self._policy_version = await load()
            except ConfigError:  # it has no such call, so it has the weights that it had
                raise
            except BaseException:
                self._weights_are_whole = False
                raise
            self._weights_are_whole = self._has_given_weights = True

    async def _load_into_vllm(self, load: Callable[[], Awaitable[int]]) -> int:
        # For whoever else asks this server, which forgets what it has read unless it is asked not to.
        pause = "mode=keep&clear_cache=false" if self._at_publish == KEEP else "mode=wait"
        await self._http.tell(f"/pause?{pause}", {})
        try:
            policy_version = await load()
            if self._at_publish != KEEP:
                await self._forget_what_was_read()
            await self._http.tell("/update_weight_version", {"new_version": str(policy_version)})
        finally:
            await self._checks.tell("/resume", {})  # one that hangs is not waited for
        return policy_version

    async def _load_into_sglang(self, directory: str, policy_version: int) -> int:
        keeps = self._at_publish == KEEP
        needs = "no router before it"
        await self._http.tell("/pause_generation", {"mode": "in_place" if keeps else "retract"}, needs)
        try:
            version = str(policy_version)
            body = {"model_path": directory, "weight_version": version, "flush_cache": not keeps}
            reply = await self._http.tell("/update_weights_from_disk", body, needs)
            if not (isinstance(reply, dict) and reply.get("success")):
                raise InferenceError(f"The server at {self.base_url} did not read the new weights: {reply}")
        finally:
            await self._checks.tell("/continue_generation", {}, needs)
        return policy_version

    @asynccontextmanager
    async def _passing(self) -> AsyncIterator[None]:
        """For one request, which new weights wait for."""
        async with self._gate.passing():
            if not self._weights_are_whole:
                raise InferenceError(
                    f"The server at {self.base_url} has not got all of the new weights; publish again."
                )
            yield

    async def _forget_what_was_read(self) -> None:
        reply = await self._http.tell("/reset_prefix_cache", {})
        if not (isinstance(reply, dict) and reply.get("success")):
            raise InferenceError(
                f"The server at {self.base_url} has new weights, but keeps what the old ones have read "
                f"({reply}); publish again."
            )
        if self.tokenizer.images is not None:  # what the old ones saw in images
            await self._http.tell("/reset_encoder_cache", {})

    async def load_adapter(self, directory: Path, policy_version: int) -> None:
        """Let the server answer by an adapter in peft's format, in a place that it can see itself.

        Nobody waits: calls under way end by the adapter that they began with, for which the one before stays,
        or go on by the new one, as `at_publish` says. Needs vLLM with `--enable-lora`, and
        VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment. Raises ConfigError where that is not so, and
        InferenceError when the server could not read the adapter.
        """
        if (await self._facts()).engine == "sglang":
            raise ConfigError(
                f"The server at {self.base_url} is SGLang, whose adapters this client does not know; serve "
                "the model with vLLM, or train whole weights (`lora.rank = 0`)."
            )
        # No name comes twice: servers refuse one that they have, of another run or from before a failure.
        name = f"adapter-{policy_version}-{secrets.token_hex(4)}"
        needs = "`--enable-lora`, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
        where = {"lora_name": name, "lora_path": str(directory.resolve())}
        await self._http.tell("/v1/load_lora_adapter", where, needs)
        self._adapters.append(name)
        self._policy_version = policy_version
        if len(self._adapters) > _ADAPTERS_KEPT:
            self._old_adapters.append(self._adapters.pop(0))
        # What is cut off here goes on by the adapter that has just become the last one.
        self._cut()
        await self._unload_old_adapters()

    def forget_weights(self) -> None:
        """The server may have begun anew, without adapters and in no NCCL group."""
        self._old_adapters += self._adapters
        self._adapters = []
        if self._link is not None:
            self._link.drop()

    async def leave(self) -> None:
        """Leave nothing of ours in the server but the weights."""
        if self._link is not None:
            with suppress(ConfigError, InferenceError):
                await self._link.close()
        self.forget_weights()
        await self._unload_old_adapters()

    async def _unload_old_adapters(self) -> None:
        while self._old_adapters:
            name = {"lora_name": self._old_adapters.pop(0)}
            with suppress(ConfigError, InferenceError):  # one that began anew has not got it
                await self._http.tell("/v1/unload_lora_adapter", name)

    @property
    def max_context(self) -> int:
        """Before the server was asked, a number that limits nothing; `generate_ids` knows better."""
        return _UNKNOWN_CONTEXT if self._facts.value is None else self._facts.value.max_context

    async def generate_ids(
        self, prompt_ids: list[int], sampling: SamplingParams, *, on_piece: OnPiece | None = None
    ) -> ModelOutput:
        """See `TokenClient`. Raises ValueError for what the server cannot honour."""
        return await self.go_on(self.begin(prompt_ids, sampling, on_piece))

    def begin(
        self, prompt_ids: list[int], sampling: SamplingParams, on_piece: OnPiece | None = None
    ) -> AnswerParts:
        """An answer that nobody has been asked for yet."""
        return AnswerParts(
            prompt_ids=list(prompt_ids),
            sampling=sampling,
            text_stream=TextStream(self.tokenizer.decode, self._is_hidden),
            stops=StopTexts(sampling.stop),
            on_piece=on_piece,
        )

    async def go_on(self, answer: AnswerParts) -> ModelOutput:
        """The whole answer, of which other servers or older weights may have sampled a part.

        Where this fails, what had arrived is in `answer`, and another server can go on with it. Raises what
        `generate_ids` does.
        """
        start_s = time.perf_counter()
        facts = await self._facts()
        room = facts.max_context - len(answer.prompt_ids)
        if room < 1:
            raise ContextLengthError(
                f"The prompt has {len(answer.prompt_ids)} tokens and the context of {facts.model} holds "
                f"{facts.max_context}, so no token fits behind it."
            )
        max_tokens = min(answer.sampling.max_tokens, room)
        answer.finish_reason = answer.stop_reason = None  # of a part that failed in its last moment
        while not self._is_whole(answer, max_tokens):
            async with self._passing(), self._until_cut(answer.sampling):
                await self._hear_part(answer, max_tokens)
        if answer.finish_reason is FinishReason.LENGTH and len(answer.ids) < max_tokens:
            raise InferenceError(
                f"The server at {self.base_url} ended an answer at {len(answer.ids)} tokens, where "
                f"{max_tokens} were allowed: it has a limit of its own. Start vLLM with "
                "`--generation-config vllm`."
            )
        answer.finish()
        output = answer.output()
        output.logprob_meaning = self.facts.logprob_meaning(answer.sampling)
        output.latency_s = time.perf_counter() - start_s
        return output

    def _is_whole(self, answer: AnswerParts, max_tokens: int) -> bool:
        """Whether nothing can follow, also where the server could not say so any more."""
        if answer.finish_reason is None:
            ends = (self.tokenizer.end_token_id, *answer.sampling.stop_token_ids)
            if answer.stops.match is not None or (answer.ids and answer.ids[-1] in ends):
                answer.finish_reason = FinishReason.STOP
            elif len(answer.ids) >= max_tokens:
                answer.finish_reason = FinishReason.LENGTH
        return answer.finish_reason is not None

    @asynccontextmanager
    async def _until_cut(self, sampling: SamplingParams) -> AsyncIterator[None]:
        """For one request, which new weights may cut off; what it goes on by is the caller's to ask."""
        # A grammar is followed from the beginning of an answer, which a second request could not go on from.
        if self._at_publish == FINISH or sampling.grammar:
            yield
            return
        limit = asyncio.timeout(None)
        self._parts.add(limit)
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            self._parts.discard(limit)

    def _cut(self) -> None:
        """End the requests under way; their answers go on with others."""
        if self._at_publish != FINISH:
            for each in self._parts:
                if not each.expired():
                    each.reschedule(0.0)

    async def _hear_part(self, answer: AnswerParts, max_tokens: int) -> None:
        """Ask for what is missing. What arrives before it is cut off, or fails, is in the answer."""
        version = self._policy_version
        part = answer.part(self.base_url, version)
        server_policy_version: int | None = None
        async with aclosing(self._ask(self._body(part, max_tokens))) as chunks:
            async for chunk in chunks:
                if (chunk_policy_version := version_of(chunk)) is not None:
                    server_policy_version = chunk_policy_version
                    if self._has_given_weights:
                        self._require_given_weights(part, version, chunk_policy_version)
                    if not self._adapters:  # with one, what it tells is the version of the weights beneath it
                        part.policy_version = chunk_policy_version
                part.hear(chunk)
                if answer.stops.match is not None and answer.finish_reason is not None:
                    break
        # Also where no chunk named a version: then nobody knows which weights sampled what has arrived.
        if self._has_given_weights:
            self._require_given_weights(part, version, server_policy_version)
        part.require_whole()

    def _require_given_weights(
        self, part: AnswerPart, policy_version: int, server_policy_version: int | None
    ) -> None:
        """Raises InferenceError for an answer of other weights, which spoils what has arrived of this part: a
        server that began anew while nobody asked it has those of its first start."""
        if server_policy_version == policy_version:
            self._tells_version = True
        elif server_policy_version is not None or self._tells_version:
            part.whole.is_spoiled |= part.has_tokens
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
        try:
            if facts.engine == "sglang":
                return await self._score_by_sglang(ids, start)
            return await self._score_by_vllm(ids, start)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise InferenceError(
                f"The server at {self.base_url} ({facts.engine}) did not say how likely the ids of a prompt "
                "are; vLLM does, for `prompt_logprobs`, and SGLang, for `return_logprob`."
            ) from error

    async def _score_by_vllm(self, ids: list[int], start: int) -> list[float]:
        greedy = self.begin(ids, SamplingParams(max_tokens=1, temperature=0.0))
        body = self._body(greedy.part(self.base_url, 0), 1) | {"stream": False, "prompt_logprobs": 0}
        for name in ("seed", "stream_options"):
            body.pop(name, None)
        async with self._passing(), aclosing(self._ask(body)) as chunks:
            (reply,) = [chunk async for chunk in chunks]
        scores = reply["choices"][0]["prompt_logprobs"][start:]
        return [float(each[str(token)]["logprob"]) for each, token in zip(scores, ids[start:], strict=True)]

    async def _score_by_sglang(self, ids: list[int], start: int) -> list[float]:
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        async with self._passing():
            reply = await self._http.tell("/generate", body, "no router before it")
        rows = reply["meta_info"]["input_token_logprobs"]
        if [row[1] for row in rows] != list(ids):
            raise ValueError("other ids")
        return [float(row[0]) for row in rows[start:]]

    async def release(self) -> None:
        """Close the connections that nobody uses; the next call opens new ones."""
        await self._http.close()
        await self._checks.close()

    async def close(self) -> None:
        await self.release()

    def _ask(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks that answer a request, which is `_body`'s."""
        reader = self.tokenizer.images
        if reader is None or not shows_images(body["prompt"]):
            return self._http.complete(body)
        if self.facts.engine != "vllm":
            raise ConfigError(
                f"The server at {self.base_url} is {self.facts.engine}, which takes no images with prompts "
                f"of ids; serve the model with {NEEDS}."
            )
        return complete_with_images(self._http, body, reader)

    def _body(self, part: AnswerPart, max_tokens: int) -> dict[str, Any]:
        """The request for a part of an answer that may have `max_tokens` in all."""
        answer, sampling = part.whole, part.whole.sampling
        # A request draws from the beginning of its seed: the first one would repeat the numbers of the first
        # part.
        seed = sampling.seed if part.is_first else draw_seed(sampling.seed, len(answer.ids))
        body: dict[str, Any] = {
            "model": self._adapters[-1] if self._adapters else self.facts.model,
            "prompt": part.read_ids,
            "max_tokens": max_tokens - len(answer.ids),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "seed": seed % _SEEDS,
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
        if unused_ids := self.tokenizer.unused_ids:
            body["logit_bias"] = dict.fromkeys(map(str, unused_ids), _LOWEST_BIAS)
        may_be_cut = self._at_publish != FINISH and not sampling.grammar
        if answer.on_piece is not None or may_be_cut:
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
