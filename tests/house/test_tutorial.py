"""The tutorial's Python runs as it stands: its blocks, from top to bottom, are one program that ends well.

docs/tutorial.md ──► ```python blocks ──► one file in an empty directory ──► exit code 0, and the run promised
"""

import os
import re
import subprocess
import sys
from pathlib import Path

LONGEST_S = 240.0
"""The page says half a minute; a machine that is busy elsewhere takes longer, one that hangs is stopped."""

BLOCK = re.compile(r"^```python\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_python_of_the_tutorial_is_a_program_that_trains_an_agent(checkout: Path, tmp_path: Path) -> None:
    blocks = [match["body"] for match in BLOCK.finditer((checkout / "docs" / "tutorial.md").read_text())]
    program = tmp_path / "tutorial.py"
    program.write_text("\n\n".join(blocks))
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=LONGEST_S,
    )
    assert done.returncode == 0, done.stderr
    assert "mean reward on numbers never trained on" in done.stdout
    assert (tmp_path / "runs" / "tutorial" / "summary.json").is_file()
