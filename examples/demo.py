"""`make demo`: the workflow of two agents of pretrained/relay.py, trained with an adapter.

torchrun --nproc-per-node 2 demo.py MODEL RUN
"""

import sys
from typing import Any

from pretrained.relay import trainer

SETTINGS: dict[str, Any] = {
    "steps": 24,
    "lora": {"rank": 16},
    "evaluation": {"num_tasks": 32, "every_steps": 0},
}

if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    model, run = sys.argv[1:]
    trainer(model, run, **SETTINGS).train()
