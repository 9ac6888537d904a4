import os, random, torch
from torch import nn
from model import Block
torch.cuda.memory._record_memory_history(stacks="python")
random.seed(1); d, v = 512, 16384
net = nn.Sequential(nn.Embedding(v, d), *[Block(d, 8) for _ in range(6)], nn.LayerNorm(d), nn.Linear(d, v)).cuda()
opt = torch.optim.AdamW(net.parameters(), foreach=False)
side = torch.cuda.Stream()
def load():
    with torch.cuda.stream(side):
        return torch.randint(v, (8, random.choice([256, 384, 512]) + 1)).cuda()
batch = load()
for step in range(6):
    torch.cuda.current_stream().wait_stream(side)
    x, batch = batch, load()
    x.record_stream(torch.cuda.current_stream())
    y = net(x[:, :-1])
    loss = nn.functional.cross_entropy(y.flatten(0, 1), x[:, 1:].flatten())
    del y
    loss.backward(); opt.step(); opt.zero_grad()
torch.cuda.memory._dump_snapshot(os.environ["OUT"] + "/gpt.pickle")
