"""Records what transformers makes of chat templates: writes tests/vectors/chat_templates.json.

    python tests/peers/chat_templates.py tests/vectors/chat_templates.json

Needs transformers and jinja2. The templates are written for this, in the manners of the field: each uses what models' own
templates use of Jinja, of Python and of transformers.
"""

import json
import sys

import transformers
from transformers.utils import chat_template_utils

TEMPLATES = {
    # Tools as JSON lines, calls as JSON, thinking that is cut off, runs of tool answers put together.
    "chatml": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages[::-1] %}
    {%- if ns.last_query < 0 and message.role == 'user' %}
        {%- set ns.last_query = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant' }}
        {%- if content %}
            {{- '\\n' + content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {%- if tool_call.arguments is string %}
                {{- tool_call.arguments }}
            {%- else %}
                {{- tool_call.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{{- '[query ' ~ ns.last_query ~ ']' }}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    # Headers, indented tools, a date, an exception.
    "headers": """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" + system_message }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- "\\n" }}
        {{- t | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{{- "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|end|>\\n\\n' -}}
        {{- tool_call.name + "(" }}
        {%- for arg_name, arg_val in tool_call.arguments | items %}
            {{- arg_name + '="' ~ arg_val ~ '"' }}
            {%- if not loop.last %}
                {{- ", " }}
            {%- endif %}
        {%- endfor %}
        {{- ")<|eot|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start|>ipython<|end|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
""",
    # Alternation, tools written out member by member, upper case and titles, a block for trainers.
    "brackets": """{%- set ns = namespace(index=0) %}
{%- for message in messages if message.role in ('user', 'assistant') and not message.tool_calls %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and loop.last %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- else %}
                    {{- "]" }}
                {%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}
                {{- ", " }}
            {%- else %}
                {{- "]" + eos_token }}
            {%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
{% generation %}{{ " " + message["content"]|trim + eos_token }}{% endgeneration %}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- message.role.upper() ~ '/' ~ message.role | title ~ ': ' ~ message.content.replace('\\n', ' ').rstrip() }}
    {%- endif %}
{%- endfor %}
""",
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a place, <now> & \"here\"; für Zürich: 天気",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "Where"},
                    "days": {"type": "integer", "default": 3, "minimum": 0.5},
                    "exact": {"type": "boolean", "enum": [True, False, None]},
                },
                "required": ["place", "days"],
                "additionalProperties": {},
            },
        },
    },
    {"type": "function", "function": {"name": "zoom", "description": "b", "parameters": {"a": []}}},
]

CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"place": "Zürich <1>", "days": 2, "a": [1, 2.5, null, true]}'},
}

REQUESTS = {
    "plain": {"messages": [{"role": "user", "content": " Hi <b>there</b> & 'you' "}]},
    "no generation": {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>\nx\n</think>\n\nYes. "}],
        "add_generation_prompt": False,
    },
    "developer and parts": {
        "messages": [
            {"role": "developer", "content": "Be brief.\n"},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        ],
        "chat_template_kwargs": {"enable_thinking": False, "date_string": "01 Jan 2030"},
    },
    "tools": {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Weather?"}], "tools": TOOLS},
    "no tools": {"messages": [{"role": "user", "content": "Weather?"}], "tools": []},
    "a call": {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": "{\"t\": 21}"},
            {"role": "assistant", "content": "21 degrees"},
            {"role": "user", "content": "Thanks"},
        ],
        "tools": TOOLS,
    },
    "two calls": {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "tool_calls": [CALL, CALL]},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": "1"},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": "2"},
        ],
    },
    "does not alternate": {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
}


def variables(request):
    """What a server hands to the template: see Conversation::from_request."""
    request = json.loads(json.dumps(request))
    for message in request["messages"]:
        if message["role"] == "developer":
            message["role"] = "system"
        content = message.get("content")
        if isinstance(content, list):
            message["content"] = "\n".join(part["text"] for part in content)
        elif content is None:
            message["content"] = ""
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return {
        "messages": request["messages"],
        "tools": request.get("tools") or None,
        "add_generation_prompt": request.get("add_generation_prompt", True),
        "bos_token": "<s>",
        "eos_token": "</s>",
        **request.get("chat_template_kwargs", {}),
    }


def main():
    cases = []
    for name, template in TEMPLATES.items():
        compiled = chat_template_utils._compile_jinja_template(template)
        for what, request in REQUESTS.items():
            try:
                output = {"text": compiled.render(**variables(request))}
            except Exception as error:
                output = {"error": str(error)}
            cases.append({"template": name, "id": what, "request": json.dumps(request, ensure_ascii=False), **output})
    record = {"transformers": transformers.__version__, "templates": TEMPLATES, "cases": cases}
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(record, file, ensure_ascii=False, indent=1)
        file.write("\n")


main()
