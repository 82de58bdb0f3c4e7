"""`ligermodels generate --file`: a line for each sample, kept when a run is interrupted; bad lines are named."""

import io
import json
import os
import sys

import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import ligermodels
from ligermodels.cli import generate_file, main
from ligermodels.cli.console import Console
from ligermodels.cli.generate_images import PromptReader
from ligermodels.errors import InputError
from tests.cases import LLAMA

PROMPTS = [{"prompt": "w5 w6", "id": "a"}, {"prompt": "w7", "id": "b", "tags": [1, "é"]}, {"prompt": "w8 w9 w10"}]
TEMPLATE = "{% for m in messages %}w11 {{ m.content }} {% endfor %}w12"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model; the words of its tokenizer are w0 to w98."""
    folder = tmp_path_factory.mktemp("model")
    ligermodels.export(ligermodels.create(LLAMA), folder)
    tokenizer = tokenizers.Tokenizer(WordLevel({f"w{i}": i for i in range(99)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def run(folder, tmp_path, capsys):
    """Runs the command on lines; returns its exit status, the lines of its output, and what it prints."""

    def call(lines, *flags, output="out.jsonl", status=0):
        source = tmp_path / "prompts.jsonl"
        source.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
        files = ["--file", str(source), "--output", str(tmp_path / output)]
        assert main(["generate", str(folder), *files, "--device", "cpu", "--max-new-tokens", "6", *flags]) == status
        return read(tmp_path / output), capsys.readouterr().err

    return call


def read(file):
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def in_order(results):
    return sorted(results, key=lambda result: (result["index"], result["sample"]))


def text(ids):
    return "".join(f" w{i}" for i in ids if i != 2)


def test_each_line_gets_its_completion_and_keeps_its_fields(run, folder):
    model = ligermodels.load(folder)
    results, err = run(["\n", *PROMPTS])
    new = ligermodels.generate(model, [[5, 6], [7], [8, 9, 10]], max_new_tokens=6)
    for index, (result, fields, ids) in enumerate(zip(in_order(results), PROMPTS, new, strict=True)):
        expected = {"index": index, "sample": 0, **fields, "completion": text(ids)}
        assert result == expected | {"finish_reason": "stop" if ids[-1] == 2 else "length"}
    count = sum(map(len, new))
    assert err.startswith(f"3 prompts, {count} new tokens in ") and err.count("\n") == 1


def test_messages_and_chats_go_through_the_template(run, folder):
    model = ligermodels.load(folder)
    expected = ligermodels.generate(model, [[11, 5, 12], [11, 9, 11, 5, 12]], max_new_tokens=6)
    results, _ = run([{"prompt": [{"role": "user", "content": "w5"}]}])
    assert results[0]["completion"] == text(expected[0]).strip()
    results, _ = run([{"prompt": "w5"}], "--chat", "--system", "w9", output="chat.jsonl")
    assert results[0]["completion"] == text(expected[1]).strip()


def test_sampling_flags_reach_the_engine(run, folder):
    """Log-probabilities are those of the drawn tokens; the random numbers are those of the line's index."""
    flags = ["--temperature", "1.5", "--top-k", "50", "--top-p", "0.99", "--min-p", "0.001", "--seed", "3"]
    flags += ["--repetition-penalty", "1.1", "--presence-penalty", "0.2", "--frequency-penalty", "0.1"]
    results, _ = run(PROMPTS[:2], *flags, "--num-samples", "2", "--logprobs")
    engine = ligermodels.Engine(ligermodels.load(folder), max_tokens=4096)
    options = {"temperature": 1.5, "top_k": 50, "top_p": 0.99, "min_p": 0.001, "seed": 3, "n": 2}
    options |= {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}
    for ids in ([5, 6], [7]):
        engine.submit(ids, max_new_tokens=6, **options)
    expected = sorted(engine, key=lambda sample: (sample.request, sample.sample))
    assert [result["ids"] for result in in_order(results)] == [sample.ids for sample in expected]
    assert [result["logprobs"] for result in in_order(results)] == [
        pytest.approx(sample.logprobs, abs=1e-5) for sample in expected
    ]
    assert len({tuple(sample.ids) for sample in expected}) == 4
    stop = f"w{results[0]['ids'][2]}"
    stopped, _ = run(PROMPTS[:2], *flags, "--num-samples", "2", "--stop", "nothing", stop, output="stop.jsonl")
    assert all(result["completion"].find(stop) < 0 for result in stopped)
    assert in_order(stopped)[results[0]["sample"]]["finish_reason"] == "stop"


