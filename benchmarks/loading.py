"""Loading a checkpoint to the GPU: time, rate, growth of host memory, and bytes read.

    python -m benchmarks.loading FOLDER                              a checkpoint of any family
    python -m benchmarks.loading FOLDER --generate llama-3-8b        generates a bf16 checkpoint of that shape first

Each provider runs in its own process. It is a function from a folder to the tensors that it loaded to the GPU, by their
Hub names. A hash of each tensor is compared with that of the tensor in the file; this is not timed. Loading a tiny
checkpoint first excludes imports from the time. Every provider runs with the files in the page cache (warm) and after
they were dropped from it (cold). With several GPUs, ligermodels also runs on all of them, and each rank loads its FSDP2
shards.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from benchmarks import results
from benchmarks.train_step import MODELS
from ligermodels import distributed, hub
from ligermodels.training.parallel import fsdp
from ligermodels.weights.files import INDEX_FILE, read_header
from ligermodels.weights.loading import load_weights
from ligermodels.weights.mapping import plan_pieces
from ligermodels.weights.sharding import full_tensor
from ligermodels.weights.writing import DTYPE_NAMES

DEVICE = "cuda"
FILES = 4
TINY = MODELS["llama-3-8b"] | {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
BLOCK_BYTES = 16 * 2**20
THREADS = 8
COLUMNS = "{:34} {:5} {:>8} {:>8} {:>9} {:>8} {:>8} {:>10}  {}"

LoadedTensors = Iterable[tuple[str, Tensor]]


def ligermodels(folder: Path) -> LoadedTensors:
    return hub_tensors(hub.load(folder, dtype=torch.bfloat16, device=DEVICE))


def ligermodels_sharded(folder: Path) -> LoadedTensors:
    """Loads the FSDP2 shards of one rank in the same way as train.py."""
    world = distributed.World(torch.device(DEVICE, torch.cuda.current_device()), dist.get_rank(), dist.get_world_size())
    model = hub.create(folder, dtype=torch.bfloat16, device="meta")
    fsdp.shard(model, world, torch.bfloat16)
    model.to_empty(device=world.device)
    load_weights(model, folder)
    return hub_tensors(model)


@torch.no_grad()
def hub_tensors(model) -> LoadedTensors:
    """The parameters of a model as the tensors of its Hub checkpoint, gathered if they are sharded."""
    parameters = dict(model.named_parameters())
    pieces = plan_pieces({name: parameter.shape for name, parameter in parameters.items()}, model.weight_rules())
    for name, group in itertools.groupby(pieces, key=lambda piece: piece.parameter):
        parameter = full_tensor(parameters[name])
        yield from ((piece.tensor, parameter[piece.index].reshape(piece.shape)) for piece in group)


def transformers(folder: Path) -> LoadedTensors:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map=DEVICE).state_dict().items()


def safetensors(folder: Path) -> LoadedTensors:
    from safetensors.torch import load_file

    return [item for file in weight_files(folder) for item in load_file(file, device=DEVICE).items()]


def read_and_copy(folder: Path) -> LoadedTensors:
    """The fastest simple method: threads read blocks of the files into pinned buffers, two per thread, and copy them to
    the GPU asynchronously. The bytes are not converted."""
    files = {file: torch.empty(file.stat().st_size, dtype=torch.uint8, device="cuda") for file in weight_files(folder)}
    blocks = [(file, start) for file, data in files.items() for start in range(0, len(data), BLOCK_BYTES)]
    stream = torch.cuda.Stream()
    free: SimpleQueue[tuple[torch.Tensor, torch.cuda.Event]] = SimpleQueue()
    for _ in range(min(2 * THREADS, len(blocks))):
        free.put((torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()))

    def copy_block(file, start):
        target = files[file][start : start + BLOCK_BYTES]
        buffer, copied = free.get()
        copied.synchronize()
        with file.open("rb", buffering=0) as opened:
            opened.seek(start)
            assert opened.readinto(buffer.numpy()[: len(target)]) == len(target)
        with torch.cuda.stream(stream):
            target.copy_(buffer[: len(target)], non_blocking=True)
            copied.record()
        free.put((buffer, copied))

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(copy_block, *zip(*blocks, strict=True)))
    stream.synchronize()
    return tensors_in_files(files)


def read_and_copy_naively(folder: Path) -> LoadedTensors:
    """Reads and copies one whole file at a time."""
    files = {}
    for file in weight_files(folder):
        files[file] = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).to(DEVICE)
    return tensors_in_files(files)


def tensors_in_files(files: dict[Path, Tensor]) -> LoadedTensors:
    """The tensors contained in `files`, which maps each safetensors file to its bytes."""
    for file, data in files.items():
        for name, stored in read_header(file).items():
            size = torch.Size(stored.shape).numel() * stored.dtype.itemsize
            yield name, data[stored.begin :][:size].view(stored.dtype).view(stored.shape)


SHARDED = "ligermodels, FSDP2"
PROVIDERS: dict[str, Callable[[Path], LoadedTensors]] = {
    "ligermodels": ligermodels,
    SHARDED: ligermodels_sharded,
    "read and copy, 8 threads, pinned": read_and_copy,
    "read and copy, naively": read_and_copy_naively,
    "safetensors": safetensors,
    "transformers": transformers,
}


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def generate(raw: dict, folder: Path) -> None:
    """Writes a bf16 checkpoint for the configuration `raw`, in up to FILES files of about equal size.

    The data of each file repeats one random block, shifted by a different amount per file. No two tensors are equal, so
    that the hashes reveal swapped tensors.
    """
    dtype = torch.bfloat16
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw | {"torch_dtype": "bfloat16"}))
    model = hub.create(raw, device="meta")
    pieces = plan_pieces({name: parameter.shape for name, parameter in model.named_parameters()}, model.weight_rules())
    sizes = [torch.Size(piece.shape).numel() * dtype.itemsize for piece in pieces]
    shards: dict[int, dict[str, dict]] = {}
    for piece, size, end in zip(pieces, sizes, itertools.accumulate(sizes), strict=True):
        entries = shards.setdefault((end - 1) * FILES // sum(sizes), {})
        begin = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        entries[piece.tensor] = {
            "dtype": DTYPE_NAMES[dtype], "shape": piece.shape, "data_offsets": [begin, begin + size]
        }  # fmt: skip
    files = [folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    block = torch.randn(min(sum(sizes), 2**24 + 4099), generator=torch.Generator().manual_seed(0)).mul(0.02)
    block = block.to(dtype).view(torch.uint8)
    with ThreadPoolExecutor(FILES) as pool:
        list(pool.map(write_safetensors, files, shards.values(), (block.roll(20014 * number) for number in shards)))
    weight_map = {name: file.name for file, shard in zip(files, shards.values(), strict=True) for name in shard}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}))


def write_safetensors(file: Path, entries: dict[str, dict], block: Tensor) -> None:
    text = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
    text += b" " * (-len(text) % 8)
    size = max(entry["data_offsets"][1] for entry in entries.values())
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, size, len(block)):
            stream.write(block.numpy()[: size - start].data)
        os.fsync(stream.fileno())


def fingerprint(tensor: Tensor) -> int:
    """The sum of the tensor's 64-bit words, each multiplied by a different odd number, modulo 2^64."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    words = F.pad(data, (0, -len(data) % 8)).view(torch.int64)
    return int((words * (2 * torch.arange(len(words), device=words.device) + 1)).sum())


