"""The real huggingface_hub client against a local test server: requests, the cache, and error messages."""

import json
import multiprocessing
import os
import threading
from pathlib import Path

import pytest
import tokenizers
import torch
from huggingface_hub import constants, set_client_factory
from huggingface_hub.utils._http import default_client_factory
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import ligermodels
from ligermodels import hub
from ligermodels.cli import main
from ligermodels.errors import CheckpointError, ConfigError, HubError, InputError
from tests.cases import LLAMA
from tests.hub.hub_server import INVALID, etag

NAME = "owner/model"
SMALL = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tools.jinja",
    "LICENSE",
}
INDEX = "model.safetensors.index.json"
# Files that real repositories also contain and that are not downloaded.
OTHERS = (
    "README.md",
    "pytorch_model.bin",
    "model.gguf",
    "consolidated.safetensors",
    "original/consolidated.00.pth",
    "onnx/model.onnx",
    "onnx/config.json",
    "fp16/model.safetensors",
    "modeling_llama.py",
    "training_args.bin",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny Llama in three shards; the words of its tokenizer are w0 to w98."""
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    ligermodels.export(ligermodels.create(LLAMA), folder, max_shard_size=100_000)
    tokenizer = tokenizers.Tokenizer(WordLevel({f"w{i}": i for i in range(99)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "additional_chat_templates").mkdir()
    for name in SMALL - {"config.json", "tokenizer.json"}:
        (folder / name).write_text("{}")
    return folder


@pytest.fixture(scope="module")
def files(checkpoint):
    """The content of the checkpoint's repository, by file name."""
    own = {str(path.relative_to(checkpoint)): path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
    assert {len(content) > 10_000 for name, content in own.items() if name.endswith(".safetensors")} == {True}
    return own | {name: f"not to be read: {name}".encode() for name in OTHERS}


@pytest.fixture
def repository(server, files):
    """The server with the checkpoint's repository."""
    server.add(NAME, files)
    return server


def error_message(call, *args, error=HubError, **how) -> str:
    with pytest.raises(error) as caught:
        call(*args, **how)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def shards(files) -> list[str]:
    return sorted(name for name in files if name.startswith("model-"))


def names(folder) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def weight_requests(server) -> list:
    return [request for request in server.requests if request.path.endswith(".safetensors") or "/cdn/" in request.path]


def go_offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def same(model, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


# Downloaded files


def test_info_downloads_only_config_json_and_the_index(repository, files, capsys):
    assert main(["info", NAME]) == 0
    out = capsys.readouterr().out
    assert all(f"{shard}  {len(files[shard]) / 1000:.1f} KB" in out for shard in shards(files))
    assert {Path(request.path).name for request in repository.requests if "/resolve/" in request.path} == {
        "config.json",
        INDEX,
    }
    assert not weight_requests(repository)


def test_a_tokenizer_is_downloaded_without_weights_and_a_model_without_other_files(repository, checkpoint, files):
    tokenizer = ligermodels.load_tokenizer(NAME)
    assert tokenizer.encode("w5 w7") == [5, 7] and not weight_requests(repository)
    model = ligermodels.load(NAME)
    assert names(model.source) == {*SMALL, INDEX, *shards(files)} and len(shards(files)) == 3
    assert same(model, ligermodels.load(checkpoint))
    assert [repository.bytes_sent(files[shard]) for shard in shards(files)] == [len(files[s]) for s in shards(files)]


@pytest.fixture
def adapter(repository, files, tmp_path):
    """The repository's model with the LoRA of the Hub's owner/adapter, which has its own tokenizer."""
    model = ligermodels.load(NAME)
    ligermodels.add_lora(model, rank=2)
    ligermodels.export_adapter(model, tmp_path / "adapter")
    written = (path for path in (tmp_path / "adapter").rglob("*") if path.is_file())
    own = {str(path.relative_to(tmp_path / "adapter")): path.read_bytes() for path in written}
    own_tokenizer = {"tokenizer.json": files["tokenizer.json"].replace(b"w5", b"v5")}
    repository.add("owner/adapter", own | {"optimizer.pt": b"x", "adapter_model.bin": b"x"} | own_tokenizer)
    return model


def test_an_adapter_is_downloaded_as_two_files_and_its_tokenizer_and_names_its_base_model(repository, adapter):
    before = len(repository.requests)
    other = ligermodels.load(NAME)
    ligermodels.load_adapter(other, "owner/adapter")
    assert same(other, adapter) and other.source == adapter.source
    asked = {request.path.rpartition("/")[2] for request in repository.requests[before:] if "/resolve/" in request.path}
    assert asked & {"optimizer.pt", "adapter_model.bin"} == set()
    assert asked >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
    settings = json.loads((hub.adapter_folder("owner/adapter") / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == (NAME, adapter.source.name)
    assert ligermodels.load_tokenizer(NAME, adapter="owner/adapter").encode("v5 w7") == [5, 7]


def test_cached_files_are_not_requested_again(repository):
    folder = hub.resolve(NAME)
    repository.requests.clear()
    assert hub.resolve(NAME) == folder
    assert [request.path for request in repository.requests] == [f"/api/models/{NAME}/revision/main"]


def test_a_single_file_is_preferred_to_shards(server, files):
    server.add(NAME, files | {"model.safetensors": files[shards(files)[0]]})
    assert names(hub.resolve(NAME)) == {*SMALL, INDEX, "model.safetensors"}


def test_a_revision_is_a_branch_a_tag_or_a_commit(server, files):
    first = server.add(NAME, files | {"LICENSE": b"first"}, "v1", "release/1")
    second = server.add(NAME, files | {"LICENSE": b"second"})
    for revision, text in {
        "v1": "first",
        "release/1": "first",
        first: "first",
        None: "second",
        second: "second",
    }.items():
        folder = hub.resolve(NAME, revision=revision)
        assert (folder / "LICENSE").read_text() == text, revision
        assert (folder.name == first) == (text == "first")
    message = error_message(hub.resolve, NAME, revision="v9")
    assert message == f"{NAME}: has no revision 'v9'; see {server.endpoint}/{NAME}/commits"


OUT = "../" * 4 + "outside/x"
ENDPOINT_LIES = {
    "commit of a description": {"sha": OUT}, "commit of a file": {"X-Repo-Commit": OUT},
    "absolute commit": {"X-Repo-Commit": "/tmp/outside"}, "short commit": {"sha": "0a1b"},
    "list for a commit": {"sha": ["a" * 40]},
    "ETag": {"ETag": f'"{OUT}"'}, "weak ETag": {"ETag": f'W/"{OUT}"'}, "absolute ETag": {"ETag": "/tmp/outside"},
    "ETag that is a folder": {"ETag": '".."'}, "ETag of a large file": {"X-Linked-Etag": OUT},
    "hash of a large file": {"lfs_oid": OUT},
}  # fmt: skip


@pytest.mark.parametrize("lie", ENDPOINT_LIES)
def test_an_endpoint_that_names_paths_writes_nothing_outside_of_the_cache(repository, monkeypatch, tmp_path, lie):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", lie != "hash of a large file")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "a/b/c/d/e/hub"))
    repository.lies = ENDPOINT_LIES[lie]
    message = error_message(ligermodels.load, NAME)
    assert message.startswith(f"{repository.endpoint}: answers with ") and "is HF_ENDPOINT a Hub?" in message
    written = [path for path in tmp_path.rglob("*") if path.is_file() or path.is_symlink()]
    assert all(path.is_relative_to(tmp_path / "a/b/c/d/e/hub") for path in written)
    assert all(path.resolve().is_relative_to(tmp_path / "a/b/c/d/e/hub") for path in written)
    repository.lies = {}
    assert ligermodels.load_tokenizer(NAME).encode("w5 w7") == [5, 7]


@pytest.mark.parametrize("revision", ["../../x", "a/../../../x", "/tmp/x"])
def test_a_revision_that_is_a_path_is_refused_before_a_request(repository, revision):
    message = error_message(hub.resolve, NAME, revision=revision)
    assert message == f"{NAME}: has no revision {revision!r}; see {repository.endpoint}/{NAME}/commits"
    assert not repository.requests


def test_a_client_of_the_user_is_kept_and_checked(repository):
    made = []

    def client():
        made.append(default_client_factory())
        return made[-1]

    set_client_factory(client)
    try:
        repository.lies = {"X-Repo-Commit": OUT}
        assert "for a commit" in error_message(hub.resolve, NAME)
        assert len(made) == 1
    finally:
        set_client_factory(default_client_factory)


def test_progress_is_shown_only_for_weights_that_are_downloaded(repository, monkeypatch, capfd):
    monkeypatch.setenv("TQDM_POSITION", "-1")  # shows the client's progress bars without a terminal
    ligermodels.load_tokenizer(NAME)
    assert not capfd.readouterr().err
    hub.resolve(NAME)
    assert "Fetching 3 files: 100%" in capfd.readouterr().err
    hub.resolve(NAME)
    assert not capfd.readouterr().err


@pytest.mark.parametrize("command", ["generate", "export"])
def test_the_command_line_resolves_model_and_adapter_once_each(repository, adapter, command, tmp_path, capsys):
    generated = ["--prompt", "v5", "--max-new-tokens", "1", "--device", "cpu"]
    repository.requests.clear()
    last = generated if command == "generate" else [str(tmp_path / "merged")]
    assert main([command, NAME, *last, "--adapter", "owner/adapter"]) == 0
    assert capsys.readouterr().out.startswith("v5" if command == "generate" else f"{tmp_path / 'merged'}: ")
    asked = {request.path for request in repository.asked("GET", "/revision/main")}
    assert asked == {f"/api/models/{name}/revision/main" for name in (NAME, "owner/adapter")}
    assert len(repository.asked("GET", "/revision/main")) == 2


def test_an_adapter_stands_for_the_commit_of_the_base_that_it_was_trained_on(repository, files, adapter, capsys):
    repository.add(NAME, files | {"tokenizer.json": b"of another commit"})
    generated = ["--prompt", "v5", "--max-new-tokens", "1", "--device", "cpu"]
    assert main(["generate", "owner/adapter", *generated]) == 0
    assert capsys.readouterr().out.startswith("v5")
    with pytest.raises(CheckpointError, match="contains an adapter and no model: load its base model"):
        ligermodels.load("owner/adapter")


# Errors before weights are downloaded


def test_a_repository_without_safetensors_is_refused(server, files):
    server.add(NAME, {name: files[name] for name in (*SMALL, *OTHERS)})
    message = error_message(hub.resolve, NAME)
    assert f"{NAME}: has no weights in safetensors, but pytorch_model.bin, model.gguf, consolidated.saf" in message
    assert "only model.safetensors, or model.safetensors.index.json with its shards, is read" in message
    assert not weight_requests(server) and not server.bytes_sent(files["pytorch_model.bin"])


def test_an_error_names_the_shards_that_the_repository_lacks(server, files):
    _, *rest = shards(files)
    server.add(NAME, {name: content for name, content in files.items() if name not in rest})
    message = error_message(hub.resolve, NAME)
    assert f"{INDEX} names files that the repository does not have: {', '.join(rest)};" in message
    assert not weight_requests(server)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model_type": "gpt2"}, HubError, "config.json: model_type 'gpt2' is not supported"),
        ({"num_key_value_heads": 4}, ConfigError, "num_key_value_heads"),
        (None, HubError, f"{NAME}: has no config.json"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(server, files, change, error, words):
    config = {"config.json": json.dumps(LLAMA | change).encode()} if change else {}
    server.add(NAME, {name: content for name, content in files.items() if name != "config.json"} | config)
    assert words in error_message(hub.resolve, NAME, error=error)
    assert not weight_requests(server)


def test_an_index_that_names_a_file_outside_the_folder_is_refused(server, files):
    server.add(NAME, files | {INDEX: json.dumps({"weight_map": {"a": "../../x.safetensors"}}).encode()})
    assert "weight_map names '../../x.safetensors'" in error_message(hub.resolve, NAME, error=CheckpointError)
    assert not weight_requests(server)


# Tokens


@pytest.mark.parametrize("where", ["argument", "environment", "file"])
def test_a_token_is_sent_only_to_the_hub(server, files, monkeypatch, where):
    server.add(NAME, files, private=True, readers=frozenset({"a-token"}))
    if where == "environment":
        monkeypatch.setenv("HF_TOKEN", "a-token")
    if where == "file":
        Path(constants.HF_TOKEN_PATH).write_text("a-token\n")
    hub.resolve(NAME, token="a-token" if where == "argument" else None)
    asked = [request for request in server.requests if NAME in request.path]
    assert {request.token for request in asked} == {"a-token"}
    assert {request.token for request in server.asked("GET", "/cdn/")} == {None}


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (None, "is gated and there is no token; accept its licence at {page}, then set HF_TOKEN"),
        (
            "another-token",
            "is gated and the token in HF_TOKEN has no access to it (Access to model owner/model is ",
        ),
        ("another-token", "accept its licence and request access at {page} with the token's account"),
        ("revoked", f"the Hub does not accept the token in HF_TOKEN ({INVALID}); create another at "),
    ],
)
def test_a_missing_an_unauthorised_and_an_invalid_token_have_different_errors(server, files, monkeypatch, token, words):
    server.add(NAME, files, gated=True, readers=frozenset({"a-token"}))
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    assert words.format(page=f"{server.endpoint}/{NAME}") in error_message(hub.resolve, NAME)
    assert hub.resolve(NAME, token="a-token").is_dir()


def test_a_403_shows_the_message_of_the_hub(repository):
    repository.spoil("GET", "/revision/main", times=9, status=403)
    assert "the Hub refuses the token passed (spoiled); see " in error_message(hub.resolve, NAME, token="a-token")


# Names


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("meta-llama/Llama-3-8B", "'meta-llama/Meta-Llama-3-8B'"),
        ("qwen2.5-7b", "'Qwen/Qwen2.5-7B'"),
        ("lama", "'llama'"),
        (NAME, None),
    ],
)
def test_an_unknown_name_gets_a_suggestion_and_is_not_replaced(server, capsys, name, meant):
    for token, access in {None: "private, which needs HF_TOKEN", "a-token": "the token passed cannot see it"}.items():
        message = error_message(hub.resolve, name, token=token)
        ending = f"did you mean {meant}?" if meant else "check the spelling"
        assert message == f"{name}: is no folder, and is not a repository of the Hub, or {access}; {ending}"
    assert main(["generate", name, "--prompt", "w5", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert all("meta-llama/Meta" not in request.path and "Qwen/Q" not in request.path for request in server.requests)


@pytest.mark.parametrize(
    "name", ["./no/folder", "a/b/c", "/no/such/folder", "~/no/such", "~nobody/x", Path("no/folder")]
)
def test_a_path_is_not_sent_to_the_hub(server, name):
    assert error_message(hub.resolve, name) == f"{name}: is neither a folder nor a Hub name such as 'owner/model'"
    assert not server.requests


def test_a_mistyped_folder_gets_the_most_similar_one_beside_it_as_suggestion(server, tmp_path, monkeypatch):
    (tmp_path / "models" / "llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for typed in ("./models/llma", "models/llma", f"{tmp_path}/models/llma"):
        assert "/llama'?" in error_message(hub.resolve, typed)
    begins = "models/none: is no folder in models, and is not a repository of the Hub, or private"
    assert error_message(hub.resolve, "models/none").startswith(begins)
    go_offline(monkeypatch)
    begins = "models/none: is no folder in models, and HF_HUB_OFFLINE is set"
    assert error_message(hub.resolve, "models/none").startswith(begins)
    asked = {f"/api/models/models/{name}/revision/main" for name in ("llma", "none")}
    assert {request.path for request in server.requests} <= asked


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("owner/mod el", "is neither a folder nor a Hub name such as 'owner/model'"),
        ("https://huggingface.co/owner/model", "is a URL; pass the Hub name instead, such as 'owner/model'"),
        ("llama", "is an architecture and has no weights to load"),
        ("model" * 60, "is neither a folder nor a Hub name such as 'owner/model'"),
        (__file__, "is a file; pass the folder that contains it"),
    ],
)
def test_other_invalid_names_are_refused_without_a_request(server, name, words):
    assert words in error_message(hub.resolve, name)
    assert not server.requests


def test_an_existing_folder_is_used_as_it_is(server, tmp_path):
    assert hub.resolve(tmp_path) == hub.resolve(str(tmp_path)) == tmp_path
    assert not server.requests


# Without the Hub


@pytest.fixture(params=["offline", "unreachable", "failing"])
def without_hub(request, server, monkeypatch):
    """A function that disconnects the client from the Hub, and returns the text of the error message for that."""

    def leave():
        server.requests.clear()
        if request.param == "offline":
            go_offline(monkeypatch)
            return "HF_HUB_OFFLINE is set, and the cache "
        if request.param == "unreachable":
            server.stop()
            return f"{server.endpoint} cannot be reached (Connect"
        server.spoil("GET", "", times=99, status=503)
        return "the Hub answers "

    return leave


def test_without_the_hub_the_cache_is_used(repository, without_hub):
    folder, commit = hub.resolve(NAME), hub.resolve(NAME).name
    without_hub()
    assert hub.resolve(NAME) == hub.resolve(NAME, revision=commit) == folder
    assert ligermodels.load_tokenizer(NAME).encode("w5") == [5]


def test_without_the_hub_an_error_names_the_files_that_are_not_cached(repository, without_hub, files):
    ligermodels.load_tokenizer(NAME)
    why = without_hub()
    message = error_message(hub.resolve, NAME)
    assert message.startswith(f"{NAME}: {why}") and f"does not hold {', '.join(shards(files))}; " in message
    assert not weight_requests(repository)


def test_without_the_hub_and_with_an_empty_cache_an_error_names_the_revision(server, without_hub):
    why = without_hub()
    message = error_message(hub.resolve, "meta-llama/Llama-3-8B")
    assert message.startswith(f"meta-llama/Llama-3-8B: is no folder, and {why}")
    assert f"the cache {constants.HF_HUB_CACHE} does not hold revision 'main'" in message
    assert "did you mean 'meta-llama/Meta-Llama-3-8B'?" in message
    assert "does not hold revision 'v2'" in error_message(hub.resolve, "meta-llama/Meta-Llama-3-8B", revision="v2")
    assert "did you mean" not in error_message(hub.resolve, "meta-llama/Meta-Llama-3-8B")


def test_offline_an_error_names_a_small_file_that_the_cache_lacks(repository, monkeypatch):
    (hub.resolve(NAME) / "generation_config.json").unlink()
    go_offline(monkeypatch)
    message = error_message(hub.resolve, NAME)
    assert "HF_HUB_OFFLINE is set" in message and "generation_config.json" in message


# Interruptions


def test_a_broken_connection_is_resumed_where_it_broke(repository, files):
    content = files[shards(files)[1]]
    repository.spoil("GET", f"/cdn/{etag(content)}", cut=50_000)
    folder = hub.resolve(NAME)
    assert (folder / shards(files)[1]).read_bytes() == content
    whole, rest = repository.asked("GET", f"/cdn/{etag(content)}")
    begin = int(rest.range.removeprefix("bytes=").removesuffix("-"))
    assert whole.range is None and 50_000 - 1024 < begin <= 50_000  # the client keeps complete chunks (1024 bytes)
    assert repository.bytes_sent(content) == 50_000 + len(content) - begin


def test_a_reset_connection_is_retried(repository, files):
    content = files[shards(files)[1]]
    repository.spoil("GET", f"/cdn/{etag(content)}", cut=50_000, reset=True)
    assert (hub.resolve(NAME) / shards(files)[1]).read_bytes() == content


def test_a_failed_download_leaves_no_partial_file_and_resumes_with_the_missing_files(repository, files):
    first, second, third = (files[shard] for shard in shards(files))
    repository.spoil("GET", f"/cdn/{etag(second)}", cut=50_000)
    repository.spoil("GET", f"/cdn/{etag(second)}", cut=0, times=99)
    message = error_message(ligermodels.load, NAME)
    assert message.startswith(f"{NAME}: ") and shards(files)[1] in message and "complete files are kept" in message
    (snapshot,) = Path(constants.HF_HUB_CACHE).glob("models--owner--model/snapshots/*")
    assert not (snapshot / shards(files)[1]).exists() and (snapshot / shards(files)[0]).exists()

    repository.faults.clear()
    before = repository.bytes_sent(first), repository.bytes_sent(third)
    folder = hub.resolve(NAME)
    assert [(folder / shard).read_bytes() for shard in shards(files)] == [first, second, third]
    assert (repository.bytes_sent(first), repository.bytes_sent(third)) == before == (len(first), len(third))


@pytest.mark.parametrize("status", [429, 503])
def test_a_request_is_retried_while_the_hub_is_overloaded(repository, files, status):
    content = files[shards(files)[0]]
    for method, path in (
        ("GET", "/revision/main"),
        ("GET", "/tree/" + next(iter(repository.repositories[NAME].commits))),
        ("HEAD", "/tokenizer.json"),
        ("GET", "/tokenizer.json"),
        ("HEAD", "/" + shards(files)[0]),
        ("GET", f"/cdn/{etag(content)}"),
    ):
        repository.spoil(method, path, status=status)
    assert names(hub.resolve(NAME)) == {*SMALL, INDEX, *shards(files)}
    assert not repository.faults and repository.bytes_sent(content) == len(content)


def test_two_processes_download_each_file_once(repository, files):
    """Both request the largest file before either receives it."""
    processes = [multiprocessing.get_context("fork").Process(target=hub.resolve, args=(NAME,)) for _ in range(2)]
    largest = max((files[shard] for shard in shards(files)), key=len)
    repository.gates["HEAD", next(name for name in files if files[name] == largest)] = threading.Barrier(2)
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert repository.bytes_sent(largest) == len(largest)
    folder = hub.resolve(NAME)
    assert all((folder / shard).read_bytes() == files[shard] for shard in shards(files))
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))


def test_any_other_failure_is_a_one_line_error(server, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    server.add(NAME, {"config.json": b"{}"})
    message = error_message(hub.resolve, NAME, error=InputError)
    assert "could not be downloaded (NotADirectoryError:" in message and os.fspath(tmp_path) in message
