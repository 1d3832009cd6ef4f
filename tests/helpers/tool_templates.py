"""Small chat templates in the published forms of tool calls, written for these tests."""

from __future__ import annotations

_CHATML_TOOLS = """{%- if tools %}{{- '<|im_start|>system\n<tools>\n' }}
{%- for tool in tools %}{{- tool | tojson ~ '\n' }}{%- endfor %}
{{- '</tools><|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' ~ message.content ~ '\n</tool_response><|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' ~ message.role ~ '\n' ~ (message.content or '') }}
{%- for call in message.tool_calls or [] %}CALL{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}THOUGHT{%- endif %}"""

_JSON_CALL = """{{- '\n<tool_call>\n{"name": ' ~ call.function.name | tojson ~ ', "arguments": ' ~
call.function.arguments | tojson ~ '}\n</tool_call>' }}"""

_XML_CALL = """{{- '\n<tool_call>\n<function=' ~ call.function.name ~ '>\n' }}
{%- for name, value in call.function.arguments.items() %}
{{- '<parameter=' ~ name ~ '>\n' ~ (value if value is string else value | tojson) }}
{{- '\n</parameter>\n' }}
{%- endfor %}{{- '</function>\n</tool_call>' }}"""

HERMES = _CHATML_TOOLS.replace("CALL", _JSON_CALL).replace("THOUGHT", "")
XML = _CHATML_TOOLS.replace("CALL", _XML_CALL).replace("THOUGHT", "{{- '<think>\n' }}")
LLAMA = """{%- for tool in tools or [] %}{{- tool | tojson ~ '\n' }}{%- endfor %}
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\n\n' }}
{%- if message.tool_calls %}{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' ~ call.name ~ '", "parameters": ' ~ call.arguments | tojson ~ '}' }}
{%- else %}{{- message.content }}{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n\n' }}{%- endif %}"""
NONE = """{%- for message in messages %}{{- message.role | capitalize ~ ': ' ~ message.content }}
{{- '<|im_end|>' }}{%- endfor %}{%- if add_generation_prompt %}{{- 'Assistant: ' }}{%- endif %}"""

# One system message, in front; a question of the user; calls as XML, through the arguments' items.
STRICT = (
    """{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('in front') }}{% endif %}
{%- endfor %}{%- if not messages | selectattr('role', 'equalto', 'user') | list %}
{{- raise_exception('no question') }}{%- endif %}"""
    + XML
)

FORMS = {"hermes": HERMES, "xml": XML, "llama": LLAMA, "none": NONE}
