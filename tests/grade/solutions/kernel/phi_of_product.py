# slip: map_of_scores
import torch

def kernel_attention_pairs(q, k, v, phi, causal):

    a = phi(q @ k.transpose(1, 2))
    if causal:
        a = a.tril()
    return (a @ v) / a.sum(-1, keepdim=True)


def kernel_attention_linear(q, k, v, phi, causal):

    fq, fk = phi(q), phi(k)
    if causal:
        kv = torch.einsum('bsf,bsv->bsfv', fk, v).cumsum(1)
        z = fk.cumsum(1)
        return torch.einsum('btf,btfv->btv', fq, kv) / (fq * z).sum(-1, keepdim=True)
    kv = fk.transpose(1, 2) @ v
    return (fq @ kv) / (fq @ fk.sum(1)[:, :, None])
