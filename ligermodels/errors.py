"""The one family of errors that mean "what was given cannot be used": a single line with file, field and remedy.

Command lines print such an error and exit with status 2; anything else is a bug and keeps its traceback.
"""


class InputError(ValueError):
    """The base of them all."""


class ConfigError(InputError):
    """A config.json that names something unsupported or contradicts itself."""


class CheckpointError(InputError):
    """Files that are not the safetensors checkpoint the config describes."""


class HubError(InputError):
    """A name for which there is no model to be had."""
