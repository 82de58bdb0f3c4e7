"""From tokenised documents to batches on a device: the store, the split, packing, mixing."""
