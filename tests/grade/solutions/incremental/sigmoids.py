# slip: sigmoid_instead
"""Takes a sigmoid of each score."""

import torch
def multihead_attention_incremental(x, prev_K, prev_V, P_q, P_k, P_v, P_o):
    q = torch.einsum('bd,hdk->bhk', x, P_q)
    k = torch.einsum('bd,hdk->bhk', x, P_k)
    v = torch.einsum('bd,hdv->bhv', x, P_v)
    K = torch.cat([prev_K, k.unsqueeze(2)], 2)
    V = torch.cat([prev_V, v.unsqueeze(2)], 2)
    w = torch.sigmoid(torch.einsum('bhk,bhmk->bhm', q, K))
    o = torch.einsum('bhm,bhmv->bhv', w, V)
    return torch.einsum('bhv,hdv->bd', o, P_o), K, V
def multiquery_attention_incremental(x, prev_K, prev_V, P_q, P_k, P_v, P_o):
    q = torch.einsum('bd,hdk->bhk', x, P_q)
    K = torch.cat([prev_K, (x @ P_k)[:, None]], 1)
    V = torch.cat([prev_V, (x @ P_v)[:, None]], 1)
    w = torch.sigmoid(torch.einsum('bhk,bmk->bhm', q, K))
    return torch.einsum('bhv,hdv->bd', torch.einsum('bhm,bmv->bhv', w, V), P_o), K, V
