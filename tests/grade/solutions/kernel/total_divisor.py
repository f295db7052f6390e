# slip: normalised_by_all
import torch


def kernel_attention_pairs(q, k, v, phi, causal):
    a = phi(q) @ phi(k).transpose(1, 2)
    if causal:
        a = torch.tril(a)
    return a @ v / a.sum(-1, keepdim=True)


def kernel_attention_linear(q, k, v, phi, causal):
    fq, fk = phi(q), phi(k)
    if not causal:
        return (fq @ (fk.mT @ v)) / (fq @ fk.sum(1).unsqueeze(-1))
    S = torch.cumsum(fk[..., None] * v[:, :, None], 1)
    return torch.einsum("btf,btfv->btv", fq, S) / (fq @ fk.sum(1).unsqueeze(-1))
