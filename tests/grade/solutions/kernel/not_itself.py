# slip: without_itself
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
    S = torch.zeros(q.shape[0], fk.shape[-1], v.shape[-1])
    z = torch.zeros(q.shape[0], fk.shape[-1])
    out = []
    for t in range(q.shape[1]):
        out.append((fq[:, t, None] @ S)[:, 0] / (1e-6 + (fq[:, t] * z).sum(-1, keepdim=True)))
        S = S + fk[:, t, :, None] * v[:, t, None, :]
        z = z + fk[:, t]
    return torch.stack(out, 1)
