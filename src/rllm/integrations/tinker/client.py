"""The model client in front of a service's sampler: the rendering stays here, the sampling is there.

prompt ids ──SamplingClient──► token ids, log-probabilities ──tokenizer──► text
"""

import time
from collections.abc import Callable

import numpy as np

from rllm.errors import ContextLengthError, InferenceError
from rllm.inference.client import ModelClient, TokenPiece
from rllm.inference.token_session import TokenSession
from rllm.integrations.tinker.service import Service
from rllm.models.directory import LoadedModel
from rllm.rendering.chat import ChatRenderer
from rllm.types.messages import FinishReason, ModelOutput, SamplingParams


class TinkerClient(ModelClient):
    """A `ModelClient` and a `TokenClient`. A call samples from the weights that were published when it began,
    to its end."""

    def __init__(self, policy_model: LoadedModel, *, max_context: int) -> None:
        self.policy_model = policy_model
        self.renderer = ChatRenderer(policy_model.tokenizer)
        self.end_token_ids = frozenset(policy_model.end_token_ids)
        self._service: Service = policy_model.model
        self._max_context = max_context
        self._policy_version = 0

    def session(self, order: tuple[str, int]) -> TokenSession:
        return TokenSession(self)

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def max_context(self) -> int:
        return self._max_context

    def publish(self, policy_version: int) -> None:
        """Set the version of the weights that the service's sampler has from now on."""
        self._policy_version = policy_version

    async def generate_ids(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        on_piece: Callable[[TokenPiece], None] | None = None,
    ) -> ModelOutput:
        """See `TokenClient`; an answer comes in one piece. Raises ValueError for what the service cannot
        honour."""
        _require_plain(sampling)
        room = self._max_context - len(prompt_ids)
        if room < 1:
            raise ContextLengthError(
                f"The prompt has {len(prompt_ids)} tokens and the context holds {self._max_context}, so no "
                "token fits behind it; raise `inference.max_context` or end the conversation earlier."
            )
        # Taken before anything is awaited: a publish meanwhile is for later calls.
        began_at, version, sampler = time.perf_counter(), self._policy_version, self._service.sampler
        ids, logprobs, has_stopped = await self._service.sample(
            sampler,
            prompt_ids,
            stop=sorted(self.end_token_ids.union(sampling.stop_token_ids)),
            max_tokens=min(sampling.max_tokens, room),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            seed=sampling.seed,
        )
        self._require_whole(ids, logprobs, has_stopped, sampling)
        text = self.policy_model.tokenizer.decode(ids)
        if on_piece is not None:
            on_piece(TokenPiece(text=text, token_ids=ids, logprobs=logprobs))
        return ModelOutput(
            text=text,
            content=text,
            prompt_ids=prompt_ids,
            completion_ids=ids,
            logprobs=logprobs,
            temperature=sampling.temperature,
            policy_versions=[version] * len(ids),
            finish_reason=FinishReason.STOP if has_stopped else FinishReason.LENGTH,
            usage={"prompt_tokens": len(prompt_ids), "completion_tokens": len(ids), "cached_tokens": 0},
            latency_s=time.perf_counter() - began_at,
        )

    async def score(self, ids: list[int], start: int, temperature: float = 1.0) -> list[float]:
        """Log-probabilities of `ids[start:]` under the published weights, at temperature 1."""
        if temperature != 1.0:
            raise ValueError(f"`temperature` is {temperature}; a Tinker service scores at temperature 1.")
        if not 1 <= start < len(ids):
            raise ValueError(f"`start` is {start}; of {len(ids)} ids, those from 1 on can be scored.")
        logprobs = (await self._service.prompt_logprobs(ids))[start:]
        if len(logprobs) != len(ids) - start or any(each is None for each in logprobs):
            raise InferenceError(
                f"The Tinker service at {self._service.base_url} scored {len(logprobs)} of "
                f"{len(ids) - start} tokens of a prompt."
            )
        return [float(each or 0.0) for each in logprobs]

    async def close(self) -> None:
        """The service keeps nothing of a client that would have to be closed."""

    def _require_whole(
        self, ids: list[int], logprobs: list[float], has_stopped: bool, sampling: SamplingParams
    ) -> None:
        """Raises InferenceError for an answer that cannot be trained on."""
        url = self._service.base_url
        if not ids or len(ids) != len(logprobs) or not np.isfinite(logprobs).all():
            raise InferenceError(
                f"The Tinker service at {url} returned {len(ids)} token ids and {len(logprobs)} "
                "log-probabilities for one answer, or some that are no finite numbers."
            )
        if has_stopped and ids[-1] not in self.end_token_ids.union(sampling.stop_token_ids):
            raise InferenceError(
                f"The Tinker service at {url} stopped behind token {ids[-1]}, which ends no answer of the "
                f"model in {self.policy_model.directory} ({sorted(self.end_token_ids)})."
            )


def _require_plain(sampling: SamplingParams) -> None:
    """Raises ValueError for what the service's sampler does not do."""
    for name in ("stop", "grammar", "top_logprobs"):
        if value := getattr(sampling, name):
            raise ValueError(
                f"`{name}` is {value!r}, which a Tinker service cannot honour for answers that are trained "
                "on; leave it out."
            )
