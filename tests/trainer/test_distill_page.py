"""docs/distill.md: its code runs as it stands, and its keys are keys."""

import re
from pathlib import Path
from typing import Any

from rllm.config.distill import DistillConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "distill.md").read_text()


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    names: dict[str, Any] = {"folder": tmp_path}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(block, "docs/distill.md", "exec"), names)
    assert names["result"].summary["after"]["reverse_kl"] > 0.0
    assert names["result"].model_path.is_dir()


def test_the_keys_of_the_page_exist() -> None:
    named = set(re.findall(r"`distill\.(\w+)`", PAGE))
    assert named <= set(DistillConfig.__dataclass_fields__)
    assert {"teacher", "gamma", "baseline", "clip"} <= named
