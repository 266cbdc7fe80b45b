"""The value that `train()` of every trainer returns, which a notebook shows as a table with its curve."""

from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllm.types.html import html_table, percent


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainResult:
    """Where a finished run is and what it came to."""

    directory: Path
    summary: dict[str, Any]
    """`untrained`, `before` and `after` (each `success`, `greedy` and their intervals),
    `wall_s`, `phase_s`."""

    @property
    def model_path(self) -> Path:
        """The trained model, in Hugging Face format; of a run with one policy."""
        return self.directory / "model"

    def model_path_of(self, policy: str) -> Path:
        """The model of one of several policies."""
        return self.directory / "models" / policy

    def _repr_html_(self) -> str:
        """In a notebook: what was measured, with intervals, and the learning curve."""
        reports = {
            name: each for name in ("untrained", "before", "after") if (each := self.summary.get(name))
        }
        if any("success" in each for each in reports.values()):
            columns = ["success, 95 %", "greedy, 95 %"]
            cells = [
                [percent(each.get(way), each.get(f"{way}_interval")) for way in ("success", "greedy")]
                for each in reports.values()
            ]
        else:  # supervised
            numbers = [
                {key: value for key, value in each.items() if isinstance(value, int | float)}
                for each in reports.values()
            ]
            columns = list(dict.fromkeys(key for each in numbers for key in each))
            cells = [[f"{each[key]:.4g}" if key in each else "–" for key in columns] for each in numbers]
        rows = [(name, *each) for name, each in zip(reports, cells, strict=True)]
        curve = self.directory / "curve.png"
        picture = b64encode(curve.read_bytes()).decode() if curve.is_file() else ""
        image = f'<img alt="learning curve" src="data:image/png;base64,{picture}">' if picture else ""
        return html_table(("", *columns), rows, str(self.directory)) + image
