"""Which replica is asked next, with which weights, and for how long each was at work: on clients that answer
at once and write down what they were given."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rllm.errors import CanaryError, ConfigError, InferenceError
from rllm.inference import fleet as fleet_module
from rllm.inference.answer_parts import AnswerParts
from rllm.inference.fleet import Fleet, Replica, WeightFiles
from rllm.inference.vllm import VLLMClient
from rllm.models.builtin import create_model
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.types.messages import ModelOutput, SamplingParams

ASK = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    create_model(directory, "tiny", 0)
    return HuggingFaceTokenizer(directory)


class Client(VLLMClient):
    """Answers with one token. So many of its next answers are errors, after which it is there again."""

    num_failures = 0
    spoils = False
    heard_ids: Sequence[int] = ()
    """That it says before it fails."""

    def __init__(self, number: int, tokenizer: HuggingFaceTokenizer) -> None:
        super().__init__(f"http://127.0.0.1:{number + 1}/v1", tokenizer)
        self.prompts: list[list[int]] = []
        self.answers: list[AnswerParts] = []
        self.weights: list[tuple[str, int]] = []
        self.ends: list[str] = []
        self.row: list[float] | Exception = [-1.0, -2.0]
        self.temperatures: list[float] = []
        self.is_there = True
        self.num_forgotten = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def check(self) -> Any:
        if not self.is_there:
            raise InferenceError("no answer")

    async def score(self, ids: list[int], start: int, temperature: float = 1.0) -> list[float]:
        self.temperatures.append(temperature)
        await self.may_answer.wait()
        if isinstance(self.row, Exception):
            raise self.row
        return self.row

    async def load_adapter(self, directory: Path, policy_version: int) -> None:
        self.weights.append((f"adapter {directory.name}", policy_version))

    async def receive_weights(self, sender: Any, hold_weights: Any) -> None:
        async with hold_weights() as policy_version:
            self.weights.append((sender, policy_version))
            await self.may_answer.wait()

    def forget_weights(self) -> None:
        self.num_forgotten += 1

    async def leave(self) -> None:
        self.ends.append("left")

    async def close(self) -> None:
        self.ends.append("closed")

    async def update_weights(self, directory: Path, policy_version: int) -> None:
        assert directory.is_dir()
        self.weights.append((directory.name, policy_version))
        self.set_policy_version(policy_version)

    async def go_on(self, answer: AnswerParts) -> ModelOutput:
        self.prompts.append(answer.prompt_ids)
        self.answers.append(answer)
        await self.may_answer.wait()
        if self.num_failures:
            self.num_failures -= 1
            answer.is_spoiled = self.spoils
            answer.ids += self.heard_ids
            raise InferenceError("out of memory")
        return ModelOutput(text="", prompt_ids=answer.prompt_ids, completion_ids=[9])


def fleet_of(clients: Sequence[Client], directory: Path | None = None, **options: Any) -> Fleet:
    if directory is not None:
        options["weights"] = WeightFiles(lambda target: target.mkdir(), directory)
    return Fleet(clients, max_context=512, **options)


async def test_who_read_the_beginning_is_asked_unless_it_is_twice_as_busy_as_another(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    fleet = fleet_of([Client(number, tokenizer) for number in range(3)])
    one, two, three = fleet.replicas
    two.num_tokens, three.num_tokens = 5, 6
    for own_tokens, chosen in ((20, one), (21, two)):
        one.num_tokens = own_tokens
        assert await fleet._in_service(one, 10) is chosen
    one.num_tokens = 0
    for name, value in (("is_up", False), ("is_leaving", True)):
        setattr(one, name, value)
        assert await fleet._in_service(one, 10) is two
        assert await fleet._in_service(None, 10) is two
        setattr(one, name, not value)
    await fleet.close()


async def test_calls_one_at_a_time_are_shared_out_and_a_conversation_stays(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    clients = [Client(number, tokenizer) for number in range(3)]
    fleet = fleet_of(clients)
    prompts = [[number] * 64 for number in range(6)]
    for prompt in prompts:
        await fleet.generate_ids(prompt, ASK)
    assert [client.prompts for client in clients] == [[prompts[at], prompts[at + 3]] for at in range(3)]
    for _ in range(3):
        await fleet.generate_ids([*prompts[1], 9, 8], ASK)
    assert [len(client.prompts) for client in clients] == [2, 5, 2]
    await fleet.close()


async def test_a_replica_is_at_work_from_the_first_of_its_calls_to_the_last(
    tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(fleet_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    fleet = fleet_of([Client(number, tokenizer) for number in range(2)])
    replica = fleet.replicas[0]
    first, second = replica.busy(7), replica.busy(5)
    for time_s, act, (busy_s, num_calls, num_tokens) in (
        (101.0, None, (0.0, 0, 0)),
        (102.0, first.__aenter__, (0.0, 1, 7)),
        (104.0, second.__aenter__, (2.0, 2, 12)),
        (105.0, lambda: first.__aexit__(None, None, None), (3.0, 1, 5)),
        (109.0, lambda: second.__aexit__(None, None, None), (7.0, 0, 0)),
        (200.0, None, (7.0, 0, 0)),
    ):
        now[0] = time_s
        if act is not None:
            await act()
        assert (replica.busy_s, replica.num_calls, replica.num_tokens) == (busy_s, num_calls, num_tokens)
    async with replica.busy(1):
        now[0] += 3.0
    assert (replica.busy_s, fleet.busy_s) == (10.0, 5.0), "of the fleet: the mean"
    await fleet.close()


async def test_a_replica_gets_weights_once_for_each_time_that_they_change(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    (client,) = clients = [Client(0, tokenizer)]
    fleet = fleet_of(clients, tmp_path / "weights")
    writes: list[int] = []
    for policy_version, write, is_new in (
        (0, None, True),
        (0, None, False),
        (1, None, True),
        (1, lambda: writes.append(1), True),
        (1, None, False),
        (2, None, True),
    ):
        before = len(client.weights)
        fleet.publish(policy_version, write)
        for _ in range(2):
            await fleet.generate_ids([5], ASK)
        assert len(client.weights) - before == is_new
        assert (fleet.policy_version, client.policy_version) == (policy_version, policy_version)
    assert writes == [1]
    assert client.weights == [("publish-1", 0), ("publish-2", 1), ("publish-3", 1), ("publish-4", 2)]
    kept = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert kept == ["publish-3", "publish-4"], "one may still be read"
    await fleet.close()
    assert not (tmp_path / "weights").exists()


async def test_a_replica_that_began_anew_gets_weights_again_and_no_other(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    clients, starts = [Client(number, tokenizer) for number in range(2)], [1, 1]
    fleet = fleet_of(clients, tmp_path / "w", num_starts=[lambda: starts[0], lambda: starts[1]])
    fleet.publish(3)
    for replica in fleet.replicas:
        await fleet.bring_up_to_date(replica)
    starts[1] = 2
    for replica in fleet.replicas * 2:
        await fleet.bring_up_to_date(replica)
    assert [len(client.weights) for client in clients] == [1, 2]
    assert clients[0].weights == clients[1].weights[:1], "written once for both"
    assert [client.num_forgotten for client in clients] == [1, 2], "with each start"
    watches = [replica.watch for replica in fleet.replicas]
    await fleet.close()
    assert all(watch is not None and watch.done() for watch in watches)
    assert [client.ends for client in clients] == [["left", "closed"]] * 2


async def test_a_call_is_asked_elsewhere_as_often_as_there_are_replicas(
    tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "PROBE_EVERY_S", 0.0)
    for num_failures, fails in (([1, 0], False), ([1, 1], False), ([2, 1], True)):
        clients = [Client(number, tokenizer) for number in range(2)]
        fleet = fleet_of(clients)
        for client, number in zip(clients, num_failures, strict=True):
            client.num_failures = number
        if fails:
            with pytest.raises(InferenceError, match="out of memory"):
                await fleet.generate_ids([5], ASK)
            assert fleet.num_moved == 2
        else:
            output = await fleet.generate_ids([5], ASK)
            assert output.completion_ids == [9]
            assert fleet.num_moved == sum(num_failures)
        await fleet.close()


@pytest.mark.parametrize("spoils", [False, True])
async def test_an_answer_goes_on_elsewhere_unless_its_tokens_are_of_other_weights(
    tokenizer: HuggingFaceTokenizer, spoils: bool
) -> None:
    clients = [Client(number, tokenizer) for number in range(2)]
    clients[0].num_failures, clients[0].spoils = 1, spoils
    fleet = fleet_of(clients)
    await fleet.generate_ids([5], ASK)
    assert (clients[0].answers[0] is clients[1].answers[0]) is not spoils
    assert [replica.is_up for replica in fleet.replicas] == [False, True]
    clients[0].num_failures = 1
    fleet.replicas[0].is_up, fleet.replicas[1].is_up = True, False
    call = fleet.generate_ids([6], ASK, on_piece=lambda piece: None)
    if spoils:  # its reader has heard of them
        with pytest.raises(InferenceError, match="out of memory"):
            await call
    else:
        fleet.replicas[1].is_up = True
        fleet.replicas[1].num_tokens = 1
        assert (await call).completion_ids == [9]
    await fleet.close()


@pytest.mark.parametrize("is_heard", [False, True])
async def test_an_answer_that_follows_a_grammar_begins_anew_elsewhere_or_fails_where_some_of_it_was_heard(
    tokenizer: HuggingFaceTokenizer, is_heard: bool
) -> None:
    clients = [Client(number, tokenizer) for number in range(2)]
    clients[0].num_failures, clients[0].heard_ids = 1, [7, 8]
    fleet = fleet_of(clients)
    followed = SamplingParams(max_tokens=4, grammar="start: /a*/")
    call = fleet.generate_ids([5], followed, on_piece=(lambda piece: None) if is_heard else None)
    if is_heard:
        with pytest.raises(InferenceError, match="out of memory"):
            await call
        assert clients[1].answers == []
    else:
        assert (await call).completion_ids == [9]
        assert [answer.ids for answer in clients[1].answers] == [[]]
    await fleet.close()


async def test_who_finds_nobody_in_service_waits_as_long_as_it_may_and_is_told_who_is_away(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    fleet = fleet_of([Client(0, tokenizer), Client(1, tokenizer)], patience_s=0.01)
    for replica in fleet.replicas:
        replica.is_up = False
    assert fleet.num_in_service == 0
    with pytest.raises(InferenceError, match=r"127.0.0.1:1/v1, http://127.0.0.1:2/v1 .*0\.01 s"):
        await fleet.generate_ids([5], ASK)
    fleet._patience_s = 60.0
    call = asyncio.create_task(fleet.generate_ids([5], ASK))
    await asyncio.sleep(0)
    await fleet.add(Client(3, tokenizer))
    assert (await call).completion_ids == [9]
    assert fleet.num_in_service == 1
    await fleet.close()


async def test_one_that_leaves_ends_its_calls_and_stays_where_nobody_waits_for_that(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    clients = [Client(number, tokenizer) for number in range(2)]
    fleet = fleet_of(clients)
    leaving: Replica = fleet.replicas[0]
    clients[0].may_answer.clear()
    call = asyncio.create_task(fleet.generate_ids([5], ASK))
    while not clients[0].prompts:
        await asyncio.sleep(0)
    removal = asyncio.create_task(fleet.remove(leaving.url + "/"))
    while not leaving.is_leaving:
        await asyncio.sleep(0)
    with pytest.raises(ConfigError, match=r"127.0.0.1:2/v1 .* stay"):
        await fleet.remove(fleet.replicas[1].url)
    removal.cancel()
    await asyncio.gather(removal, return_exceptions=True)
    assert not leaving.is_leaving
    removal = asyncio.create_task(fleet.remove(leaving.url))
    await asyncio.sleep(0)
    assert not removal.done()
    clients[0].may_answer.set()
    await removal
    assert (await call).completion_ids == [9]
    assert [replica.client for replica in fleet.replicas] == [clients[1]]
    with pytest.raises(ConfigError, match="nowhere"):
        await fleet.remove("http://nowhere/v1")
    await fleet.close()


@pytest.mark.parametrize("fails", [False, True])
async def test_one_that_leaves_ends_its_scores_as_well(tokenizer: HuggingFaceTokenizer, fails: bool) -> None:
    clients = [Client(number, tokenizer) for number in range(2)]
    fleet = fleet_of(clients)
    leaving = fleet.replicas[0]
    if fails:
        clients[0].row = InferenceError("out of memory")
    clients[0].may_answer.clear()
    scores = asyncio.create_task(fleet.score([5, 6, 7], 1))
    await until(lambda: bool(clients[0].temperatures))
    removal = asyncio.create_task(fleet.remove(leaving.url))
    await until(lambda: leaving.is_leaving)
    await asyncio.sleep(0)
    assert not removal.done()
    clients[0].may_answer.set()
    assert await scores == [-1.0, -2.0]
    await until(removal.done)
    assert [replica.client for replica in fleet.replicas] == [clients[1]]
    assert leaving.probe is None or leaving.probe.done(), "nobody asks for one that is gone"
    await fleet.close()


async def test_a_check_of_all_takes_those_out_that_do_not_answer_and_ends_their_calls(
    tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "PROBE_EVERY_S", 60.0)
    clients = [Client(number, tokenizer) for number in range(2)]
    fleet = fleet_of(clients)
    clients[0].may_answer.clear()
    call = asyncio.create_task(fleet.generate_ids([5], ASK))
    while not clients[0].prompts:
        await asyncio.sleep(0)
    clients[0].is_there = False
    await fleet.check()
    assert [replica.is_up for replica in fleet.replicas] == [False, True]
    assert (await call).completion_ids == [9]
    assert (len(clients[1].prompts), fleet.num_moved) == (1, 1)
    await fleet.close()


async def test_one_that_was_removed_during_a_check_is_not_asked_whether_it_is_back(
    tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Client):
        async def check(self) -> Any:
            await self.may_answer.wait()
            raise InferenceError("closed")

    monkeypatch.setattr(fleet_module, "PROBE_EVERY_S", 60.0)
    clients = [Client(0, tokenizer), Slow(1, tokenizer)]
    fleet = fleet_of(clients)
    leaving = fleet.replicas[1]
    clients[1].may_answer.clear()
    check = asyncio.create_task(fleet.check())
    await asyncio.sleep(0)
    await fleet.remove(leaving.url)
    clients[1].may_answer.set()
    await check
    assert leaving.probe is None
    await fleet.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_a_score_is_what_those_in_service_agree_on(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    clients = [Client(number, tokenizer) for number in range(3)]
    fleet = fleet_of(clients, tmp_path / "deep" / "weights")
    fleet.publish(1)
    assert await fleet.score([5, 6, 7], 1) == [-1.0, -2.0]
    assert [client.temperatures for client in clients] == [[1.0]] * 3
    assert [client.weights for client in clients] == [[("publish-1", 1)]] * 3
    clients[2].row = [-1.0, -2.005]
    assert await fleet.score([5, 6, 7], 1, 0.5) == [-1.0, -2.0]
    assert clients[0].temperatures[-1] == 0.5
    for row in ([-1.0, -2.5], [-0.98, -2.0], [-1.0, float("nan")]):
        clients[1].row = row
        with pytest.raises(CanaryError, match="policy version 1"):
            await fleet.score([5, 6, 7], 1)
    for name, value in (("is_leaving", True), ("is_up", False)):
        setattr(fleet.replicas[1], name, value)
        assert await fleet.score([5, 6, 7], 1) == [-1.0, -2.0], "nobody asks that one"
        setattr(fleet.replicas[1], name, not value)
    clients[1].row = InferenceError("out of memory")
    assert await fleet.score([5, 6, 7], 1) == [-1.0, -2.0]
    assert [replica.is_up for replica in fleet.replicas] == [True, False, True]
    clients[0].row = ValueError("a defect")
    with pytest.raises(ValueError, match="a defect"):
        await fleet.score([5, 6, 7], 1)
    clients[0].row = clients[2].row = InferenceError("away")
    with pytest.raises(InferenceError, match="all of them"):
        await fleet.score([5, 6, 7], 1)
    waiting = asyncio.create_task(fleet.score([5, 6, 7], 1))
    await asyncio.sleep(0)
    assert not waiting.done()
    await fleet.add(Client(3, tokenizer))
    assert await waiting == [-1.0, -2.0]
    await fleet.close()


async def test_one_that_is_added_has_the_weights_first_where_there_are_some(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    clients = [Client(number, tokenizer) for number in range(4)]
    fleet = fleet_of(clients[:1], tmp_path / "weights")
    assert (fleet.policy_version, fleet.max_context) == (0, 512)
    await fleet.add(clients[1])
    assert clients[1].weights == []
    fleet.publish(4)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "of somebody").touch()
    await fleet.add(clients[2])
    fleet.publish(5)
    await fleet.add(clients[3])
    assert [client.weights for client in clients] == [[], [], [("publish-1", 4)], [("publish-2", 5)]]
    await fleet.close()
    adapters = Fleet(
        clients[:1],
        max_context=512,
        weights=WeightFiles(lambda target: target.mkdir(), tmp_path / "a", is_adapter=True),
    )
    adapters.publish(6)
    await adapters.generate_ids([5], ASK)
    assert clients[0].weights == [("adapter publish-1", 6)]
    await adapters.close()


async def test_one_that_is_not_given_the_weights_is_not_added_and_nobody_asks_for_it(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    class Full(Client):
        async def update_weights(self, directory: Path, policy_version: int) -> None:
            raise InferenceError("out of memory")

    clients = [Client(0, tokenizer), Full(1, tokenizer)]
    fleet = fleet_of(clients[:1], tmp_path / "weights")
    fleet.publish(1)
    tasks = asyncio.all_tasks()
    with pytest.raises(InferenceError, match="out of memory"):
        await fleet.add(clients[1])
    assert asyncio.all_tasks() == tasks
    assert (fleet.num_in_service, clients[1].ends) == (1, ["left", "closed"])
    await fleet.close()


async def test_weights_that_are_sent_are_held_meanwhile(tokenizer: HuggingFaceTokenizer) -> None:
    sender: Any = "the sender"
    client = Client(0, tokenizer)
    fleet = Fleet([client], max_context=512, weights=sender)
    with pytest.raises(InferenceError, match="published"):
        await fleet.generate_ids([5], ASK)
    fleet.publish(1)
    fleet._changing.acquire()
    call = asyncio.create_task(fleet.generate_ids([5], ASK))
    await asyncio.sleep(0.02)
    assert client.weights == [], "somebody changes them"
    client.may_answer.clear()
    fleet._changing.release()
    await until(lambda: bool(client.weights))
    with pytest.raises(RuntimeError, match="thread"):
        fleet.publish(2)
    in_thread = asyncio.create_task(asyncio.to_thread(fleet.publish, 2))
    await asyncio.sleep(0.02)
    assert not in_thread.done()
    client.may_answer.set()
    await in_thread
    await call
    for _ in range(2):
        await fleet.generate_ids([5], ASK)
    assert client.weights == [("the sender", 1), ("the sender", 2)]
    await fleet.close()


async def test_one_that_fails_is_asked_whether_it_is_back_and_gets_the_weights_again(
    tokenizer: HuggingFaceTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(fleet_module, "PROBE_EVERY_S", 0.0)
    clients = [Client(number, tokenizer) for number in range(2)]
    fleet = fleet_of(clients, tmp_path / "weights")
    fleet.publish(1)
    first, second = fleet.replicas
    clients[0].may_answer.clear()
    hanging = asyncio.create_task(fleet.generate_ids([5, 6, 7], ASK))
    await until(lambda: bool(clients[0].prompts))
    assert first.num_tokens == 3 + 4, "its prompt and what may come of it"
    clients[0].is_there = False
    num_forgotten = clients[0].num_forgotten
    fleet._out_of_service(first, InferenceError("out of memory"))
    assert "127.0.0.1:1/v1" in caplog.text
    assert "out of memory" in caplog.text
    assert (await hanging).completion_ids == [9]
    assert clients[1].prompts == [[5, 6, 7]], "what hangs with it moves on"
    assert (first.is_up, first.weights_number, clients[0].num_forgotten) == (False, -1, num_forgotten + 1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not first.is_up
    first.weights_number = 1  # by a call under way
    second.is_up = False
    waiting = asyncio.create_task(fleet.generate_ids([8], ASK))
    await asyncio.sleep(0)
    caplog.clear()
    clients[0].may_answer.set()
    clients[0].is_there = True
    await waiting
    assert "127.0.0.1:1/v1" in caplog.text
    assert clients[0].weights == [("publish-1", 1)] * 2
    assert clients[0].num_forgotten > num_forgotten + 1
    await fleet.close()


async def test_one_in_service_is_asked_now_and_then_whether_it_still_answers(
    tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "CHECK_EVERY_S", 0.0)
    monkeypatch.setattr(fleet_module, "PROBE_EVERY_S", 60.0)
    client = Client(0, tokenizer)
    fleet = fleet_of([client])
    (replica,) = fleet.replicas
    assert replica.watch is None
    await fleet.generate_ids([5], ASK)
    watch = replica.watch
    await fleet.generate_ids([5], ASK)
    assert watch is not None
    assert replica.watch is watch
    for _ in range(20):
        await asyncio.sleep(0)
    assert replica.is_up
    client.is_there = False
    await until(lambda: not replica.is_up)
    await fleet.close()


async def test_a_session_stays_with_who_answered_it(tokenizer: HuggingFaceTokenizer) -> None:
    clients = [Client(number, tokenizer) for number in range(2)]
    fleet = fleet_of(clients)
    async with fleet.session(("task", 0)) as session:
        for _ in range(3):
            output = await session.respond([{"role": "user", "content": "?"}], ASK)
            assert output.completion_ids == [9]
    assert [len(client.prompts) for client in clients] == [3, 0]
    await fleet.close()


async def test_one_that_was_removed_is_ended_and_its_prompts_lead_nowhere(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    clients = [Client(number, tokenizer) for number in range(2)]
    fleet = fleet_of(clients)
    prompt = [3] * 64
    await fleet.generate_ids(prompt, ASK)
    leaving, staying = fleet.replicas
    assert fleet._routes.find(prompt) is leaving
    staying.is_up = False
    clients[0].may_answer.clear()
    calls = [asyncio.create_task(fleet.generate_ids(prompt, ASK))]
    await until(lambda: len(clients[0].prompts) == 2)
    removal = asyncio.create_task(fleet.remove(leaving.url))
    await until(lambda: leaving.is_leaving)
    calls.append(asyncio.create_task(fleet.generate_ids(prompt, ASK)))
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(clients[0].prompts) == 2, "a further one waits"
    removal.cancel()
    await until(lambda: len(clients[0].prompts) == 3)
    clients[0].may_answer.set()
    await asyncio.gather(*calls)
    staying.is_up = True
    await fleet.remove(leaving.url)
    assert fleet._routes.find(prompt) is None
    assert (clients[0].ends, clients[1].ends) == (["left", "closed"], [])
    assert leaving.watch is not None
    assert leaving.watch.done()
    await fleet.close()
