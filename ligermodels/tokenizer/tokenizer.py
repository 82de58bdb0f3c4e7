"""The tokenizer: encodes and decodes text, pads batches and renders chats, on top of the `tokenizers` library."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
from tokenizers import Encoding
from torch import Tensor

from ligermodels.errors import CheckpointError, InputError, first_line
from ligermodels.tokenizer.chat_template import DEFAULT_TEMPLATE, Rendered, choose_template, render_chat
from ligermodels.tokenizer.files import TOKENIZER_CONFIG_FILE, T, TokenizerFiles, checked_call, read_tokenizer

MAX_TEXT_BYTES = 2**22  # of a text that is encoded at once: `tokenizers` needs up to 175 bytes for each
CharacterSpan = tuple[int, int]  # [start, stop)
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # the decoding of an incomplete character


def special_token(name: str) -> property:
    """A property: the special token's text, None if there is none. It can be set to a token of the vocabulary."""

    def get(self: "Tokenizer") -> str | None:
        return self.named.get(name)

    def put(self: "Tokenizer", token: str) -> None:
        if self.tokenizer.token_to_id(token) is None:
            raise InputError(f"{name}: {token!r} is not in the vocabulary of {self.file}")
        self.named[name] = token

    return property(get, put)


def special_token_id(name: str) -> property:
    """A property: the special token's id, None if there is none."""

    def get(self: "Tokenizer") -> int | None:
        return self.tokenizer.token_to_id(self.named[name]) if name in self.named else None

    return property(get)


class TokenizedTexts(dict[str, Any]):
    """input_ids and attention_mask, as the arguments of a model: `model(**tokenizer(text, return_tensors="pt"))`.

    Of one text lists of numbers, of several a list for each; or tensors [B, T] int64.
    """

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        return self["attention_mask"]

    def to(self, device: int | str | torch.device) -> "TokenizedTexts":
        """Copies the tensors to a device."""
        return TokenizedTexts({name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.items()})


