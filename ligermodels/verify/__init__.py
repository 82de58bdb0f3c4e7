"""`verify`: whether a checkpoint computes here what it computes in transformers, and comes back as it was.

The criteria are the error budget of the tests: our error against the truth may be a stated multiple of the one that the
reference implementation itself makes in the same dtype. One model is in memory at a time; of each run only errors
are kept, and of the most exact one its results, on the host. transformers is needed here and nowhere else.
"""

from datetime import UTC, datetime
from pathlib import Path

from ligermodels import hub
from ligermodels.verify import reference
from ligermodels.verify.certificate import Certificate, write_certificate
from ligermodels.verify.parity import parity_checks
from ligermodels.verify.round_trip import round_trip_checks
from ligermodels.verify.text import text_checks


def verify(name_or_folder: str | Path, output: str | Path, *, device: str = "cpu", new_tokens: int = 32) -> Certificate:
    """Compares, and writes the certificate to `output` as NAME.json and NAME.html.

    new_tokens: how many greedy tokens are compared. Raises InputError (HubError, ConfigError, CheckpointError) where
    transformers is not installed, or one of the two cannot load the checkpoint.
    """
    reference.require_transformers()
    folder = hub.resolve(name_or_folder)
    checks = [*parity_checks(folder, device, new_tokens), *round_trip_checks(folder, device), *text_checks(folder)]
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return write_certificate(Path(output), str(name_or_folder), folder, device, date, checks)
