"""A run on preferences of a second, and a process that trains it until it is killed; the fates are
letter_game.py's.

{"run": DIR, "loss": "kto"}                 train, or resume, to the end     {"signal": 0, "events": […]}
{"run": DIR, "die_at_line": ["train", 2]}   kill -9 when that line is logged               {"signal": 9}
{"run": DIR, "die_at_event": 57}            kill -9 at the 57th time that a file of the run is touched
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from letter_game import EndAtLine, FileEvents, merged

from rllm.trainer.dpo import AgentDPOTrainer

SETTINGS: dict[str, Any] = {
    "seed": 3,
    "threads": 1,
    "epochs": 2,
    "batch_size": 5,
    "optimizer": {"learning_rate": 1e-3, "warmup_steps": 1},
    "evaluation": {"every_steps": 2},
    "checkpoint": {"every_steps": 2, "keep": 2},
    "data": {"heldout_fraction": 0.25},
}
PAIRS = [
    {"prompt": f"{letter} or {other}", "chosen": letter, "rejected": f"{other} {other}"}
    for letter in "ABC"
    for other in "DEFG"
]
LABELLED = [
    {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
    for pair in PAIRS
    for side in ("chosen", "rejected")
]


def make_trainer(
    run: Path, loss: str = "dpo", changes: dict[str, Any] | None = None, **more: Any
) -> AgentDPOTrainer:
    """A trainer of the game; `changes` are sections or keys on top of SETTINGS."""
    config = merged(merged(SETTINGS, {"preference": {"loss": loss}}), changes or {})
    rows = LABELLED if loss == "kto" else PAIRS
    return AgentDPOTrainer(**{"config": config, "train_dataset": rows, "output": run, **more})


def _serve(request: dict[str, Any]) -> None:
    """In the child: train, and tell what was done to files."""
    run = Path(request["run"])
    events = FileEvents(run, request.get("die_at_event"))
    tracker = None
    if "die_at_line" in request:
        tracker = EndAtLine(tuple(request["die_at_line"]), signal.SIGKILL)
    trainer = make_trainer(run, request.get("loss", "dpo"), tracker=tracker)
    sys.addaudithook(events)
    trainer.train()
    print(json.dumps({"signal": 0, "events": events.seen}), flush=True)


def main() -> None:
    # Imported before the first fork: children then have them for nothing.
    from matplotlib import backends, figure, font_manager, ticker  # noqa: F401
    from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast  # noqa: F401

    import rllm.models.builtin
    import rllm.trainer.preference_job  # noqa: F401

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
