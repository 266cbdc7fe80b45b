"""A model client whose answers the servers of verl sample: ids in, ids out.

prompt ids ──► verl's LLMServerClient.generate ──► TokenOutput ──► ModelOutput
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from uuid import uuid4

from rllm.errors import ContextLengthError, InferenceError
from rllm.inference.client import ModelClient, TokenPiece
from rllm.inference.token_session import TokenSession
from rllm.rendering.chat import ChatRenderer
from rllm.types.messages import FinishReason, LogprobMeaning, ModelOutput, SamplingParams

BROKEN_OFF = ("aborted", "abort")
"""The reason that verl's servers give for an answer that they did not go on with."""


class VerlClient(ModelClient):
    """A `ModelClient` and a `TokenClient` for one episode."""

    def __init__(
        self,
        servers: Any,
        renderer: ChatRenderer,
        options: Mapping[str, Any],
        *,
        max_context: int,
        end_token_ids: Iterable[int] = (),
    ) -> None:
        """`servers`: an `LLMServerClient`. `options`: the sampling parameters that verl gives a loop; those
        that `SamplingParams` has are a call's own. `end_token_ids`: each of them ends an answer."""
        self.renderer = renderer
        self.end_token_ids = frozenset(end_token_ids)
        self.policy_version = 0
        """verl's global step, of the weights that answered last."""
        self._servers, self._options, self._max_context = servers, dict(options), max_context
        self._request_id = f"rllm-{uuid4().hex}"
        """One for all calls: verl sends them to the server that has read their prefix."""

    @property
    def max_context(self) -> int:
        return self._max_context

    def session(self, order: tuple[str, int]) -> TokenSession:
        return TokenSession(self)

    async def generate_ids(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        on_piece: Callable[[TokenPiece], None] | None = None,
    ) -> ModelOutput:
        """See `TokenClient`; an answer comes in one piece. Raises InferenceError for an answer without
        log-probabilities, ValueError for sampling that verl's servers are not asked for."""
        if sampling.grammar or sampling.top_logprobs or sampling.stop:
            raise ValueError("verl's servers are asked for no `grammar`, `top_logprobs` and `stop`.")
        room = self._max_context - len(prompt_ids)
        if room < 1:
            raise ContextLengthError(
                f"The prompt has {len(prompt_ids)} tokens, and the context holds {self._max_context}; raise "
                "`data.max_prompt_length` or `data.max_response_length`."
            )
        options = {
            **self._options,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_tokens": min(sampling.max_tokens, room),
        }
        if sampling.stop_token_ids:
            options["stop_token_ids"] = list(sampling.stop_token_ids)
        answer = await self._servers.generate(
            self._request_id, prompt_ids=prompt_ids, sampling_params=options
        )
        ids, logprobs = list(answer.token_ids), answer.log_probs
        if not ids or answer.stop_reason in BROKEN_OFF:
            raise InferenceError(
                f"verl's server broke an answer off after {len(ids)} tokens ({answer.stop_reason})."
            )
        if logprobs is None or len(logprobs) != len(ids):
            raise InferenceError(
                "verl's server gave no log-probability for each token; set "
                "`actor_rollout_ref.rollout.calculate_log_probs` to true."
            )
        oldest, newest = _versions(answer)
        self.policy_version = newest
        text = self.renderer.tokenizer.decode(ids)
        if on_piece is not None:
            on_piece(TokenPiece(text=text, token_ids=ids, logprobs=list(logprobs)))
        # vLLM's replica says "completed" of an answer that ran into its limit, too.
        ends = self.end_token_ids.union(sampling.stop_token_ids)
        at_limit = answer.stop_reason == "length" or len(ids) >= options["max_tokens"]
        is_cut = at_limit and ids[-1] not in ends
        return ModelOutput(
            text=text,
            content=text,
            prompt_ids=prompt_ids,
            completion_ids=ids,
            logprobs=list(logprobs),
            logprob_meaning=LogprobMeaning.TEMPERATURE,
            temperature=sampling.temperature,
            # verl tells the oldest and the newest version of an answer, and not which tokens are of which. Of
            # a row only these two are looked at later.
            policy_versions=[oldest, *[newest] * (len(ids) - 1)],
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            usage={"prompt_tokens": len(prompt_ids), "completion_tokens": len(ids)},
        )

    async def close(self) -> None:
        """verl's servers keep nothing of a client that would have to be closed."""


def _versions(answer: Any) -> tuple[int, int]:
    """Global steps of the oldest and the newest weights that sampled an answer; 0 where nobody says so."""
    fields = answer.extra_fields
    newest = fields.get("max_global_steps", fields.get("global_steps")) or 0
    return int(fields.get("min_global_steps", newest) or 0), int(newest)
