"""Chat templates for tokenizers that have none, by name: the formats that models on the Hub were trained on.

Each renders system, user and assistant messages as the template of its format does, and marks what the assistant
writes, up to the token that ends its turn, by {% generation %}. A format fits a tokenizer that has each of its tokens
as one token. Formats without tokens of their own end a turn by eos_token. None supports tools.

    chatml    Qwen, SmolLM, OLMo 3                    llama3    Llama 3
    gemma     Gemma 3; Gemma 1 and 2, with system     granite   Granite 3.0; later ones add a system message
    phi3      Phi 3                                   tulu      Tülu, OLMo 2
    zephyr    Zephyr 7B                               mistral   Mistral 7B v0.2, Mixtral 8x7B
    llama2    Llama 2
"""

from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # its names are flags of a command line, which does not wait for the library
    from ligermodels.tokenizer.tokenizer import Tokenizer

# What each template consists of: files of templates/. The first that fits a tokenizer is the one to propose for it.
PARTS_OF_TEMPLATES = {
    "chatml": ("refuse_tools", "chatml"), "llama3": ("refuse_tools", "llama3"),
    "gemma": ("refuse_tools", "take_turns", "gemma"), "granite": ("refuse_tools", "granite"),
    "phi3": ("refuse_tools", "three_roles", "phi3"), "tulu": ("refuse_tools", "three_roles", "tulu"),
    "zephyr": ("refuse_tools", "three_roles", "zephyr"), "mistral": ("refuse_tools", "take_turns", "mistral"),
    "llama2": ("refuse_tools", "take_turns", "llama2"),
}  # fmt: skip


def read_template_file(name: str) -> str:
    return files("ligermodels.tokenizer").joinpath("templates", f"{name}.jinja").read_text(encoding="utf-8")


BUILT_IN_TEMPLATES = {
    name: "".join(map(read_template_file, parts)).removesuffix("\n") for name, parts in PARTS_OF_TEMPLATES.items()
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
