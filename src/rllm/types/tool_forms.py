"""The ways in which tools are offered to a model."""

AUTO, NATIVE, TEXT = TOOL_FORMS = ("auto", "native", "text")
"""By the model's chat template (`native`), described in the system message with calls read from what the
model writes (`text`), or as text where the template has no tools (`auto`)."""
