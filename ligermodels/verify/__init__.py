"""`verify`: checks that a checkpoint gives the same results here and in transformers, and survives a round trip.

The criteria are the error budget of the tests: our error may be at most a stated multiple of the error that the
reference implementation itself makes in the same dtype. One model is in memory at a time. Only the errors of a run are
kept, and the results of the most exact run, on the host. transformers is needed only here.
"""

from pathlib import Path

from ligermodels import hub
from ligermodels.errors import InputError
from ligermodels.verify import reference
from ligermodels.verify.certificate import Certificate, write_certificate
from ligermodels.verify.certificate import as_json as as_json
from ligermodels.verify.parity import parity_checks, scope
from ligermodels.verify.round_trip import round_trip_checks, text_checks
from ligermodels.weights.config_file import read_config
from ligermodels.weights.gguf.folder import shown_file


def verify(name_or_folder: str | Path, output: str | Path, *, device: str = "cpu", new_tokens: int = 32) -> Certificate:
    """Runs all checks, and writes the certificate to `output` as NAME.json and NAME.html.

    new_tokens: the number of greedy tokens to compare. Raises InputError (HubError, ConfigError, CheckpointError) if
    transformers is not installed, if either of the two cannot load the checkpoint, or if it is in NF4, FP8 or GGUF.
    """
    reference.require_transformers()
    folder = hub.resolve(name_or_folder)
    if file := shown_file(folder):
        raise InputError(f"verify: {file} is GGUF; verify the folder that ligermodels export {file} FOLDER makes of it")
    reference.refuse_computing_in_bits(name_or_folder, read_config(folder))
    checks = [*parity_checks(folder, device, new_tokens), *round_trip_checks(folder, device), *text_checks(folder)]
    return write_certificate(Path(output), str(name_or_folder), folder, device, checks, scope(folder))