def test_a_run_goes_on_with_the_samples_that_its_output_lacks(run, tmp_path, monkeypatch):
    """Results do not depend on where a run was interrupted; the line that was being written is written again."""
    flags = ["--temperature", "1", "--seed", "4", "--num-samples", "2"]
    whole, _ = run(PROMPTS, *flags)
    output = tmp_path / "out.jsonl"
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    submitted = []
    submit = ligermodels.Engine.submit
    monkeypatch.setattr(
        ligermodels.Engine, "submit", lambda *args, **options: submitted.append(args[1]) or submit(*args, **options)
    )
    results, _ = run(PROMPTS, *flags)
    assert in_order(results) == in_order(whole) and results[:3] == whole[:3] and 1 <= len(submitted) < 3
    before = output.read_bytes()
    again, err = run(PROMPTS, *flags)
    assert again == results and output.read_bytes() == before
    assert err.startswith("3 prompts, 3 of them answered by an earlier command, 0 new tokens in ")


def test_an_interrupt_is_one_line_and_leaves_whole_lines(run, tmp_path, monkeypatch):
    write = generate_file.write
    written = []

    def interrupted(output, line, target):
        if written:
            raise KeyboardInterrupt
        written.append(line)
        write(output, line, target)

    monkeypatch.setattr(generate_file, "write", interrupted)
    results, err = run(PROMPTS, status=130)
    assert len(results) == 1 and err == "ligermodels: interrupted\n"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{'prompt'\n", "not JSON"),
        ("[1]\n", "has no field prompt"),
        ({"text": "w5"}, "has no field prompt; must be an object such as"),
        ({"prompt": 3}, "field prompt must be a text or a list of messages"),
        ({"prompt": ""}, "a prompt is empty"),
        ({"prompt": [{"role": "person", "content": "w5"}]}, "field prompt[0].role is 'person'"),
        ({"prompt": "w5", "completion": "w6"}, "has a field completion, which is one of the results; rename it"),
        ({"prompt": "w5", "score": float("inf")}, "has a number that is infinite or NaN, which JSON does not have"),
        ({"prompt": "w5 " * 300}, "shorten it, lower max_new_tokens, or give the engine a larger max_length"),
    ],
)
def test_a_line_that_cannot_be_used_is_one_line_on_stderr_and_others_go_on(run, line, reason):
    results, err = run([PROMPTS[0], line, PROMPTS[2]], "--cache-tokens", "128", status=2)
    assert sorted(result["index"] for result in results) == [0, 2]
    first, second = err.splitlines()
    assert "prompts.jsonl:2:" in first and first.count("prompts.jsonl") == 1 and reason in first
    assert second.startswith("2 prompts, ") and second.endswith("; 1 line cannot be used")


def test_an_output_of_other_lines_is_refused_and_not_changed(run, tmp_path):
    run(PROMPTS)
    before = (tmp_path / "out.jsonl").read_bytes()
    _, err = run([PROMPTS[1]], status=2)
    assert "prompts.jsonl:1: the output has results of another line here; give another --output" in err
    assert (tmp_path / "out.jsonl").read_bytes() == before
    (tmp_path / "notes.txt").write_text("not ours")
    with pytest.raises(json.JSONDecodeError):
        run(PROMPTS, output="notes.txt", status=2)
    assert (tmp_path / "notes.txt").read_text() == "not ours"


def test_only_the_samples_that_are_wanted_count_as_done(run, tmp_path):
    """A line with another number is kept; one whose number is none is no result."""
    whole, _ = run(PROMPTS)
    output = tmp_path / "out.jsonl"
    other = whole[1] | {"sample": 1_000_000_000}
    output.write_text("".join(json.dumps(line) + "\n" for line in (whole[0], other, whole[2])))
    results, _ = run(PROMPTS)
    assert in_order(results) == in_order([*whole, other])
    for number in (-1, True, 0.0):
        output.write_text(json.dumps(whole[0] | {"sample": number}) + "\n")
        assert "out.jsonl:1: is not a result of generate" in run(PROMPTS, status=2)[1]


def test_a_full_disk_is_one_line(run, folder, tmp_path, capsys):
    source = tmp_path / "prompts.jsonl"
    source.write_text(json.dumps(PROMPTS[0]) + "\n")
    flags = ["--file", str(source), "--output", "/dev/full", "--device", "cpu", "--max-new-tokens", "2"]
    assert main(["generate", str(folder), *flags]) == 2
    assert capsys.readouterr().err == (
        "ligermodels: --output /dev/full: not written: No space left on device; make room, and run the same command "
        "again\n"
    )


