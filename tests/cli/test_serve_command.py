"""`rllm serve` as people start and stop it: real processes, real signals, real SDKs."""

import asyncio
import http.client
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from click.testing import Result

from rllm.gateway.ledger import Ledger
from rllm.models.builtin import create_model
from rllm.models.tokenizer import HuggingFaceTokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))
sys.path.insert(0, str(Path(__file__).parents[1] / "inference"))
import fake_upstream as fake
from policy_server import PolicyServer

SOURCES = Path(__file__).resolve().parents[2] / "src"
BY_IDS = ("gateway", "--upstream", "http://x/v1", "--tokenizer", "TINY", "--port", "0")
Rllm = Callable[..., Result]
Start = Callable[..., "subprocess.Popen[str]"]
HI: Any = [{"role": "user", "content": "hi"}]


def listening(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return json.loads(line)


def stopped(process: "subprocess.Popen[str]", by: signal.Signals) -> tuple[int, str, str]:
    process.send_signal(by)
    stdout, stderr = process.communicate(timeout=30)
    return process.returncode, stdout, stderr


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    create_model(path, "tiny", 0)
    return path


@pytest.fixture(scope="module")
def model(
    tiny: Path, start_rllm: Start, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """What a served model said when it listened."""
    folder = tmp_path_factory.mktemp("served")
    words = ("--port", "0", "--threads", "1", "--name", "my", "--num-drafts", "2", "--json")
    process = start_rllm("serve", "model", tiny, *words, cwd=folder)
    yield listening(process)
    assert stopped(process, signal.SIGTERM) == (0, "", "")


def test_a_served_model_answers_and_remembers(model: dict[str, Any]) -> None:
    with openai.OpenAI(base_url=model["base_url"], api_key="EMPTY") as client:
        assert [each.id for each in client.models.list()] == ["my"]
        reply = client.chat.completions.create(model="any name", messages=HI, max_tokens=3)
    with anthropic.Anthropic(base_url=model["url"] + "/sessions/other", api_key=model["token"]) as client:
        client.messages.create(model="my", max_tokens=3, messages=HI)
    request = urllib.request.Request(
        model["url"] + "/sessions/default/traces", headers={"Authorization": f"Bearer {model['token']}"}
    )
    with urllib.request.urlopen(request) as told:
        (trace,) = json.load(told)
    assert trace["id"] == reply.id
    assert len(trace["completion_ids"]) == len(trace["logprobs"]) == 3
    with Ledger.open(Path(model["ledger"]), read_only=True) as ledger:
        assert {each["id"] for each in ledger.sessions()} == {"default", "other"}


def test_a_gateway_in_front_of_servers_captures_what_passes(
    model: dict[str, Any], start_rllm: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", model["token"])
    process = start_rllm(
        *("serve", "gateway", "--upstream", model["url"] + "/v1", "--api-key-env", "MY_KEY"),
        *("--port", "0", "--ledger", "calls", "--token", "chosen", "--json"),
        cwd=tmp_path,
    )
    said = listening(process)
    assert said["token"] == "chosen"
    assert said["pid"] == process.pid
    assert said["ledger"] == str(tmp_path / "calls")
    with openai.OpenAI(base_url=said["url"] + "/sessions/mine/v1", api_key="chosen") as client:
        reply = client.chat.completions.create(model="tiny", messages=HI, max_tokens=3)
        stream = client.chat.completions.create(model="tiny", messages=HI, max_tokens=3, stream=True)
        streamed = {each.id for each in stream}
    returncode, stdout, stderr = stopped(process, signal.SIGINT)
    assert returncode == 130
    assert stdout == ""
    assert json.loads(stderr)["error"]["type"] == "Interrupted"
    with Ledger.open(tmp_path / "calls") as ledger:
        first, second = ledger.traces("mine")
    assert first.id == reply.id
    assert {second.id} == streamed
    assert first.upstream.startswith(model["url"])


def test_a_fleet_answers_under_one_address_also_when_a_server_ends(
    tiny: Path, start_rllm: Start, tmp_path: Path
) -> None:
    with PolicyServer(tiny) as first, PolicyServer(tiny) as second:
        servers = ("--server", first.url, "--server", second.url)
        process = start_rllm(
            *(
                "serve",
                "fleet",
                tiny,
                *servers,
                "--processed-logprobs",
                "--port",
                "0",
                "--name",
                "my",
                "--json",
            ),
            cwd=tmp_path,
        )
        said = listening(process)
        long: Any = [{"role": "user", "content": "which way? " * 30}]
        with openai.OpenAI(base_url=said["url"] + "/sessions/mine/v1", api_key=said["token"]) as client:
            assert [each.id for each in client.models.list()] == ["my"]
            for number in range(3):  # the longest beginning leads back to where it was read
                reply = client.chat.completions.create(model="my", messages=long, max_tokens=8)
                long += [reply.choices[0].message, {"role": "user", "content": f"and {number}?"}]
            # Each has scored a text at the start.
            assert sorted((first.num_answered, second.num_answered)) == [1, 4]
            (first if first.num_answered > 1 else second).stop()
            client.chat.completions.create(model="my", messages=long, max_tokens=8)
            assert {first.num_answered, second.num_answered} == {2, 4}
        assert stopped(process, signal.SIGTERM)[0] == 0
    with Ledger.open(tmp_path / "ledger") as ledger:
        traces = ledger.traces("mine")
    assert len(traces) == 4
    for before, after in itertools.pairwise(traces):
        ids = before.prompt_ids + before.completion_ids
        assert after.prompt_ids[: len(ids)] == ids


def test_servers_join_and_leave_a_fleet_that_is_served(tiny: Path, start_rllm: Start, tmp_path: Path) -> None:
    """One that is removed in mid-answer finishes it; another model, or who cannot be reached, stays out."""
    create_model(tmp_path / "other", "tiny", 7)
    with (
        PolicyServer(tiny) as first,
        PolicyServer(tiny) as second,
        PolicyServer(tmp_path / "other") as other,
        PolicyServer(tiny, max_context=64) as short,
    ):
        words = (
            "serve",
            "fleet",
            tiny,
            "--server",
            first.url,
            "--processed-logprobs",
            "--port",
            "0",
            "--json",
        )
        process = start_rllm(*words, cwd=tmp_path)
        said = listening(process)

        def asked(method: str, path: str, **body: Any) -> tuple[int, Any]:
            request = urllib.request.Request(
                said["url"] + path,
                method=method,
                data=json.dumps(body).encode() if body else None,
                headers={"Authorization": f"Bearer {said['token']}"},
            )
            try:
                with urllib.request.urlopen(request, timeout=60) as reply:
                    return reply.status, json.load(reply)
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, json.load(error)

        for url, message in (
            (other.url, "they serve different weights"),
            (short.url, "has a context of 64 tokens"),
            ("http://127.0.0.1:9/v1", "cannot be reached"),
            (first.url, "is there already"),
            ("not a url", "is no base URL"),
        ):
            status, reply = asked("POST", "/admin/workers", url=url)
            assert (status, message in reply["error"]["message"]) == (400, True), reply
        assert asked("POST", "/admin/workers", url=second.url, weight=2.0)[0] == 400
        ((only),) = asked("GET", "/admin/workers")[1]["workers"]
        assert only["url"] == first.url
        assert asked("DELETE", f"/admin/workers/{only['worker_id']}")[0] == 409

        status, joined = asked("POST", "/admin/workers", url=second.url)
        assert (status, joined["url"], joined["healthy"]) == (200, second.url, True)
        with openai.OpenAI(base_url=said["url"] + "/sessions/mine/v1", api_key=said["token"]) as client:
            for number in range(4):
                asking: Any = [{"role": "user", "content": f"{number} " * 30}]
                client.chat.completions.create(model="m", messages=asking, max_tokens=8)
            assert min(first.num_answered, second.num_answered) > 1, "each has scored a text once"
            with ThreadPoolExecutor(4) as threads:
                answers = [
                    threads.submit(
                        client.chat.completions.create,
                        model="m",
                        messages=[{"role": "user", "content": f"{number}!"}],
                        max_tokens=200,
                    )
                    for number in range(4)
                ]
                assert asked("DELETE", f"/admin/workers/{only['worker_id']}") == (
                    200,
                    {"worker_id": only["worker_id"], "removed": True},
                )
                num_answered = first.num_answered
                assert [each.result().choices[0].finish_reason for each in answers]
            client.chat.completions.create(model="m", messages=asking, max_tokens=8)
            assert first.num_answered == num_answered
        assert [each["url"] for each in asked("GET", "/admin/workers")[1]["workers"]] == [second.url]
        first.stop()
        assert asked("POST", "/admin/reload")[0] == 200
        assert asked("POST", "/admin/weight_version", weight_version=3)[0] == 409
        assert stopped(process, signal.SIGTERM)[0] == 0


def test_servers_of_two_models_are_no_fleet(rllm: Rllm, tiny: Path, tmp_path: Path) -> None:
    create_model(tmp_path / "other", "tiny", 7)
    with PolicyServer(tiny) as first, PolicyServer(tmp_path / "other") as second:
        servers = ("--server", first.url, "--server", second.url)
        result = rllm(
            "serve", "fleet", str(tiny), *servers, "--port", "0", "--ledger", str(tmp_path / "calls")
        )
    assert result.exit_code == 1
    assert "different weights" in re.sub(r"\s+", " ", result.stderr)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("TINY",), "--replicas 0"),
        (("TINY", "--server", "http://x/v1", "--replicas", "2"), "1 --server and --replicas 2"),
        (("TINY", "--replicas", "2"), "--server-python"),
        (("TINY", "--replicas", "1", "--server-python", sys.executable), "has no vLLM"),
        (("nowhere", "--server", "http://127.0.0.1:9/v1"), "no model `nowhere`"),
        (("TINY", "--server", "http://127.0.0.1:9/v1"), "cannot be reached"),
    ],
)
def test_a_fleet_that_cannot_be_served_is_refused(
    rllm: Rllm, tiny: Path, words: tuple[str, ...], message: str
) -> None:
    given = [str(tiny) if word == "TINY" else word for word in words]
    result = rllm("serve", "fleet", *given, "--port", "0")
    assert result.exit_code != 0
    assert message in re.sub(r"\s+", " ", result.output + result.stderr)


