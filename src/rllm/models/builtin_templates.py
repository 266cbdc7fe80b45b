"""The chat templates of the built-in models."""

CHAT_TEMPLATE = (
    "{% if tools %}"
    "{{ '<|system|>' }}"
    "{% if messages and messages[0]['role'] == 'system' %}"
    "{{ (messages[0]['content'] or '') + '\\n' }}{% set messages = messages[1:] %}"
    "{% endif %}"
    "{{ 'Tools:' }}"
    "{% for tool in tools %}"
    "{% set parameters = (tool['function']['parameters'] or {})['properties'] or {} %}"
    "{{ '\\n' + tool['function']['name'] + '(' }}"
    "{% for name in parameters %}"
    "{% set kind = parameters[name]['type'] or 'any' %}"
    "{{ (', ' if loop.index0 else '') + name + ': ' + (kind if kind is string else kind | join('|')) }}"
    "{% endfor %}"
    "{{ ')' }}"
    "{% if tool['function']['description'] %}"
    "{{ ' ' + tool['function']['description'].split('\\n')[0] }}"
    "{% endif %}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\\n' if loop.index0 or message['content'] else '' }}"
    "{{ '<tool_call>\\n{\"name\": ' + call['function']['name'] | tojson + ', \"arguments\": ' }}"
    "{% if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}"
    "{% else %}{{ call['function']['arguments'] | tojson }}{% endif %}"
    "{{ '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""One token opens a message and one closes it: a small model reads every one of them at every turn.

Tools are listed as signatures, not as schemas, for the same reason. Calls are written as Hermes and Qwen do,
with the tags spelled by ordinary tokens.
"""

IMAGE_MARK = "<image>"
"""The token of models that read images, which stands where a message shows one."""

IMAGE_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}",
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] or [] %}"
    f"{{{{ part['text'] if part['type'] == 'text' else '{IMAGE_MARK}' }}}}"
    "{% endfor %}{% endif %}",
)
