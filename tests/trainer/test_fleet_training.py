"""Runs whose policy is sampled by model servers: the same tokens, the newest weights, whatever ends."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rllm.config.loader import load_config
from rllm.config.schema import TrainConfig
from rllm.errors import CanaryError, ConfigError
from rllm.models.builtin import create_model
from rllm.models.directory import load_model, save_model
from rllm.store.episodes import EpisodeStore
from rllm.tracking.jsonl import read_metrics
from rllm.trainer import samplers
from rllm.trainer.policies import make_client
from rllm.trainer.replay import replay
from rllm.types.episode import Episode

sys.path.insert(0, str(Path(__file__).parents[1] / "inference"))
from policy_server import PolicyServer
from tensor_receiver import MemoryNccl, MemorySender

STEPS = 4
VOCABULARY = 604
"""Of `builtin:tiny`."""
FIRST, SECOND = "http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"
SERVED = {"engine": "vllm", "lockstep": False, "servers": [FIRST]}
Edit = Callable[[str, Any], Any]


@pytest.fixture(scope="module")
def foreign_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the run's architecture that is not the run's."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    create_model(directory, "tiny", 99)
    return directory


@pytest.fixture
def servers(foreign_weights: Path) -> Iterator[list[PolicyServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(PolicyServer(foreign_weights)) for _ in range(2)]


def _on(servers: list[PolicyServer], **more: Any) -> dict[str, Any]:
    inference = {"engine": "vllm", "lockstep": False, "servers": [each.url for each in servers]}
    return {"inference": inference, "algorithm": {"old_logprobs": "trainer"}, **more}


def _lines(run: Path) -> list[dict[str, Any]]:
    return [each for each in read_metrics(run / "metrics.jsonl") if each["phase"] == "train"]


def _episodes(run: Path) -> list[Episode]:
    with EpisodeStore.open(run / "store.sqlite", read_only=True) as store:
        return [episode for step in range(STEPS) for episode in store.episodes("train", step)]


def _tokens(run: Path) -> list[Any]:
    return sorted(
        (episode.task_id, episode.rollout_idx, [step.response_ids for step in episode.trajectories[0].steps])
        for episode in _episodes(run)
    )


@pytest.fixture(scope="module")
def built_in(letters: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on the built-in engine."""
    run = tmp_path_factory.mktemp("built-in") / "run"
    local = {"inference": {"lockstep": False}, "algorithm": {"old_logprobs": "trainer"}}
    letters.make_trainer(run, local).train()
    return run


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_two_servers_sample_what_the_built_in_engine_samples(
    letters: ModuleType, servers: list[PolicyServer], tmp_path: Path, engine: str, built_in: Path
) -> None:
    for each in servers:
        each.engine = engine
    letters.make_trainer(tmp_path / "servers", _on(servers)).train()
    assert _tokens(tmp_path / "servers") == _tokens(built_in)
    assert min(server.num_answered for server in servers) > 20, "both have work"
    lines = _lines(tmp_path / "servers")
    assert servers[0].versions[-1] == servers[1].versions[-1] == str(lines[-1]["policy_version"])
    assert all(line["canary_gap"] < 1e-4 for line in lines)
    assert replay(letters.make_trainer(tmp_path / "servers", _on(servers)).run).is_identical
    assert not (tmp_path / "servers" / "served_weights").exists()


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_servers_that_are_sent_tensors_sample_and_agree_as_those_that_read_files(
    letters: ModuleType,
    foreign_weights: Path,
    tmp_path: Path,
    built_in: Path,
    schedule: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The group of GPUs alone is replaced, and what refuses to go without one."""
    nccl = MemoryNccl()
    monkeypatch.setattr(samplers, "WeightSender", partial(MemorySender, nccl=nccl))
    monkeypatch.setattr(samplers, "require_nccl", lambda: None)
    monkeypatch.setattr(TrainConfig, "_validate_nccl", lambda *arguments: None)
    save_model(load_model(foreign_weights), tmp_path / "untied", with_output_layer=True)
    with ExitStack() as stack:
        servers = [stack.enter_context(PolicyServer(tmp_path / "untied", nccl=nccl)) for _ in range(2)]
        settings = _on(servers, **({"schedule": {"kind": "async"}} if schedule == "async" else {}))
        settings["inference"]["weight_transfer"] = "nccl"
        letters.make_trainer(tmp_path / "run", settings).train()
    lines = _lines(tmp_path / "run")
    assert all(line["canary_gap"] < 1e-4 for line in lines)
    last = str(lines[-1]["policy_version"])
    assert servers[0].versions[-1] == servers[1].versions[-1] == last
    assert not any(path.startswith("/collective_rpc") for each in servers for path in each.paths)
    assert len(nccl.groups) == 2, "each server has one, and keeps it"
    if schedule == "sync":
        assert _tokens(tmp_path / "run") == _tokens(built_in)


def test_a_push_of_tensors_that_a_server_only_says_it_has_ends_the_run(
    letters: ModuleType, foreign_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl = MemoryNccl()
    monkeypatch.setattr(samplers, "WeightSender", partial(MemorySender, nccl=nccl))
    monkeypatch.setattr(samplers, "require_nccl", lambda: None)
    monkeypatch.setattr(TrainConfig, "_validate_nccl", lambda *arguments: None)
    save_model(load_model(foreign_weights), tmp_path / "untied", with_output_layer=True)
    with PolicyServer(tmp_path / "untied", nccl=nccl, ignores_weights=True) as server:
        settings = _on([server])
        settings["inference"]["weight_transfer"] = "nccl"
        with pytest.raises(CanaryError, match=server.url):
            letters.make_trainer(tmp_path / "run", settings).train()


def test_a_server_that_ends_loses_no_episode_and_comes_back_with_the_newest_weights(
    letters: ModuleType, servers: list[PolicyServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rllm.inference.fleet.PROBE_EVERY_S", 0.05)
    first, second = servers
    first.dies_after = 40

    def revive() -> None:
        while first.dies_after is not None:
            time.sleep(0.01)
        while first.is_there:
            time.sleep(0.01)
        first.start()

    reviver = threading.Thread(target=revive)
    reviver.start()
    steps = {"steps": 24, "checkpoint": {"every_steps": 24}, "evaluation": {"num_tasks": 4, "every_steps": 0}}
    letters.make_trainer(tmp_path / "run", _on(servers, **steps)).train()
    reviver.join()
    lines = _lines(tmp_path / "run")
    assert len(lines) == 24
    assert all(line["episodes"] == 6 and line["failed"] == 0 for line in lines)
    assert first.num_answered > 40, "it answers again"
    assert first.versions[-1] == second.versions[-1] == str(lines[-1]["policy_version"])


def test_an_adapter_goes_to_the_servers_by_itself(letters: ModuleType, tmp_path: Path) -> None:
    lora = {"lora": {"rank": 2}, "warm_start": {"steps": 0}}
    create_model(tmp_path / "initial", "tiny", letters.SETTINGS["seed"])
    with ExitStack() as stack:
        servers = [stack.enter_context(PolicyServer(tmp_path / "initial")) for _ in range(2)]
        letters.make_trainer(tmp_path / "servers", _on(servers, **lora)).train()
    local = {"inference": {"lockstep": False}, "algorithm": {"old_logprobs": "trainer"}, **lora}
    letters.make_trainer(tmp_path / "local", local).train()
    assert _tokens(tmp_path / "servers") == _tokens(tmp_path / "local")
    versions = [line["policy_version"] for line in _lines(tmp_path / "servers")]
    assert servers[0].versions == ["0", *map(str, versions)]


@pytest.mark.parametrize("at_publish", ["recompute", "keep", "finish"])
def test_an_asynchronous_run_on_servers_keeps_its_bound(
    letters: ModuleType, servers: list[PolicyServer], tmp_path: Path, at_publish: str
) -> None:
    schedule = {"schedule": {"kind": "async", "max_staleness": 2}, "steps": 6}
    changes = _on(servers, **schedule) | {"algorithm": {}}
    changes["inference"]["at_publish"] = at_publish
    letters.make_trainer(tmp_path / "run", changes).train()
    assert max(line["staleness_max"] for line in _lines(tmp_path / "run")) in (1, 2)
    idle = [line["sampler_idle"] for line in _lines(tmp_path / "run")]
    assert 0.0 <= min(idle) <= max(idle) < 1.0
    assert max(idle) > 0.0
    assert replay(letters.make_trainer(tmp_path / "run", changes).run).is_identical


def _on_pairs(solvers: list[PolicyServer], judges: list[PolicyServer], **more: Any) -> dict[str, Any]:
    policies = {"solver": {"servers": [each.url for each in solvers]}}
    policies["judge"] = {"servers": [each.url for each in judges]}
    return {"policies": policies, "inference": {"engine": "vllm"}, **more}


def test_each_policy_is_sampled_by_servers_of_its_own(
    letters: ModuleType, servers: list[PolicyServer], foreign_weights: Path, tmp_path: Path
) -> None:
    with PolicyServer(foreign_weights) as judge:
        changes = _on_pairs(servers, [judge])
        letters.make_pair_trainer(tmp_path / "servers", changes).train()
        letters.make_pair_trainer(tmp_path / "local").train()
        assert _pair_tokens(tmp_path / "servers") == _pair_tokens(tmp_path / "local")
        last = _lines(tmp_path / "servers")[-1]
        for name, its in (("solver", servers), ("judge", [judge])):
            assert last[f"policy.{name}.canary_gap"] < 1e-4
            assert {each.versions[-1] for each in its} == {str(last[f"policy.{name}.policy_version"])}
            assert min(each.num_answered for each in its) > 10
        assert replay(letters.make_pair_trainer(tmp_path / "servers", changes).run).is_identical


def _pair_tokens(run: Path) -> list[Any]:
    return sorted(
        (episode.task_id, episode.rollout_idx, [each.steps[0].response_ids for each in episode.trajectories])
        for episode in _episodes(run)
    )


def test_policies_go_on_with_servers_at_other_addresses(
    letters: ModuleType, servers: list[PolicyServer], foreign_weights: Path, tmp_path: Path
) -> None:
    solver, judge = servers
    with pytest.raises(OSError, match="gone"):
        letters.make_pair_trainer(tmp_path / "run", _on_pairs([solver], [judge]), tracker=Stopping()).train()
    with PolicyServer(foreign_weights) as other:
        letters.make_pair_trainer(tmp_path / "run", _on_pairs([judge], [other])).train()
    assert [line["step"] for line in _lines(tmp_path / "run")] == list(range(STEPS))


FROZEN = {"judge": {"trainable": False}}


def test_servers_of_a_frozen_policy_get_its_weights_once(
    letters: ModuleType, servers: list[PolicyServer], tmp_path: Path
) -> None:
    solver, judge = servers
    changes = _on_pairs([solver], [judge])
    changes["policies"]["judge"]["trainable"] = False
    letters.make_pair_trainer(tmp_path / "servers", changes).train()
    letters.make_pair_trainer(tmp_path / "local", {"policies": FROZEN}).train()
    assert _pair_tokens(tmp_path / "servers") == _pair_tokens(tmp_path / "local")
    assert judge.versions == ["0"]


def test_a_server_that_is_no_frozen_policy_ends_the_run_before_its_first_episode(
    letters: ModuleType, servers: list[PolicyServer], tmp_path: Path
) -> None:
    solver, judge = servers
    judge.ignores_weights = True
    changes = _on_pairs([solver], [judge])
    changes["policies"]["judge"]["trainable"] = False
    with pytest.raises(CanaryError, match=rf"policies\.judge\.servers.*{judge.url}"):
        letters.make_pair_trainer(tmp_path / "run", changes).train()
    assert not (tmp_path / "run" / "store.sqlite").exists()


@pytest.mark.parametrize("other", [f"{FIRST}/", FIRST.replace("127.0.0.1", "localhost")])
def test_one_server_is_no_server_of_two_policies_nor_twice_of_one(
    letters: ModuleType, tmp_path: Path, other: str
) -> None:
    policies = {"solver": {"servers": [SECOND, FIRST]}, "judge": {"servers": [other]}}
    changes: dict[str, Any] = {"policies": policies, "inference": {"engine": "vllm"}}
    with pytest.raises(ConfigError, match=rf"policies\.solver\.servers.*policies\.judge\.servers.*{other}"):
        letters.make_pair_trainer(tmp_path / "run", changes).train()
    with pytest.raises(ConfigError, match=rf"inference\.servers.*twice.*{FIRST}, {other}"):
        letters.make_trainer(tmp_path / "run", {"inference": {**SERVED, "servers": [FIRST, other]}}).train()


class Stopping:
    """A tracker that breaks off after a step, as a machine may."""

    def begin(self, phase: str) -> None: ...
    def advance(self, done: int, total: int) -> None: ...
    def close(self) -> None: ...
    def log(self, step: int, phase: str, metrics: Mapping[str, Any]) -> None:
        if (phase, step) == ("train", 2):
            raise OSError("the machine is gone")


def test_a_run_goes_on_with_servers_at_other_addresses(
    letters: ModuleType, foreign_weights: Path, tmp_path: Path
) -> None:
    with PolicyServer(foreign_weights) as server, pytest.raises(OSError, match="the machine is gone"):
        letters.make_trainer(tmp_path / "run", _on([server]), tracker=Stopping()).train()
    with PolicyServer(foreign_weights) as server:
        letters.make_trainer(tmp_path / "run", _on([server])).train()
        assert [line["step"] for line in _lines(tmp_path / "run")] == list(range(STEPS))
        assert replay(letters.make_trainer(tmp_path / "run", _on([server])).run).is_identical
        local = {"inference": {"lockstep": False}, "algorithm": {"old_logprobs": "trainer"}}
        with pytest.raises(ConfigError, match=r"inference\.engine: 'vllm' there, 'local' here"):
            letters.make_trainer(tmp_path / "run", local).train()


def test_an_adapter_is_refused_where_a_server_of_sglang_would_get_it(
    letters: ModuleType, foreign_weights: Path, tmp_path: Path
) -> None:
    with (
        PolicyServer(foreign_weights, engine="sglang") as server,
        pytest.raises(ConfigError, match=r"inference\.servers.*SGLang.*lora\.rank"),
    ):
        letters.make_trainer(tmp_path / "run", _on([server], lora={"rank": 2})).train()


def test_a_server_that_does_not_take_the_weights_ends_the_run_before_its_first_episode(
    letters: ModuleType, foreign_weights: Path, tmp_path: Path
) -> None:
    with (
        PolicyServer(foreign_weights, ignores_weights=True) as server,
        pytest.raises(CanaryError, match="published weights"),
    ):
        letters.make_trainer(tmp_path / "run", _on([server])).train()
    assert not (tmp_path / "run" / "store.sqlite").exists()
    assert not (tmp_path / "run" / "served_weights").exists()


def test_a_server_that_speaks_of_another_temperature_than_it_samples_at_is_refused(
    letters: ModuleType, foreign_weights: Path, tmp_path: Path
) -> None:
    rollout = {"rollout": {"temperature": 1.3}}
    with PolicyServer(foreign_weights, is_raw=True) as server, pytest.raises(CanaryError, match="processed"):
        letters.make_trainer(tmp_path / "run", _on([server], **rollout)).train()
    with PolicyServer(foreign_weights) as server:
        letters.make_trainer(tmp_path / "processed", _on([server], **rollout)).train()
    assert all(line["canary_gap"] < 1e-4 for line in _lines(tmp_path / "processed"))


def test_a_server_whose_answers_are_a_hundredth_of_a_nat_likelier_than_it_says_is_refused(
    letters: ModuleType, servers: list[PolicyServer], tmp_path: Path
) -> None:
    def shift(choice: dict[str, Any]) -> None:
        logprobs = choice["logprobs"]["token_logprobs"]
        choice["logprobs"]["token_logprobs"] = [each - 0.01 for each in logprobs]

    servers[1].edit = _choices(shift)
    with pytest.raises(CanaryError, match="processed"):
        letters.make_trainer(tmp_path / "run", _on(servers)).train()


def test_a_server_with_a_shorter_context_is_refused_by_its_address(
    letters: ModuleType, foreign_weights: Path, tmp_path: Path
) -> None:
    with (
        PolicyServer(foreign_weights, max_context=64) as server,
        pytest.raises(ConfigError, match=rf"128 and {server.url} reads 64"),
    ):
        letters.make_trainer(tmp_path / "run", _on([server])).train()


def _without(path: str) -> Edit:
    return lambda asked, reply: None if asked == path else reply


def _choices(change: Callable[[dict[str, Any]], object]) -> Edit:
    def edit(path: str, reply: Any) -> Any:
        for choice in reply.get("choices", ()):
            change(choice)
        return reply

    return edit


def _cut(choice: dict[str, Any]) -> None:
    choice["token_ids"], choice["finish_reason"] = choice["token_ids"][:1], "length"
    choice["logprobs"]["token_logprobs"] = choice["logprobs"]["token_logprobs"][:1]


REFUSED: dict[str, tuple[Edit, str]] = {
    "another tokenizer": (
        lambda path, reply: {"tokens": reply["tokens"][::-1]} if path == "/tokenize" else reply,
        "tokenizer",
    ),
    "no new weights": (_without("/collective_rpc"), "VLLM_SERVER_DEV_MODE=1"),
    "no versions": (_without("/update_weight_version"), "/update_weight_version"),
    "no ids": (_choices(lambda choice: choice.pop("token_ids")), "no token ids"),
    "no log-probabilities": (_choices(lambda choice: choice.pop("logprobs")), "no log-probabilities"),
    "no scores": (_choices(lambda choice: choice.pop("prompt_logprobs", None)), "how likely"),
    "a limit of its own": (_choices(_cut), "--generation-config vllm"),
    "an id that is no token of the model": (
        _choices(lambda choice: choice["token_ids"].__setitem__(0, VOCABULARY)),
        f"id {VOCABULARY} of a vocabulary of {VOCABULARY}",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_server_that_cannot_sample_the_policy_is_refused_by_the_key_that_names_it(
    letters: ModuleType, servers: list[PolicyServer], tmp_path: Path, case: str
) -> None:
    """Though another one could."""
    edit, mend = REFUSED[case]
    servers[1].edit = edit
    with pytest.raises(ConfigError, match=rf"inference\.servers.*{servers[1].url} .*{mend}"):
        letters.make_trainer(tmp_path / "run", _on(servers)).train()
    assert not (tmp_path / "run" / "store.sqlite").exists()


def test_a_server_of_another_model_or_none_is_refused_by_the_key_that_names_it(
    letters: ModuleType, servers: list[PolicyServer], tmp_path: Path
) -> None:
    create_model(tmp_path / "small", "small", 0)
    with (
        PolicyServer(tmp_path / "small") as larger,
        pytest.raises(ConfigError, match=rf"inference\.servers.*{larger.url} .*500 to /collective_rpc"),
    ):
        letters.make_trainer(tmp_path / "run", _on([servers[0], larger])).train()
    servers[1].stop()
    with pytest.raises(ConfigError, match=rf"inference\.servers.*{servers[1].url} .*reached"):
        letters.make_trainer(tmp_path / "run", _on(servers)).train()


def _of_two(one: list[str], two: list[str], **inference: Any) -> dict[str, Any]:
    policies = {"one": {"servers": one}, "two": {"servers": two}}
    return {"policies": policies, "inference": inference or {"engine": "vllm", "lockstep": False}}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"inference": {"replicas": 2}}, "inference.replicas"),
        ({"inference": {"server_python": "python"}}, "inference.server_python"),
        ({"inference": {"servers": ["http://127.0.0.1:1/v1"]}}, "inference.servers"),
        ({"inference": {"server_seeds": False}}, "inference.server_seeds"),
        ({"inference": {"at_publish": "keep"}}, "inference.at_publish"),
        ({"inference": {**SERVED, "at_publish": "finish"}}, r"inference\.at_publish.*schedule\.kind"),
        ({"inference": {**SERVED, "at_publish": "soon"}}, r"inference\.at_publish"),
        (
            {
                "inference": {**SERVED, "at_publish": "keep"},
                "schedule": {"kind": "async"},
                "lora": {"rank": 2},
            },
            r"inference\.at_publish.*adapter",
        ),
        ({"inference": {"weight_transfer": "nccl"}}, r"inference\.weight_transfer.*inference\.engine"),
        ({"inference": {**SERVED, "weight_transfer": "ipc"}}, r"inference\.weight_transfer.*files, nccl"),
        ({"inference": {**SERVED, "weight_transfer": "nccl"}}, r"inference\.weight_transfer.*model\.device"),
        (
            {
                "inference": {**SERVED, "weight_transfer": "nccl"},
                "model": {"device": "cuda"},
                "lora": {"rank": 2},
            },
            r"inference\.weight_transfer.*adapter",
        ),
        ({"inference": {"engine": "sglang"}}, "inference.engine"),
        ({"inference": {"engine": "vllm", "lockstep": False}}, "inference.replicas"),
        ({"inference": {"engine": "vllm", "lockstep": False, "replicas": 1}}, "inference.server_python"),
        ({"inference": {"engine": "vllm", "servers": ["http://127.0.0.1:1/v1"]}}, "inference.lockstep"),
        ({"cluster": {"kind": "ray"}}, "cluster.kind"),
        ({"policies": {"one": {}, "two": {}}}, r"2 policies.*policies\.one\.servers"),
        (_of_two([FIRST], []), r"policies\.two\.servers"),
        ({"policies": {"one": {"servers": [FIRST]}}}, r"inference\.servers.*policies\.one\.servers"),
        (_of_two([FIRST], [SECOND], engine="local"), r"policies\.one\.servers.*inference\.engine"),
        (
            _of_two([FIRST], [SECOND], engine="vllm", lockstep=False, replicas=1, server_python="python"),
            r"inference\.replicas.*policies\.one\.servers",
        ),
    ],
)
def test_what_servers_cannot_do_is_refused_by_name(changes: dict[str, Any], key: str) -> None:
    whole = changes if "inference" in changes else {"inference": SERVED, **changes}
    with pytest.raises(ConfigError, match=key):
        load_config(whole)


@pytest.mark.parametrize(("transfer", "spared_gpu"), [("files", None), ("nccl", 3)])
async def test_each_policys_replicas_have_gpus_weights_and_logs_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transfer: str, spared_gpu: int | None
) -> None:
    """Of the second of two policies, with two replicas each."""
    started: list[tuple[Any, ...]] = []

    async def start(settings: Any, num: int, logs: Path, *stack: Any, **gpus: Any) -> list[Any]:
        started.append((settings, num, logs, gpus))
        raise InterruptedError

    monkeypatch.setattr(samplers, "start_replicas", start)
    inference = {**SERVED, "servers": [], "replicas": 2, "server_python": "python", "num_slots": 5}
    settings = {
        "policies": {"one": {}, "two": {}},
        "inference": {**inference, "max_context": 77, "max_prefill_tokens": 99},
    }
    config = load_config(settings)
    config.inference.weight_transfer, config.model.device = transfer, "cuda:3"
    create_model(tmp_path / "model", "tiny", 0)
    model = load_model(tmp_path / "model")
    with pytest.raises(InterruptedError):
        async with samplers.open_client(config, "two", model, tmp_path):
            raise AssertionError("no server has started")
    ((server, num, logs, gpus),) = started
    assert (num, logs) == (2, tmp_path / "servers" / "two")
    assert gpus == {"first_gpu": 2, "spared_gpu": spared_gpu}
    assert server.model == tmp_path / "served_weights" / "two" / "initial"
    assert (server.max_context, server.max_requests, server.max_prefill_tokens) == (77, 5, 99)
    assert server.takes_tensors == (transfer == "nccl")
    assert (server.adapter_rank, server.reads_images) == (0, False)
    assert not (tmp_path / "served_weights").exists(), "what servers would have read is gone"


def test_a_python_without_servers_is_refused_before_any_work(tmp_path: Path) -> None:
    inference = {**SERVED, "servers": [], "replicas": 1, "server_python": str(tmp_path / "python")}
    with pytest.raises(ConfigError, match=r"inference\.server_python"):
        samplers.require_servers(load_config({"inference": inference}))


async def test_only_a_sampler_that_measures_it_says_how_long_it_had_work(foreign_weights: Path) -> None:
    client = make_client(TrainConfig(), load_model(foreign_weights))
    assert samplers.busy_s(client) == 0.0
    assert samplers.busy_s(object()) is None
    await client.close()


def test_over_nccl_each_server_needs_a_gpu_beside_the_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "require_vllm", lambda python, key: None)
    monkeypatch.setattr(samplers, "require_nccl", lambda: None)
    monkeypatch.setattr(samplers, "cuda_devices", lambda: ["one", "two", "three"])
    inference = {"engine": "vllm", "lockstep": False, "server_python": "python", "weight_transfer": "nccl"}
    for replicas in (2, 3):
        settings = {"model": {"device": "cuda"}, "inference": {**inference, "replicas": replicas}}
        config = load_config(settings)
        if replicas == 2:
            samplers.require_servers(config)
            continue
        with pytest.raises(ConfigError, match=r"inference\.replicas.* 3.* 3 GPUs"):
            samplers.require_servers(config)
