"""What a harness's model sampled: each token in one row, with its version, and nothing else is trained on."""

import asyncio
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from playing import played

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))
from readable_weights import FIRST_TOKEN, publish_between_steps, readable_model

from rllm.inference.local.client import LocalClient
from rllm.inference.scripted import END_ID, ScriptedClient
from rllm.trainer.samples import training_batch
from rllm.types.episode import Outcome
from rllm.types.messages import Message
from rllm.types.sample import NOT_SAMPLED, TrainingSample
from rllm.types.task import Task

BUSY = """
import json, socket, sys, urllib.parse, urllib.request
from concurrent.futures import ThreadPoolExecutor
url = sys.argv[1] + "/chat/completions"

def request(*messages, headers={}, **fields):
    body = json.dumps({"messages": messages, **fields}).encode()
    return urllib.request.Request(url, body, {"Content-Type": "application/json", **headers})

def ask(*messages, **more):
    reply = json.load(urllib.request.urlopen(request(*messages, **more)))
    return [each["message"] for each in reply["choices"]]

def user(text):
    return {"role": "user", "content": text}

task, system = user(sys.argv[2]), {"role": "system", "content": "Help."}
(plan,) = ask(task)
history = [task, plan, user("result")]
with ThreadPoolExecutor(8) as threads:  # two goes at the next turn, and four sub-agents
    turns = [threads.submit(ask, *history), threads.submit(ask, *history)]
    helpers = [threads.submit(ask, system, user(f"Part {n}.")) for n in range(4)]
    (step,), _ = (each.result() for each in turns)
    (help0,) = helpers[0].result()
    ask(system, user("Part 0."), help0, user("More."))
once = {"Idempotency-Key": "k1"}
(left,) = ask(*history, step, user("a reminder"), headers=once)
assert ask(*history, step, user("a reminder"), headers=once) == [left]  # a retry gets the same answer

def lost(*messages):  # the connection breaks when the answer comes; the same is asked again
    there = urllib.parse.urlsplit(url)
    body = json.dumps({"messages": messages}).encode()
    head = f"POST {there.path} HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
    with socket.create_connection((there.hostname, there.port)) as line:
        line.sendall(head.encode() + body)
        line.recv(1)
    return ask(*messages, headers={"x-stainless-retry-count": "1"})

lost(*history, step, user("another"))
summary = user("Summary of all until now, which nobody sampled.")
(after,) = ask(task, summary)  # compaction
ask(task, summary, after, user("on"))
rewritten = {"role": "assistant", "content": "what nobody said"}
ask(task, rewritten, user("result"))
ask(task, summary, user("two ideas"), n=2)
"""


def sampled_texts(rows: Sequence[TrainingSample], client: ScriptedClient) -> list[str]:
    """Of each stretch of tokens that is trained on."""
    texts: list[str] = []
    for row in rows:
        is_sampled_T = row.policy_versions_T != NOT_SAMPLED
        ends = np.flatnonzero(np.diff(np.concatenate(([0], is_sampled_T, [0]))))
        for start, end in ends.reshape(-1, 2):
            ids = row.token_ids_T[start:end].tolist()
            texts.append(client.tokenizer.decode([each for each in ids if each != END_ID]))
    return texts


async def test_all_that_was_sampled_is_in_one_row_whatever_the_harness_does(
    task: Task, tmp_path: Path
) -> None:
    """Calls side by side, sub-agents, retries, lost answers, compaction, a rewritten history, two choices."""
    numbers = itertools.count()
    said: list[str] = []

    def say(messages: Sequence[Message]) -> str:
        said.append(f"<sampled {next(numbers)}>")
        return said[-1]

    (tmp_path / "busy.py").write_text(BUSY)
    command = 'copy = ["busy.py"]\ncommand = ["python3", "{harness}/busy.py", "{base_url}", "{task}"]'
    (tmp_path / "busy.toml").write_text(command)
    client = ScriptedClient(say)
    episode = await played(str(tmp_path / "busy.toml"), task, client, tmp_path)
    assert episode.outcome is Outcome.SCORED, episode.info
    (trajectory,) = episode.trajectories
    batch = training_batch([episode], {trajectory.uid: np.ones(len(trajectory.steps))})
    assert sorted(sampled_texts(batch.samples, client)) == sorted(said)
    assert len(said) == 15
    counts = batch.token_counts
    assert counts["trained"] == counts["sampled"] == sum(row.num_trainable for row in batch.samples)
    # the main thread, its second try at a turn and what was lost; four helpers; what follows the summary; the
    # rewritten history; two ideas
    assert len(batch.samples) == 11


@pytest.mark.slow
async def test_weights_published_while_a_harness_works_are_the_versions_of_its_tokens(
    task: Task, tmp_path: Path
) -> None:
    text = """
import json, sys, urllib.request
messages = [{"role": "user", "content": "Go."}]
for turn in range(3):
    body = json.dumps({"messages": messages, "max_tokens": 32}).encode()
    reply = urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/chat/completions", body))
    messages += [json.load(reply)["choices"][0]["message"], {"role": "user", "content": "On."}]
"""
    (tmp_path / "turns.py").write_text(text)
    command = 'copy = ["turns.py"]\ncommand = ["python3", "{harness}/turns.py", "{base_url}", "{task}"]'
    (tmp_path / "turns.toml").write_text(command)
    model = readable_model(tmp_path / "model")
    client = LocalClient(model, num_slots=2, max_context=192, lockstep=True)

    async def publish() -> None:
        for version, after in ((1, 10), (2, 40), (3, 50), (4, 80)):
            await publish_between_steps(client, model, version, after)

    publishing = asyncio.create_task(publish())
    try:
        episode = await played(str(tmp_path / "turns.toml"), task, client, tmp_path)
        await publishing
    finally:
        publishing.cancel()
        await client.close()
    assert episode.outcome is Outcome.SCORED, episode.info
    (trajectory,) = episode.trajectories
    versions = [version for step in trajectory.steps for version in step.policy_versions]
    assert versions == [each - FIRST_TOKEN for step in trajectory.steps for each in step.response_ids]
    assert (len(versions), set(versions)) == (96, {0, 1, 2, 3, 4})
    rows = training_batch([episode], {trajectory.uid: np.ones(3)}).samples
    trained = [row.token_ids_T[row.policy_versions_T != NOT_SAMPLED] - FIRST_TOKEN for row in rows]
    known = [row.policy_versions_T[row.policy_versions_T != NOT_SAMPLED] for row in rows]
    assert np.concatenate(trained).tolist() == np.concatenate(known).tolist() == versions
