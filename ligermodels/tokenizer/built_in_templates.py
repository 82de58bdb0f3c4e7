"""Chat templates for tokenizers that have none, by name: the formats that models on the Hub were trained on.

Each renders system, user and assistant messages as the template of its format does, and marks what the assistant
writes, up to the token that ends its turn, by {% generation %}. A format fits a tokenizer that has each of its tokens
as one token. Formats without tokens of their own end a turn by eos_token. None supports tools. Knows tokens; must not
know models.

    chatml    Qwen, SmolLM, OLMo 3                    llama3    Llama 3
    gemma     Gemma 3; Gemma 1 and 2, with system     granite   Granite 3.0; later ones add a system message
    phi3      Phi 3                                   tulu      Tülu, OLMo 2
    zephyr    Zephyr 7B                               mistral   Mistral 7B v0.2, Mixtral 8x7B
    llama2    Llama 2
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # its names are flags of a command line, which does not wait for the library
    from ligermodels.tokenizer.tokenizer import Tokenizer

REFUSE_TOOLS = r"""{%- if tools %}
    {{- raise_exception('this chat template does not support tools; use a model whose template does') }}
{%- endif %}
{%- for message in messages if message.tool_calls %}
    {{- raise_exception('this chat template does not support tool calls; use a model whose template does') }}
{%- endfor %}"""

THREE_ROLES = r"""
{%- for message in messages if message.role not in ['system', 'user', 'assistant'] %}
    {{- raise_exception('this chat template has the roles system, user and assistant, not ' + message.role) }}
{%- endfor %}"""

TAKE_TURNS = r"""
{%- set has_system = messages[0].role == 'system' %}
{%- set turns = messages[1:] if has_system else messages %}
{%- for message in turns %}
    {%- if message.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}
        {{- raise_exception('after an optional system message, user and assistant must take turns') }}
    {%- endif %}
{%- endfor %}"""

# The first that fits a tokenizer is the one to propose for it.
BUILT_IN_TEMPLATES = {
    "chatml": REFUSE_TOOLS
    + r"""
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}""",
    "llama3": REFUSE_TOOLS
    + r"""
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content | trim + '<|eot_id|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}""",
    "gemma": REFUSE_TOOLS
    + TAKE_TURNS
    + r"""
{{- bos_token }}
{%- for message in turns %}
    {%- if message.role == 'assistant' %}
        {{- '<start_of_turn>model\n' }}
        {%- generation %}
            {{- message.content | trim + '<end_of_turn>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- else %}
        {%- set system = messages[0].content + '\n\n' if has_system and loop.first else '' %}
        {{- '<start_of_turn>user\n' + system + message.content | trim + '<end_of_turn>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\n' }}
{%- endif %}""",
    "granite": REFUSE_TOOLS
    + r"""
{%- for message in messages %}
    {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content + '<|end_of_text|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- else %}
        {{- message.content + '<|end_of_text|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_of_role|>assistant<|end_of_role|>' }}
{%- endif %}""",
    "phi3": REFUSE_TOOLS
    + THREE_ROLES
    + r"""
{%- for message in messages %}
    {{- '<|' + message.role + '|>\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content + '<|end|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- else %}
        {{- message.content + '<|end|>\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|assistant|>\n' if add_generation_prompt else eos_token }}""",
    "tulu": REFUSE_TOOLS
    + THREE_ROLES
    + r"""
{{- bos_token }}
{%- for message in messages %}
    {{- '<|' + message.role + '|>\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content + eos_token }}
        {%- endgeneration %}
        {{- '' if loop.last else '\n' }}
    {%- else %}
        {{- message.content + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\n' }}
{%- endif %}""",
    "zephyr": REFUSE_TOOLS
    + THREE_ROLES
    + r"""
{%- for message in messages %}
    {{- '<|' + message.role + '|>\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content + eos_token }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- else %}
        {{- message.content + eos_token + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\n' }}
{%- endif %}""",
    "mistral": REFUSE_TOOLS
    + TAKE_TURNS
    + r"""
{{- bos_token }}
{%- for message in turns %}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- ' ' + message.content + eos_token }}
        {%- endgeneration %}
    {%- else %}
        {%- set system = messages[0].content + '\n\n' if has_system and loop.first else '' %}
        {{- ' [INST] ' + system + message.content + ' [/INST]' }}
    {%- endif %}
{%- endfor %}""",
    "llama2": REFUSE_TOOLS
    + TAKE_TURNS
    + r"""
{%- for message in turns %}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- ' ' + message.content | trim + ' ' + eos_token }}
        {%- endgeneration %}
    {%- else %}
        {%- set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' if has_system and loop.first else '' %}
        {{- bos_token }}
        {{- '[INST] ' + (system + message.content) | trim + ' [/INST]' }}
    {%- endif %}
{%- endfor %}""",
}
OWN_TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "granite": ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
}


def missing_tokens(name: str, tokenizer: "Tokenizer") -> list[str]:
    """The tokens of a built-in template that the tokenizer would not read as one token; "eos_token" if it has none."""
    texts = OWN_TOKENS.get(name, ())
    ids = {text: tokenizer.encode(text, add_special_tokens=False) for text in texts}
    missing = [text for text in texts if ids[text] != [tokenizer.tokenizer.token_to_id(text)]]
    needs_eos = "eos_token" in BUILT_IN_TEMPLATES[name] and tokenizer.eos_token is None
    return [*missing, "eos_token"] if needs_eos else missing


def fitting_templates(tokenizer: "Tokenizer") -> list[str]:
    """The names of the built-in templates that the tokenizer has all tokens for, the best first."""
    return [name for name in BUILT_IN_TEMPLATES if not missing_tokens(name, tokenizer)]
