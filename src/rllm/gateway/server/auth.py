"""The rights of tokens: one for the whole run, and one for each session that opens nothing else.

    Authorization: Bearer T | x-api-key: T | /k/T/…  ──► TokenScope.RUN: everything
                                                     ──► a session's: its own calls and traces
A session's token is derived from the run's, so nothing has to be remembered: it says which session it is
for, and an HMAC under the run's token proves that it was given out here.
"""

import hashlib
import hmac
import ipaddress
import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass

from rllm.errors import ConfigError, RequestRefused

_NAME_BYTES = _PROOF_BYTES = 16
# Name and proof are 32 bytes, which base64 writes in 43 characters and a `=` that is left out.
_SESSION_TOKEN = re.compile(r"s-[A-Za-z0-9_-]{43}")
_RUN_TOKEN = re.compile(r"[A-Za-z0-9._~+-]+")


@dataclass(slots=True, frozen=True)
class TokenScope:
    """The rights of a valid token."""

    session_name: bytes | None = None
    """Digest of the one session; None for all of them, and for what is not a session's."""

    def require_session(self, session: str) -> None:
        if self.session_name is not None and not hmac.compare_digest(self.session_name, _digest(session)):
            raise RequestRefused(
                f"This token opens another session than {session[:80]!r}; use that session's own token, "
                "or the run's.",
                status=403,
                kind="permission_error",
                code="foreign_session",
            )

    def require_run(self, what: str) -> None:
        if self.session_name is not None:
            raise RequestRefused(
                f"A session's token does not open {what}; use the run's token.",
                status=403,
                kind="permission_error",
                code="foreign_session",
            )


EVERYTHING = TokenScope()


class Tokens:
    """Checks and makes tokens. `run` is None where everybody who can connect may do everything."""

    def __init__(self, run: str | None) -> None:
        if run is not None and not _RUN_TOKEN.fullmatch(run):
            raise ConfigError(
                f"The token has {len(run)} characters, not all of them letters, digits or one of ._~+-; "
                "choose one that is safe in a URL, or none to have one made."
            )
        self.run = run
        self._key = b"" if run is None else hashlib.sha256(run.encode()).digest()

    @staticmethod
    def new() -> str:
        return secrets.token_urlsafe(24)

    def of_session(self, session: str) -> str | None:
        if self.run is None:
            return None
        name = _digest(session)
        return "s-" + urlsafe_b64encode(name + self._proof(name)).decode().rstrip("=")

    def scope(self, path_token: str, headers: Mapping[str, str]) -> TokenScope:
        """The rights that the request's tokens give; the first valid one counts: many clients must send some
        API key.

        Raises RequestRefused (401) when there is none.
        """
        if self.run is None:
            return EVERYTHING
        candidates = [path_token, headers.get("x-api-key", "")]
        scheme, _, credentials = headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            candidates.append(credentials.strip())
        for token in candidates:
            scope = self._scope_of(token) if token else None
            if scope is not None:
                return scope
        raise RequestRefused(
            f"{'The token is wrong' if any(candidates) else 'There is no token'}; send the one that the "
            "gateway "
            "printed as `Authorization: Bearer TOKEN` or `x-api-key: TOKEN`, or put /k/TOKEN in front of "
            "the path.",
            status=401,
            kind="authentication_error",
            code="invalid_api_key",
        )

    def _scope_of(self, token: str) -> TokenScope | None:
        assert self.run is not None, "without a token there is nothing to check"
        # In a time that does not tell how many characters are right.
        if hmac.compare_digest(token.encode("utf-8", "surrogatepass"), self.run.encode()):
            return EVERYTHING
        if not _SESSION_TOKEN.fullmatch(token):
            return None
        both = urlsafe_b64decode(f"{token[2:]}=")
        name, proof = both[:_NAME_BYTES], both[_NAME_BYTES:]
        return TokenScope(name) if hmac.compare_digest(proof, self._proof(name)) else None

    def _proof(self, name: bytes) -> bytes:
        return hmac.digest(self._key, b"session:" + name, "sha256")[:_PROOF_BYTES]


def require_guarded(host: str, token: str | None) -> None:
    """Raises ConfigError for a gateway that other machines could use without a token, or with a bad one."""
    if token:
        Tokens(token)
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"`host` is {host!r}, which other machines can reach, and there is no token; set a token, "
            "or listen on 127.0.0.1."
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _digest(session: str) -> bytes:
    return hashlib.sha256(session.encode("utf-8", "surrogatepass")).digest()[:_NAME_BYTES]
