"""Chat templates for models that bring none, by name: `plain` and `chatml`, or a file of yours.

A base model ends no turn by itself. So each named template has a text that ends an answer: a token of the
vocabulary where it is one, otherwise a text at which sampling stops.
"""

from pathlib import Path

from rllm.errors import ConfigError

PLAIN, CHATML = NAMES = ("plain", "chatml")
_BEGIN = "{{ bos_token }}"
_TURNS = {
    PLAIN: (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{{ 'Assistant:' + message['content'] + eos_token + '\\n' }}{% elif message['role'] == 'system' %}"
        "{{ message['content'] + '\\n\\n' }}{% else %}{{ 'User: ' + message['content'] + '\\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
    CHATML: (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
}
_ENDS = {PLAIN: "\nUser:", CHATML: "<|im_end|>"}


def chat_template_named(name: str, *, begins_texts: bool) -> str:
    """The template of that name, or in the file of that name. `begins_texts`: whether the tokenizer begins
    every text with a token, which a named template then prints.

    Raises ConfigError for a file that cannot be read.
    """
    if name in NAMES:
        return (_BEGIN if begins_texts else "") + _TURNS[name]
    path = Path(name)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The chat template {name!r} is neither {' nor '.join(NAMES)}, and as a file it cannot be read: "
            f"{error}."
        ) from error


def end_of_answer(template: str) -> str:
    """The text that ends an answer in a named template; empty for all others, which have end tokens."""
    turns = template.removeprefix(_BEGIN)
    return next((_ENDS[name] for name in NAMES if _TURNS[name] == turns), "")
