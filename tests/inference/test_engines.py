"""A client by the name of its engine: what is made, and what is refused before anything is asked."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rllm.errors import ConfigError, ModelDirectoryError
from rllm.inference.engines import OPENAI_URL, make_client, text_tokenizer
from rllm.inference.local.client import LocalClient
from rllm.inference.openai import OpenAIClient
from rllm.inference.scripted import CodepointTokenizer
from rllm.inference.vllm import VLLMClient
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.types.messages import SamplingParams


@pytest.fixture
async def made() -> AsyncIterator[list[Any]]:
    """Clients to be closed."""
    clients: list[Any] = []
    yield clients
    for client in clients:
        await client.close()


async def test_openai_takes_its_address_and_key_from_the_environment_where_none_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    client = make_client("openai")
    assert isinstance(client, OpenAIClient)
    assert client.base_url == OPENAI_URL
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1/")
    assert make_client("openai").base_url == "http://127.0.0.1:1/v1"  # type: ignore[attr-defined]
    given = make_client("openai", {"base_url": "http://127.0.0.1:2/v1", "model": "m", "timeout_s": 3.0})
    assert (given.base_url, given.model) == ("http://127.0.0.1:2/v1", "m")  # type: ignore[attr-defined]


async def test_vllm_is_asked_only_with_the_first_call(model_dir: Path) -> None:
    client = make_client("vllm", {"base_url": "http://127.0.0.1:1/v1", "model": "m"}, tokenizer=model_dir)
    assert isinstance(client, VLLMClient)
    assert client.session(("t", 0)).prompt_tokens([{"role": "user", "content": "hi"}]) > 0
    await client.close()


async def test_local_is_a_model_directory(model_dir: Path, made: list[Any]) -> None:
    client = make_client("local", {"model": str(model_dir), "num_slots": 2, "max_context": 64})
    made.append(client)
    assert isinstance(client, LocalClient)
    assert client.max_context == 64
    output = await client.get_model_response(
        [{"role": "user", "content": "hi"}], SamplingParams(max_tokens=2)
    )
    assert 1 <= len(output.completion_ids) <= 2


def test_a_tokenizer_comes_in_any_form_that_users_have_it_in(model_dir: Path) -> None:
    of_transformers = AutoTokenizer.from_pretrained(str(model_dir))
    ours = CodepointTokenizer()
    assert text_tokenizer(ours) is ours
    expected = HuggingFaceTokenizer(model_dir).encode("hello there")
    for given in (model_dir, str(model_dir), of_transformers, HuggingFaceTokenizer(model_dir)):
        read = text_tokenizer(given)
        assert read.encode("hello there") == expected
        assert "hi" in read.apply_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)


def test_what_cannot_be_made_is_refused_with_the_mend(subtests: pytest.Subtests) -> None:
    for engine, args, why in [
        ("sglang", {}, r"`engine_name`.*'sglang'.*openai, vllm, local"),
        ("verl", {}, "`engine_name` is 'verl'"),
        ("openai", {"base_ulr": "x"}, "`base_ulr`.*did you mean `base_url`"),
        ("openai", {"zzz": 1}, "`zzz`.*it has base_url"),
        ("openai", {"base_url": "localhost"}, "`base_url` is 'localhost'"),
        ("vllm", {}, "`tokenizer` is missing"),
        ("local", {}, "`model` is None"),
    ]:
        with subtests.test(engine=engine, args=args, why=why), pytest.raises(ConfigError, match=why):
            make_client(engine, args)


def test_what_is_no_tokenizer_and_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`tokenizer` is 5"):
        make_client("openai", {"base_url": "http://a/v1"}, tokenizer=5)
    with pytest.raises(ConfigError, match="one of transformers"):
        make_client("vllm", tokenizer=CodepointTokenizer())
    with pytest.raises(ConfigError, match="has its own"):
        make_client("local", {"model": str(tmp_path)}, tokenizer=CodepointTokenizer())
    with pytest.raises(ModelDirectoryError, match=r"config\.json"):
        make_client("local", {"model": str(tmp_path)})
