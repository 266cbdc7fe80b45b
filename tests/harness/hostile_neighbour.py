"""One hostile sandbox beside honest ones, in a process of 1,024 descriptors.

`python hostile_neighbour.py FOLDER` prints the outcome, the reward and the cause of each episode.
"""

import asyncio
import json
import logging
import os
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "rewards"))
from playing import played_all
from swe_projects import repository, row, usable_backend

from rllm.types.task import Task

PROGRAM = """
import json, os, socket, sys, time, urllib.request
own = urllib.request.urlparse(sys.argv[1])
def ask():
    body = json.dumps({"messages": [{"role": "user", "content": "Go on."}]}).encode()
    urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/chat/completions", body)).read()
def flood(first):
    lines = []
    until = time.monotonic() + 5
    while time.monotonic() < until:
        try:
            line = socket.create_connection((own.hostname, own.port), 1)
            line.sendall(first)
            lines.append(line)
        except OSError:
            time.sleep(0.01)
        if len(lines) > 180:
            lines.pop(0).close()
if "hostile" in sys.argv[2]:
    ask()
    head = f"POST {own.path}/chat/completions HTTP/1.1\\r\\nHost: x\\r\\n".encode()
    firsts = [b"", head, head + b"Content-Length: 9\\r\\n\\r\\n", b"GET /elsewhere HTTP/1.1\\r\\n\\r\\n"]
    children = []
    for number in range(12):
        child = os.fork()
        if child == 0:
            flood(firsts[number % 4])
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
else:
    for turn in range(8):
        ask()
        time.sleep(0.5)
    path = "calc/__init__.py"
    text = open(path).read()
    open(path, "w").write(text.replace("a - b", "a + b"))
"""


async def main(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    logging.basicConfig()
    source, commit = repository(folder)
    os.environ["RLLM_HOME"] = str(folder / "home")
    (folder / "program.py").write_text(PROGRAM)
    harness = folder / "my_agent.toml"
    harness.write_text(
        'copy = ["program.py"]\ncommand = ["python3", "{harness}/program.py", "{base_url}", "{task}"]'
    )
    issues = ["hostile", *["an honest one"] * 3]
    tasks = [
        Task(
            id=f"{number}-{issue}",
            metadata={
                "entry": row(source, base_commit=commit, problem_statement=issue),
                "backend": usable_backend(),
            },
        )
        for number, issue in enumerate(issues)
    ]
    episodes = await played_all(
        str(harness), tasks, lambda _: "words", folder, n_parallel_tasks=4, max_failed_fraction=1.0
    )
    for episode in episodes:
        cause = episode.info.get("error", {}).get("message", "")
        print(json.dumps([episode.task_id, episode.outcome, episode.reward, cause]))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
