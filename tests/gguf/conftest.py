import pytest

pytest.importorskip("gguf")


@pytest.fixture(autouse=True)
def cache_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
