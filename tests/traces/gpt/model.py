import torch
from torch import nn
class Attention(nn.Module):
    def __init__(s, d, h):
        super().__init__()
        s.h, s.qkv, s.out = h, nn.Linear(d, 3 * d), nn.Linear(d, d)
    def forward(s, x):
        b, t, d = x.shape
        q, k, v = s.qkv(x).view(b, t, 3, s.h, d // s.h).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return s.out(y.transpose(1, 2).reshape(b, t, d))
class Mlp(nn.Module):
    def __init__(s, d):
        super().__init__()
        s.up, s.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
    def forward(s, x):
        return s.down(nn.functional.gelu(s.up(x)))
class Block(nn.Module):
    def __init__(s, d, h):
        super().__init__()
        s.a, s.b, s.at, s.mlp = nn.LayerNorm(d), nn.LayerNorm(d), Attention(d, h), Mlp(d)
    def forward(s, x):
        x = x + s.at(s.a(x))
        return x + s.mlp(s.b(x))
