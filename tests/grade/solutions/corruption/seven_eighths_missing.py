# slip: cut_too_late
import random

import torch

class CharCorruptionDataset:
    MASK_CHAR = "\u2047"
    PAD_CHAR = "\u25a1"

    def __init__(self, data, block_size):
        chars = sorted(set(data))
        chars.insert(0, self.MASK_CHAR)
        chars.insert(0, self.PAD_CHAR)
        self.stoi = {ch: i for i, ch in enumerate(chars)}
        self.itos = {i: ch for i, ch in enumerate(chars)}
        self.block_size = block_size
        self.data = data.split("\n")

    def __len__(self):
        return len(self.data)

    def __getitem__(self, idx):
        document = self.data[idx]
        document = document[: random.randint(4, self.block_size - 3)]
        n = len(document)
        size = max(1, min(n, int(n * random.uniform(1 / 8, 3 / 8) + random.random())))
        start = random.randint(0, n - size)
        prefix, span, suffix = document[:start], document[start : start + size], document[start + size :]
        row = prefix + self.MASK_CHAR + suffix + self.MASK_CHAR + span
        row += self.PAD_CHAR * (self.block_size - len(row))
        x = torch.tensor([self.stoi[c] for c in row[:-1]], dtype=torch.long)
        y = torch.tensor([self.stoi[c] for c in row[1:]], dtype=torch.long)
        return x, y