def test_a_fleet_of_a_model_that_reads_no_images_needs_no_image_processor(
    rllm: Rllm, tiny: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny, directory)
    config = json.loads((directory / "config.json").read_text()) | {"vision_config": None}
    (directory / "config.json").write_text(json.dumps(config))
    given = ("--server", "http://127.0.0.1:9/v1", "--ledger", str(tmp_path / "calls"), "--port", "0")
    result = rllm("serve", "fleet", str(directory), *given)
    assert result.exit_code != 0
    assert "cannot be reached" in re.sub(r"\s+", " ", result.stderr)


async def test_with_a_tokenizer_the_next_prompt_begins_with_the_ids_seen_so_far(
    tiny: Path, start_rllm: Start, tmp_path: Path
) -> None:
    """The ids go out as they were made and sampled, and nothing is rendered behind the gateway."""
    async with fake.FakeUpstream() as server:
        server.default = _sampled_by(HuggingFaceTokenizer(tiny))
        process = await asyncio.to_thread(
            start_rllm,
            *("serve", "gateway", "--upstream", server.url, "--tokenizer", tiny),
            *("--port", "0", "--ledger", "calls", "--no-auth", "--json"),
            cwd=tmp_path,
        )
        said = await asyncio.to_thread(listening, process)
        async with openai.AsyncOpenAI(base_url=said["url"] + "/sessions/mine/v1", api_key="EMPTY") as client:
            messages: list[Any] = [*HI]
            for _ in range(2):
                reply = await client.chat.completions.create(model="m", messages=messages)
                answer = reply.choices[0].message
                messages += [{"role": "assistant", "content": answer.content}, *HI]
        assert (await asyncio.to_thread(stopped, process, signal.SIGTERM))[0] == 0
    with Ledger.open(tmp_path / "calls") as ledger:
        first, second = ledger.traces("mine")
    assert first.response["content"] == "Right"
    seen = first.prompt_ids + first.completion_ids
    assert second.prompt_ids[: len(seen)] == seen
    assert (second.conversation, second.segment) == (first.conversation, first.segment)
    assert [each.path for each in server.asked] == ["/v1/completions"] * 2
    assert [each["prompt"] for each in server.bodies] == [first.prompt_ids, second.prompt_ids]
    assert [each["seed"] % 2**63 for each in server.bodies] == [
        each.sampling["seed"] % 2**63 for each in (first, second)
    ]


