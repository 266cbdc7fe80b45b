"""The connections to one vLLM or SGLang server: what it serves, and the chunks of its answers.

    GET /v1/models, /version ──facts──► VLLMServerFacts          body ──complete──► chunk, chunk, …

Failures become errors here: ContextLengthError and ValueError for what was asked wrongly, InferenceError for
what the server did not do.
"""

import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from rllm.errors import ConfigError, InferenceError
from rllm.errors.redaction import without_keys
from rllm.inference.openai_http import HttpRefusal, Response, ServerHttp, WhichConnection, json_or_none
from rllm.inference.sse import EventSplitter
from rllm.types.messages import LogprobMeaning, SamplingParams

_MAX_ERROR_CHARS = 500


@dataclass(kw_only=True, slots=True)
class VLLMServerFacts:
    """The facts that a server gives about itself."""

    model: str
    max_context: int
    engine: str = "vllm"
    """`vllm` or `sglang`."""
    version: tuple[int, ...] = ()
    processed_logprobs: bool = False
    """vLLM was started with `--logprobs-mode processed_logprobs`. No server tells, so it has to be set."""

    def logprob_meaning(self, sampling: SamplingParams) -> LogprobMeaning:
        if self.processed_logprobs:
            return sampling.logprob_meaning
        if self.engine == "sglang" and sampling.temperature not in (0.0, 1.0):
            return LogprobMeaning.TEMPERATURE
        return LogprobMeaning.RAW


class VLLMHttp(ServerHttp):
    """The connections to one server."""

    async def facts(self, model: str) -> VLLMServerFacts:
        """Raises InferenceError when the server does not serve `model`; an empty name takes any."""
        listing = await self.get(f"{self.base_url}/models")
        models = listing.get("data") if isinstance(listing, dict) else None
        entries = {
            each["id"]: each
            for each in models or ()
            if isinstance(each, dict) and isinstance(each.get("id"), str)
        }
        if not entries or (model and model not in entries):
            raise InferenceError(
                f"The server at {self.base_url} serves {', '.join(entries) or 'no model'}; "
                f"{f'`{model}` is wanted' if model else 'one is needed'}."
            )
        entry = entries[model] if model else next(iter(entries.values()))
        length = entry.get("max_model_len")
        if type(length) is not int:
            raise InferenceError(
                f"The server at {self.base_url} does not tell the `max_model_len` of {entry['id']}, as vLLM "
                "and SGLang do; serve the model with one of them."
            )
        version_reply = await self.get(f"{self.root}/version")
        version = version_reply.get("version") if isinstance(version_reply, dict) else None
        return VLLMServerFacts(
            model=entry["id"],
            max_context=length,
            engine="sglang" if entry.get("owned_by") == "sglang" else "vllm",
            version=_numbers(version) if isinstance(version, str) else (),
        )

    @property
    def root(self) -> str:
        """The address that calls hang on which are not of OpenAI's protocol."""
        return self.base_url.removesuffix("/v1")

    async def complete(
        self, body: Mapping[str, Any], path: str = "/completions", needs: str = ""
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of an answer, or the one reply. Leaving early closes the connection. `needs` is what a
        server lacks that does not know `path`."""
        response = await self._open(body, path, needs)
        try:
            if response.content_type == "text/event-stream":
                async with aclosing(self._chunks(response)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            reply = await self.whole(response)
            if not isinstance(reply, dict):
                raise InferenceError(
                    f"The server at {self.base_url} answered with something that is no JSON."
                )
            yield reply
        finally:
            response.release()

    async def tell(
        self, path: str, body: Mapping[str, Any], needs: str = "VLLM_SERVER_DEV_MODE=1 in its environment"
    ) -> Any:
        """The reply to one of the calls that manage a server, from the root of its address; `needs` is what a
        server without it lacks."""
        root = self.root
        with self.failures():
            async with self.session.post(
                root + path, json=dict(body), trace_request_ctx=WhichConnection()
            ) as response:
                content = await self.body_of(response)
        if response.status == 404:
            raise ConfigError(
                f"The server at {root} has no {path}, so it takes no new weights; start it with {needs}."
            )
        if response.status != 200:
            text = without_keys(content.decode(errors="replace"))[:_MAX_ERROR_CHARS]
            raise InferenceError(f"The server at {root} answered {response.status} to {path}: {text}")
        return json_or_none(content)

    async def tokenize(self, body: Mapping[str, Any]) -> list[int] | None:
        """The ids of a text; None where the server does not tell them."""
        reply = None
        with suppress(ConfigError):  # it has no such call
            reply = await self.tell("/tokenize", body)
        ids = reply.get("tokens") if isinstance(reply, dict) else None
        return ids if isinstance(ids, list) else None

    async def _open(self, body: Mapping[str, Any], path: str, needs: str) -> Response:
        try:
            return await self.open(path, body)
        except HttpRefusal as error:
            if needs and error.status in (403, 404):
                raise ConfigError(
                    f"The server at {self.base_url} refused {path} ({error.status}: {error.message}); start "
                    f"it with {needs}."
                ) from error
            if error.status in (400, 422):
                raise ValueError(
                    f"The server at {self.base_url} refused the request: {error.message}"
                ) from error
            raise InferenceError(
                f"The server at {self.base_url} answered {error.status}: {error.message}"
            ) from error

    async def _chunks(self, response: Response) -> AsyncGenerator[dict[str, Any], None]:
        events = EventSplitter()
        while True:
            with self.failures():
                part = await response.content.readany()
            if not part:
                return
            for _, data in events.feed(part):
                if data.strip() == b"[DONE]":
                    continue
                chunk = json_or_none(data)
                if not isinstance(chunk, dict):
                    raise InferenceError(
                        f"The server at {self.base_url} sent an event that is no JSON object."
                    )
                yield chunk


def _numbers(version: str) -> tuple[int, ...]:
    prefix = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in prefix[0].split(".")) if prefix else ()
