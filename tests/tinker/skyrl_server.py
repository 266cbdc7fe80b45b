"""SkyRL's Tinker server on this machine's CPU, started by the Python of `.venv-skyrl`.

    skyrl_server.py --port N --base-model DIR …   the server, which starts
    skyrl_server.py engine …                      what computes, as a child of it

SkyRL is written for Python 3.12, whose `TypedDict` it needs, and starts its engine with `uv run`, which would
make an environment of its own; both are seen to here, before it is imported.
"""

import argparse
import sys
import typing
from typing import Any

import typing_extensions

if sys.version_info < (3, 12):
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]


def engine_command(parent: list[str], config: Any) -> list[str]:
    """In place of `_build_uv_run_cmd_engine`."""
    from skyrl.tinker.config import config_to_argv

    return [sys.executable, __file__, "engine", *config_to_argv(config)]


def main() -> None:
    if sys.argv[1] == "engine":
        from skyrl.tinker import engine

        del sys.argv[1]
        engine.main()
        return
    import uvicorn
    from skyrl.tinker import api

    api._build_uv_run_cmd_engine = engine_command
    parser = argparse.ArgumentParser()
    api.add_model(parser, api.EngineConfig)
    parser.add_argument("--port", type=int, required=True)
    words = vars(parser.parse_args())
    port = words.pop("port")
    api.app.state.engine_config = api.EngineConfig.model_validate(words)
    uvicorn.run(api.app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
