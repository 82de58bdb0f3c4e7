import time

import pytest
from huggingface_hub import constants

from tests.hub.hub_server import HubServer


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A test server; the client uses it with an empty cache, without a token, and without waiting between retries."""
    server = HubServer()
    settings = {
        "ENDPOINT": server.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_TOKEN_PATH": str(tmp_path / "token"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "DOWNLOAD_CHUNK_SIZE": 1024,
    }
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    yield server
    server.stop()
