"""The one door to a terminal: whatever is printed through it, text of others included, steers nothing.

anything that rich prints ──► Screen ──► styles of ours, and text in which a control character is `\\x1b`
"""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from rllm.errors.redaction import escaped


class Screen(Console):
    """A console that takes no text for markup, links or emoji, and prints no control character of a text."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)
        if self.width < 1:  # COLUMNS=0, of a terminal whose size nobody knows
            self.width = 80

    def render_str(self, text: str, **options: Any) -> Text:
        """Before columns are measured."""
        return super().render_str(escaped(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Text that was put together elsewhere."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escaped(segment.text))
