"""Write golden.json: chats rendered by transformers' Jinja and tokenized by Python's tokenizers.

    python -m venv venv && venv/bin/pip install transformers jinja2 tokenizers
    venv/bin/python tests/vectors/text/make_golden.py

Every template is applied to every conversation. An exception of the template is recorded as
"error". Messages are prepared in the plain way, as vLLM does: parts joined by a line feed or kept,
arguments parsed.
"""

import copy
import json
import pathlib

import jinja2
import tokenizers
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

HERE = pathlib.Path(__file__).parent
TINY = HERE.parent / "tiny-llama"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

# name: (content format the engine detects, source)
TEMPLATES = {
    "tiny": ("string", (TINY / "chat_template.jinja").read_text()),
    "chatml": (
        "string",
        """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    ),
    "qwen_like": (
        "string",
        """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string and not message.content.startswith('<tool_response>') %}
        {%- set ns.multi_step = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') }}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
                {%- if call.function %}{%- set call = call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
                {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
""",
    ),
    "llama3_like": (
        "string",
        """{{- bos_token }}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = false %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- tool_call.name + ".call(" }}
        {%- for arg_name, arg_val in tool_call.arguments | items %}
            {{- arg_name + '="' ~ arg_val ~ '"' }}
            {%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}
        {{- ")<|eom_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
""",
    ),
    "mistral_like": (
        "string",
        """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("conversation roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
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
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if tool_call.id is defined %}{{- ', "id": "' + tool_call.id[-9:] + '"}' }}{%- else %}{{- "}" }}{%- endif %}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ', "call_id": "' + message.tool_call_id|default('none') + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
""",
    ),
    "gemma_like": (
        "parts",
        """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if message['role'] == 'tool' -%}{%- continue -%}{%- endif -%}
    {%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}{%- else -%}{%- set role = message['role'] -%}{%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
""",
    ),
    "deepseek_like": (
        "string",
        """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='', is_first_sp=true) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}{%- if ns.is_first_sp %}{% set ns.system_prompt = ns.system_prompt + message['content'] %}{% set ns.is_first_sp = false %}{%- else %}{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}{%- endif %}{%- endif %}{%- endfor %}
{{- bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.is_tool = false -%}{{ '<|User|>' + message['content'] }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] is not none %}
        {%- set ns.is_tool = false -%}
        {%- for tool in message['tool_calls'] %}
            {%- if not ns.is_first %}
                {{- '<|Assistant|><|calls|>' + tool['type'] + '<|sep|>' + tool['function']['name'] + '\\n```json\\n' + tool['function']['arguments']|tojson(sort_keys=true, separators=(',', ':')) + '\\n```' }}
                {%- set ns.is_first = true -%}
            {%- else %}
                {{- '\\n' + tool['type'] + '<|sep|>' + tool['function']['name'] + tool['function']['arguments']|tojson(ensure_ascii=true) }}
            {%- endif %}
        {%- endfor %}
        {{- '<|end|>' }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and (message['tool_calls'] is not defined or message['tool_calls'] is none) %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
        {{- '<|Assistant|>' + content + eos_token }}
    {%- endif %}
    {%- if message['role'] == 'tool' %}
        {%- set ns.is_tool = true -%}
        {{- ('<|outputs|>' if ns.is_output_first else '\\n') + message['content'] }}
        {%- set ns.is_output_first = false %}
    {%- endif %}
{%- endfor -%}
{% if ns.is_tool %}{{ '<|outputs_end|>' }}{% endif %}{% if add_generation_prompt and not ns.is_tool %}{{ '<|Assistant|>' }}{% endif %}""",
    ),
    "phi_like": (
        "string",
        """{% for message in messages %}
{# trimmed comment #}
{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}
{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}
""",
    ),
    "pythonisms": (
        "string",
        """{%- macro show(value, depth=0) -%}
    {%- if value is mapping -%}
        {%- for key, item in value.items() -%}{{ '  ' * depth }}{{ key }}:{{ '\\n' }}{{ show(item, depth + 1) }}{%- endfor -%}
    {%- elif value is sequence and value is not string -%}
        {%- for item in value -%}{{ show(item, depth + 1) }}{%- endfor -%}
    {%- else -%}
        {{ '  ' * depth }}{{ value }}{{ '\\n' }}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages if message.role != 'system' %}
    {%- if loop.index > 6 %}{% break %}{% endif %}
    {%- generation -%}
    [{{ loop.index0 }}/{{ loop.length }}] {{ message.role.upper() }} {{ message.get('name', 'nobody') }} {{ message.name is defined }} {{ message.get('x') }}
    {%- endgeneration -%}
    {{- ' ' }}{{ message.content[:12] }}|{{ message.content.strip().split(' ')[0].title() }}|{{ message.content.find('e') }}|{{ message.content.replace('e', '3', 1) | length }}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}{{ show(call.function.arguments) }}{{ call.function.arguments }}{{ call.function.arguments.keys() | list | join('/') }}{% endfor %}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if tools %}
    {%- for tool in tools | map(attribute='function') %}
        {{- tool.name ~ ' ' ~ tool.parameters.properties | length }}
        {%- for key, item in tool.parameters.properties.items() %} {{ key }}:{{ item.type | default('any', true) }}{% if 'items' in item %}{% for k, v in item.items() %}<{{ k }}={{ v }}>{% endfor %}{% endif %}{% endfor %}
        {{- '\\n' }}
    {%- endfor %}
{%- endif %}
{{- [1, 2.0, none, true, 'it\\'s', {"k": 1e-05}] }} {{ 7 // 2 }} {{ 7 / 2 }} {{ none }} {{ undefined_thing }} {{ "a" if false }}
{{- "%s" if add_generation_prompt else '-' }} {{ documents | default([], true) | length }} {{ (messages | last).role.capitalize() }} {{ ['b', 'a'] | sort | join(', ') }} {{ {'b': 1, 'a': [1, 2]} | tojson }} {{ messages | rejectattr('role', 'equalto', 'user') | map(attribute='role') | unique | list }}
{{- 1 ~ none ~ (2 ~ true) ~ 1.0 ~ [none, 'a'] }} {{ '  ' * 2 ~ 'x' + 'y' }} {{ '\\n'.join(['x', 'y']) }} {{ 'a-b-c'.split('-', 1) }} {{ 'abc'[::-1] }} {{ 'a,b'.rsplit(',')[-1] }} {{ "x" in "xyz" }} {{ 3 in [1, 2] }} {{ not none }}""",
    ),
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The weather <now> & later, in "caf\u00e9s" it\'s',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Zürich", "東京"]},
                    "days": {"type": ["integer", "null"], "minimum": 1.0, "maximum": 1e16},
                    "tags": {"type": "array", "items": {"type": "string"}, "default": []},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "stop",
            "description": None,
            "parameters": {"type": "object", "properties": {}},
        },
    },
]


def call(name, arguments, id="call_123456789"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def said(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


LONG = " ".join(
    f"The {n}th quick brown fox jumps over the lazy dog, isn't it? {n * 37}" for n in range(16)
)
CONVERSATIONS = {
    "one": {"messages": said(("user", "hello world"))},
    "system": {"messages": said(("system", "  Be brief. "), ("user", "Hi\nthere\n\n "))},
    "turns": {
        "messages": said(
            ("system", "You are \u00fcber helpful."),
            ("user", "Wie geht's? \u4f60\u597d \U0001f600"),
            ("assistant", "<think>\nhmm\n</think>\n\nGut, und <s>dir</s>?"),
            ("user", "  'quoted' \"twice\" <b>&amp;</b> "),
        )
    },
    "thinking": {
        "messages": said(("user", "2+2?"), ("assistant", "<think>\nadd\n</think>\n\n4")),
        "add_generation_prompt": False,
    },
    "parts": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "first"}, {"type": "text", "text": "second "}],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "done"}]},
            {"role": "user", "content": "plain"},
        ]
    },
    "tools": {"messages": said(("system", "S"), ("user", "Weather?")), "tools": TOOLS},
    "tool_call": {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    call(
                        "weather",
                        '{"days": 2, "city": "Z\u00fcrich", "nested": {"a": [1, 2.5, null, true]}}',
                    )
                ],
            },
            {"role": "tool", "tool_call_id": "call_123456789", "content": '{"t": 21.5}'},
            {"role": "user", "content": "And now?"},
        ],
        "tools": TOOLS,
    },
    "tool_result": {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [call("weather", {"city": "Z\u00fcrich", "at": 1.0})],
            },
            {"role": "tool", "tool_call_id": "call_123456789", "content": "21.5"},
        ],
        "tools": TOOLS,
    },
    # Floats with a last digit that a parser with double rounding gets wrong.
    "floats": {
        "messages": [
            {"role": "user", "content": "Where?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    call("weather", '{"lat": -26.068083554060742, "lon": 9.789590442087885}')
                ],
            },
            {"role": "tool", "tool_call_id": "call_123456789", "content": "21.5"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [call("weather", {"at": -30.347107806775554, "small": 1.5e-7})],
            },
            {"role": "tool", "tool_call_id": "call_123456780", "content": "22"},
        ],
        "tools": TOOLS,
    },
    "two_calls": {
        "messages": [
            {"role": "user", "content": "Both?"},
            {
                "role": "assistant",
                "content": "Sure",
                "tool_calls": [call("weather", '{"city": "東京"}'), call("stop", "")],
            },
            {
                "role": "tool",
                "tool_call_id": "a",
                "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}],
            },
            {"role": "tool", "tool_call_id": "b", "content": "3"},
        ],
        "tools": TOOLS,
    },
    "kwargs": {
        "messages": said(("user", "no thinking please")),
        "chat_template_kwargs": {"enable_thinking": False, "date_string": "01 Jan 2025"},
    },
    "documents": {
        "messages": [{"role": "user", "name": "anna", "content": "Read e-mail"}],
        "documents": [{"title": "T", "text": "x"}],
    },
    "continue": {
        "messages": said(("user", "Tell me."), ("assistant", "Once upon a  ")),
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "two_systems": {"messages": said(("system", "A"), ("system", "B"), ("user", "x"))},
    "wrong_roles": {"messages": said(("assistant", "I start"), ("user", "ok"))},
    "long": {
        "messages": said(
            ("system", LONG), ("user", LONG), ("assistant", LONG[::2]), ("user", "so?")
        )
    },
}


def prepared(messages, form):
    """vLLM's form of the client's messages."""
    out = []
    for message in copy.deepcopy(messages):
        content, role = message["content"], message["role"]
        parts = [content] if isinstance(content, str) else content or []
        texts = [part if isinstance(part, str) else part["text"] for part in parts]
        if form == "string" or role == "tool":
            message["content"] = "\n".join(texts)
        else:
            message["content"] = [{"type": "text", "text": text} for text in texts]
        for each in message.get("tool_calls", []):
            arguments = each["function"]["arguments"]
            each["function"]["arguments"] = (
                json.loads(arguments)
                if isinstance(arguments, str) and arguments
                else arguments or {}
            )
        out.append(message)
    return out


def main():
    tokenizer = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    cases = []
    for template_name, (form, source) in TEMPLATES.items():
        for chat_name, chat in CONVERSATIONS.items():
            case = {"template": template_name, "chat": chat_name}
            try:
                [text], _ = render_jinja_template(
                    [prepared(chat["messages"], form)],
                    tools=chat.get("tools"),
                    documents=chat.get("documents"),
                    chat_template=source,
                    add_generation_prompt=chat.get("add_generation_prompt", True),
                    continue_final_message=chat.get("continue_final_message", False),
                    **{**SPECIAL, **chat.get("chat_template_kwargs", {})},
                )
                case["text"] = text
                case["ids"] = tokenizer.encode(text, add_special_tokens=False).ids
            except (jinja2.TemplateError, TypeError, ValueError) as error:
                case["error"] = str(error)
            cases.append(case)
    # One case a line: a diff of this file shows which cases changed.
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    golden = {
        "made_with": {
            "transformers": transformers.__version__,
            "jinja2": jinja2.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "special_tokens": SPECIAL,
        "templates": {
            name: {"format": form, "source": source} for name, (form, source) in TEMPLATES.items()
        },
        "conversations": CONVERSATIONS,
    }
    head = json.dumps(golden, indent=1, ensure_ascii=False)[:-2]
    (HERE / "golden.json").write_text(f'{head},\n "cases": [\n{lines}\n]}}\n')
    errors = [case for case in cases if "error" in case]
    print(f"{len(cases)} cases, {len(errors)} of them errors")
    for case in errors:
        print(" ", case["template"], case["chat"], case["error"][:100])


if __name__ == "__main__":
    main()
