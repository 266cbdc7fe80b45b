"""The connection to a Tinker service: the one file that knows the `tinker` client.

    TINKER_BASE_URL, TINKER_API_KEY ──connect──► base model, tokenizer, a new adapter
        TrainingClient:  forward, forward_backward, optim_step, save_state, load_state
        SamplingClient:  sample, compute_logprobs of the weights as they were when it was made

The client tries lost connections again, for minutes to hours. Whoever waits here looks every few seconds
whether the service still answers at all: one that has been gone for `GONE_AFTER_S` ends the wait.
"""

import asyncio
import io
import json
import logging
import os
import tarfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rllm.config.optimizer import OptimizerConfig
from rllm.errors import ConfigError, InferenceError, MissingExtraError, RllmError
from rllm.integrations.tinker.translation import Arrays, ServiceLoss

T = TypeVar("T")
CLIENTS = ((0, 24, 1), (0, 25, 0))
"""Versions of the client, from one to before the other, whose calls and whose wire (JSON) are known here."""
GONE_AFTER_S = 30.0
"""A service that nobody could reach for so long is gone."""
_LOOK_EVERY_S = 5.0
_SEEDS = 2**31 - 1
_ADAM_EPS = 1e-8
"""As torch's AdamW, which `optimizer` describes; the client's own default is 1e-12."""
log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, frozen=True)
class ServerFacts:
    """In what a server differs from the documented service."""

    row_means: bool = False
    """It averages over rows and their tokens, where the service adds up."""
    clips_gradients: bool = True
    """It knows `grad_clip_norm`."""


def require_client() -> None:
    """Raises MissingExtraError without the client, ConfigError for a version that was never tried."""
    tinker = _library()
    version = tuple(int(part) for part in tinker.__version__.split(".")[:3] if part.isdecimal())
    if not CLIENTS[0] <= version < CLIENTS[1]:
        first, end = (".".join(map(str, each)) for each in CLIENTS)
        raise ConfigError(
            f"The installed `tinker` is {tinker.__version__}; this release speaks with those from {first} on "
            f"and before {end}: newer ones send protobuf, which no server here could be tried with. Run: "
            f"pip install 'tinker>={first},<{end}'"
        )


def _library() -> Any:
    """The one import of the client, which only some have. Raises MissingExtraError."""
    try:
        import tinker  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "tinker", "tinker") from error
    return tinker