def test_a_pipe_is_an_output_if_something_reads_it(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match=f"^--output {pipe}: cannot be written: No such device or address$"):
        generate_file.appended(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with generate_file.open_output(pipe) as output:
        assert os.get_blocking(output.fileno())
        output.write(b"{}\n")
    assert os.read(reader, 9) == b"{}\n"
    os.close(reader)


def test_an_output_of_one_endless_line_is_refused_by_its_beginning(tmp_path, monkeypatch):
    with (tmp_path / "zeros").open("wb") as stream:
        stream.truncate(2**20)
    monkeypatch.setattr(generate_file, "MAX_RESULT_BYTES", 2**10)
    assert max(map(len, generate_file.lines_of_output(tmp_path / "zeros"))) == 2**10
    with pytest.raises(InputError, match=r"zeros:1: is longer than any result of generate; give another --output"):
        generate_file.results_in(tmp_path / "zeros")


def test_a_conversation_has_one_engine_and_ends_where_its_cache_is_full(folder, capsys, monkeypatch):
    built = []
    init = ligermodels.Engine.__init__
    monkeypatch.setattr(
        ligermodels.Engine, "__init__", lambda *args, **options: built.append(options) or init(*args, **options)
    )
    lines = b"w5\nw6\n" + b"w7 " * 60 + b"\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
    flags = ["--chat", "--device", "cpu", "--max-new-tokens", "4", "--cache-tokens", "64", "--stop", "nothing"]
    assert main(["generate", str(folder), *flags]) == 2
    out, err = capsys.readouterr()
    assert out.count("\n") == 2 and len(built) == 1 and built[0]["max_tokens"] == 64
    assert "is longer than the 64 that the engine holds for one request" in err and err.count("\n") == 1


def test_standard_input_and_output_take_the_place_of_files(folder, capsys, monkeypatch):
    lines = "".join(json.dumps(fields) + "\n" for fields in PROMPTS)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode()), encoding="utf-8"))
    assert main(["generate", str(folder), "--file", "-", "--device", "cpu", "--max-new-tokens", "3"]) == 0
    assert {json.loads(line)["index"] for line in capsys.readouterr().out.splitlines()} == {0, 1, 2}


def test_no_more_lines_are_read_than_wait_and_run(folder, monkeypatch):
    """Memory does not grow with the file."""
    model = ligermodels.load(folder)
    engine = ligermodels.Engine(model, tokenizer=ligermodels.load_tokenizer(folder), max_tokens=256, max_rows=2)
    read = []

    def lines():
        for index in range(12):
            read.append(index)
            yield index, f"line {index}", b'{"prompt": "w5"}'

    encode = generate_file.prompt_encoder(PromptReader(folder, engine.tokenizer), "prompts.jsonl", False, None)
    with generate_file.PromptProgress(None, Console(None, quiet=False)) as progress:
        batch = generate_file.PromptBatch(engine, encode, lines(), {}, 3, {}, progress)
        for done, _ in enumerate(batch.results()):
            assert len(read) <= done + 2 * engine.max_rows + 1
    assert len(read) == 12 and not batch.submitted and progress.lines == 12


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--output", "x"], "--output needs --file"),
        (["--logprobs"], "--logprobs needs --file"),
        (["--file", "x", "--json"], "--file writes JSON objects a line; leave out --json"),
        (["--prompt", "y", "--cache-tokens", "8"], "--cache-tokens needs --chat or --file"),
        (["--file", "x", "--prompt", "y"], "--file and --prompt are both given"),
        (["--chat", "--num-samples", "2", "--temperature", "1"], "a conversation continues one answer"),
        (["--prompt", "y", "--num-samples", "2"], "n is 2 at temperature 0"),
        (["--prompt", "y", "--min-p", "2"], "--min-p: is '2'; must be a number from 0 to 1"),
        (["--prompt", "y", "--stop", ""], "must be a text or a list of texts, none of them empty"),
        (["--file", "gone.jsonl", "--device", "cpu"], "gone.jsonl"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(folder, flags, reason, capsys):
    assert main(["generate", str(folder), *flags]) == 2
    err = capsys.readouterr().err
    assert reason in err and err.count("\n") == 1
