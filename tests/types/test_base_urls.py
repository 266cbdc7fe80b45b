"""Base URLs of servers are parsed; parts that may hold a key are refused and not repeated."""

import pytest

from rllm.config.distill import DistillConfig
from rllm.errors import ConfigError
from rllm.types.addresses import require_base_url


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/v1", "https://host/a/b", "http://[::1]:80/v1"])
def test_a_base_url_loses_its_last_slash(url: str) -> None:
    assert require_base_url("it", f"{url}/") == require_base_url("it", url) == url


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://h/v1?api_key=S3CRET", r"http://h/v1 has a query"),
        ("http://h/v1#S3CRET", r"http://h/v1 has a query"),
        ("http://user:S3CRET@h/v1", r"…@h/v1 has a name or password"),
        ("http://S3CRET@h:x/v1", "no base URL"),
        ("user:S3CRET@h/v1", "no base URL"),
        ("ftp://h/v1?S3CRET", "no base URL"),
        ("", "no base URL"),
    ],
)
def test_others_are_refused_without_their_secret(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"--base-url.*{message}") as refusal:
        require_base_url("--base-url", url)
    assert "S3CRET" not in str(refusal.value)


def test_a_teacher_with_a_query_is_refused_when_its_configuration_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"`distill\.teacher` http://h/v1 has a query"):
        DistillConfig(teacher="http://h/v1?key=S3CRET").validate()