@pytest.mark.parametrize("by_ids", [False, True])
async def test_no_seeds_are_sent_to_a_server_that_ends_with_them(
    tiny: Path, start_rllm: Start, tmp_path: Path, by_ids: bool
) -> None:
    async with fake.FakeUpstream() as server:
        server.default = _sampled_by(HuggingFaceTokenizer(tiny)) if by_ids else fake.speak
        process = await asyncio.to_thread(
            start_rllm,
            *("serve", "gateway", "--upstream", server.url, "--no-seeds"),
            *(("--tokenizer", tiny) if by_ids else ()),
            *("--port", "0", "--ledger", "calls", "--no-auth", "--json"),
            cwd=tmp_path,
        )
        said = await asyncio.to_thread(listening, process)
        async with openai.AsyncOpenAI(base_url=said["base_url"], api_key="EMPTY") as client:
            await client.chat.completions.create(model="m", messages=HI)
            with pytest.raises(openai.BadRequestError, match="without --no-seeds"):
                await client.chat.completions.create(model="m", messages=HI, seed=3)
        assert (await asyncio.to_thread(stopped, process, signal.SIGTERM))[0] == 0
    assert ["seed" in each for each in server.bodies] == [False]


def _sampled_by(tokenizer: HuggingFaceTokenizer) -> Any:
    """As vLLM answers: always the same word, in the model's own ids."""
    ids = [*tokenizer.encode("Right"), tokenizer.end_token_id]

    async def behave(asked: Any) -> Any:
        choice = {"index": 0, "text": "Right", "finish_reason": "stop", "token_ids": ids}
        choice["logprobs"] = {"token_logprobs": [-0.5] * len(ids)}
        return await fake.body(json.dumps({"id": "cmpl-1", "choices": [choice]}).encode())(asked)

    return behave


