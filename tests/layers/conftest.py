"""Fixtures of the tests of layers."""

import pytest

from tests.conftest import DEVICE


@pytest.fixture(params=["kernels", "reference"])
def path(request):
    """Runs a test by the Triton kernels, then by the references."""
    if request.param == "kernels":
        request.getfixturevalue("kernels")
    elif DEVICE != "cpu":
        pytest.skip("references run on CPU tensors")
