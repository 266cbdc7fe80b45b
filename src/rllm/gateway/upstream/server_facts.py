"""The facts about a server: which engine it is, which models it serves, which fields it takes.

GET /v1/models, /version ──ready──► Known ──capture_for(request)──► fields that the gateway asks for itself
                                      ▲
400 that names such a field ──refused─┘   (it is not asked for in such calls again)

Such calls are those for the same model, all streamed or all not: SGLang gives ids in whole answers of chat
completions and refuses to in streamed ones.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rllm.errors import RequestRefused
from rllm.gateway.upstream.http import HttpClient
from rllm.gateway.upstream.pool import Upstream
from rllm.types.messages import LogprobMeaning
from rllm.types.wire import CallRequest

CAPTURES = frozenset({"logprobs", "token_ids", "usage"})
_WITHOUT_IDS = frozenset({"logprobs", "usage"})
_ENGINES_WITH_IDS = ("vllm", "sglang", "rllm")
"""As `owned_by` of /v1/models says; the last is `rllm serve`."""
_MAX_MODELS = 1024
_FIELD_NAMES = {
    "logprobs": ("logprobs",),
    "token_ids": ("return_token_ids",),
    "usage": ("stream_options", "include_usage"),
    "seed": ("seed",),
}


Kind = tuple[str, bool]
"""The kind of a call: its model, and whether it is streamed."""


def _kind_of(request: CallRequest) -> Kind:
    return request.model, request.stream


@dataclass(kw_only=True, slots=True, eq=False)
class Known:
    """One server."""

    engine: str = ""
    """`vllm`, `sglang`, `rllm`, or nothing known."""
    version: str = ""
    models: list[str] = field(default_factory=list[str])
    is_probed: bool = False
    policy_version: int | None = None
    """The last one that it told."""
    counts_tokens: bool = True
    """False once it said that it cannot."""
    _refusals: OrderedDict[tuple[Kind, str], str] = field(default_factory=OrderedDict[tuple[Kind, str], str])
    """(kind of call, capture) to what the server said."""
    _accepted_fields: OrderedDict[Kind, frozenset[str]] = field(
        default_factory=OrderedDict[Kind, frozenset[str]]
    )
    """The requests that it has taken with success."""

    _probing: asyncio.Task[None] | None = None

    async def ready(self, upstream: Upstream, http: HttpClient) -> None:
        """Returns once the server was probed; those who wait at the same time share one probe."""
        if self._probing is None and not self.is_probed:
            self._probing = asyncio.create_task(self._probe(upstream, http))
            self._probing.add_done_callback(self._probe_ended)
        if self._probing is not None:
            await asyncio.shield(self._probing)

    def _probe_ended(self, probing: asyncio.Task[None]) -> None:
        self._probing = None
        if not probing.cancelled():
            probing.exception()  # whoever waited has it; when nobody does any more, it is no news

    async def _probe(self, upstream: Upstream, http: HttpClient) -> None:
        """Raises Unreachable, Dropped or TimeoutError; a server that answers anything is probed."""
        status, listing = await http.get(f"{upstream.url}/models")
        models = _objects(listing.get("data")) if status == 200 and isinstance(listing, dict) else []
        self.models = [each["id"] for each in models if isinstance(each.get("id"), str)]
        owners = {str(each.get("owned_by")).lower() for each in models}
        self.engine = next((engine for engine in _ENGINES_WITH_IDS if engine in owners), "")
        status, version_reply = await http.get(f"{upstream.root}/version")
        version = version_reply.get("version") if status == 200 and isinstance(version_reply, dict) else None
        if isinstance(version, str):
            self.version = version
            self.engine = self.engine or "vllm"
        self.is_probed = True

    def capture_for(self, request: CallRequest, fields: frozenset[str] | None) -> frozenset[str]:
        """`fields`: what was configured; None asks for what the engine is known to give."""
        if fields is None:
            fields = self.known_captures
        if not self._refusals:
            return fields
        kind = _kind_of(request)
        return frozenset(each for each in fields if (kind, each) not in self._refusals)

    @property
    def known_captures(self) -> frozenset[str]:
        """The fields that the engine is known to return."""
        return CAPTURES if self.engine in _ENGINES_WITH_IDS else _WITHOUT_IDS

    def takes_seed(self, request: CallRequest) -> bool:
        """Whether a seed of ours decides the draws: vLLM follows one, and the others are not known to."""
        return self.engine == "vllm" and (_kind_of(request), "seed") not in self._refusals

    def logprob_meaning(self, request: CallRequest, *, processed_logprobs: bool) -> LogprobMeaning:
        """vLLM's are those of the model itself unless told otherwise; SGLang's know the temperature. Behind
        `rllm serve` may be either, so its are known where both mean the same.

        What a request leaves open comes from the model's generation_config.json, which no server tells. So
        what depends on it is not known, and neither is what servers mean that are neither of the two.
        """
        temperature = request.temperature
        if self.engine == "vllm" and not processed_logprobs:
            return LogprobMeaning.RAW
        if self.engine == "rllm":
            is_untouched = (temperature, request.top_p, request.top_k) == (1.0, 1.0, 0)
            return LogprobMeaning.RAW if is_untouched else LogprobMeaning.UNKNOWN
        if self.engine not in _ENGINES_WITH_IDS or temperature is None:
            return LogprobMeaning.UNKNOWN
        if processed_logprobs and temperature != 0.0:
            if request.top_p not in (None, 1.0) or (request.top_k or 0) > 0:
                return LogprobMeaning.TRUNCATED
            if request.top_p is None or request.top_k is None:
                return LogprobMeaning.UNKNOWN
        return LogprobMeaning.RAW if temperature in (0.0, 1.0) else LogprobMeaning.TEMPERATURE

    def note_accepted(self, request: CallRequest, capture: frozenset[str]) -> None:
        kind = _kind_of(request)
        accepted_fields = self._accepted_fields.get(kind)
        if accepted_fields is None or not capture <= accepted_fields:
            self._accepted_fields[kind] = capture if accepted_fields is None else capture | accepted_fields
            if len(self._accepted_fields) > _MAX_MODELS:
                self._accepted_fields.popitem(last=False)

    def note_refused(self, request: CallRequest, capture: frozenset[str], why: str) -> None:
        for each in capture:
            self._refusals[_kind_of(request), each] = why
            if len(self._refusals) > _MAX_MODELS:
                self._refusals.popitem(last=False)

    def why_refused(self, request: CallRequest, capture: str) -> str:
        return self._refusals.get((_kind_of(request), capture), "")

    def fields_at_fault(
        self, error: RequestRefused, request: CallRequest, capture: frozenset[str]
    ) -> frozenset[str]:
        """Which of the fields that the gateway added an error is about; none when the client's own are wrong.

        What it took in such calls before is blamed only when the error points at it: some servers repeat the
        whole request in their errors, our fields among the rest.
        """
        if error.status not in (400, 422):
            return frozenset()
        accepted_fields = self._accepted_fields.get(_kind_of(request), frozenset())
        # Servers on FastAPI repeat the whole request under `input`, with all its fields.
        text = error.message.split("'input'")[0].split('"input"')[0]
        blamed_fields: set[str] = set()
        for each in added_fields(request, capture):
            names = _FIELD_NAMES[each]
            pointed_at = error.param is not None and any(name in error.param for name in names)
            if pointed_at or (each not in accepted_fields and any(name in text for name in names)):
                blamed_fields.add(each)
        return frozenset(blamed_fields)

    def health(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "version": self.version,
            "models": self.models,
            "policy_version": self.policy_version,
            "refused_fields": [
                {"model": model, "stream": stream, "field": _FIELD_NAMES[each][0], "error": why}
                for ((model, stream), each), why in self._refusals.items()
            ],
        }


def added_fields(request: CallRequest, capture: frozenset[str]) -> frozenset[str]:
    """The fields that the gateway asks for and the client did not."""
    asked_by_client = {
        "logprobs": request.logprobs,
        "token_ids": request.return_token_ids,
        "usage": request.include_usage or not request.stream,
        "seed": request.seed is not None,
    }
    return frozenset(each for each in capture if not asked_by_client[each])


def all_models(facts: Sequence[Known]) -> list[str]:
    """Each once, in the order of the servers."""
    return list(dict.fromkeys(model for each in facts for model in each.models))


def _objects(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
