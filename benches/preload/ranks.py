"""A rank of a small training job, on a separate GPU if there are enough, for
`symmalloc run --check -- torchrun --nproc-per-node 2 ranks.py`.

Prints a digest of the locations of its tensors relative to the first one. Equal digests on all ranks mean equal placements.
"""

import hashlib
import os

import torch
from torch import nn


def main() -> None:
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    side = torch.cuda.Stream()
    places, first = hashlib.sha256(), next(model.parameters()).data_ptr()
    for step in range(40):
        x = torch.randn(64 + 16 * (step % 5), 1024, device="cuda")
        loss = model(x).square().mean()
        loss.backward()
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.current_stream())
            scratch = torch.empty(1 << 20, device="cuda").fill_(step)
        scratch.record_stream(torch.cuda.current_stream())
        for tensor in (x, loss, scratch):
            places.update(f"{tensor.data_ptr() - first} ".encode())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    print(f"rank {os.environ.get('RANK', 0)} loss {loss.item()} places {places.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