def fingerprints(tensors: LoadedTensors) -> dict[str, int]:
    return {name: fingerprint(tensor) for name, tensor in tensors}


def stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors in the files, read with the safetensors library."""
    for file in weight_files(folder):
        with safe_open(file, framework="pt", device=DEVICE) as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


class HostMemory:
    """Context manager that measures the peak growth of this process's memory in bytes: `peak`.

    Samples RssAnon + RssShmem every few milliseconds; file-backed pages are not counted. Pinned memory is added. It may
    already be included in these counters, so the result is an upper bound.
    """

    def __enter__(self) -> "HostMemory":
        self.before, self.peak, self.ended = self.current(), 0, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        self.thread.join()

    def watch(self) -> None:
        while not self.ended.wait(0.003):
            self.peak = max(self.peak, self.current() - self.before)

    def current(self) -> int:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        resident = sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
        return resident + torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)


def bytes_read() -> dict[str, int]:
    """Bytes read by this process so far: by system calls (memory-mapped reads are not counted), and from disk."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"read": int(counts["rchar"]), "from_disk": int(counts["read_bytes"])}


def measure(provider: str, folder: Path, expected: dict[str, int]) -> dict:
    """Measures one row. Runs in its own process, so that memory and one-time costs are those of this provider."""
    distributed.start()
    load = PROVIDERS[provider]
    with tempfile.TemporaryDirectory() as tiny:
        generate(TINY, Path(tiny) / "tiny")
        load(Path(tiny) / "tiny")
    torch.cuda.synchronize()
    before = bytes_read()
    with HostMemory() as memory:
        start = time.perf_counter()
        tensors = load(folder)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    row = {
        "seconds": round(seconds, 3),
        "gb_per_s": round(total_bytes(folder) / seconds / 1e9, 2),
        "host_mib": round(memory.peak / 2**20),
        "gpu_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }
    row |= {f"{what}_gb": round((count - before[what]) / 1e9, 2) for what, count in bytes_read().items()}
    found = fingerprints(tensors)
    wrong = [name for name in expected if found.get(name) != expected[name]]
    return row | ({"error": f"{len(wrong)} tensors differ, such as {wrong[0]}"} if wrong else {})


def total_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in weight_files(folder))


