"""The text that stands for an image: a chat template prints one placeholder, which is replaced before tokenisation.

After tokenisation would be too late: line breaks beside a placeholder merge with their neighbours. Texts are those of
the processors of transformers 5. Must not know pixels or files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ligermodels.errors import InputError
from ligermodels.images.processors import ImagePlan

MAX_FEATURES_OF_TEXT = 2**20


@dataclass(frozen=True)
class Placeholder:
    """printed: what a chat template prints for an image. feature: the token for each of the image's features.

    text: the text of an image with this plan. others: tokens of that text beside `feature`, none of which a model
    writes; their embeddings are their own. around: what chat templates print before and after `printed`.
    prefix: a text with images is a prompt of its own form, which no chat template writes; see `prefixes.py`.
    """

    printed: str
    feature: str
    text: Callable[[ImagePlan], str]
    others: tuple[str, ...] = ()
    around: tuple[str, str] = ("", "")
    prefix: bool = False

    @property
    def in_plain_text(self) -> str:
        """What stands for an image in a text without a chat template."""
        before, after = self.around
        return before + self.printed + after

    def expand(self, text: str, plans: Sequence[ImagePlan]) -> str:
        """The text with each placeholder replaced, in the order of the plans. Raises InputError for another number."""
        pieces = text.split(self.printed)
        if len(pieces) - 1 != len(plans):
            raise InputError(
                f"the text has the image placeholder {self.printed} {len(pieces) - 1} times, but there are "
                f"{len(plans)} images; give one image for each"
            )
        return "".join(piece + image for piece, image in zip(pieces, [*self.texts(plans), ""], strict=True))

    def texts(self, plans: Sequence[ImagePlan]) -> list[str]:
        """The texts of the images of one text. Raises InputError for more features than MAX_FEATURES_OF_TEXT."""
        features = sum(plan.features for plan in plans)
        if features > MAX_FEATURES_OF_TEXT:
            raise InputError(
                f"{len(plans)} images take {features:,} image tokens, more than {MAX_FEATURES_OF_TEXT:,}; use fewer or "
                "smaller images"
            )
        return [self.text(plan) for plan in plans]

    def refuse(self, text: str) -> None:
        """Raises InputError for a text of a message that has a token of images: it would be taken for an image."""
        found = next((token for token in (self.printed, self.feature, *self.others) if token in text), None)
        if found:
            raise InputError(f"has {found} in its text, which stands for an image; remove it, and give images as parts")


def qwen() -> Placeholder:
    token = "<|image_pad|>"
    around = "<|vision_start|>", "<|vision_end|>"
    return Placeholder(token, token, lambda plan: token * plan.features, around=around)


def gemma3(features: int) -> Placeholder:
    """features: of a picture: the whole image or a crop."""
    start, token, end = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
    picture = f"\n\n{start}{token * features}{end}\n\n"

    def text(plan: ImagePlan) -> str:
        if not plan.crops:
            return picture
        crops = " ".join([picture] * len(plan.crops))
        return f"Here is the original image {picture} and here are some crops to help you see better {crops}"

    return Placeholder(start, token, text, (end,))


def mllama() -> Placeholder:
    token = "<|image|>"
    return Placeholder(token, token, lambda plan: token)


def pixtral() -> Placeholder:
    token, row_end, image_end = "[IMG]", "[IMG_BREAK]", "[IMG_END]"

    def text(plan: ImagePlan) -> str:
        rows, columns = plan.grid
        return row_end.join([token * columns] * rows) + image_end

    return Placeholder(token, token, text, (row_end, image_end))


def llava() -> Placeholder:
    token = "<image>"
    return Placeholder(token, token, lambda plan: token * plan.features)


def paligemma() -> Placeholder:
    return replace(llava(), prefix=True)


def smolvlm(features: int) -> Placeholder:
    """features: of a tile."""
    fake, token, whole = "<fake_token_around_image>", "<image>", "<global-img>"
    tile = token * features

    def text(plan: ImagePlan) -> str:
        rows, columns = plan.grid
        split = "".join(
            "".join(f"{fake}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        return split + ("\n" if split else "") + f"{fake}{whole}{tile}{fake}"

    return Placeholder(token, token, text, (fake, whole))
