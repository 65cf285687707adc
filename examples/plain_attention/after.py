"""A small decoder in plain PyTorch reads a long prompt and goes on.

Run: python before.py, and python after.py FOLDER, which keeps what main memory may not hold in that folder. Weights and
prompt are random, from a seed: what counts is that both answer the same.
"""

import sys

import torch
from torch import Tensor, nn

from h3kv import h3_attention, h3_kv_cache

LAYERS, HEADS, HEAD_DIM, VOCABULARY = 2, 4, 32, 256
PROMPT_TOKENS, CHUNK_TOKENS, NEW_TOKENS = 1500, 128, 24
SIZE = HEADS * HEAD_DIM


def rotate(x: Tensor, past: int) -> Tensor:
    """Rotary position embedding of [batch, heads, tokens, head dim], whose first token has position `past`."""
    frequencies = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(past, past + x.shape[2])[:, None] * frequencies
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=-1)


class Attention(nn.Module):
    """Causal attention of new tokens to themselves and to all before."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.qkv = nn.Linear(SIZE, 3 * SIZE, bias=False)
        self.output = nn.Linear(SIZE, SIZE, bias=False)
        nn.init.normal_(self.qkv.weight, std=0.2)

    def forward(self, x: Tensor, cache: h3_kv_cache.KvCache, past: int) -> Tensor:
        """New hidden states, [batch, tokens, size]."""
        batch, tokens, _ = x.shape
        total = past + tokens
        q, k, v = self.qkv(x).view(batch, tokens, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, past), rotate(k, past)
        attn_weights = h3_attention.qk_matmul(q, k, cache.layer(self.index))
        mask = torch.full((tokens, total), -torch.inf).triu(past + 1)
        attn_weights = (attn_weights * HEAD_DIM**-0.5 + mask).softmax(dim=-1)
        out = h3_attention.pv_matmul(attn_weights, v, cache.layer(self.index))
        return self.output(out.transpose(1, 2).reshape(batch, tokens, SIZE))


class Decoder(nn.Module):
    """Embedding, attention and feed-forward layers, logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, SIZE)
        self.attention = nn.ModuleList(Attention(index) for index in range(LAYERS))
        self.feed_forward = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, 2 * SIZE), nn.GELU(), nn.Linear(2 * SIZE, SIZE))
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(SIZE)
        self.head = nn.Linear(SIZE, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, cache: h3_kv_cache.KvCache, past: int) -> Tensor:
        """Logits of the last token, [batch, 1, vocabulary]."""
        x = self.embedding(ids)
        for attention, feed_forward in zip(self.attention, self.feed_forward, strict=True):
            x = x + attention(self.norm(x), cache, past)
            x = x + feed_forward(x)
        return self.head(self.norm(x[:, -1:]))


@torch.inference_mode()
def main() -> None:
    """Read the prompt in chunks, then generate greedily."""
    if len(sys.argv) != 2:
        sys.exit("usage: python after.py FOLDER")
    torch.manual_seed(0)
    model = Decoder().eval()
    chunks = list(torch.randint(VOCABULARY, (1, PROMPT_TOKENS)).split(CHUNK_TOKENS, dim=1))
    caps = {"device_bytes": "1MiB", "host_bytes": "6MiB", "store": sys.argv[1], "store_bytes": "64MiB"}
    cache = h3_kv_cache.create(layers=LAYERS, kv_heads=HEADS, head_dim=HEAD_DIM, window_tokens=64, **caps)
    past, answer = 0, []
    while len(answer) < NEW_TOKENS:
        ids = chunks.pop(0)
        logits = model(ids, cache, past)
        past += ids.shape[1]
        if not chunks:
            answer.append(int(logits.argmax()))
            chunks.append(torch.tensor([[answer[-1]]]))
    sys.stdout.write(f"{answer}\n")
    cache.close()


if __name__ == "__main__":
    main()
