# slip: projections_exchanged
"""Exchanges two projections."""

import torch
def multihead_attention_incremental(x, prev_K, prev_V, P_q, P_k, P_v, P_o):
    q = torch.einsum('bd,hdk->bhk', x, P_k)
    k = torch.einsum('bd,hdk->bhk', x, P_q)
    v = torch.einsum('bd,hdv->bhv', x, P_v)
    K = torch.cat([prev_K, k.unsqueeze(2)], 2)
    V = torch.cat([prev_V, v.unsqueeze(2)], 2)
    w = torch.softmax(torch.einsum('bhk,bhmk->bhm', q, K), -1)
    return torch.einsum('bhv,hdv->bd', torch.einsum('bhm,bhmv->bhv', w, V), P_o), K, V
def multiquery_attention_incremental(x, prev_K, prev_V, P_q, P_k, P_v, P_o):
    q = torch.einsum('bd,dk->bk', x, P_k)[:, None].expand(-1, P_q.shape[0], -1)
    K = torch.cat([prev_K, torch.einsum('bd,hdk->bhk', x, P_q).mean(1, keepdim=True)], 1)
    V = torch.cat([prev_V, (x @ P_v)[:, None]], 1)
    w = torch.softmax(torch.einsum('bhk,bmk->bhm', q, K), -1)
    return torch.einsum('bhv,hdv->bd', torch.einsum('bhm,bmv->bhv', w, V), P_o), K, V
