"""Decodes the images of a batch, in threads: Pillow and torch leave Python free to go on. Knows no files of data."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils._pytree import tree_map_only

from ligermodels.errors import InputError
from ligermodels.images.inputs import Processor
from ligermodels.images.processors import Prepared
from ligermodels.training.data.rows.cache import cache_folder
from ligermodels.training.data.rows.packing import Segment
from ligermodels.training.data.rows.store import TokenStore

MAX_THREADS = 16  # of a rank; hosts with many GPUs share their cores among as many ranks

StoredImage: TypeAlias = tuple[TokenStore, int]  # an image by its number in a store


class ImageDecoder:
    """processor: of the model.

    prepare_inputs: makes of ids, labels, cu_seqlens and pixel inputs, by their names, what `forward` takes as `images`,
    so that it need not ask the device for ids; None where `forward` takes pixel inputs alone.
    """

    def __init__(self, processor: Processor, prepare_inputs: Callable[..., Any] | None = None) -> None:
        self.processor, self.prepare_inputs = processor, prepare_inputs
        self.threads = ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))), "images")

    def arguments(
        self,
        rows: Sequence[Sequence[StoredImage]],
        input_ids: Tensor,
        labels: Tensor | None,
        cu_seqlens: Tensor | None,
        pinned: bool,
    ) -> dict[str, Any]:
        """Of `forward`, for the images of rows; empty if there are none. As `pixel_inputs`."""
        inputs: dict[str, Any] = self.pixel_inputs(rows, input_ids)
        if inputs and self.prepare_inputs is not None:
            inputs = {"images": self.prepare_inputs(input_ids, labels, cu_seqlens=cu_seqlens, **inputs)}
        return tree_map_only(Tensor, Tensor.pin_memory, inputs) if pinned else inputs

    def pixel_inputs(self, rows: Sequence[Sequence[StoredImage]], input_ids: Tensor) -> dict[str, Tensor]:
        """The images of rows, under the Hub's names of a model's arguments; empty if there are none.

        rows: of each row its images, in the order of their tokens; one that is there twice is decoded once.
        input_ids: [B, T] of the B rows. Raises InputError as `prepare` does.
        """
        if not any(rows):
            return {}
        different = {(id(store), number): (store, number) for row in rows for store, number in row}
        futures = {key: self.threads.submit(self.prepare, *image) for key, image in different.items()}
        prepared = [[futures[id(store), number].result() for store, number in row] for row in rows]
        return self.processor.images.collate(prepared, input_ids == self.processor.feature_id)

    def prepare(self, store: TokenStore, number: int) -> Prepared:
        """Raises InputError, which names the document, if the image cannot be read, or is another than was planned."""
        images = store.images
        assert images is not None
        first = int(images.starts[number])
        place = f"{store.place(first)}: image"
        plan, pixels = self.processor.prepare(images.source(number), place)
        expected = self.processor.plan_size(int(images.heights[number]), int(images.widths[number]), place)
        if plan != expected:
            raise InputError(
                f"{place}: has another size than when the data were tokenised; restore it, or delete the cache of "
                f"data, {cache_folder()}, and start another run"
            )
        return plan, pixels


def images_of(row: Iterable[Segment]) -> list[StoredImage]:
    """The images of a row of segments."""
    return [
        (store, number)
        for store, start, size in row
        if store.images is not None
        for number in store.images.between(start, start + size)
    ]
