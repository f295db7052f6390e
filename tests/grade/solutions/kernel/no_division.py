# slip: not_normalised
import torch


def kernel_attention_pairs(q, k, v, phi, causal):
    a = phi(q) @ phi(k).transpose(1, 2)
    if causal:
        a = torch.tril(a)
    return a @ v


def kernel_attention_linear(q, k, v, phi, causal):
    fq, fk = phi(q), phi(k)
    if not causal:
        return (fq @ (fk.mT @ v)) / (fq @ fk.sum(1).unsqueeze(-1))
    S = torch.zeros(q.shape[0], fk.shape[-1], v.shape[-1])
    z = torch.zeros(q.shape[0], fk.shape[-1])
    out = []
    for t in range(q.shape[1]):
        S = S + fk[:, t, :, None] * v[:, t, None, :]
        z = z + fk[:, t]
        out.append((fq[:, t, None] @ S)[:, 0] / (fq[:, t] * z).sum(-1, keepdim=True))
    return torch.stack(out, 1)
