"""The fake server says what vLLM 0.32 said; tests/vllm asks a real one the same."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import transcript
from policy_server import PolicyServer


async def test_the_fake_server_says_what_vllm_said(tmp_path: Path) -> None:
    models = transcript.make_models(tmp_path)
    with PolicyServer(models[0], max_context=transcript.MAX_CONTEXT) as server:
        said = await transcript.record(server.url, models)
    assert not transcript.differences(json.loads(transcript.FILE.read_text()), said)
