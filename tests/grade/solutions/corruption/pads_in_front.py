# slip: padding_first
"""Fills up on the wrong side."""

import random, torch
class CharCorruptionDataset:
    MASK_CHAR = "\u2047"; PAD_CHAR = "\u25A1"
    def __init__(self, data, block_size):
        chars = [self.PAD_CHAR, self.MASK_CHAR] + sorted(set(data))
        self.stoi = {c: i for i, c in enumerate(chars)}; self.itos = {i: c for i, c in enumerate(chars)}
        self.block_size = block_size; self.data = data.split("\n")
    def __len__(self): return len(self.data)
    def __getitem__(self, idx):
        doc = self.data[idx]
        doc = doc[:random.randint(4, min(len(doc), int(self.block_size * 7 / 8)))]
        m = max(1, random.randint(len(doc) // 8, 3 * len(doc) // 8)); i = random.randint(0, len(doc) - m)
        s = doc[:i] + self.MASK_CHAR + doc[i+m:] + self.MASK_CHAR + doc[i:i+m]
        s = s.rjust(self.block_size, self.PAD_CHAR)
        t = torch.tensor([self.stoi[c] for c in s], dtype=torch.long)
        return t[:-1], t[1:]
