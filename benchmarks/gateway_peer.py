"""The other proxy of `gateway.py`: LiteLLM's, in a process and a virtual environment of its own.

    python gateway_peer.py PORT UPSTREAM_URL KEY

It is started by `gateway.py` with `--litellm-python`: one worker, no database, no callbacks, no request log.
"""

import os
import sys
import tempfile
from pathlib import Path

CONFIG = """
model_list:
  - model_name: scripted
    litellm_params:
      model: openai/scripted
      api_base: {upstream}
      api_key: none
litellm_settings:
  num_retries: 0
  telemetry: false
general_settings:
  master_key: {key}
"""


def main() -> None:
    if len(sys.argv) != 4:
        print("gateway_peer.py is a part of gateway.py, which starts it.")
        return
    port, upstream, key = sys.argv[1:]
    os.environ.update(LITELLM_MODE="PRODUCTION", LITELLM_LOG="ERROR", LITELLM_LOCAL_MODEL_COST_MAP="True")
    directory = tempfile.mkdtemp(prefix="gateway-peer-")
    config = Path(directory) / "config.yaml"
    config.write_text(CONFIG.format(upstream=upstream, key=key))
    from litellm import run_server

    run_server(
        ["--config", str(config), "--host", "127.0.0.1", "--port", port, "--num_workers", "1"],
        standalone_mode=False,
    )


if __name__ == "__main__":
    main()
