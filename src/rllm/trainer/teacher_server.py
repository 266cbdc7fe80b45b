"""A teacher behind an address: prompts in as ids, what the server says of each of their tokens out.

    row ──POST /v1/completions, prompt = ids──► prompt_logprobs: {"17": {"logprob": -0.2, "decoded_token": …}}

vLLM answers so; a server that does not is refused before any work. Its numbers are those of temperature 1.
"""

import asyncio
import math
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rllm.config.distill import DistillConfig
from rllm.errors import ConfigError, InferenceError
from rllm.inference.vllm import VLLMClient
from rllm.inference.vllm_http import VLLMHttp, VLLMServerFacts
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.types.sample import TrainingSample

NUM_TRIES = 4
NUM_PARALLEL = 16
"""Prompts that are with the server at the same time."""
MOST_IDS_AT_ONCE = 1024
"""The number of ids of the vocabulary that are compared at once."""

Answer = TypeVar("Answer")


class ServerScorer:
    """A `Scorer` that asks a server. Calls block and have event loops of their own, so none must run."""

    def __init__(
        self, base_url: str, *, model: str = "", api_key: str | None = None, retry_wait_s: float = 1.0
    ) -> None:
        """`api_key`: OPENAI_API_KEY of the environment where None. A call that fails is tried four times in
        all, after `retry_wait_s` and twice as long each time."""
        self.base_url = base_url_of(base_url)
        self.model = model
        self._api_key = os.environ.get("OPENAI_API_KEY") if api_key is None else api_key
        self._retry_wait_s = retry_wait_s
        self._facts: VLLMServerFacts | None = None

    def score(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
        """One [T] array per sample: log-probability of each trainable token, 0 elsewhere.

        Raises InferenceError when the server is gone, ConfigError for rows that were not sampled at
        temperature 1.
        """
        for sample in samples:
            if sample.temperature != 1.0:
                raise ConfigError(
                    f"{sample.order_key} was sampled at temperature {sample.temperature}, but a server "
                    "scores prompts at temperature 1; sample at 1, or give the teacher as a directory."
                )
        prompts = [_up_to_last_trained(sample) for sample in samples]
        scores = [np.zeros(sample.num_tokens, dtype=np.float32) for sample in samples]
        answers = self._run([prompt for prompt in prompts if prompt])
        for sample, scores_T, prompt in zip(samples, scores, prompts, strict=True):
            if prompt:
                logprobs = _logprobs(prompt, next(answers))
                trained_places = np.flatnonzero(sample.trainable_T)
                scores_T[trained_places] = logprobs[trained_places]
        return scores

    def require_room(self, max_context: int) -> None:
        """Raises ConfigError unless the server returns log-probabilities of prompts as long as rows are."""
        (answer,) = self._run([[0, 0]])
        if not isinstance(answer, list) or len(answer) != 2:
            raise ConfigError(
                f"The server at {self.base_url} cannot be a teacher: it returned no `prompt_logprobs`, which "
                "say how likely it finds a text that it did not write. Serve the model with vLLM, or give it "
                "as a directory."
            )
        assert self._facts is not None, "it has just been asked"
        if self._facts.max_context <= max_context:  # it has to generate one token behind the row
            raise ConfigError(
                f"`inference.max_context` is {max_context}, but the teacher at {self.base_url} takes prompts "
                f"of {self._facts.max_context - 1} tokens; set it to that, or raise the server's "
                "--max-model-len."
            )

    def require_same_vocabulary(self, tokenizer: HuggingFaceTokenizer) -> None:
        """Raises ConfigError naming the first id that the server takes for another token."""
        ids = sorted(tokenizer.vocabulary())
        assert self._facts is not None, "require_room has asked it"
        # One id stands before them, and one is generated behind.
        size = min(MOST_IDS_AT_ONCE, self._facts.max_context - 2)
        prompts = [[ids[start], *ids[start : start + size]] for start in range(0, len(ids), size)]
        try:
            answers = list(self._run(prompts))
        except ValueError as error:
            raise ConfigError(
                f"The teacher at {self.base_url} does not know all {len(ids)} tokens of the student's "
                f"vocabulary ({error}); choose a teacher of the student's family."
            ) from error
        for prompt, answer in zip(prompts, answers, strict=True):
            for token_id, entry in zip(prompt[1:], answer[1:], strict=True):
                theirs, mine = entry[str(token_id)].get("decoded_token"), tokenizer.token_text(token_id)
                if theirs != mine:
                    raise ConfigError(
                        f"The teacher at {self.base_url} has another vocabulary than the student: token "
                        f"{token_id} is {mine!r} for the student and {theirs!r} for the teacher; choose a "
                        "teacher of the student's family, or learn from its answers with `rllm sft`."
                    )

    def _run(self, prompts: Sequence[list[int]]) -> Iterator[Any]:
        """The server's scores of the prompts, in their order."""
        return iter(asyncio.run(self._ask_all(prompts)))

    async def _ask_all(self, prompts: Sequence[list[int]]) -> list[Any]:
        http = VLLMHttp(self.base_url, api_key=self._api_key, timeout_s=600.0, connect_timeout_s=30.0)
        places = asyncio.Semaphore(NUM_PARALLEL)

        async def ask(prompt: list[int]) -> Any:
            async with places:
                return await self._call_with_retries(lambda: self._ask(http, prompt))

        try:
            if self._facts is None:
                self._facts = await self._call_with_retries(lambda: http.facts(self.model))
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask(prompt)) for prompt in prompts]
            return [task.result() for task in tasks]
        # Python 3.11.2 puts what `except*` raises into a group again.
        except ExceptionGroup as errors:
            raise _first_of(errors) from None
        finally:
            await http.close()

    async def _call_with_retries(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        for number in range(NUM_TRIES - 1):
            try:
                return await call()
            except InferenceError as error:
                await asyncio.sleep(error.retry_after_s or self._retry_wait_s * 2**number)
        return await call()

    async def _ask(self, http: VLLMHttp, prompt: list[int]) -> Any:
        assert self._facts is not None, "it is asked first"
        body = {
            "model": self._facts.model,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 1,
        }
        async with aclosing(http.complete(body)) as replies:
            async for reply in replies:
                choices = reply.get("choices") or [{}]
                return choices[0].get("prompt_logprobs")
        raise InferenceError(f"The server at {self.base_url} gave no answer.")


async def sampling_client(distill: DistillConfig, tokenizer: HuggingFaceTokenizer) -> VLLMClient:
    """The client by which the server samples ids of the student's vocabulary. Raises InferenceError."""
    return await VLLMClient.connect(
        base_url_of(distill.teacher),
        tokenizer,
        model=distill.teacher_model,
        api_key=os.environ.get("OPENAI_API_KEY"),
    )


def base_url_of(address: str) -> str:
    """The address, with `/v1` at its end."""
    address = address.rstrip("/")
    return address if address.endswith("/v1") else f"{address}/v1"


def _first_of(errors: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _up_to_last_trained(sample: TrainingSample) -> list[int]:
    places = np.flatnonzero(sample.trainable_T)
    return sample.token_ids_T[: places[-1] + 1].tolist() if len(places) else []


def _logprobs(prompt: Sequence[int], answer: Any) -> NDArray[np.float32]:
    """[T] of each token of the prompt; NaN for the first, of which nothing can be said."""
    if not isinstance(answer, list) or len(answer) != len(prompt):
        raise InferenceError(f"The teacher returned {answer!r:.80} for a prompt of {len(prompt)} tokens.")
    values = [math.nan]
    for token_id, entry in zip(prompt[1:], answer[1:], strict=True):
        entry_of_token = (entry or {}).get(str(token_id))
        if entry_of_token is None:
            raise InferenceError(f"The teacher left out token {token_id}, which is in the prompt.")
        values.append(float(entry_of_token["logprob"]))
    return np.array(values, dtype=np.float32)
