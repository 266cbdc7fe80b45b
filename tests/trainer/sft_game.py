"""A supervised run of a second, and a process that trains it until it is killed, as letter_game.py is.

{"run": DIR}                                train, or resume, to the end     {"signal": 0, "events": […]}
{"run": DIR, "die_at_line": ["train", 2]}   kill -9 when that line is logged               {"signal": 9}
{"run": DIR, "die_at_event": 57}            kill -9 at the 57th time that a file of the run is touched
{"run": DIR, "interrupt_at_line": …}        Ctrl-C when that line is logged                  {"signal": 2}
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from letter_game import EndAtLine, FileEvents

from rllm.trainer.sft import AgentSFTTrainer

SETTINGS: dict[str, Any] = {
    "seed": 3,
    "threads": 1,
    "epochs": 2,
    "batch_size": 4,
    "optimizer": {"learning_rate": 3e-3, "schedule": "cosine", "warmup_steps": 1},
    "evaluation": {"every_steps": 2},
    "checkpoint": {"every_steps": 2, "keep": 2},
    "data": {"heldout_fraction": 0.25},
}
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"{letter} {other}"},
            {"role": "assistant", "content": letter},
            {"role": "user", "content": other},
            {"role": "assistant", "content": f"{letter} {letter}"},
        ]
    }
    for letter in "ABCD"
    for other in "EFG"
]


def make_trainer(run: Path, **more: Any) -> AgentSFTTrainer:
    return AgentSFTTrainer(**{"config": SETTINGS, "train_dataset": CHATS, "output": run, **more})


def _serve(request: dict[str, Any]) -> None:
    """In the child: train, and tell what was done to files."""
    run = Path(request["run"])
    events = FileEvents(run, request.get("die_at_event"))
    tracker = None
    for fate, how in (("die_at_line", signal.SIGKILL), ("interrupt_at_line", signal.SIGINT)):
        if fate in request:
            tracker = EndAtLine(tuple(request[fate]), how)
    trainer = make_trainer(run, tracker=tracker)
    sys.addaudithook(events)
    try:
        trainer.train()
    except KeyboardInterrupt:
        print(json.dumps({"signal": int(signal.SIGINT)}), flush=True)
    else:
        print(json.dumps({"signal": 0, "events": events.seen}), flush=True)


def main() -> None:
    # Imported before the first fork: children then have them for nothing.
    from matplotlib import backends, figure, font_manager, ticker  # noqa: F401
    from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast  # noqa: F401

    import rllm.models.builtin
    import rllm.trainer.backends.torch_measure
    import rllm.trainer.policies  # noqa: F401

    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                _serve(json.loads(line))
                os._exit(0)
            except BaseException:  # noqa: BLE001  a child must never go on as its parent
                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"signal": status & 0x7F, "code": status >> 8}), flush=True)


if __name__ == "__main__":
    main()
