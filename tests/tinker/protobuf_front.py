"""A Tinker service that speaks protobuf, made of one that speaks JSON alone: it stands before that one.

    client ──forward_backward, protobuf──► JSON ──► the service
    client ◄──protobuf── samples, outputs of a loss ◄── JSON ◄── the service

All else passes as it is. What the messages are is the installed client's to say
(`tinker.proto.tinker_public_pb2`).
"""

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from tinker.proto import tinker_public_pb2 as wire

PROTOBUF = "application/x-protobuf"
ASKS_FOR_PROTOBUF = {"proto_write_fwdbwd": True, "fwd_via_fwdbwd": True}
"""The service's word to clients that speak both forms."""
DTYPES = {wire.DTYPE_FLOAT32: np.float32, wire.DTYPE_INT64: np.int64}
NAMES = {wire.DTYPE_FLOAT32: "float32", wire.DTYPE_INT64: "int64"}
STOPS = {"stop": wire.STOP_REASON_STOP, "length": wire.STOP_REASON_LENGTH}
NOT_PASSED_ON = {
    "accept-encoding",
    "connection",
    "content-length",
    "date",
    "host",
    "server",
    "transfer-encoding",
}


def json_of_update(body: bytes) -> tuple[bool, dict[str, Any]]:
    """(whether it is a forward pass alone, the same request as JSON)."""
    message = wire.ForwardBackwardRequest()
    message.ParseFromString(body)
    rows = [
        {
            "model_input": {"chunks": [_chunk(each) for each in datum.model_input]},
            "loss_fn_inputs": {name: _tensor(each) for name, each in datum.loss_fn_inputs.items()},
        }
        for datum in message.data
    ]
    settings = dict(message.loss_fn_config) or None
    content = {"data": rows, "loss_fn": message.loss_fn, "loss_fn_config": settings}
    where = "forward_input" if message.forward_only else "forward_backward_input"
    return message.forward_only, {"model_id": message.model_id, "seq_id": message.seq_id, where: content}


def _chunk(chunk: Any) -> dict[str, Any]:
    assert chunk.WhichOneof("chunk") == "encoded_text", "rows are text"
    return {"type": "encoded_text", "tokens": np.frombuffer(chunk.encoded_text.tokens, np.int32).tolist()}


def _tensor(tensor: Any) -> dict[str, Any]:
    values = np.frombuffer(tensor.dense, DTYPES[tensor.dtype])
    return {"data": values.tolist(), "dtype": NAMES[tensor.dtype], "shape": list(tensor.shape)}


def protobuf_of_answer(answer: Mapping[str, Any]) -> bytes | None:
    """None for an answer that newer clients take as JSON too: not yet, failed, or of another kind."""
    if "loss_fn_outputs" in answer:
        return _outputs(answer).SerializeToString()
    return _samples(answer).SerializeToString() if "sequences" in answer else None


def _outputs(answer: Mapping[str, Any]) -> Any:
    rows, message = answer["loss_fn_outputs"], wire.ForwardBackwardOutput()
    message.loss_fn_output_type = answer["loss_fn_output_type"]
    for name, value in answer.get("metrics", {}).items():
        message.metrics[name] = value
    record = message.loss_fn_outputs.add()
    record.num_datums = len(rows)
    for name in rows[0] if rows else ():
        arrays = [np.asarray(row[name]["data"], np.float32) for row in rows]
        field = record.fields[name]
        field.dtype = wire.DTYPE_FLOAT32
        field.offsets = np.cumsum([0, *(each.nbytes for each in arrays)]).astype(np.int64).tobytes()
        field.data = np.concatenate(arrays).tobytes()
    return message


def _samples(answer: Mapping[str, Any]) -> Any:
    message = wire.SampleResponse()
    for each in answer["sequences"]:
        sequence = message.sequences.add()
        sequence.stop_reason = STOPS[each["stop_reason"]]
        sequence.tokens = np.asarray(each["tokens"], np.int32).tobytes()
        if each.get("logprobs") is not None:
            sequence.logprobs = np.asarray(each["logprobs"], np.float32).tobytes()
    if answer.get("prompt_logprobs"):
        known = [np.nan if each is None else each for each in answer["prompt_logprobs"]]
        message.prompt_logprobs = np.asarray(known, np.float32).tobytes()
    return message


class Front(ThreadingHTTPServer):
    """`num_passes` and `num_answers` count what was spoken in protobuf."""

    daemon_threads = True

    def __init__(self, behind: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind, self.num_passes, self.num_answers = urlsplit(behind).netloc, 0, 0

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that waited too long hangs up and asks again."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def protobuf_front(behind: str) -> Iterator[Front]:
    with Front(behind) as front:
        threading.Thread(target=front.serve_forever, daemon=True).start()
        yield front
        front.shutdown()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Front

    def do_GET(self) -> None:
        self._pass_on(self.path, None)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path
        if path.endswith("/client/config"):
            headers = {"Content-Type": "application/json"}
            self._answer(HTTPStatus.OK, headers, json.dumps(ASKS_FOR_PROTOBUF).encode())
            return
        if self.headers.get("Content-Type") == PROTOBUF:
            is_forward, request = json_of_update(body)
            path, body = path if not is_forward else "/api/v1/forward", json.dumps(request).encode()
            self.server.num_passes += 1
        self._pass_on(path, body)

    def _pass_on(self, path: str, body: bytes | None) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        headers = {name: value for name, value in headers.items() if name not in NOT_PASSED_ON}
        if body is not None:
            headers |= {"content-type": "application/json", "accept": "*/*"}
        connection = HTTPConnection(self.server.behind)
        connection.request(self.command, path, body, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        headers = {name: value for name, value in response.getheaders() if name.lower() not in NOT_PASSED_ON}
        if response.status == HTTPStatus.OK and PROTOBUF in ",".join(self.headers.get_all("Accept", ())):
            message = protobuf_of_answer(json.loads(content))
            if message is not None:
                headers, content = {"Content-Type": PROTOBUF}, message
                self.server.num_answers += 1
        self._answer(response.status, headers, content)

    def _answer(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass
