import pytest

from tests.interop.models import Folders


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return Folders(tmp_path_factory.mktemp("checkpoints"))
