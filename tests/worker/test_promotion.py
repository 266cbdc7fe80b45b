"""Another model behind a worker: only if its interval says so, and without a call dropped."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import worker_files as files
from click.testing import CliRunner, Result

from rllm.build.models import model_directory
from rllm.cli.main import rllm as front_door
from rllm.contracts import parse_contract, read_contract
from rllm.contracts.binding_edit import with_model
from rllm.errors import ContractError, InferenceError
from rllm.worker.host import WorkerHost
from rllm.worker.http import WorkerServer

PROGRAM = """
import asyncio

async def solve(task, config):
    await asyncio.sleep(0.02)
    return {"length": len(task.metadata["task"]) if config.model.startswith("good") else -1}
"""


def rllm(*words: str | Path) -> Result:
    return CliRunner().invoke(
        front_door, [str(word) for word in words], prog_name="rllm", catch_exceptions=False
    )


@pytest.fixture
def contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A worker that is right with a model called good and wrong with one called bad."""
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    path = files.write_worker(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    text = path.read_text().replace('"program.py:solve"', '"program.py:solve", model: bad  # for now\n      ')
    path.write_text(text.replace("rllm: {program", "rllm: {  program"))
    for name in ("good", "good-too", "bad"):
        shutil.copytree(model_directory(Path("builtin:tiny")), tmp_path / name)
    rows = [{"inputs": {"task": "x" * number}, "outputs": {"length": number}} for number in range(12)]
    rows = [{"inputs": {"run_id": "same", **row["inputs"]}, "outputs": row["outputs"]} for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_model_is_promoted_only_if_the_whole_interval_is_above_zero(contract: Path) -> None:
    rows, folder, before = contract.parent / "rows.jsonl", contract.parent, contract.read_text()

    def promote(name: str) -> tuple[int, dict[str, Any]]:
        result = rllm("worker", "promote", contract, folder / name, "--if-better", rows, "--json")
        return result.exit_code, json.loads(result.stdout)

    code, verdict = promote("good")
    assert (code, verdict["promoted"], verdict["current"], verdict["candidate"]) == (0, True, 0.0, 1.0)
    assert verdict["interval"][0] > 0
    assert contract.read_text() == before.replace("model: bad", "model: good"), "not a byte else"
    for name in ("bad", "good-too"):
        code, verdict = promote(name)
        assert (code, verdict["promoted"]) == (1, False)
        assert read_contract(contract).binding.model == "good"
    (folder / "rows.jsonl").write_text('{"inputs": {"run_id": "a", "task": "x"}}\n')
    refused = rllm("worker", "promote", contract, folder / "good", "--if-better", rows)
    assert refused.exit_code == 2
    assert "rows.jsonl:1 has no `outputs`" in " ".join(refused.stderr.split())


BROKEN = """
from rllm.errors import InferenceError

async def solve(task, config):
    if not config.model.startswith("good"):
        raise InferenceError("the server is gone")
    return {"length": len(task.metadata["task"])}
"""


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_run_that_failed_says_nothing_about_a_model(contract: Path, attempts: int) -> None:
    """Also one whose only attempt it was: no failure is a wrong answer."""
    folder, before = (
        contract.parent,
        contract.read_text().replace("max_attempts: 3", f"max_attempts: {attempts}"),
    )
    contract.write_text(before)
    (folder / "program.py").write_text(BROKEN)
    words = ("worker", "promote", contract, folder / "good", "--if-better")
    refused = rllm(*words, folder / "rows.jsonl")
    assert refused.exit_code == 2
    assert "the server is gone" in " ".join(refused.stderr.split())
    assert contract.read_text() == before


def test_rows_that_no_model_could_get_right_are_refused_before_any_run(contract: Path) -> None:
    folder, rows = contract.parent, contract.parent / "odd.jsonl"
    (folder / "program.py").write_text("def solve(task, config):\n    raise AssertionError\n")
    for row, word in (
        ('{"inputs": {"text": "x"}, "outputs": {"length": 1}}', "break their schema at $"),
        ('{"inputs": {"task": 1}, "outputs": {"length": 1}}', "$.task"),
        ('{"inputs": {"task": "x"}, "outputs": {"lenght": 1}}', "`lenght`, and outputs have"),
        ('{"inputs": {"task": "x"}, "outputs": {"length": "one"}}', "'one', which the output schema"),
        ('{"inputs": {"task": "x"}, "outputs": {"run_id": "a", "status": "ok"}}', "no `outputs`"),
        ('{"inputs": {"task": "x"}, "outputs": [1]}', "no `outputs`"),
    ):
        rows.write_text(f'{{"inputs": {{"task": "x"}}, "outputs": {{"length": 1}}}}\n{row}\n')
        refused = rllm("worker", "promote", contract, folder / "good", "--if-better", rows)
        assert refused.exit_code == 2
        message = "".join(refused.stderr.split())
        assert "odd.jsonl:2" in message
        assert "".join(word.split()) in message


def test_outputs_as_they_were_served_are_outputs_to_compare_with(contract: Path) -> None:
    """The run's name and its status are filled in anew."""
    rows, outputs = contract.parent / "rows.jsonl", {"run_id": "served", "status": "ok", "length": 4}
    rows.write_text(12 * (json.dumps({"inputs": {"task": "four"}, "outputs": outputs}) + "\n"))
    assert rllm("worker", "promote", contract, contract.parent / "good", "--if-better", rows).exit_code == 0


def test_an_evaluator_that_raises_is_named_with_its_row(contract: Path) -> None:
    folder = contract.parent
    (folder / "judge.py").write_text("def right(inputs, outputs):\n    return outputs['lenght'] == 4\n")
    words = ("--if-better", folder / "rows.jsonl", "--evaluator", folder / "judge.py:right")
    refused = rllm("worker", "promote", contract, folder / "good", *words)
    assert (refused.exit_code, "row 1: KeyError: 'lenght'" in " ".join(refused.stderr.split())) == (2, True)


def test_a_contract_keeps_its_line_ends_and_its_rights(contract: Path) -> None:
    folder, rows = contract.parent, contract.parent / "rows.jsonl"
    contract.write_bytes(contract.read_bytes().replace(b"\n", b"\r\n"))
    contract.chmod(0o640)
    before = contract.read_bytes()
    linked = folder / "linked.worker.md"
    linked.symlink_to(contract)
    refused = rllm("worker", "promote", linked, folder / "good", "--if-better", rows)
    assert refused.exit_code == 2
    assert str(contract) in "".join(refused.stderr.split())
    assert rllm("worker", "promote", contract, folder / "good", "--if-better", rows).exit_code == 0
    assert contract.read_bytes() == before.replace(b"model: bad", b"model: good")
    assert contract.stat().st_mode & 0o777 == 0o640


def test_a_row_holds_any_character_of_json(contract: Path) -> None:
    rows, text = contract.parent / "rows.jsonl", "a\u2028b\x85c"
    row = {"inputs": {"run_id": "a", "task": text}, "outputs": {"length": len(text)}}
    rows.write_text(12 * (json.dumps(row, ensure_ascii=False) + "\n"), "utf-8")
    assert rllm("worker", "promote", contract, contract.parent / "good", "--if-better", rows).exit_code == 0


def test_a_contract_that_is_edited_meanwhile_is_left_as_it_is(contract: Path) -> None:
    edit = "contract.write_text(contract.read_text() + '\\n')"
    program = contract.parent / "program.py"
    program.write_text(
        f"from pathlib import Path\ncontract = Path({str(contract)!r})\n"
        + PROGRAM.replace("await asyncio", f"{edit}\n    await asyncio")
    )
    before, words = contract.read_text(), ("--if-better", contract.parent / "rows.jsonl")
    refused = rllm("worker", "promote", contract, contract.parent / "good", *words)
    assert (refused.exit_code, contract.read_text().rstrip("\n")) == (2, before.rstrip("\n"))


async def test_a_model_that_does_not_start_is_closed(contract: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Client:
        async def close(self) -> None:
            closed.append("client")

    class Policy:
        async def start(self) -> None:
            raise InferenceError("no memory is left")

    monkeypatch.setattr("rllm.build.workers.program_client", lambda *_, **__: Client())
    monkeypatch.setattr("rllm.build.workers.local_policy", lambda *_: Policy())
    with pytest.raises(InferenceError, match="no memory"):
        async with WorkerHost([read_contract(contract)], contract.parent / "runs"):
            pass
    assert closed == ["client"]


async def test_a_server_changes_over_without_dropping_a_call(contract: Path) -> None:
    rows, folder = contract.parent / "rows.jsonl", contract.parent
    answers: list[tuple[bool, int]] = []
    is_changed = is_over = False
    async with (
        WorkerHost([read_contract(contract)], folder / "runs") as host,
        aiohttp.ClientSession() as http,
    ):
        server = WorkerServer(host)
        await server.start()
        http.headers["Authorization"] = f"Bearer {server.token}"
        url = f"{server.url}/workers/measure/runs"

        async def call(caller: int) -> None:
            number = 0
            while not is_over:
                inputs = {"run_id": f"{caller}-{number}", "task": "four"}
                began_after = is_changed
                async with http.post(url, json={"inputs": inputs}) as reply:
                    assert reply.status == 200, await reply.text()
                    answers.append((began_after, (await reply.json())["outputs"]["length"]))
                number += 1

        async with asyncio.TaskGroup() as callers:
            for caller in range(8):
                callers.create_task(call(caller))
            words = ("--if-better", rows, "--server", server.url, "--token", server.token, "--json")
            result = await asyncio.to_thread(rllm, "worker", "promote", contract, folder / "good", *words)
            is_changed = True
            while sum(began_after for began_after, _ in answers) < 8:
                await asyncio.sleep(0.01)
            is_over = True
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["reloaded"]
        lengths = [length for _, length in answers]
        assert set(lengths[:8]) == {-1}
        assert {length for began_after, length in answers if began_after} == {4}, "the new model"
        model = host.workers["measure"].backing.model
        assert model is not None
        assert [each.model.name for each in model._served] == ["good"], "the old one is closed"
        contract.write_text(contract.read_text().replace("max_attempts: 3", "max_attempts: 4"))
        async with http.post(f"{server.url}/workers/measure/model") as reply:
            assert reply.status == 409
            assert "than its model" in await reply.text()
        await server.close()


def test_a_contract_without_a_model_has_none_to_change(tmp_path: Path) -> None:
    text = files.write_worker(tmp_path).read_text()
    with pytest.raises(ContractError, match="names no model"):
        with_model(text, "runs/better")
    block = text.replace(
        'rllm: {program: "program.py:solve"}', "rllm:\n  program: a.py:b\n  model: 'old one'"
    )
    changed = with_model(block, "a b: c")
    assert parse_contract(changed).binding.model == "a b: c"
    assert changed.replace('"a b: c"', "'old one'") == block