class Service:
    """One adapter that a service trains, and its sampler."""

    def __init__(self, base_url: str) -> None:
        """Raises ConfigError where nobody answers. The client reads TINKER_API_KEY itself."""
        self.base_url = base_url.rstrip("/")
        self.base_model = ""
        self.sampler: Any = None
        """The client of the weights that were published last."""
        self._training: Any = None
        self._last_look = time.monotonic()
        self._unreachable_since: float | None = None
        self._looking = threading.Lock()
        self._num_saved = 0
        if trouble := self._trouble():
            raise ConfigError(
                f"No Tinker service answers at TINKER_BASE_URL={self.base_url} ({trouble}); start it, or "
                "mend the address."
            )
        os.environ.setdefault("TINKER_TELEMETRY", "0")  # the client would report on its use
        self.facts = self._server_facts()
        # It logs each call that failed; the error that ends the run says the same once.
        logging.getLogger("tinker.lib.retry_handler").setLevel(logging.CRITICAL)
        self._client: Any = _library().ServiceClient(base_url=self.base_url)

    def parameters(self) -> Iterator[Any]:
        """None: those of a model in a service are not in this process."""
        return iter(())

    # ---- at start --------------------------------------------------------------------------------------

    def choose_base_model(self, path: str) -> str:
        """The model that it serves under the name of the directory `path`. Raises ConfigError."""
        with self._errors_named("list its models"):
            answer = self._wait(_in_thread(self._client.get_server_capabilities))
        names = [each.model_name for each in answer.supported_models if each.model_name]
        name = Path(path).name
        matches = [each for each in names if each == path or each.rpartition("/")[2] == name]
        if not matches:
            raise ConfigError(
                f"`model.path` is {path!r}, but the service at {self.base_url} has no model `{name}`; it "
                f"serves {', '.join(names[:12]) or 'none'}. Give the directory of one of these, by its name."
            )
        self.base_model = matches[0]
        return self.base_model

    def create_adapter(self, rank: int, seed: int) -> None:
        """A new adapter, which changes nothing yet."""
        # An output layer that is the embedding as well has no adapter at some servers; sampler and trainer
        # agree on it either way.
        with self._errors_named(f"create an adapter of rank {rank}"):
            self._training = self._wait(
                _in_thread(
                    lambda: self._client.create_lora_training_client(
                        base_model=self.base_model, rank=rank, seed=seed % _SEEDS
                    )
                )
            )

    def tokenizer(self) -> Any:
        """The tokenizer of transformers that the service names for its model."""
        with self._errors_named("name its tokenizer"):
            return self._wait(_in_thread(self._training.get_tokenizer))

    # ---- training --------------------------------------------------------------------------------------

    def forward(self, rows: Sequence[tuple[Sequence[int], Arrays]]) -> list[NDArray[np.float64]]:
        """Log-probability of each target of each (ids, arrays)."""
        with self._errors_named("score rows"):
            return self._logprobs(self._wait(self._training.forward(_data(rows), "cross_entropy")), rows)

    def forward_backward(
        self, rows: Sequence[tuple[Sequence[int], Arrays]], loss: ServiceLoss
    ) -> list[NDArray[np.float64]]:
        """Add to the gradient; log-probability of each target under the weights as they are."""
        with self._errors_named(f"compute gradients of `{loss.name}`"):
            future = self._training.forward_backward(_data(rows), loss.name, loss.bounds or None)
            return self._logprobs(self._wait(future), rows)

    def optim_step(self, learning_rate: float, optimizer: OptimizerConfig) -> dict[str, float]:
        """One step of AdamW along the gradient; what the server says of it."""
        return self._optim_step(
            learning_rate=learning_rate,
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            weight_decay=optimizer.weight_decay,
            grad_clip_norm=optimizer.max_grad_norm,
        )

    def reset_optimizer(self) -> None:
        """Forget the moments of the gradient, and keep the weights."""
        self._load(self.save_state("reset"), with_optimizer=False)
        if self.facts.row_means:
            # SkyRL loads the moments with any state; a step with a rate and betas of 0 leaves none of them.
            self._optim_step(learning_rate=0.0, beta1=0.0, beta2=0.0, weight_decay=0.0, grad_clip_norm=0.0)

    def save_state(self, name: str) -> str:
        """Keep weights and moments in the service; where, as a `tinker://` path."""
        self._num_saved += 1  # a name is given once
        with self._errors_named("save its state"):
            return self._wait(self._training.save_state(f"{name}-{self._num_saved}")).path

    def load_state(self, path: str) -> None:
        """Go back to weights and moments that `save_state` kept."""
        self._load(path, with_optimizer=True)

    def keep_sampler(self, name: str) -> str:
        """Keep the weights in the service for sampling; where."""
        self._num_saved += 1
        with self._errors_named("keep its weights"):
            return self._wait(self._training.save_weights_for_sampler(f"{name}-{self._num_saved}")).path

    def adapter_files(self, path: str) -> dict[str, bytes]:
        """The files that `keep_sampler` kept at `path`, in peft's format, by name."""
        run, _, checkpoint = path.removeprefix("tinker://").partition("/")
        with self._errors_named(f"hand out {path}"):
            rest = self._client.create_rest_client()
            answer = self._wait(_in_thread(lambda: rest.get_checkpoint_archive_url(run, checkpoint).result()))
            with urllib.request.urlopen(answer.url, timeout=GONE_AFTER_S) as download:
                archive = io.BytesIO(download.read())
            with tarfile.open(fileobj=archive) as members:
                return {Path(each.name).name: _content(members, each) for each in members if each.isfile()}

    def publish(self) -> None:
        """`sampler` samples from the weights as they are."""
        with self._errors_named("publish weights"):
            self.sampler = self._wait(_in_thread(self._training.save_weights_and_get_sampling_client))

    def _load(self, path: str, *, with_optimizer: bool) -> None:
        training = self._training
        load = training.load_state_with_optimizer if with_optimizer else training.load_state
        with self._errors_named(f"load {path}"):
            self._wait(load(path))

    def _optim_step(self, **settings: float) -> dict[str, float]:
        with self._errors_named("step its optimizer"):
            answer = self._wait(
                self._training.optim_step(_library().types.AdamParams(eps=_ADAM_EPS, **settings))
            )
        return dict(answer.metrics or {})

    def _logprobs(
        self, answer: Any, rows: Sequence[tuple[Sequence[int], Arrays]]
    ) -> list[NDArray[np.float64]]:
        logprobs = [np.array(each["logprobs"].data, dtype=np.float64) for each in answer.loss_fn_outputs]
        lengths = [len(arrays["target_tokens"]) for _, arrays in rows]
        if [len(each) for each in logprobs] != lengths:
            raise InferenceError(
                f"The Tinker service at {self.base_url} was sent {len(rows)} rows of {sum(lengths)} tokens "
                f"and said log-probabilities of {sum(map(len, logprobs))} tokens in {len(logprobs)} rows."
            )
        return logprobs

    # ---- sampling --------------------------------------------------------------------------------------

    async def sample(
        self, sampler: Any, prompt_ids: Sequence[int], *, stop: Sequence[int], **settings: Any
    ) -> tuple[list[int], list[float], bool]:
        """(ids, their log-probabilities, whether a token of `stop` ended them) after a prompt."""
        params = _library().types.SamplingParams(
            stop=list(stop), **{**settings, "seed": settings["seed"] % _SEEDS}
        )
        with self._errors_named("sample"):
            answer = await self._answer(sampler.sample(_model_input(prompt_ids), 1, params))
            (sequence,) = answer.sequences
            return list(sequence.tokens), list(sequence.logprobs or ()), sequence.stop_reason == "stop"

    async def prompt_logprobs(self, ids: Sequence[int]) -> list[float | None]:
        """The log-probability of each id after those before it, under the published weights. Some servers
        leave out the first, which nothing comes before."""
        with self._errors_named("score a prompt"):
            logprobs = await self._answer(self.sampler.compute_logprobs(_model_input(ids)))
        return [None, *logprobs] if len(logprobs) == len(ids) - 1 else list(logprobs)

    # ---- waiting ---------------------------------------------------------------------------------------

    def _wait(self, future: Any) -> Any:
        """The result of a call; raises InferenceError once the service is gone."""
        inner: Future[Any] = future if isinstance(future, Future) else future.future()
        while True:
            try:
                return inner.result(_LOOK_EVERY_S)
            except TimeoutError:
                # The call may have ended since, or with a TimeoutError, which is then its answer.
                if inner.done():
                    return inner.result()
                self._require_there()

    async def _answer(self, future: "Future[T]") -> T:
        waiting = asyncio.wrap_future(future)
        try:
            while not (await asyncio.wait({waiting}, timeout=_LOOK_EVERY_S))[0]:
                await asyncio.to_thread(self._require_there)
            return waiting.result()
        except (asyncio.CancelledError, RllmError):
            waiting.cancel()
            raise

    def _require_there(self) -> None:
        """Raises InferenceError where nobody could reach the service for a while."""
        # Many calls wait at the same time, in several threads: one of them looks for all.
        with self._looking:
            if time.monotonic() - self._last_look >= _LOOK_EVERY_S:
                trouble, self._last_look = self._trouble(), time.monotonic()
                if not trouble:
                    self._unreachable_since = None
                elif self._unreachable_since is None:
                    self._unreachable_since = time.monotonic()
            since = self._unreachable_since
        if since is not None and time.monotonic() - since >= GONE_AFTER_S:
            raise InferenceError(
                f"The Tinker service at {self.base_url} has not answered for {time.monotonic() - since:.0f} "
                "seconds. Once it is back, the same command goes on from the last checkpoint.",
                is_final=True,
            )

    def _trouble(self) -> str:
        """The reason that the service cannot be reached; empty where it answers, whatever the answer."""
        try:
            with urllib.request.urlopen(f"{self.base_url}/api/v1/healthz", timeout=_LOOK_EVERY_S):
                return ""
        # Any answer will do, also a refusal: somebody is there.
        except urllib.error.HTTPError:
            return ""
        except (OSError, ValueError) as error:
            return str(getattr(error, "reason", error))

    def _server_facts(self) -> ServerFacts:
        """SkyRL's server publishes its schema; the service itself does not."""
        try:
            with urllib.request.urlopen(f"{self.base_url}/openapi.json", timeout=_LOOK_EVERY_S) as answer:
                adam = json.load(answer)["components"]["schemas"]["AdamParams"]["properties"]
        except (OSError, ValueError, KeyError, TypeError):
            return ServerFacts()
        clips = "grad_clip_norm" in adam
        if not clips:
            log.warning(
                "The server at %s does not know `grad_clip_norm`: gradients are not scaled down to "
                "`optimizer.max_grad_norm`.",
                self.base_url,
            )
        return ServerFacts(row_means=not clips, clips_gradients=clips)

    @contextmanager
    def _errors_named(self, what: str) -> Iterator[None]:
        """Errors of the client as one sentence."""
        try:
            yield
        except RllmError:
            raise
        except Exception as error:
            message = str(error).partition("\n")[0] or type(error).__name__
            raise InferenceError(
                f"The Tinker service at {self.base_url} could not {what}: {message[:500]}"
            ) from error


def _data(rows: Sequence[tuple[Sequence[int], Arrays]]) -> list[Any]:
    datum = _library().types.Datum
    return [datum(model_input=_model_input(ids), loss_fn_inputs=dict(arrays)) for ids, arrays in rows]


def _model_input(ids: Sequence[int]) -> Any:
    return _library().types.ModelInput.from_ints(list(ids))


def _content(members: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = members.extractfile(member)
    assert file is not None, "a member that is a file"
    return file.read()


def _in_thread(work: Callable[[], T]) -> "Future[T]":
    """Work whose caller can stop waiting: a daemon, so that it holds up no exit."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  it is the waiting thread's
            future.set_exception(error)

    threading.Thread(target=run, name="tinker", daemon=True).start()
    return future