def test_with_a_tokenizer_the_server_must_be_there(tiny: Path, rllm: Rllm) -> None:
    url = f"http://127.0.0.1:{fake.closed_port()}/v1"
    result = rllm("serve", "gateway", "--upstream", url, "--tokenizer", tiny, "--port", "0")
    assert result.exit_code == 1
    assert "cannot be reached" in result.stderr


@pytest.mark.parametrize(
    ("words", "module", "extra"),
    [
        (("gateway", "--upstream", "http://x/v1"), "aiohttp", "gateway"),
        (("gateway", "--upstream", "http://x/v1"), "orjson", "gateway"),
        (("gateway", "--upstream", "http://x/v1", "--tokenizer", "TINY"), "aiohttp", "gateway"),
        (("model", "TINY"), "aiohttp", "gateway"),
        (("model", "TINY"), "torch", "train"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_the_extra_that_brings_it(
    words: tuple[str, ...], module: str, extra: str, tiny: Path, tmp_path: Path
) -> None:
    hidden = f"import sys; sys.modules[{module!r}] = None; from rllm.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", hidden, "serve", *(str(tiny) if word == "TINY" else word for word in words)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert f"`{module}` is not installed; run: pip install 'rllm[{extra}]'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_people_are_told_what_to_export(start_rllm: Start, tmp_path: Path) -> None:
    words = ("serve", "gateway", "--upstream", "http://x/v1", "--port", "0", "--no-auth")
    process = start_rllm(*words, cwd=tmp_path)
    assert process.stdout is not None
    lines: list[str] = []
    while not any("Ctrl-C" in line for line in lines):
        lines.append(process.stdout.readline())
        assert lines[-1], process.communicate()[1]
    told = "".join(lines)
    assert stopped(process, signal.SIGTERM)[0] == 0
    for word in ("export OPENAI_BASE_URL=http://127.0.0.1:", "export ANTHROPIC_BASE_URL=http"):
        assert word in told
    assert "export OPENAI_API_KEY=none" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model", "absent"), "no model `absent`"),
        (("model", "TINY", "--host", "0.0.0.0", "--no-auth"), "set a token"),
        (("model", "TINY", "--host", "no.such.host.invalid"), "no address of this machine"),
        (("model", "TINY", "--port", "PORT"), "cannot be listened on"),
        (("model", "TINY", "--port", "0", "--device", "abacus"), "abacus"),
        (("model", "TINY", "--token", "x", "--no-auth"), "exclude each other"),
        (("model", "TINY", "--token", ""), "--token is empty"),
        (("model", "TINY", "--port", "0", "--token", "a b"), "safe in a URL"),
        (("model", "TINY", "--port", "70000"), "--port"),
        (("gateway",), "--upstream"),
        (("gateway", "--upstream", "ftp://x", "--port", "0"), "ftp://x"),
        (("gateway", "--upstream", "http://x/v1", "--port", "PORT"), "cannot be listened on"),
        (("gateway", "--upstream", "http://x/v1", "--api-key-env", "NOT_THERE"), "NOT_THERE"),
        (("gateway", "--upstream", "http://x/v1", "--dialect", "morse"), "morse"),
        (("gateway", "--upstream", "http://x/v1", "--model", "m"), "--model needs --tokenizer"),
        ((*BY_IDS, "--upstream", "http://y/v1"), "with 2 upstreams"),
        ((*BY_IDS, "--dialect", "messages"), "Leave --dialect out"),
        (("gateway", "--upstream", "http://x/v1", "--tokenizer", "absent", "--port", "0"), "no directory"),
        (("modle", "x"), "did you mean `rllm serve model`?"),
    ],
)
def test_bad_words_are_refused_with_nothing_written(
    words: tuple[str, ...], message: str, rllm: Rllm, tiny: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        known = {"TINY": str(tiny), "PORT": str(taken.getsockname()[1])}
        result = rllm("serve", *(known.get(word, word) for word in words))
    assert result.exit_code == 2, result.stderr
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_ledger_that_another_gateway_writes_is_refused(
    model: dict[str, Any], tiny: Path, rllm: Rllm
) -> None:
    result = rllm("serve", "model", tiny, "--port", "0", "--ledger", model["ledger"], "--json")
    assert result.exit_code == 2
    assert f"process {model['pid']}" in json.loads(result.stderr)["error"]["message"]


def test_no_answered_call_is_lost_to_a_kill(
    model: dict[str, Any], start_rllm: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", model["token"])
    answered: list[str] = []
    for moment in range(2):
        process = start_rllm(
            *("serve", "gateway", "--upstream", model["url"] + "/v1", "--api-key-env", "MY_KEY"),
            *("--port", "0", "--ledger", "calls", "--no-auth", "--json"),
            cwd=tmp_path,
        )
        url = listening(process)["url"]
        threads = [
            threading.Thread(target=_ask_until_it_dies, args=(f"{url}/sessions/{number}/v1", answered))
            for number in range(4)
        ]
        for thread in threads:
            thread.start()
        while len(answered) < 12 * (moment + 1):
            threading.Event().wait(0.01)
        threading.Event().wait(random.Random(moment).random() / 10)
        os.kill(process.pid, signal.SIGKILL)
        for thread in threads:
            thread.join()
        process.communicate()
    with Ledger.open(tmp_path / "calls") as ledger:
        kept = [each.id for number in range(4) for each in ledger.traces(str(number))]
    assert len(kept) == len(set(kept))
    assert set(answered) <= set(kept)


def _ask_until_it_dies(url: str, answered: list[str]) -> None:
    """Counts an answer when it is whole, as a client would."""
    for number in itertools.count():
        body = {"model": "tiny", "messages": HI, "max_tokens": 2, "stream": bool(number % 2)}
        try:
            with urllib.request.urlopen(f"{url}/chat/completions", json.dumps(body).encode()) as reply:
                told = reply.read().decode()
        except (OSError, http.client.HTTPException):
            return
        if number % 2 == 0 or "data: [DONE]" in told:
            answered.append(re.findall(r'"id":"(chatcmpl-[^"]+)"', told)[0])
