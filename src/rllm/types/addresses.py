"""Addresses of the public net, and those that are none, however they are written.

url ──► host ──┬─ a number, in any notation of `inet_aton` or IPv6 ──► public, or refused
               ├─ a name that is local by its ending               ──► refused
               └─ a name ──resolved here──► refused where one of its addresses is not public
"""

import ipaddress
import socket
import unicodedata
from collections.abc import Callable, Sequence
from urllib.parse import unquote, urlsplit

from rllm.errors import ConfigError

_LOCAL_ENDINGS = ("localhost", "local", "internal", "intranet", "lan", "home", "corp", "private", "home.arpa")
_PROTOCOL = ipaddress.IPv4Network("192.0.0.0/24")
"""Oracle's metadata is in it; Python took most of it for public before 3.13."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def require_base_url(what: str, url: str) -> str:
    """Return the base URL of a server, without a slash at its end.

    Raises ConfigError for a text that is no such URL, and for one with a user, a password, a query or a
    fragment: paths are joined to it, and it is written into files. Nothing that may be a key is repeated.
    """
    shown = url.partition("?")[0].partition("#")[0]
    shown = shown if "@" not in shown else f"…@{shown.rpartition('@')[2]}"
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_url, parts = False, urlsplit("")
    if not is_url:
        raise ConfigError(f"{what} is {shown!r}, which is no base URL; write http://127.0.0.1:8000/v1.")
    if parts.username or parts.password:
        raise ConfigError(
            f"{what} {shown} has a name or password in it, which would end in a file in clear text; put the "
            "key into OPENAI_API_KEY."
        )
    if parts.query or parts.fragment:
        raise ConfigError(
            f"{what} {shown} has a query behind it (`?…`), which no path can be joined to; leave it out, and "
            "put a key into OPENAI_API_KEY."
        )
    return url.rstrip("/")


def public_addresses(host: str, resolve: Callable[[str], Sequence[Address]]) -> list[Address]:
    """The addresses of a host, as `host_of` gives it, all of them public; none of a name that is not known
    here. Raises ConfigError for a host that has one that is not public."""
    number = _number(host)
    is_local = number is None and _is_local(host)
    addresses = [] if is_local else [number] if number is not None else list(resolve(host))
    if is_local or not all(map(_is_public, addresses)):
        raise ConfigError(f"`url` leads to {host}, which is not on the public net; give a public address.")
    return addresses


def host_of(url: str) -> str:
    """As a client would read it: without a user, in lower case, full-width digits and dots as plain ones."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"`url` is {url[:80]!r}, which is no address ({error}).") from None
    if not host or "@" in parts.netloc or "\\" in url:
        raise ConfigError(f"`url` is {url[:80]!r}; give an address with a host, and without a user or `\\`.")
    return unicodedata.normalize("NFKC", unquote(host)).replace("。", ".").lower().rstrip(".")


def _number(host: str) -> Address | None:
    """127.0.0.1 is also 127.1, 2130706433, 0x7f000001 and 0177.0.0.1."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except (OSError, UnicodeEncodeError):
        return None


def _is_local(host: str) -> bool:
    return "." not in host or host.endswith(tuple(f".{ending}" for ending in _LOCAL_ENDINGS))


def addresses_of_name(host: str) -> list[Address]:
    """The addresses of a name; none where nobody knows it."""
    try:
        address_infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [ipaddress.ip_address(str(place[0]).partition("%")[0]) for *_, place in address_infos]


def _is_public(address: Address) -> bool:
    """Also of the IPv4 address that an IPv6 one stands for."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return _is_public(inner)
    elif address in _PROTOCOL:
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved
