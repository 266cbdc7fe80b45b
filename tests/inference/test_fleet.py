"""Who of several replicas is asked, when one is added, removed, or ends."""

import asyncio
import shlex
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rllm.config.lora import LoraConfig
from rllm.errors import CanaryError, ConfigError, InferenceError
from rllm.inference.answer_parts import AnswerParts
from rllm.inference.fleet import AGREEMENT, Fleet, WeightFiles
from rllm.inference.vllm import VLLMClient
from rllm.inference.vllm_process import ServerProcess, ServerSettings
from rllm.models.builtin import create_model
from rllm.models.directory import load_model, save_model
from rllm.models.lora import save_adapter, with_adapter
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.types.messages import ModelOutput, SamplingParams

sys.path.insert(0, str(Path(__file__).parent))
from policy_server import PolicyServer

QUESTION = [{"role": "user", "content": "A 1"}]
SHORT = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for seed in range(2):
        create_model(directory / str(seed), "tiny", seed)
    return directory


@pytest.fixture
def servers(models: Path) -> Iterator[list[PolicyServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(PolicyServer(models / "0")) for _ in range(3)]


def _client(server: PolicyServer, models: Path) -> VLLMClient:
    return VLLMClient(server.url, models / "0", processed_logprobs=True)


@asynccontextmanager
async def _fleet(servers: list[PolicyServer], models: Path, directory: Path) -> AsyncIterator[Fleet]:
    model = load_model(models / "1")
    fleet = Fleet(
        [_client(each, models) for each in servers],
        weights=WeightFiles(lambda target: save_model(model, target, with_output_layer=True), directory),
        max_context=512,
        patience_s=5.0,
    )
    try:
        yield fleet
    finally:
        await fleet.close()


async def test_nothing_is_sampled_before_the_first_publish(
    servers: list[PolicyServer], models: Path, tmp_path: Path
) -> None:
    async with _fleet(servers[:1], models, tmp_path / "weights") as fleet:
        with pytest.raises(InferenceError, match="published"):
            await fleet.generate_ids([5, 6], SHORT)


async def test_a_conversation_stays_and_new_ones_go_where_least_is_to_be_done(
    servers: list[PolicyServer], models: Path, tmp_path: Path
) -> None:
    async with _fleet(servers, models, tmp_path / "weights") as fleet:
        fleet.publish(1)
        sessions = [fleet.session((str(number), 0)) for number in range(6)]
        await asyncio.gather(*(session.respond(QUESTION, SHORT) for session in sessions))
        assert [server.num_answered for server in servers] == [2, 2, 2]
        for _ in range(3):
            answer = await sessions[0].respond(QUESTION, SHORT)
        assert sorted(server.num_answered for server in servers) == [2, 2, 5]
        assert set(answer.policy_versions) == {1}


async def test_a_new_replica_has_the_weights_before_its_first_call_and_a_leaving_one_ends_its_calls(
    servers: list[PolicyServer], models: Path, tmp_path: Path
) -> None:
    async with _fleet(servers[:1], models, tmp_path / "weights") as fleet:
        fleet.publish(3)
        expected = await fleet.score([5, 6, 7, 8], 1)
        await fleet.add(_client(servers[1], models))
        assert servers[1].versions == ["3"]
        assert await fleet.score([5, 6, 7, 8], 1) == expected, "of both, who agree"
        long = [
            asyncio.create_task(fleet.generate_ids([5, number], SamplingParams(max_tokens=200)))
            for number in range(6, 14)
        ]
        await asyncio.sleep(0.05)
        await fleet.remove(servers[0].url)
        at_removal = servers[0].num_answered
        await asyncio.gather(*long)
        await asyncio.gather(*(fleet.generate_ids([9, number], SHORT) for number in range(6, 12)))
        assert servers[0].num_answered == at_removal
        with pytest.raises(ConfigError, match="stay"):
            await fleet.remove(servers[1].url)


async def test_a_call_moves_on_from_a_replica_that_ends_and_none_waits_for_ever(
    servers: list[PolicyServer], models: Path, tmp_path: Path
) -> None:
    async with _fleet(servers[:2], models, tmp_path / "weights") as fleet:
        fleet.publish(1)
        await fleet.score([5, 6, 7], 1)
        servers[0].stop()
        answers = await asyncio.gather(*(fleet.generate_ids([5, 6, each], SHORT) for each in range(7, 13)))
        assert len(answers) == 6
        assert fleet.num_moved > 0
        assert fleet.num_in_service == 1
        fleet.publish(2)
        servers[0].start()
        async with asyncio.timeout(20):
            while fleet.num_in_service < 2:
                await asyncio.sleep(0.05)
            await asyncio.gather(*(fleet.generate_ids([5, 6, each], SHORT) for each in range(7, 13)))
        assert servers[0].versions == ["1", "2"]
        servers[0].stop()
        servers[1].stop()
        with pytest.raises(InferenceError):
            await fleet.generate_ids([5, 6, 7], SHORT)


async def test_a_replica_that_hangs_loses_its_calls_to_others_and_comes_back(
    servers: list[PolicyServer], models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rllm.inference.fleet.CHECK_EVERY_S", 0.02)
    monkeypatch.setattr("rllm.inference.fleet.PROBE_EVERY_S", 0.02)
    monkeypatch.setattr("rllm.inference.vllm._ANSWERS_WITHIN_S", 1.0)
    async with _fleet(servers[:2], models, tmp_path / "weights") as fleet:
        fleet.publish(1)
        sessions = [fleet.session(("task", order)) for order in range(2)]
        before = await asyncio.gather(*(session.respond(QUESTION, SHORT) for session in sessions))
        assert [each.num_answered for each in servers[:2]] == [1, 1]
        servers[0].hangs = True
        async with asyncio.timeout(60):
            after = await asyncio.gather(*(each.respond(QUESTION, SHORT) for each in sessions))
        assert (fleet.num_moved, servers[1].num_answered) == (1, 3)
        assert [each.completion_ids for each in after] == [each.completion_ids for each in before]
        fleet.publish(2)
        servers[0].hangs = False
        async with asyncio.timeout(60):
            while fleet.num_in_service < 2:
                await asyncio.sleep(0.01)
        await fleet.score(list(range(8)), 1)
        assert [each.versions[-1] for each in servers[:2]] == ["2", "2"]


async def test_a_server_of_ones_own_that_hangs_is_begun_anew(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HANGS_AFTER_S", "CHECK_EVERY_S", "END_WITHIN_S"):
        monkeypatch.setattr(f"rllm.inference.vllm_process.{name}", 0.3)
    server = tmp_path / "server.py"
    server.write_text(
        "import http.server, os, pathlib, signal, sys\n"
        "class Health(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.send_header('Content-Length', '0'); self.end_headers()\n"
        "        self.wfile.flush()\n"
        f"        first = pathlib.Path({str(tmp_path / 'first')!r})\n"
        "        if not first.exists():\n"
        "            first.touch(); os.kill(os.getpid(), signal.SIGSTOP)\n"
        "port = int(sys.argv[sys.argv.index('--port') + 1])\n"
        "http.server.HTTPServer(('127.0.0.1', port), Health).serve_forever()\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(server)])} "$@"\n')
    python.chmod(0o755)
    settings = ServerSettings(
        python=str(python),
        model=models / "0",
        max_context=64,
        max_requests=2,
        max_prefill_tokens=64,
        dtype="float32",
    )
    async with asyncio.timeout(60), ServerProcess(settings, 0, tmp_path / "server.log") as process:
        while process.num_starts < 2:
            await asyncio.sleep(0.05)


async def test_a_publish_waits_for_weights_that_are_being_written_and_each_has_its_own(
    servers: list[PolicyServer], models: Path, tmp_path: Path
) -> None:
    weights, is_writing, may_end = ["first"], threading.Event(), threading.Event()

    def write_slowly(target: Path) -> None:
        begun_with = weights[0]
        is_writing.set()
        may_end.wait(5)
        save_model(load_model(models / "1"), target, with_output_layer=True)
        (target / "which").write_text(f"{begun_with} {weights[0]}")

    fleet = Fleet(
        [_client(servers[0], models)],
        weights=WeightFiles(write_slowly, tmp_path / "weights"),
        max_context=512,
    )
    fleet.publish(1)
    call = asyncio.create_task(fleet.generate_ids([5, 6], SHORT))
    await asyncio.to_thread(is_writing.wait, 5)
    second = threading.Thread(target=fleet.publish, args=(2, lambda: weights.__setitem__(0, "second")))
    second.start()
    await asyncio.sleep(0.1)
    assert weights == ["first"], "nobody changes what is being written"
    may_end.set()
    assert set((await call).policy_versions) == {1}
    second.join()
    assert set((await fleet.generate_ids([5, 6], SHORT)).policy_versions) == {2}
    written = {path.parent.name: path.read_text() for path in (tmp_path / "weights").glob("*/which")}
    assert written == {"publish-1": "first first", "publish-2": "second second"}
    await fleet.close()


async def test_calls_of_the_adapter_before_are_still_answered(models: Path, tmp_path: Path) -> None:
    loaded = with_adapter(load_model(models / "0"), LoraConfig(rank=2), 0)
    with PolicyServer(models / "0") as server:
        client = _client(server, models)
        for version in range(1, 5):
            save_adapter(loaded, tmp_path / f"publish-{version}")
            await client.load_adapter(tmp_path / f"publish-{version}", version)
        assert [name.split("-")[1] for name in server.adapters] == ["3", "4"]
        await client.close()


async def test_a_server_that_is_never_ready_is_given_up_with_the_end_of_its_log(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rllm.inference.vllm_process.START_WITHIN_S", 0.5)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho I hang\nexec sleep 60\n")
    python.chmod(0o755)
    settings = ServerSettings(
        python=str(python),
        model=models / "0",
        max_context=64,
        max_requests=2,
        max_prefill_tokens=64,
        dtype="float32",
    )
    process = ServerProcess(settings, 0, tmp_path / "server.log")
    with pytest.raises(InferenceError, match=r"3 times (?s:.*)I hang"):
        async with process:
            pass
    assert process.num_starts == 3


class _Scorer(VLLMClient):
    """Scores as the test says: a row, or an error."""

    row: list[float] | Exception

    async def check(self) -> Any:
        return None

    async def update_weights(self, directory: Path, policy_version: int) -> None:
        self.set_policy_version(policy_version)

    async def score(self, ids: list[int], start: int, temperature: float = 1.0) -> list[float]:
        if isinstance(self.row, Exception):
            raise self.row
        return self.row


@pytest.mark.parametrize(
    ("rows", "outcome"),
    [
        ([[-1.0, -2.0]], [-1.0, -2.0]),
        ([[-1.0, -2.0], [-1.0, -2.0 + AGREEMENT / 2]], [-1.0, -2.0]),
        ([[-1.0, -2.0], [-1.0, -2.0 + AGREEMENT * 2]], CanaryError),
        ([[-1.0, -2.0], [-1.0, float("nan")]], CanaryError),
        ([InferenceError("gone"), [-1.0, -2.0]], [-1.0, -2.0]),
        ([InferenceError("gone")], InferenceError),
        ([ValueError("a defect"), [-1.0]], ValueError),
    ],
)
async def test_a_score_is_what_all_replicas_that_answer_agree_on(
    models: Path, tmp_path: Path, rows: list[Any], outcome: Any
) -> None:
    tokenizer = HuggingFaceTokenizer(models / "0")
    clients = [_Scorer(f"http://127.0.0.1:{number + 1}/v1", tokenizer) for number in range(len(rows))]
    for client, row in zip(clients, rows, strict=True):
        client.row = row
    fleet = Fleet(clients, weights=WeightFiles(lambda to: to.mkdir(), tmp_path / "w"), max_context=512)
    fleet.publish(1)
    if isinstance(outcome, list):
        assert await fleet.score([5, 6, 7], 1) == outcome
    else:
        with pytest.raises(outcome):
            await fleet.score([5, 6, 7], 1)
    assert fleet.num_in_service == sum(not isinstance(row, InferenceError) for row in rows)
    await fleet.close()


async def test_an_adapter_comes_back_to_a_server_that_failed_once_and_leaves_with_the_run(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM, the server refuses an adapter under a name that it has."""
    monkeypatch.setattr("rllm.inference.fleet.PROBE_EVERY_S", 0.02)
    loaded = with_adapter(load_model(models / "0"), LoraConfig(rank=2), 0)
    with PolicyServer(models / "0") as server:
        for _ in range(2):  # two runs, one after the other
            fleet = Fleet(
                [_client(server, models)],
                weights=WeightFiles(
                    lambda target: save_adapter(loaded, target), tmp_path / "weights", is_adapter=True
                ),
                max_context=512,
                patience_s=5.0,
            )
            fleet.publish(1)
            before = await fleet.generate_ids([5, 6, 7], SHORT)
            server.fails_next = 1
            after = await fleet.generate_ids([5, 6, 7], SHORT)
            assert after.completion_ids == before.completion_ids
            assert fleet.num_moved == 1
            assert len(server.adapters) == 1, "the one from before it failed is gone"
            await fleet.close()
            assert server.adapters == []


@pytest.mark.parametrize("way", ["its answers tell", "its starter knows"])
async def test_a_server_that_began_anew_while_nobody_asked_it_gets_the_weights_before_it_answers(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr("rllm.inference.fleet.PROBE_EVERY_S", 0.02)
    model, num_starts = load_model(models / "1"), [1]
    with PolicyServer(models / "0", tells_version=way == "its answers tell") as server:
        fleet = Fleet(
            [_client(server, models)],
            weights=WeightFiles(
                lambda target: save_model(model, target, with_output_layer=True), tmp_path / "weights"
            ),
            max_context=512,
            num_starts=[lambda: num_starts[0]] if way == "its starter knows" else (),
        )
        fleet.publish(3)
        sampling = SamplingParams(max_tokens=4, temperature=0.0)
        before = await fleet.generate_ids([5, 6, 7], sampling)
        await fleet.replicas[0].client.release()  # a connection that was long idle
        server.stop()
        server.start()
        num_starts[0] += 1
        after = await fleet.generate_ids([5, 6, 7], sampling)
        assert server.versions == ["3", "3"]
        assert (after.completion_ids, after.policy_versions) == (before.completion_ids, [3] * 4)
        assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5)
        await fleet.close()


class _Unreliable(VLLMClient):
    """Answers after some turns of the event loop, unless its fate for that call is to fail or to hang; one
    that hangs does not say what it serves either, for a while."""

    fates: list[str]
    hangs = 0

    async def check(self) -> Any:
        await asyncio.sleep(0)
        if self.hangs:
            self.hangs -= 1
            raise InferenceError("no answer")

    async def update_weights(self, directory: Path, policy_version: int) -> None:
        await asyncio.sleep(0)
        self.set_policy_version(policy_version)

    async def go_on(self, answer: AnswerParts) -> ModelOutput:
        prompt_ids = answer.prompt_ids
        version, fate = self.policy_version, self.fates.pop() if self.fates else ""
        for _ in range(len(prompt_ids)):
            await asyncio.sleep(0)
        if fate == "fails":
            raise InferenceError("out of memory")
        if fate == "hangs":
            self.hangs = 3
            await asyncio.Event().wait()
        return ModelOutput(
            text="", prompt_ids=prompt_ids, completion_ids=prompt_ids[:1], policy_versions=[version]
        )


async def test_a_call_that_is_cancelled_while_weights_are_written_leaves_them_to_the_next(
    models: Path, tmp_path: Path
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def write(target: Path) -> None:
        target.mkdir()
        begun.set()
        assert may_end.wait(20)

    client = _Unreliable("http://127.0.0.1:1/v1", HuggingFaceTokenizer(models / "0"))
    client.fates = []
    fleet = Fleet([client], weights=WeightFiles(write, tmp_path / "weights"), max_context=512)
    fleet.publish(1)
    first = asyncio.create_task(fleet.generate_ids([5], SHORT))
    assert await asyncio.to_thread(begun.wait, 20)
    first.cancel()
    await asyncio.wait({first})
    second = asyncio.create_task(fleet.generate_ids([6], SHORT))
    await asyncio.sleep(0)
    may_end.set()
    assert (await second).completion_ids == [6]
    await fleet.close()


class _Restarted(_Unreliable):
    """Loads weights and ends calls when the test says so."""

    may_load: asyncio.Event
    may_fail: asyncio.Event
    begun: Counter[str]
    served = 0

    async def update_weights(self, directory: Path, policy_version: int) -> None:
        self.begun[f"load {policy_version}"] += 1
        await self.may_load.wait()
        self.served = policy_version

    async def go_on(self, answer: AnswerParts) -> ModelOutput:
        prompt_ids = answer.prompt_ids
        if prompt_ids == [1]:
            self.begun["call"] += 1
            await self.may_fail.wait()
            raise InferenceError("out of memory")
        return ModelOutput(text="", prompt_ids=prompt_ids, completion_ids=[2], policy_versions=[self.served])


async def test_a_server_that_begins_anew_after_it_was_given_weights_while_out_of_service_gets_them_again(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rllm.inference.fleet.PROBE_EVERY_S", 0.0)
    client = _Restarted("http://127.0.0.1:1/v1", HuggingFaceTokenizer(models / "0"))
    client.may_load, client.may_fail, client.begun = asyncio.Event(), asyncio.Event(), Counter()
    client.hangs = 20
    fleet = Fleet([client], weights=WeightFiles(lambda to: to.mkdir(), tmp_path / "w"), max_context=512)
    fleet.publish(1)
    client.may_load.set()
    failing = asyncio.create_task(fleet.generate_ids([1], SHORT))
    async with asyncio.timeout(20):
        while not client.begun["call"]:
            await asyncio.sleep(0.001)
    client.may_load.clear()
    fleet.publish(2)
    waiting = asyncio.create_task(fleet.generate_ids([2], SHORT))
    async with asyncio.timeout(20):
        while not client.begun["load 2"]:
            await asyncio.sleep(0.001)
    client.may_fail.set()
    await asyncio.sleep(0)
    client.may_load.set()
    assert (await waiting).policy_versions == [2]
    assert fleet.num_in_service == 0
    client.served = 0  # it begins anew, and then answers
    failing.cancel()
    async with asyncio.timeout(20):
        assert (await fleet.generate_ids([2], SHORT)).policy_versions == [2]
    await fleet.close()


_FATES = st.lists(st.sampled_from(["", "fails", "hangs"]), max_size=4)


@given(
    replicas=st.lists(_FATES, min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    publishes=st.lists(st.integers(0, 30), max_size=3),
)
@example(replicas=[["fails", "hangs"]], lengths=[1, 2], publishes=[])  # hangs while it is out of service
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_call_is_answered_once_by_weights_no_older_than_it_whatever_fails_or_hangs(
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    replicas: list[list[str]],
    lengths: list[int],
    publishes: list[int],
) -> None:
    for name in ("CHECK_EVERY_S", "PROBE_EVERY_S"):
        monkeypatch.setattr(f"rllm.inference.fleet.{name}", 0.0)

    async def play() -> None:
        tokenizer = HuggingFaceTokenizer(models / "0")
        clients = [_Unreliable(f"http://127.0.0.1:{each + 1}/v1", tokenizer) for each in range(len(replicas))]
        for client, fates in zip(clients, replicas, strict=True):
            client.fates = list(fates)
        weights = Path(mkdtemp(dir=tmp_path))  # a write of the example before may not have ended
        fleet = Fleet(clients, weights=WeightFiles(lambda target: target.mkdir(), weights), max_context=512)
        fleet.publish(1)

        async def call(number: int, length: int) -> None:
            for _ in range(number):
                await asyncio.sleep(0)
            for _ in range(4 * len(replicas)):  # whoever plays the rollout asks again
                published = fleet.policy_version
                try:
                    output = await fleet.generate_ids([number] * length, SHORT)
                except InferenceError:
                    continue
                assert output.completion_ids == [number]
                assert published <= output.policy_versions[0] <= fleet.policy_version
                return
            raise AssertionError("never answered")

        async def publish(version: int, turns: int) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            fleet.publish(version)

        async with asyncio.timeout(60):
            await asyncio.gather(
                *(call(number, length) for number, length in enumerate(lengths)),
                *(publish(2 + index, turns) for index, turns in enumerate(sorted(publishes))),
            )
        assert [(each.num_calls, each.num_tokens) for each in fleet.replicas] == [(0, 0)] * len(replicas)
        await fleet.close()

    asyncio.run(play())