def fill_page_cache(folder: Path) -> None:
    """Reads the files, which puts them into the page cache."""
    buffer = bytearray(BLOCK_BYTES)
    for file in weight_files(folder):
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def drop_from_page_cache(folder: Path) -> None:
    """Removes the files from the page cache."""
    for file in weight_files(folder):
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


CACHES = {"warm": fill_page_cache, "cold": drop_from_page_cache}


def run_provider(provider: str, cache: str, folder: Path, expected: Path) -> list[dict]:
    """The row of a provider, or one row per rank. expected: a JSON file with the fingerprints."""
    CACHES[cache](folder)
    command = [sys.executable, "-m", "benchmarks.loading", str(folder), "--row", provider, str(expected)]
    if provider == SHARDED:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torch.cuda.device_count()}"]
    result = subprocess.run(command, capture_output=True, text=True)
    row = {"provider": provider, "cache": cache}
    if result.returncode:
        return [row | {"error": result.stderr.strip().splitlines()[-1][:200]}]
    return [row | json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def format_row(row: dict) -> str:
    keys = ("provider", "cache", "seconds", "gb_per_s", "host_mib", "gpu_gib", "read_gb", "from_disk_gb", "error")
    return COLUMNS.format(*(row.get(key, "") for key in keys)).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with config.json and safetensors files")
    parser.add_argument(
        "--generate", choices=MODELS, help="generate a checkpoint of this model first; FOLDER must not exist"
    )
    parser.add_argument("--output", type=Path, default=results.FOLDER, help="folder for the dated JSON file")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=list(CACHES))
    parser.add_argument("--row", nargs=2, metavar=("PROVIDER", "EXPECTED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        provider, expected = args.row
        row = measure(provider, args.folder, json.loads(Path(expected).read_text()))
        print(json.dumps(row) + "\n", end="", flush=True)  # one write per row: ranks share the pipe
        distributed.stop()
        return
    if args.generate:
        generate(MODELS[args.generate], args.folder)
    providers = [name for name in args.providers if name != SHARDED or torch.cuda.device_count() > 1]
    rows = []
    print(COLUMNS.format("provider", "cache", "s", "GB/s", "host MiB", "GPU GiB", "read GB", "disk GB", ""))
    with tempfile.NamedTemporaryFile("w", suffix=".json") as expected:
        json.dump(fingerprints(stored_tensors(args.folder)), expected, indent=1)
        expected.flush()
        for cache, provider in itertools.product(args.caches, providers):
            found = run_provider(provider, cache, args.folder, Path(expected.name))
            print(*map(format_row, found), sep="\n", flush=True)
            rows += found
    name = args.generate or args.folder.name
    settings = {"checkpoint": name, "files": len(weight_files(args.folder)), "bytes": total_bytes(args.folder)}
    print(results.save(args.output, f"loading-{name}", results.environment() | settings | {"rows": rows}))


if __name__ == "__main__":
    main()