class Tokenizer:
    """The tokenizer of a checkpoint folder.

    tokenizer: the library's tokenizer. file: has the vocabulary. named: special tokens by their names in
    tokenizer_config.json; chat templates get them as variables. special_ids: ids that decoding skips.
    padding_side: "left" or "right". model_max_length: None if there is no limit. appended: named tokens that `file`
    lacks.
    """

    bos_token, bos_token_id = special_token("bos_token"), special_token_id("bos_token")
    eos_token, eos_token_id = special_token("eos_token"), special_token_id("eos_token")
    pad_token, pad_token_id = special_token("pad_token"), special_token_id("pad_token")
    unk_token, unk_token_id = special_token("unk_token"), special_token_id("unk_token")

    def __init__(self, files: TokenizerFiles) -> None:
        self.tokenizer, self.file, self.named = files.tokenizer, files.file, dict(files.named)
        self.padding_side, self.model_max_length = files.padding_side, files.model_max_length
        self.templates, self.appended = files.templates, files.appended
        added = self.tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Reads a tokenizer. Raises CheckpointError, with file and field, if the folder has none or an invalid one."""
        return cls(read_tokenizer(Path(folder)))

    @property
    def vocab_size(self) -> int:
        """The number of ids, including added tokens."""
        return self.tokenizer.get_vocab_size()

    @property
    def chat_template(self) -> str | None:
        """The source of the default chat template."""
        return self.templates[DEFAULT_TEMPLATE].source if DEFAULT_TEMPLATE in self.templates else None

    def __call__(
        self, text: str | Sequence[str], *, padding: bool | str = False, truncation: bool = False,
        max_length: int | None = None, return_tensors: str | None = None, add_special_tokens: bool = True,
        padding_side: str | None = None,
    ) -> TokenizedTexts:  # fmt: skip
        """Token ids and attention mask of one text or several, by the arguments of Hugging Face's tokenizers.

        padding: True or "longest", to the longest row; "max_length", to `max_length`. truncation: cut what exceeds
        `max_length` from the end of a text; the tokens behind it, such as eos, stay. max_length: None for the folder's
        model_max_length. return_tensors: "pt" for tensors, of rows of one length. padding_side: as for `pad`.
        Raises InputError for other values, without a pad_token to pad with, and if a row is longer than it may be.
        """
        if padding not in (False, True, "longest", "max_length"):
            raise InputError(f"padding: is {padding!r}; must be True, False, 'longest' or 'max_length'")
        if return_tensors not in (None, "pt"):
            raise InputError(f"return_tensors: is {return_tensors!r}; must be 'pt' or None")
        limited = truncation or padding == "max_length"
        if max_length is not None and not limited:
            raise InputError(f"max_length: is {max_length}; it goes with truncation=True or padding='max_length'")
        length = self.model_max_length if max_length is None else max_length
        if limited and length is None:
            raise InputError(f"max_length: is missing, and {self.file.parent} has no model_max_length; give it")
        texts = [text] if isinstance(text, str) else list(text)
        rows = self.encode_batch(texts, add_special_tokens=add_special_tokens)
        if truncation and length is not None and max(map(len, rows), default=0) > length:
            rows = self.truncated(texts, length, add_special_tokens)
        masks: Any = [[1] * len(ids) for ids in rows]
        values: dict[str, Any] = {"input_ids": rows, "attention_mask": masks}
        if padding is not False:
            padded = self.pad(rows, side=padding_side, length=length if padding == "max_length" else None)
            values = dict(zip(values, padded, strict=True))
        elif return_tensors:
            if len({*map(len, rows)}) > 1:
                raise InputError("return_tensors: the texts have different numbers of tokens; give padding=True")
            values = {name: torch.tensor(value, dtype=torch.int64) for name, value in values.items()}
        if not return_tensors:
            values = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in values.items()}
            if isinstance(text, str):
                values = {name: value[0] for name, value in values.items()}
        return TokenizedTexts(values)

    def truncated(self, texts: Sequence[str], length: int, add_special_tokens: bool) -> list[list[int]]:
        """The ids of texts that are cut until each has, with the special tokens around it, at most `length` tokens."""
        around = self.tokenizer.num_special_tokens_to_add(False) if add_special_tokens else 0
        if length < around:
            raise InputError(f"max_length: is {length}, but the special tokens around a text are {around}")
        encodings = self.call_encoder(self.tokenizer.encode_batch, texts, texts, add_special_tokens=False)
        for encoding in encodings:
            encoding.truncate(length - around)
        return [self.tokenizer.post_process(encoding, None, add_special_tokens).ids for encoding in encodings]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text. add_special_tokens: add the tokens before and after a text, such as bos."""
        return self.call_encoder(self.tokenizer.encode, [text], text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Encodes each text as `encode` does, on all cores."""
        texts = list(texts)
        encode = self.tokenizer.encode_batch_fast
        encodings = self.call_encoder(encode, texts, texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_with_offsets(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[Encoding]:
        """Encodes with the offsets of the tokens in characters of their text, and adds no second bos."""
        texts = list(texts)
        encode = self.tokenizer.encode_batch
        encodings = self.call_encoder(encode, texts, texts, add_special_tokens=add_special_tokens)
        for text, encoding in zip(texts, encodings, strict=True):
            if self.repeats_bos(text, encoding.ids):
                encoding.truncate(len(encoding) - 1, direction="left")
        return encodings

    def encode_prompt(self, text: str) -> list[int]:
        """Encodes a text as `encode` does, but adds no bos to one that begins with it, as rendered chats do."""
        ids = self.encode(text)
        return ids[1:] if self.repeats_bos(text, ids) else ids

    def repeats_bos(self, text: str, ids: Sequence[int]) -> bool:
        """Whether the ids of a text begin with an added bos in front of the text's own."""
        bos = self.bos_token
        return bool(bos) and text.startswith(bos) and not text.startswith(2 * bos) and ids[1:2] == [self.bos_token_id]

    def call_encoder(self, encode: Callable[..., T], texts: Sequence[str], *arguments: Any, **options: Any) -> T:
        """encode: a function of the library. texts: those to encode. Raises InputError, also for a long one."""
        for index, text in enumerate(texts):
            if isinstance(text, str):
                refuse_long(text, f"texts[{index}]")
        try:
            return checked_call(self.file, "cannot encode this text", encode, *arguments, **options)
        except TypeError:
            raise encoding_error(texts) from None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids. Raises InputError for an id that is not a number from 0 to 2³²."""
        return self.decode_each([ids], skip_special_tokens)[0]

    def decode_each(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        """`decode` of several sequences; the library's own function for that would start threads."""

        def decode() -> list[str]:
            return [self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]

        try:
            return checked_call(self.file, "cannot decode these tokens", decode)
        except (TypeError, OverflowError) as error:
            raise InputError(f"ids: cannot be decoded: {first_line(error)}; must be token ids") from None

    def decode_stream(self, *, skip_special_tokens: bool = True) -> "DecodeStream":
        return DecodeStream(self, self.special_ids if skip_special_tokens else frozenset())

    def pad(
        self, batch: Sequence[Sequence[int]], *, side: str | None = None, length: int | None = None,
        multiple_of: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Pads a batch: returns input_ids [B, T] int64 and attention_mask [B, T] int64, 1 at tokens, 0 at padding.

        side: "left" or "right"; None for the tokenizer's padding_side. T is `length`, or else the length of the longest
        row, rounded up to a multiple of `multiple_of`. Raises InputError without a pad_token, and if a row is longer
        than `length`.
        """
        side = side or self.padding_side
        if side not in ("left", "right"):
            raise InputError(f"side: is {side!r}; must be 'left' or 'right'")
        if self.pad_token_id is None:
            fix = "set tokenizer.pad_token, for example to tokenizer.eos_token"
            raise InputError(
                f"{self.file.with_name(TOKENIZER_CONFIG_FILE)}: field pad_token is missing, which padding needs; {fix}"
            )
        longest = max(map(len, batch), default=0)
        width = longest if length is None else length
        if longest > width:
            raise InputError(f"length: is {width}, but a row has {longest} tokens; shorten the row first")
        width = -(-width // multiple_of) * multiple_of if multiple_of else width
        input_ids = torch.full((len(batch), width), self.pad_token_id, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(batch):
            place = slice(width - len(ids), width) if side == "left" else slice(len(ids))
            input_ids[row, place] = torch.tensor(ids, dtype=torch.int64)
            attention_mask[row, place] = 1
        return input_ids, attention_mask

    def render_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """A conversation as text. Options and errors are those of `apply_chat_template`."""
        return self.render(messages, **options).text

    @overload
    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: Literal[True] = True, **options: Any
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: Literal[False], **options: Any
    ) -> str: ...

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: bool = True, **options: Any
    ) -> list[int] | str:
        """A conversation as token ids, rendered by the folder's chat template; as text if `tokenize` is false.

        messages: objects with role and content, such as {"role": "user", "content": "…"}. Options, all by keyword:
        tools: JSON schemas of functions. documents: objects with title and text.
        add_generation_prompt: end with the beginning of an assistant message.
        continue_final_message: end after the last message's text, so that it can be continued.
        chat_template: the name of one of the folder's templates, or the source of a template.
        All other options are variables of the template.
        Raises InputError if the template is missing or broken, refuses the messages, or exceeds a limit.
        """
        text = self.render_chat_template(messages, **options)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def apply_chat_template_with_mask(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> tuple[list[int], list[bool]]:
        """Token ids, and the assistant mask: whether each token has text of a {% generation %} block."""
        rendered = self.render(messages, **options)
        [encoding] = self.encode_with_offsets([rendered.text], add_special_tokens=False)
        return encoding.ids, overlap_mask(encoding.offsets, rendered.spans)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None, chat_template: str | None = None, **options: Any,
    ) -> Rendered:  # fmt: skip
        template = choose_template(self.templates, chat_template, tools is not None, self.file.parent)
        return render_chat(template, messages, **(self.named | {"tools": tools, "documents": documents} | options))


class DecodeStream:
    """Decodes token by token: the concatenated texts of all steps and of `flush` equal `decode` of all ids.

    Text is returned when no later token can change it. Incomplete characters are held back until their last byte.
    Byte tokens such as <0xE4> are held back until their run ends, because the run is text only as a whole; the
    library's own DecodeStream raises an error there.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self.tokenizer, self.skipped = tokenizer, skipped
        self.ids: list[int] = []  # from the last but one returned text on: decoders treat spaces at the start specially
        self.known = 0  # the number of ids whose text has been returned

    def step(self, token: int) -> str | None:
        """Adds a token; returns the text that has become final, or None."""
        piece = self.tokenizer.tokenizer.id_to_token(token)
        if token in self.skipped or piece is None:
            return None
        self.ids.append(token)
        is_byte = len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
        return None if is_byte else self.advance(final=False) or None

    def skipped_text(self, token: int) -> str:
        """The text of a token that `step` leaves out; "" of any other."""
        return self.tokenizer.tokenizer.id_to_token(token) or "" if token in self.skipped else ""

    def flush(self) -> str:
        """The remaining text at the end, with incomplete characters as U+FFFD."""
        return self.advance(final=True)

    def advance(self, final: bool) -> str:
        before, text = self.tokenizer.decode_each([self.ids[: self.known], self.ids], skip_special_tokens=False)
        if len(text) <= len(before) or (text.endswith(UNFINISHED) and not final):
            return ""
        self.ids = self.ids[self.known :]
        self.known = len(self.ids)
        return text[len(before) :]


def is_long(text: str) -> bool:
    """Whether a text has more than MAX_TEXT_BYTES in UTF-8, where a character has at most four."""
    return 4 * len(text) > MAX_TEXT_BYTES and len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES


def refuse_long(text: str, place: str) -> None:
    """Raises InputError for a text of which gigabytes would be made."""
    if is_long(text):
        raise InputError(f"{place}: has a text of more than {MAX_TEXT_BYTES:,} bytes; make it shorter")


def encoding_error(texts: Sequence[Any]) -> InputError:
    """The error that names the text that cannot be encoded: JSON may contain lone surrogates, such as \\ud83d."""
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            return InputError(f"texts[{index}]: is {type(text).__name__}; must be a string")
        half = next((place for place, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
        if half is not None:
            return InputError(f"texts[{index}]: character {half} is a lone surrogate, which is not valid text")
    return InputError("texts: must be strings")


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, config: Path | str) -> None:
    """Raises CheckpointError if a token's id is not below `vocab_size`, the number of rows of the embedding.

    Of the added tokens only bos, eos, pad and unk of the tokenizer's file are checked: others occur only if a text
    contains them literally, and Gemma 3 1B has one beyond its embedding. config: the file that contains vocab_size.
    """
    known = tokenizer.tokenizer.get_vocab(with_added_tokens=False)
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        if getattr(tokenizer, name) not in (None, *tokenizer.appended):
            known[getattr(tokenizer, name)] = getattr(tokenizer, f"{name}_id")
    token = max(known, key=known.__getitem__, default=None)
    if token is not None and known[token] >= vocab_size:
        raise CheckpointError(
            f"{tokenizer.file}: token {token!r} has the id {known[token]}, but {config} has a vocab_size of "
            f"{vocab_size}; use the files of one model"
        )


def overlap_mask(offsets: Sequence[CharacterSpan], spans: Iterable[CharacterSpan]) -> list[bool]:
    """Whether each token contains a character of a span. offsets: the tokens' spans, ascending."""
    starts, stops = np.array(offsets, np.int64).reshape(-1, 2).T
    begins, ends = np.array(list(spans), np.int64).reshape(-1, 2).T
    first = np.searchsorted(stops, begins, "right")
    last = np.maximum(first, np.searchsorted(starts, ends))
    length = len(offsets) + 1
    open_spans = np.cumsum(np.bincount(first, minlength=length) - np.bincount(last, minlength=length))
    return (open_spans[:-1] > 0).tolist()
