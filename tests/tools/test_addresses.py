import socket
from typing import Any

import pytest

from rllm.tools import ToolError
from rllm.tools.addresses import require_public

NOT_PUBLIC = """
127.0.0.1 127.1 127.255.255.254 2130706433 0x7f000001 0x7f.1 0177.0.0.1 017700000001 0 0.0.0.0
10.0.0.1 172.16.0.1 172.31.255.255 192.168.1.1 100.64.0.1 169.254.169.254 169.254.170.2 192.0.0.192
100.100.100.200 224.0.0.1 255.255.255.255 240.0.0.1 198.18.0.1
[::1] [::] [::ffff:127.0.0.1] [::ffff:a9fe:a9fe] [fe80::1] [fe80::1%25eth0] [fc00::1] [fd00:ec2::254]
[64:ff9b::7f00:1] [2002:7f00:1::] [ff02::1]
localhost LOCALHOST localhost. a.localhost printer printer.local db.internal metadata.google.internal
router.lan nas.home.arpa 127。0。0。1 １２７.0.0.1 ①②⑦.0.0.1 %31%32%37.0.0.1 127.0.0.1. 127.0.0.1:80
"""
PUBLIC = ("8.8.8.8", "[2606:4700::1]", "example.com", "example.com:8080", "bücher.example", "0.example")


def test_addresses_off_the_public_net_are_refused_however_they_are_written() -> None:
    passed: list[str] = []
    for host in NOT_PUBLIC.split():
        for url in (f"http://{host}/", f"https://{host}/latest/meta-data?a=b#c"):
            try:
                require_public(url)
                passed.append(url)
            except ToolError:
                pass
    assert not passed


def test_public_addresses_pass() -> None:
    for host in PUBLIC:
        require_public(f"https://{host}/a?u=http://127.0.0.1/")


def test_a_name_is_what_it_resolves_to(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        "inside.example": ["10.0.0.7"],
        "both.example": ["8.8.8.8", "169.254.169.254"],
        "v6.example": ["fd00::1"],
        "out.example": ["8.8.8.8"],
    }

    def resolve(host: str, *_: Any, **__: Any) -> list[Any]:
        if host not in known:
            raise socket.gaierror("unknown")
        return [(0, 0, 0, "", (address, 0)) for address in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for host in ("inside.example", "both.example", "v6.example"):
        with pytest.raises(ToolError, match="public"):
            require_public(f"http://{host}/")
    for host in ("out.example", "unknown.example"):
        require_public(f"http://{host}/")


def test_an_address_that_hides_its_host_is_refused() -> None:
    for url in ("http://a@127.0.0.1/", "http://example.com@10.0.0.1/", "http:///etc", "http://a\\@10.0.0.1/"):
        with pytest.raises(ToolError, match="url"):
            require_public(url)
    with pytest.raises(ToolError, match="no address"):
        require_public("http://[::1/")
