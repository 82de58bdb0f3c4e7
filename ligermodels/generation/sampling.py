"""Options of sampling: their ranges, and the numbers that a row of a batch has of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Any, NamedTuple, TypedDict

from ligermodels.errors import InputError


class OptionRule(NamedTuple):
    """What the value of an option must be."""

    kind: type
    holds: Callable[[Any], bool]
    words: str


def between(lowest: float, highest: float) -> Callable[[Any], bool]:
    return lambda x: lowest <= x <= highest


# The bounds keep all results finite in fp32.
RULES = {
    "temperature": OptionRule(
        Real, lambda x: x == 0 or 1e-5 <= x <= 1e5, "0 for greedy decoding, or a number from 1e-5 to 1e5"
    ),
    "top_k": OptionRule(Integral, between(0, 2**31 - 1), "a positive whole number, or 0 or None for all tokens"),
    "top_p": OptionRule(Real, lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
    "min_p": OptionRule(Real, between(0, 1), "a number from 0 to 1"),
    "repetition_penalty": OptionRule(Real, between(0.01, 100), "a number from 0.01 to 100; 1 for no penalty"),
    "presence_penalty": OptionRule(Real, between(-2, 2), "a number from -2 to 2; 0 for no penalty"),
    "frequency_penalty": OptionRule(Real, between(-2, 2), "a number from -2 to 2; 0 for no penalty"),
    "n": OptionRule(Integral, between(1, 2**31 - 1), "a whole number of at least 1"),
    "seed": OptionRule(Integral, between(-(2**63), 2**63 - 1), "a whole number of 64 bits, or None"),
}
# Of a cache on a CPU, or for a model that was trained for less; 2 GiB for Llama-3-8B.
CACHE_TOKENS = 16384
FILTER_OPTIONS = ("top_k", "top_p", "min_p")
NONE_ALLOWED = (*FILTER_OPTIONS, "seed")


class Sampling(TypedDict, total=False):
    """How tokens are chosen; the options of every function that generates. `SamplingOptions` has ranges and defaults.

    temperature: 0, the default, for greedy decoding; otherwise tokens are sampled. top_k: sample from the k most likely
    tokens. top_p: then from the smallest set of them whose probability reaches it. min_p: then from those that have at
    least this part of the highest probability. repetition_penalty: divides the positive logits of tokens that are in
    the prompt or were generated, and multiplies the negative ones. presence_penalty, frequency_penalty: subtracted from
    the logits of tokens that were generated, once, and for each time. stop: texts that end a completion, which is cut
    before them. n: completions of each prompt. seed: makes sampling reproducible.
    """

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop: str | Sequence[str] | None
    n: int
    seed: int | None


class SamplingRow(NamedTuple):
    """The numbers that a row has in the tensors of `kernels.sample` and `kernels.penalties`; neutral by default."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The options of `Sampling`, checked. Raises InputError, which names the option, for a value out of its range."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: str | Sequence[str] | None = None  # a tuple of texts, once checked
    n: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in RULES:
            check_option(name, getattr(self, name))
        object.__setattr__(self, "stop", checked_stop(self.stop))
        if self.n > 1 and self.temperature == 0:
            raise InputError(
                f"n is {self.n} at temperature 0, where all completions are equal; set temperature, or n=1"
            )
        for name in FILTER_OPTIONS:
            if self.temperature == 0 and getattr(self.row, name) != getattr(SamplingRow(), name):
                given = f"{name} is {getattr(self, name)} at temperature 0, where no token is drawn"
                raise InputError(f"{given}; set temperature, or leave out {name}")

    @cached_property  # this and what follows are asked at every step
    def row(self) -> SamplingRow:
        neutral = SamplingRow()
        given = ((value, getattr(self, name)) for name, value in neutral._asdict().items())
        return SamplingRow(*(value if option is None else type(value)(option) for value, option in given))

    @cached_property
    def has_filters(self) -> bool:
        """Whether the row needs more of `kernels.sample` than its temperature."""
        return self.row[1:4] != SamplingRow()[1:4]

    @cached_property
    def has_penalties(self) -> bool:
        """Whether the row needs a table of `kernels.penalties`."""
        return self.row[4:] != SamplingRow()[4:]

    def resolved_seed(self) -> int:
        """The seed, or else a new one of torch's default generator, which torch.manual_seed makes reproducible."""
        if self.seed is not None:
            return int(self.seed)
        import torch  # not to read options, as command lines do

        return int(torch.randint(2**63 - 1, ()))


def check_option(name: str, value: Any) -> None:
    """Raises InputError if an option of RULES may not have this value."""
    rule = RULES[name]
    if value is None and name in NONE_ALLOWED:
        return
    if not isinstance(value, rule.kind) or isinstance(value, bool) or not rule.holds(value):
        raise InputError(f"{name} is {value!r}; must be {rule.words}")


def checked_stop(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """The stop strings as a tuple. Raises InputError for an empty text, and for what is no text."""
    texts = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
        raise InputError(f"stop is {stop!r}; must be a text or a list of texts, none of them empty")
    return tuple(texts)
