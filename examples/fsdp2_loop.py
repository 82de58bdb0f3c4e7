"""A training loop of your own: FSDP2 on a ligermodels model, without the trainer.

    torchrun --nproc-per-node 8 examples/fsdp2_loop.py --model meta-llama/Meta-Llama-3-8B --steps 100
    torchrun --nproc-per-node 2 examples/fsdp2_loop.py                        a tiny model, random weights, on a CPU too

Here every rank trains on one batch of random tokens of its own; replace `batch` by your data.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ligermodels
from ligermodels.hub import resolve
from ligermodels.weights.loading import load_weights

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a Hub id or a folder; a tiny Llama with random weights without it")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--length", type=int, default=256)
parser.add_argument("--output", help="a new folder for the trained model")
args = parser.parse_args()

device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

# The model without memory; then one FSDP unit for each block and one for the rest; then memory and weights. Each rank
# reads from the files only what its shards hold.
folder = resolve(args.model) if args.model else None
model = ligermodels.create(folder or "llama", size=None if folder else "tiny", dtype=torch.float32, device="meta")
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
model.checkpoint_activations()
for block in model.model.layers:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
model.to_empty(device=device)
if folder:
    load_weights(model, folder)
    model.source = folder  # its tokenizer files are exported with the model
else:
    model.initialize(seed=0)

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
generator = torch.Generator().manual_seed(dist.get_rank())
batch = torch.randint(model.config.vocab_size, (2, args.length), generator=generator).to(device)  # [B, T]
model.train()
for step in range(args.steps):
    loss = model(batch, labels=batch).loss  # labels are shifted inside; logits are never materialised
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss := loss.detach() / dist.get_world_size())
    if dist.get_rank() == 0:
        print(f"step {step + 1}: loss {loss.item():.3f}, grad norm {norm.full_tensor().item():.2f}")

if args.output:
    ligermodels.export(model, args.output, dtype=torch.bfloat16)  # every rank calls; rank 0 writes
dist.destroy_process_group()
