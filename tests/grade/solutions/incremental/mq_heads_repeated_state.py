# slip: state_for_each_head
import torch

def multihead_attention_incremental(x, prev_K, prev_V, P_q, P_k, P_v, P_o):

    q = torch.einsum('bd,hdk->bhk', x, P_q)
    K = torch.cat([prev_K, torch.einsum('bd,hdk->bhk', x, P_k)[:, :, None]], dim=2)
    V = torch.cat([prev_V, torch.einsum('bd,hdv->bhv', x, P_v)[:, :, None]], dim=2)
    w = torch.einsum('bhk,bhmk->bhm', q, K).softmax(-1)
    o = torch.einsum('bhm,bhmv->bhv', w, V)
    return torch.einsum('bhv,hdv->bd', o, P_o), K, V


def multiquery_attention_incremental(x, prev_K, prev_V, P_q, P_k, P_v, P_o):

    q = torch.einsum('bd,hdk->bhk', x, P_q)
    K = torch.cat([prev_K, (x @ P_k)[:, None]], dim=1)
    V = torch.cat([prev_V, (x @ P_v)[:, None]], dim=1)
    w = (q @ K.transpose(1, 2)).softmax(-1)
    o = w @ V
    return torch.einsum('bhv,hdv->bd', o, P_o), K[:, None].repeat(1, q.shape[1], 1, 1), V[:, None].repeat(1, q.shape[1], 1, 1)
