"""Whether the token may write a repository, what is uploaded, and the lines that errors become."""

from types import SimpleNamespace
from typing import ClassVar

import httpx
import pytest
from huggingface_hub import errors

from ligermodels.errors import HubError
from ligermodels.training.run import publishing

CARD = "# A card\n"


class Hub:
    """Stands for huggingface_hub's client. has: the files of the repository. errors: raised by calls of these names."""

    account: ClassVar = {"name": "me", "orgs": [{"name": "lab"}], "auth": {"accessToken": {"role": "write"}}}
    calls: ClassVar = []
    errors: ClassVar = {}
    has = ()

    def whoami(self):
        if "whoami" in self.errors:
            raise self.errors["whoami"]
        return self.account

    def create_repo(self, name, private, exist_ok):
        self.calls.append(("create", name, private, exist_ok))
        return SimpleNamespace(repo_id=name if "/" in name else f"me/{name}")

    def upload_folder(self, repo_id, folder_path):
        if "upload_folder" in self.errors:
            raise self.errors["upload_folder"]
        self.calls.append(("folder", repo_id, folder_path))

    def file_exists(self, repo_id, name):
        return name in self.has

    def upload_file(self, path_or_fileobj, path_in_repo, repo_id):
        self.calls.append(("file", repo_id, path_in_repo, path_or_fileobj))


def replace_client(monkeypatch):
    """Returns the class that stands for the client from here on."""
    fake = type("Fake", (Hub,), {"calls": [], "errors": {}})
    monkeypatch.setattr(publishing, "HfApi", fake)
    return fake


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a-token")
    return replace_client(monkeypatch)


def refusal(name):
    with pytest.raises(HubError) as error:
        publishing.writable_repository(name)
    return str(error.value)


def answer(status):
    response = httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co/api/whoami-v2"))
    return errors.HfHubHTTPError("refused", response=response)


def test_a_repository_of_the_account_or_its_organisations_can_be_written(hub):
    names = ("mine", "me/mine", "lab/ours")
    assert [publishing.writable_repository(name) for name in names] == ["me/mine", "me/mine", "lab/ours"]
    assert refusal("you/yours") == "you/yours: the token in HF_TOKEN is of me, lab, which cannot write to you"
    hub.account = Hub.account | {"auth": {"accessToken": {"role": "read"}}}
    words = "the token in HF_TOKEN can only read; create one that can write, then `hf auth login`"
    assert refusal("mine") == f"mine: {words}"


@pytest.mark.parametrize(
    "error, words",
    [
        (errors.LocalTokenNotFoundError("none"), "there is no token of the Hub; run `hf auth login`, or set HF_TOKEN"),
        (answer(401), "the Hub does not accept the token in HF_TOKEN; run `hf auth login`"),
        (answer(403), "the Hub refuses the token in HF_TOKEN; see https://huggingface.co/settings/tokens"),
        (errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set; unset it"),
        (OSError("gone\nfor good"), "not uploaded (OSError: gone)"),
    ],
)
def test_every_error_is_one_line_with_a_remedy(error, words, hub):
    hub.errors["whoami"] = error
    assert refusal("mine") == f"mine: {words}"


def test_a_name_that_the_hub_cannot_have_is_refused(hub):
    assert refusal("a/b/c") == "a/b/c: is not the name of a repository such as 'owner/model'"


@pytest.mark.parametrize("has_card", [False, True])
def test_a_folder_is_uploaded_to_a_private_repository_with_a_card_where_it_has_none(has_card, hub, tmp_path):
    hub.has = ("README.md",) if has_card else ()
    assert publishing.upload_folder(tmp_path, "mine", CARD) == "https://huggingface.co/me/mine"
    card = [("file", "me/mine", "README.md", CARD.encode())]
    assert hub.calls == [("create", "mine", True, True), ("folder", "me/mine", tmp_path)] + card * (not has_card)
