"""Chat templates in the styles of published models, written for these tests, and hostile ones.

Every style has the constructs that the published template has: whitespace control, namespaces,
macros, loop controls, slices, tests, filters, functions.
"""

from __future__ import annotations

# Llama 3.1: a date, tools or none, a system message taken off the front, headers.
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: tools\\n" }}{%- endif %}
{{- "Today: " + date_string + "\\n\\n" + system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("one call at a time") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# Qwen 3: a namespace, the list reversed, thoughts cut out of earlier answers.
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and
        not(message.content.startswith('<tool_response>') and
            message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + content }}
        {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' ~ content ~ '\\n</tool_response>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>' }}{%- endif %}
{%- endif %}"""

# Mistral: alternation enforced over a filtered list, a default system message, lists of parts.
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and
                message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function|tojson %}{{- out[:-1] }}{{- '}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {%- set content = message["content"] %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + "}[/TOOL_RESULTS]" }}
    {%- else %}{{- raise_exception("Only user, assistant and tool roles are supported") }}
    {%- endif %}
{%- endfor %}
"""

# BitNet b1.58 2B4T: labels and the end of a turn.
BITNET = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
    "message['role'] | capitalize + ': '+ message['content'] | string | trim + '<|eot_id|>' %}"
    "{{ content }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)

# Gemma, Phi and kin: macros with defaults, parts of a content, marks for training, loop controls.
MACROS = """{%- macro part(content, indent=2, first='') -%}
{%- if content is string -%}{{ first ~ content }}
{%- else -%}{%- for piece in content -%}{%- if piece.type != 'text' -%}{%- continue -%}
{%- endif -%}{{ piece['text'] | indent(indent) }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set names = {'user': 'U', 'assistant': 'A'} -%}
{%- for message in messages -%}
{%- if loop.index0 > 20 -%}{%- break -%}{%- endif -%}
{{ names.get(message.role, message.role | upper) }}{{ ' ' * 3 }}
{%- generation -%}{%- set inner = part(message.content, first='>') -%}{{ inner }}
{%- endgeneration -%}{{ '%03d|%5.2f' % (loop.index, loop.index / 3) }}
{{ inner is defined }}{{ message | tojson(indent=2, sort_keys=true) }}
{{ message | tojson(separators=(',', ':')) }}{{ message.items() | list | length }}
{%- endfor -%}
{{ documents is none }}{{ tools is defined }}"""

# Qwen 3.5: macros over lists of parts, options that are checked, an answer that begins in thought.
QWEN35 = """{%- macro text_of(content, role) %}
    {%- if content is string %}{{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}
            {%- if 'text' in part %}{{- part.text }}
            {%- else %}{{- raise_exception('no such part in ' ~ role) }}{%- endif %}
        {%- endfor %}
    {%- elif content is none or content is undefined %}{{- '' }}
    {%- else %}{{- raise_exception('a content of another kind') }}{%- endif %}
{%- endmacro %}
{%- set effort = reasoning_effort if reasoning_effort is defined else 'xhigh' %}
{%- set hints = {'low': 'Think little.', 'medium': '', 'high': '', 'xhigh': 'Think long.'} %}
{%- if effort not in hints %}
    {{- raise_exception('reasoning_effort must be low, medium, high or xhigh, not ' ~ effort) }}
{%- endif %}
{%- set system = namespace(text=hints[effort]) %}
{%- if messages[0].role == 'system' %}
    {%- set said = text_of(messages[0].content, 'system') | trim %}
    {%- set system.text = (said ~ '\n\n' ~ system.text) | trim %}
{%- endif %}
{%- if system.text %}{{- '<|im_start|>system\n' ~ system.text ~ '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if ns.question < 0 %}{{- raise_exception('no question') }}{%- endif %}
{%- for message in messages %}
    {%- set content = text_of(message.content, message.role) | trim %}
    {%- if message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.question %}
            {{- '<think>\n' ~ thought | trim ~ '\n</think>\n\n' }}
        {%- endif %}
        {{- content ~ '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' ~ content ~ '\n</tool_response><|im_end|>\n' }}
    {%- elif message.role != 'system' %}
        {{- '<|im_start|>' ~ message.role ~ '\n' ~ content ~ '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- else %}{{- '<think>\n' }}{%- endif %}
{%- endif %}"""

STYLES = {
    "llama": LLAMA,
    "qwen": QWEN,
    "qwen35": QWEN35,
    "mistral": MISTRAL,
    "bitnet": BITNET,
    "macros": MACROS,
}

_TIME, _SIZE = "no end within", "more (memory|text) than|no end within|OverflowError|ValueError"

# name -> (template, what the message must speak of)
BOMBS = {
    "nested loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}",
        _TIME,
    ),
    "loops over text": (
        "{% set s = 'ab' * 99999 %}{% for a in s %}{% for b in s %}{% for c in s %}{% endfor %}"
        "{% endfor %}{% endfor %}",
        _TIME,
    ),
    "macros that call twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(60) }}",
        _TIME,
    ),
    "a tower of powers": ("{{ (9 ** (9 ** 9)) % 7 }}", _TIME),
    "a rounding": ("{{ 1.5 | round(999999999, 'ceil') }}", _SIZE),
    "a product of text": ("{{ 'a' * 4000000000 }}", _SIZE),
    "a product of lists": ("{{ ([0] * 4000000000) | length }}", _SIZE),
    "doubling by ~": (
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}"
        "{% endfor %}{{ ns.s | length }}",
        _SIZE,
    ),
    "doubling by join": (
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] | join "
        "%}{% endfor %}",
        _SIZE,
    ),
    "growing by replace": (
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s.replace('a', "
        "'aaaa') %}{% endfor %}",
        _SIZE,
    ),
    "center": ("{{ 'a' | center(4000000000) }}", _SIZE),
    "ljust": ("{{ 'a'.ljust(4000000000) }}", _SIZE),
    "indent": ("{{ ('a\\n' * 9999) | indent(9999999) }}", _SIZE),
    "a width of %": ("{{ '%4000000000d' % 1 }}", _SIZE),
    "a width of format": ("{{ '{:>2000000000}{:>2000000000}'.format(1, 2) }}", _SIZE),
    "batch": ("{{ [1] | batch(4000000000, 'x') | list | length }}", _SIZE),
    "lipsum": ("{{ lipsum(999999) }}", _SIZE),
    "tojson": ("{{ ([[1]] * 99999) | tojson(indent=99999) }}", _SIZE),
    "endless output": (
        "{% for a in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
        "more text than any model reads",
    ),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "brackets": ("{{ " + "(" * 100_000, "RecursionError|parses|crash"),
    "lists in lists": ("{{ " + "[" * 3000 + "]" * 3000 + " }}", "RecursionError|parses|crash"),
    "a long rejection": ("{{ raise_exception('no' * 9999999) }}", "rejects: nono"),
}
