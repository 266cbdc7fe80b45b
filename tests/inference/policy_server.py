"""A model server that speaks the part of vLLM's protocol that fleets use, on the built-in engine.

    with PolicyServer(model_directory) as server: …server.url…

It answers /v1/models, /version, /health, /v1/completions (whole and streamed: token ids, log-probabilities,
those of the prompt), /inference/v1/generate with images, and the calls that bring new weights. `stop` ends it
with all its connections, `start` begins it anew, on the same port, with the weights that it had first.
`transcript.py` holds it and a real one to the same answers.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import torch
from aiohttp import web
from safetensors.torch import load_file
from tensor_receiver import PATHS, MemoryNccl, TensorReceiver
from torch import Tensor

from rllm.config.lora import LoraConfig
from rllm.errors import RllmError
from rllm.inference.client import TokenPiece
from rllm.inference.local.client import LocalClient
from rllm.models.directory import LoadedModel, load_model
from rllm.models.lora import load_adapter, with_adapter
from rllm.rendering.images import IMAGES, image_of
from rllm.types.images import PATCH_IDS_FROM, ImageFile
from rllm.types.messages import FinishReason, ModelOutput, SamplingParams, TopLogprobs

_OF_ENGINE = {
    **dict.fromkeys(("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache"), "vllm"),
    **dict.fromkeys(("/pause_generation", "/continue_generation", "/update_weights_from_disk"), "sglang"),
    "/generate": "sglang",
    **dict.fromkeys(("/get_world_size", *PATHS), "vllm"),
}


class PolicyServer:
    """Runs in a thread of its own, so that whoever trains may have an event loop."""

    def __init__(
        self,
        directory: Path,
        *,
        max_context: int = 512,
        ignores_weights: bool = False,
        is_raw: bool = False,
        tells_version: bool = False,
        engine: str = "vllm",
        takes_images: bool = True,
        nccl: MemoryNccl | None = None,
    ) -> None:
        """`tells_version`: each answer names the version that the server was told, as SGLang does. `is_raw`:
        log-probabilities of answers are those at temperature 1, whatever they are sampled at. `engine`: whose
        calls it knows, `vllm` or `sglang`. `nccl`: by which it is given tensors."""
        self.receiver = TensorReceiver(nccl or MemoryNccl(), self._load_tensors)
        self.engine = engine
        self.takes_images = takes_images
        self.sees: Callable[[ImageFile], ImageFile] = lambda image: image
        """What it makes of an image."""
        self.is_raw = is_raw
        self.tells_version = tells_version
        self.directory = directory
        self.max_context = max_context
        self.ignores_weights = ignores_weights
        self.port = 0
        self.num_answered = 0
        self.fails_next = 0
        """Answers that it will refuse with 500, though it goes on."""
        self.dies_after: int | None = None
        """Answers, after which it drops everything and is gone."""
        self.hangs = False
        """It takes calls and answers none, not even those that it is at work on."""
        self.versions: list[str] = []
        """That it was told it has, in order."""
        self.on_answer: Callable[[], None] = lambda: None
        self.on_piece: Callable[[], None] = lambda: None
        self.paths: list[str] = []
        """That it was asked, in order, with their queries."""
        self.edit: Callable[[str, Any], Any] = lambda path, reply: reply
        """Its reply to a path, of what it would say; None for one that it does not know."""
        self._model: LoadedModel | None = None
        self._client: LocalClient | None = None
        self._adapters: dict[str, LocalClient] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runner: web.ServerRunner | None = None

    @property
    def adapters(self) -> list[str]:
        """Names of those that it has."""
        return list(self._adapters)

    @property
    def is_there(self) -> bool:
        return self._runner is not None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self) -> None:
        self._run(self._start())

    def stop(self) -> None:
        if self._runner is not None:
            self._run(self._stop())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    async def _start(self) -> None:
        self._version = "default"
        self.receiver.begin_anew()
        self._num_under_way, self._is_paused = 0, False
        self._changed = asyncio.Condition()
        self._model = load_model(self.directory)
        self._client = LocalClient(self._model, num_slots=32, max_context=self.max_context)
        self._runner = web.ServerRunner(
            web.Server(self._answer, handler_cancellation=True), shutdown_timeout=0.05
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def _stop(self) -> None:
        runner, client, adapters = self._runner, self._client, self._adapters
        if runner is None or client is None:
            return
        if runner.server is not None:
            for connection in list(runner.server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
        await runner.cleanup()
        for each in (client, *adapters.values()):
            await each.close()
        self._runner, self._client, self._adapters = None, None, {}

    async def _answer(self, http: web.BaseRequest) -> web.StreamResponse:
        self.paths.append(http.path_qs)
        response = await self._respond(http)
        if not isinstance(response, web.Response):
            return response
        reply = self.edit(http.path, json.loads(response.text or "{}"))
        if reply is None:
            response = web.json_response({"detail": "Not Found"}, status=404)
        elif response.status == 200:
            response = web.json_response(reply)
        while self.hangs:
            await asyncio.sleep(0.01)
        return response

    async def _respond(self, http: web.BaseRequest) -> web.StreamResponse:
        match http.path:
            case "/v1/models":
                data = {"id": "policy", "max_model_len": self.max_context, "owned_by": self.engine}
                return web.json_response({"data": [data]})
            case "/version":
                return web.json_response({"version": "0.32.0"})
            case "/health":
                return web.json_response({})
            case path if path in _OF_ENGINE and _OF_ENGINE[path] != self.engine:
                return web.json_response({"detail": "Not Found"}, status=404)
            case "/get_world_size":
                return web.json_response({"world_size": 1})
            case path if path in PATHS:
                return await self._receive(http)
            case "/pause_generation":
                self._is_paused = True
                return web.json_response({"status": "ok"})
            case "/continue_generation":
                await self._resume()
                return web.json_response({"status": "ok"})
            case "/update_weights_from_disk":
                named = await http.json()
                self._reload(Path(named["model_path"]))
                self._version = named["weight_version"]
                self.versions.append(self._version)
                return web.json_response({"success": True, "message": "", "num_paused_requests": 0})
            case "/generate":
                return await self._score(await http.json())
            case "/pause":
                await self._pause(waits=http.query["mode"] == "wait")
                return web.json_response({"status": "paused"})
            case "/resume":
                await self._resume()
                return web.json_response({"status": "resumed"})
            case "/tokenize":
                assert self._model is not None
                ids = self._model.tokenizer.encode((await http.json())["prompt"])
                return web.json_response({"tokens": ids, "count": len(ids)})
            case "/collective_rpc":
                self._reload(Path((await http.json())["kwargs"]["weights_path"]))
                return web.json_response({"results": [None]})
            case "/reset_prefix_cache":
                return web.json_response({"success": True})
            case "/reset_encoder_cache":
                return web.json_response({})
            case "/update_weight_version":
                self._version = (await http.json())["new_version"]
                self.versions.append(self._version)
                return web.json_response({})
            case "/v1/load_lora_adapter":
                named = await http.json()
                if named["lora_name"] in self._adapters:
                    message = f"The lora adapter '{named['lora_name']}' has already been loaded."
                    return web.json_response({"error": {"message": message}}, status=400)
                self._load_adapter(**named)
                return web.json_response({})
            case "/v1/unload_lora_adapter":
                name = (await http.json())["lora_name"]
                if name not in self._adapters:
                    return web.json_response({"error": {"message": f"no adapter {name}"}}, status=404)
                await self._adapters.pop(name).close()
                return web.json_response({})
            case "/v1/completions" if self.fails_next:
                self.fails_next -= 1
                return web.json_response({"error": {"message": "out of memory"}}, status=500)
            case "/inference/v1/generate" if not self.takes_images:
                return web.json_response({"detail": "Forbidden"}, status=403)
            case "/v1/completions" | "/inference/v1/generate":
                body = await http.json()
                if http.path != "/v1/completions":
                    body = self._as_completion(body)
                if body["model"] not in ("policy", *self._adapters):
                    return _refusal(404, f"The model `{body['model']}` does not exist.")
                if len(body["prompt"]) >= self.max_context:
                    return _refusal(400, f"This model's maximum context length is {self.max_context} tokens.")
                async with self._under_way():
                    return await (self._stream(http, body) if body.get("stream") else self._complete(body))
            case _:
                return web.json_response({"error": {"message": http.path}}, status=404)

    def _as_completion(self, body: dict[str, Any]) -> dict[str, Any]:
        """The completion that a call with images asks for."""
        assert self._model is not None
        reader = self._model.tokenizer.images
        assert reader is not None
        images = [self.sees(image_of(part["url"])) for part in body["content_parts"]]
        for image in images:
            IMAGES.add(image)
        left, row = iter(images), list[int]()
        for token in body["token_ids"]:
            row += reader.ids(next(left)) if token == reader.mark_id else [token]
        read = [reader.mark_id if token >= PATCH_IDS_FROM else token for token in row]
        return {
            **body["sampling_params"],
            "model": body["model"],
            "prompt": row,
            "stream": body["stream"],
            "read_ids": read,
        }

    async def _receive(self, http: web.BaseRequest) -> web.Response:
        body = json.loads(await http.read() or b"{}")
        try:
            return web.json_response(await asyncio.to_thread(self.receiver.respond, http.path, body))
        except (RuntimeError, threading.BrokenBarrierError) as error:
            return web.json_response({"error": {"message": str(error)}}, status=500)

    def _reload(self, directory: Path) -> None:
        weights = load_file(directory / "model.safetensors")
        assert self._model is not None
        self._load_tensors({name: weights[name] for name in self._model.model.state_dict_hf()})

    def _load_tensors(self, weights: dict[str, Tensor]) -> None:
        if self.ignores_weights:
            return
        assert self._model is not None
        assert self._client is not None
        mine = self._model.model.state_dict_hf()

        def write() -> None:
            with torch.no_grad():
                for name, value in weights.items():
                    mine[name].copy_(value)

        self._client.publish(self._client.policy_version + 1, write)

    def _load_adapter(self, lora_name: str, lora_path: str) -> None:
        assert self._model is not None
        settings = json.loads((Path(lora_path) / "adapter_config.json").read_text())
        config = LoraConfig(rank=settings["r"], alpha=settings["lora_alpha"])
        model = with_adapter(self._model, config, 0)
        load_adapter(model, Path(lora_path))
        self.versions.append(lora_name.split("-")[1])
        self._adapters[lora_name] = LocalClient(model, num_slots=32, max_context=self.max_context)

    async def _pause(self, *, waits: bool) -> None:
        self._is_paused = True
        async with self._changed:
            await self._changed.wait_for(lambda: not (waits and self._num_under_way))

    async def _resume(self) -> None:
        async with self._changed:
            self._is_paused = False
            self._changed.notify_all()

    async def _score(self, body: dict[str, Any]) -> web.Response:
        """As SGLang: (log-probability, id, text) of each id that was sent."""
        assert self._client is not None
        assert body["return_logprob"]
        assert body["logprob_start_len"] == 0
        ids = body["input_ids"]
        scores = await self._client.score(ids, 1)
        rows = [[logprob, token, None] for logprob, token in zip([None, *scores], ids, strict=True)]
        return web.json_response({"text": "", "meta_info": {"input_token_logprobs": rows}})

    @asynccontextmanager
    async def _under_way(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_paused)
        self._num_under_way += 1
        try:
            yield
        finally:
            self._num_under_way -= 1
            async with self._changed:
                self._changed.notify_all()

    async def _complete(self, body: dict[str, Any]) -> web.Response:
        client = self._client_of(body)
        prompt = body["prompt"]
        choice: dict[str, Any] = {"index": 0, "prompt_token_ids": prompt}
        if "prompt_logprobs" in body:
            scores = await client.score(prompt, 1)
            named = [{str(token): {"logprob": each}} for token, each in zip(prompt[1:], scores, strict=True)]
            choice["prompt_logprobs"] = [None, *named]
        try:
            output = await client.generate_ids(prompt, _sampling_of(body))
        except RllmError as error:
            return web.json_response({"error": {"message": str(error)}}, status=500)
        logprobs = output.logprobs
        if self.is_raw:
            logprobs = await client.score(prompt + output.completion_ids, len(prompt))
        choice |= {"text": output.text, **_end_of(output, body), **_tokens(output.completion_ids, logprobs)}
        if output.top_logprobs:
            choice["logprobs"]["top_logprobs"] = [_named(each) for each in output.top_logprobs]
        await self._count_answer()
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(output.completion_ids)}
        reply = {"id": f"cmpl-{self.num_answered}", "choices": [choice], "usage": usage, **self._told()}
        return web.json_response(_as_generated(reply, body))

    async def _stream(self, http: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        pieces = asyncio.Queue[TokenPiece | None]()
        client, prompt = self._client_of(body), body["prompt"]
        answer = asyncio.create_task(
            client.generate_ids(prompt, _sampling_of(body), on_piece=pieces.put_nowait)
        )
        answer.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            told: dict[str, Any] = {"prompt_token_ids": prompt}
            held: TokenPiece | None = None
            while (piece := await pieces.get()) is not None:
                if held is not None:
                    await self._send(response, {"text": held.text, **told, **_tokens_of(held)}, body)
                    told = {}
                held = piece
                self.on_piece()
            output = answer.result()
            last = held or TokenPiece()
            end = {"text": last.text, **told, **_tokens_of(last), **_end_of(output, body)}
            await self._send(response, end, body)
            await response.write(b"data: [DONE]\n\n")
        finally:
            answer.cancel()
        await self._count_answer()
        return response

    async def _send(self, response: web.StreamResponse, choice: dict[str, Any], body: dict[str, Any]) -> None:
        chunk = {"id": "cmpl", "choices": [{"index": 0, "finish_reason": None, **choice}], **self._told()}
        chunk = _as_generated(chunk, body)
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def _client_of(self, body: dict[str, Any]) -> LocalClient:
        assert self._client is not None
        return self._adapters.get(body["model"], self._client)

    async def _count_answer(self) -> None:
        self.num_answered += 1
        self.on_answer()
        if self.dies_after is not None and self.num_answered >= self.dies_after:
            self.dies_after = None
            self._loop.create_task(self._stop())
            await asyncio.sleep(1)

    def _told(self) -> dict[str, Any]:
        if self.engine == "sglang":
            return {"metadata": {"weight_version": self._version}}
        return {"weight_version": self._version} if self.tells_version else {}


def _as_generated(chunk: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """The same in the form of /inference/v1/generate, where that was asked: ids as they are, and what is
    said of the prompt at the top."""
    if "read_ids" not in body:
        return chunk
    (choice,) = chunk["choices"]
    ids, named = choice["token_ids"], choice["logprobs"]
    content = [
        {"token_id": token, "logprob": logprob, "top_logprobs": [{"token_id": token, "logprob": logprob}]}
        for token, logprob in zip(ids, named["token_logprobs"], strict=True)
    ]
    reply = {"request_id": chunk["id"], "usage": chunk.get("usage"), "prompt_token_ids": None}
    if "prompt_token_ids" in choice:
        reply["prompt_token_ids"] = body["read_ids"]
    if "prompt_logprobs" in choice:
        scored = zip(choice["prompt_logprobs"], body["read_ids"], strict=True)
        reply["prompt_logprobs"] = [
            each and {str(token): next(iter(each.values()))} for each, token in scored
        ]
    kept = {name: choice[name] for name in ("index", "finish_reason") if name in choice}
    stop = {"stop_reason": choice.get("stop_reason")}
    return {**reply, "choices": [{**kept, **stop, "token_ids": ids, "logprobs": {"content": content}}]}


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def _sampling_of(body: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        temperature=body["temperature"],
        top_p=body["top_p"],
        top_k=max(0, body["top_k"]),
        max_tokens=body["max_tokens"],
        seed=body.get("seed", 0),
        stop=tuple(body["stop"]),
        stop_token_ids=tuple(body["stop_token_ids"]),
        top_logprobs=body["logprobs"],
    )


def _end_of(output: ModelOutput, body: dict[str, Any]) -> dict[str, Any]:
    is_stop = output.finish_reason is FinishReason.STOP
    last = output.completion_ids[-1]
    stop_id = last if last in body["stop_token_ids"] else None
    return {"finish_reason": "stop" if is_stop else "length", "stop_reason": output.stop_sequence or stop_id}


def _tokens_of(piece: TokenPiece) -> dict[str, Any]:
    tokens = _tokens(piece.token_ids, piece.logprobs)
    if piece.top_logprobs:
        tokens["logprobs"]["top_logprobs"] = [_named(each) for each in piece.top_logprobs]
    return tokens


def _tokens(ids: list[int], logprobs: list[float]) -> dict[str, Any]:
    return {
        "token_ids": ids,
        "logprobs": {
            "tokens": [f"token_id:{token}" for token in ids],
            "token_logprobs": logprobs,
            "top_logprobs": [_named([each]) for each in zip(ids, logprobs, strict=True)],
        },
    }


def _named(top: TopLogprobs) -> dict[str, float]:
    return {f"token_id:{token}": logprob for token, logprob in top}
