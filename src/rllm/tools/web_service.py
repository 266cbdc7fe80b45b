"""Asking a web service in JSON, with patience that ends.

    body ──POST──► service ──► an object
                     ├── 429, 5xx, no answer, no JSON: again, after a wait, a few times ──► WebServiceError
                     ├── 401, 403: the key is wrong ──► ConfigError
                     └── other 4xx: the question is wrong ──► ToolError, for the model

A service that is down is nobody's wrong answer, so WebServiceError flies and fails the episode.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rllm.errors import ConfigError, RllmError
from rllm.errors.redaction import (
    bytes_without_keys,
    hide_key,
    may_hold_key,
    values_without_keys,
    without_keys,
)
from rllm.tools.base import ToolError

MAX_ANSWER_BYTES = 8 * 1024 * 1024
MAX_WAIT_S = 30.0
"""The wait that a service may ask of us. A longer one is taken for an outage."""
_RETRIED = (408, 429, 500, 502, 503, 504)
_MAX_SAID_CHARS = 300


class WebServiceError(RllmError):
    """Raised when a web service does not answer, or not in its own form. Mend: try again later."""


@dataclass(kw_only=True, slots=True, frozen=True)
class WebPatience:
    """The time to wait for a service, and the number of tries."""

    timeout_s: float = 20.0
    """For one answer, from the request to its last byte."""
    attempts: int = 3
    wait_s: float = 0.5
    """Before the second attempt; twice as long before each that follows."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < float("inf") or self.attempts < 1 or not 0 <= self.wait_s <= MAX_WAIT_S:
            raise ConfigError(
                f"{self} cannot be kept: `timeout_s` is above 0, `attempts` at least 1 and `wait_s` "
                f"from 0 to {MAX_WAIT_S:g} seconds."
            )


def key_from(variable: str, service: str) -> str:
    """The key of a service, which stands in the environment and nowhere else."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"{service} needs a key; set the environment variable {variable}.")
    hide_key(key)
    return key


class _Again(Exception):
    """Raised for what may go better the next time."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A key is for one host."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


class WebService:
    """One service. Safe from several threads."""

    def __init__(self, name: str, base_url: str, headers: Mapping[str, str], patience: WebPatience) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"`base_url` of {name} is {base_url!r}; it begins with http:// or https://.")
        self.name = name
        self.patience = patience
        self._base_url = base_url.rstrip("/")
        self._headers = {"Content-Type": "application/json", "Accept": "application/json", **headers}
        self._opener = urllib.request.build_opener(_NoRedirect())

    def ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The service's answer, an object. Blocks."""
        wait_s = self.patience.wait_s
        for attempt in range(1, self.patience.attempts + 1):
            try:
                return self._once(path, body)
            except _Again as error:
                wanted_s = wait_s if error.wait_s is None else error.wait_s
                if attempt == self.patience.attempts or wanted_s > MAX_WAIT_S:
                    raise WebServiceError(f"{self.name} failed {attempt} time(s): {error}") from error
            time.sleep(wanted_s)
            wait_s = min(2 * wait_s, MAX_WAIT_S)
        raise AssertionError("the last attempt returns or raises")

    def _once(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self._base_url}{path}", data=json.dumps(body).encode(), headers=self._headers, method="POST"
        )
        try:
            with self._opener.open(request, timeout=self.patience.timeout_s) as response:
                data = self._read(response)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error) from None
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            raise _Again(f"no answer ({getattr(error, 'reason', None) or error!r})") from error
        return self._object(data)

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        """All of it, within the time for one answer, however slowly it trickles."""
        ends_s = time.monotonic() + self.patience.timeout_s
        parts: list[bytes] = []
        size = 0
        while part := response.read1(65_536):
            parts.append(part)
            size += len(part)
            if size > MAX_ANSWER_BYTES:
                raise ToolError(f"The answer has more than {MAX_ANSWER_BYTES // 1024**2} MiB; ask for less.")
            if time.monotonic() > ends_s:
                raise TimeoutError(f"not whole within {self.patience.timeout_s:g} s")
        return b"".join(parts)

    def _object(self, data: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _Again(f"the answer is no JSON: {bytes_without_keys(data)[:100]!r}") from error
        if not isinstance(answer, dict):
            raise _Again(f"the answer is no object: {bytes_without_keys(data)[:100]!r}")
        return values_without_keys(answer) if may_hold_key(data) else answer

    def _refusal(self, error: urllib.error.HTTPError) -> Exception:
        try:
            detail = without_keys(error.read(4096).decode("utf-8", "replace"))[:_MAX_SAID_CHARS]
        except (OSError, http.client.HTTPException):
            detail = ""
        what = f"HTTP {error.code} {detail}".strip()
        if error.code in _RETRIED:
            return _Again(what, _retry_after_s(error.headers.get("Retry-After")))
        if error.code in (401, 403):
            return ConfigError(f"{self.name} refuses the key: {what}")
        if error.code in (400, 404, 413, 422):
            return ToolError(f"{self.name} refuses the question: {what}", status=error.code)
        return WebServiceError(f"{self.name} answers with {what}")


def _retry_after_s(value: str | None) -> float | None:
    try:
        return max(0.0, float(value)) if value is not None else None
    except ValueError:
        return None  # a date: the usual wait will do
