"""Data of post-training: pairs, judged completions, prompts, distillation; from names given to --data to packed rows.

Entry points: `open_preferences` (opening.py), and for completions that were sampled during training `collate_groups`
(layout.py).
"""

from ligermodels.training.data.preferences.layout import PreferenceBatch, collate_groups, empty_batch
from ligermodels.training.data.preferences.opening import PreferenceData, open_preferences
from ligermodels.training.data.preferences.steps import Step, TrainingGroups, ValidationGroups
from ligermodels.training.data.preferences.store import Group, GroupOptions, GroupPrompt, unshared

__all__ = [
    "Group", "GroupOptions", "GroupPrompt", "PreferenceBatch", "PreferenceData", "Step", "TrainingGroups",
    "ValidationGroups", "collate_groups", "empty_batch", "open_preferences", "unshared",
]  # fmt: skip
