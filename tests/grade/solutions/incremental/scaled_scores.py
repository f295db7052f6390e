# slip: scaled
import torch


def multihead_attention_incremental(x, prev_K, prev_V, P_q, P_k, P_v, P_o):
    q = torch.einsum("bd,hdk->bhk", x, P_q)
    new_K = torch.cat([prev_K, torch.einsum("bd,hdk->bhk", x, P_k).unsqueeze(2)], dim=2)
    new_V = torch.cat([prev_V, torch.einsum("bd,hdv->bhv", x, P_v).unsqueeze(2)], dim=2)
    weights = torch.softmax(torch.einsum("bhk,bhmk->bhm", q, new_K) / q.shape[-1] ** 0.5, dim=-1)
    o = torch.einsum("bhm,bhmv->bhv", weights, new_V)
    y = torch.einsum("bhv,hdv->bd", o, P_o)
    return y, new_K, new_V


def multiquery_attention_incremental(x, prev_K, prev_V, P_q, P_k, P_v, P_o):
    q = torch.einsum("bd,hdk->bhk", x, P_q)
    new_K = torch.cat([prev_K, (x @ P_k)[:, None]], dim=1)
    new_V = torch.cat([prev_V, (x @ P_v)[:, None]], dim=1)
    weights = torch.softmax(torch.einsum("bhk,bmk->bhm", q, new_K), dim=-1)
    o = torch.einsum("bhm,bmv->bhv", weights, new_V)
    y = torch.einsum("bhv,hdv->bd", o, P_o)
    return y, new_K, new_V
