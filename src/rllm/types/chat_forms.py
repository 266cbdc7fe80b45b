"""The form of conversations with a model: template, tools and thoughts."""

from dataclasses import dataclass

from rllm.errors import ConfigError, choices_of

AUTO, NATIVE, TEXT = TOOL_FORMS = ("auto", "native", "text")
"""By the model's chat template (`native`), described in the system message with calls read from what the
model writes (`text`), or as text where the template has no tools (`auto`)."""
ON, OFF = "on", "off"
THINKING = (AUTO, ON, OFF)
"""Whether a model thinks before it answers; `auto` leaves it to its chat template."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ChatForm:
    """The form that a user chose; the defaults are the model's own."""

    tool_form: str = AUTO
    """One of TOOL_FORMS."""
    chat_template: str = ""
    """A named template, or the path of one, in place of the model's own."""
    thinking: str = AUTO
    """One of THINKING."""
    max_thinking_tokens: int = 0
    """Tokens that a thought may have before it is closed for the model; 0 lets it go on."""

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("tool form", self.tool_form, TOOL_FORMS),
            ("thinking", self.thinking, THINKING),
        ):
            if value not in choices:
                raise ConfigError(f"The {name} is {value!r}; {choices_of(value, choices)}.")
        if self.max_thinking_tokens < 0:
            raise ConfigError(
                f"`max_thinking_tokens` is {self.max_thinking_tokens}; it must be 0 (no limit) or more."
            )

    def changes(self) -> dict[str, str]:
        """Flag -> value of what is not as the model has it."""
        values = {
            "tool-form": self.tool_form,
            "chat-template": self.chat_template,
            "thinking": self.thinking,
            "max-thinking-tokens": str(self.max_thinking_tokens or ""),
        }
        return {name: value for name, value in values.items() if value not in ("", AUTO)}


OWN_FORM = ChatForm()
"""That of the model itself."""
