"""Which tokens end a text: those that a checkpoint and its tokenizer name. Must not know how text is generated."""

from ligermodels.generation.cache import GenerativeModel
from ligermodels.generation.texts import TextTokenizer
from ligermodels.weights.config_file import CONFIG_FILE, GENERATION_CONFIG_FILE, end_of_text_ids


def model_stop_tokens(model: GenerativeModel, tokenizer: TextTokenizer | None = None) -> set[int]:
    """eos_token_id of generation_config.json, which has more of them for chat models; else that of config.json.

    tokenizer: its end-of-text token is one more. Without tokens beyond the vocabulary, which the model cannot draw.
    """
    if "eos_token_id" in model.generation_config:
        tokens = end_of_text_ids(model.generation_config, GENERATION_CONFIG_FILE)
    else:
        tokens = end_of_text_ids(model.config.raw, CONFIG_FILE)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        tokens = [*tokens, tokenizer.eos_token_id]
    return {token for token in tokens if token < model.config.vocab_size}
