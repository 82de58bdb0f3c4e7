"""Short chat templates that use the same Jinja features as those of the model families.

name -> (form of folders.py, template)
"""

LLAMA_2 = """
{%- if messages[0]['role'] == 'system' %}
    {%- set turns = messages[1:] %}
    {%- set system = '<<SYS>>\\n' + messages[0]['content'] | trim + '\\n<</SYS>>\\n\\n' %}
{%- else %}
    {%- set turns, system = messages, '' %}
{%- endif %}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns') }}
    {%- endif %}
    {%- set text = system + message['content'] if loop.index0 == 0 else message['content'] %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + text.strip() + ' [/INST]' }}
    {%- else %}
        {{- ' ' ~ text.strip() ~ ' ' ~ eos_token }}
    {%- endif %}
{%- endfor %}"""

LLAMA_3 = """{% set headed = namespace(any=false) %}
{% for message in messages %}
    {% set text = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim %}
    {% if not headed.any %}{{ bos_token }}{% set headed.any = true %}{% endif %}
{{- text ~ '<|eot_id|>' -}}
{% endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

LLAMA_3_1 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}
{%- endif %}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools is not none %}Environment: ipython\n{% endif %}
{{- 'Today Date: ' + date_string + '\n\n' + system_message + '<|eot_id|>' }}
{%- macro described(tools) %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) + '\n\n' }}
    {%- endfor %}
{%- endmacro %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
        {%- if loop.first and tools %}{{ described(tools) }}{% endif %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('one tool call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson ~ '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

MISTRAL_1 = """{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}
{%- endif %}{% endfor %}"""

MISTRAL_3 = """{%- set loop_messages = messages %}
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in loop_messages if message.role != "comment" %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools | map(attribute="function") %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{ '"' + key + '": "' + val + '"' }}
                    {%- else %}{{ '"' + key + '": ' + val | tojson }}{% endif %}
                    {%- if not loop.last %}, {% endif %}
                {%- endfor %}
                {{- "}}" }}{% if not loop.last %}, {% endif %}
            {%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + (system_message + "\n\n" if loop.last and system_message is defined else "") }}
        {{- message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' + (", " if not loop.last else "]" + eos_token) }}
        {%- endfor %}
    {%- elif message["role"] in ["tool", "tool_results"] %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- else %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}"""

QWEN_2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

QWEN_2_5 = """{%- macro called(calls) %}
    {%- for call in calls %}
        {%- if call.function is defined %}{% set call = call.function %}{% endif %}
        {{- '\n<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' }}
        {{- call.arguments | tojson ~ '}\n</tool_call>' }}
    {%- endfor %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\n' ~ (messages[0].content if messages[0].role == 'system' else 'You have tools.') }}
    {{- "\n\n# Tools\n<tools>" }}
    {%- for tool in tools %}{{ "\n" ~ (tool | tojson) }}{% endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + ('\n' + message.content if message.content else '') }}
        {{- called(message.tool_calls or []) ~ '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{ '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

QWEN_3 = """{%- set ns = namespace(searching=true, last_query=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string
            and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}{% set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- if tools %}{{ '<|im_start|>system\n' ~ tools | map('tojson') | join('\n') ~ '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{% set call = call.function %}{% endif %}
            {{- '\n<tool_call>\n' if loop.first and content or not loop.first else '<tool_call>\n' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""

GEMMA_2 = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}
{%- endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

GEMMA_3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n'
        + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""

PHI_3 = """{% for message in messages %}{% if message['role'] in ['system', 'user', 'assistant'] %}
{{- '<|' ~ message['role'] ~ '|>\n' ~ message['content'] ~ '<|end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

PHI_4_MINI = """{% for message in messages %}
{%- if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}
{{- '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}
{%- else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""

GRANITE = """{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}{% set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "Today's Date: " ~ strftime_now('%B %d, %Y') ~ ".\n" %}{% set loop_messages = messages %}
    {%- if documents %}{% set system_message = system_message ~ 'Use the documents.' %}{% endif %}
{%- endif %}
{{- '<|im_start|>system\n' + system_message + '<|im_end|>\n' }}
{%- if tools %}{{ '<|im_start|>tools\n' + tools | tojson(indent=2) + '<|im_end|>\n' }}{% endif %}
{%- for document in documents or [] %}
    {{- '<|im_start|>document\nTitle: ' ~ document['title'] | default('none') ~ '\n' ~ document.text }}
    {{- '' if loop.last else '\n\n' }}
{%- endfor %}
{%- for message in loop_messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}
    {%- for call in message.tool_calls or [] %}{{ '<tool_call>' ~ [call.function] | tojson }}{% endfor %}
    {{- '<|im_end|>\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|im_start|>assistant' ~ (' ' + controls | tojson if controls else '') ~ '\n' }}
    {%- endif %}
{%- endfor %}"""

GLM_4 = """[gMASK]<sop>
{%- if tools is not none %}<|system|>\n# 可用工具
    {%- for tool in tools %}
        {%- set function = tool.function if tool.get("function") else tool %}

## {{ function.name }}

{{ function | tojson(indent=4, ensure_ascii=False) }}
    {%- endfor %}
{%- endif %}
{%- macro visible(content) -%}
    {%- if content is string -%}{{ content }}
    {%- else -%}
        {%- for part in content if part.type == 'text' -%}{{ part.text }}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- for call in message.tool_calls %}<|assistant|>{{ call.function.name }}\n{{ call.function.arguments }}
        {%- endfor %}
    {%- else %}<|{{ 'observation' if message.role == 'tool' else message.role }}|>\n{{ visible(message.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

SMOLLM_3 = """{%- if messages[0].role == 'system' -%}
    {%- set system = messages[0].content.replace('/no_think', '').rstrip() -%}
    {%- set mode = '/no_think' if '/no_think' in messages[0].content else '/think' -%}
    {%- set messages = messages[1:] -%}
{%- else -%}
    {%- set system, mode = '', '/think' if enable_thinking | default(true) else '/no_think' -%}
{%- endif -%}
{{ '<|im_start|>system\n## Metadata\n\nToday Date: ' ~ strftime_now('%d %B %Y') }}
{{- '\nReasoning Mode: ' ~ mode ~ '\n\n' }}
{%- if system %}{{ system + '\n\n' }}{% endif -%}
{%- if xml_tools or python_tools -%}
    {%- set ns = namespace(text='You may call:\n<tools>') -%}
    {%- for tool in xml_tools or [] -%}{%- set ns.text = ns.text ~ '\n' ~ (tool | string) -%}{%- endfor -%}
    {{ ns.text + '\n</tools>\n\n' }}
{%- endif -%}
{{ '<|im_end|>\n' }}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else '' -%}
    {%- if message.role == 'user' -%}
        {{ '<|im_start|>user\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' -%}
        {%- generation -%}
        {{ '<|im_start|>assistant\n' + ('' if mode == '/think' else '<think>\n\n</think>\n') + content.lstrip('\n') }}
        {{- '<|im_end|>\n' }}
        {%- endgeneration -%}
    {%- elif message.role == 'tool' -%}
        {{ '<|im_start|>user\n' + content + '<|im_end|>\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

OLMO_2 = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}
{{- '<|system|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'user' %}
{{- '<|user|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'assistant' %}
{%- if not loop.last %}{{ '<|assistant|>\n' + message['content'] + eos_token + '\n' }}
{%- else %}{{ '<|assistant|>\n' + message['content'] + eos_token }}{% endif %}{% endif %}
{%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"""

ERNIE = """{%- if not add_generation_prompt is defined -%}{%- set add_generation_prompt = true -%}{%- endif -%}
{%- if not cls_token is defined -%}{%- set cls_token = '<|begin_of_text|>' -%}{%- endif -%}
{%- if not sep_token is defined -%}{%- set sep_token = '<|end_of_text|>' -%}{%- endif -%}
{{- cls_token -}}
{%- for message in messages -%}
    {%- if message['role'] == 'user' -%}{{ 'User: ' + message['content'] + '\n' }}
    {%- elif message['role'] == 'assistant' -%}{{ 'Assistant: ' + message['content'] + sep_token }}
    {%- elif message['role'] == 'system' -%}{{ message['content'] + '\n' }}
    {%- elif message['role'] == 'tool' -%}{% continue %}
    {%- endif -%}
    {%- if loop.index > 5 -%}{% break %}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'Assistant: ' }}{%- endif -%}"""

CHAT_TEMPLATES = {
    "llama 2": ("llama2", LLAMA_2),
    "llama 3": ("llama3", LLAMA_3),
    "llama 3.1": ("llama3", LLAMA_3_1),
    "mistral 1": ("llama2", MISTRAL_1),
    "mistral 3": ("prepend", MISTRAL_3),
    "qwen 2": ("qwen", QWEN_2),
    "qwen 2.5": ("qwen", QWEN_2_5),
    "qwen 3": ("qwen", QWEN_3),
    "gemma 2": ("gemma", GEMMA_2),
    "gemma 3": ("gemma", GEMMA_3),
    "phi 3": ("prepend", PHI_3),
    "phi 4 mini": ("llama3", PHI_4_MINI),
    "granite": ("qwen", GRANITE),
    "glm 4": ("llama3", GLM_4),
    "smollm 3": ("qwen", SMOLLM_3),
    "olmo 2": ("llama3", OLMO_2),
    "ernie 4.5": ("llama3", ERNIE),
}
