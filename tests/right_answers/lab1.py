"""Right answers to lab 1, written in other ways than the solution."""

import math

import torch


def softmax_by_log_sum(x):
    m = x.max(dim=-1, keepdim=True).values
    m = torch.where(torch.isinf(m), torch.zeros_like(m), m)
    log_sum = m + torch.log(torch.exp(x - m).sum(-1, keepdim=True))
    return torch.where(torch.isinf(log_sum), torch.zeros_like(x), torch.exp(x - log_sum))


def softmax_in_base_two(x):
    scores = x.to(torch.float64) * math.log2(math.e)
    p = torch.exp2(scores - scores.amax(-1, keepdim=True).clamp(min=-1e300))
    return (p / p.sum(-1, keepdim=True).clamp(min=1e-300)).to(x.dtype)


def softmax_row_by_row(x):
    rows = x.reshape(-1, x.shape[-1])
    out = torch.zeros_like(rows)
    for index, row in enumerate(rows):
        seen = row > -math.inf
        if seen.any():
            weights = torch.exp(row[seen] - row[seen].max())
            out[index, seen] = weights / weights.sum()
    return out.reshape(x.shape)


def attention_grouped_einsum(q, k, v, is_causal=False):
    batch, heads_q, seq_q, head_dim = q.shape
    heads_kv, seq_k = k.shape[1], k.shape[2]
    grouped = q.float().reshape(batch, heads_kv, heads_q // heads_kv, seq_q, head_dim)
    s = torch.einsum("bhgid,bhjd->bhgij", grouped / math.sqrt(head_dim), k.float())
    seen = torch.ones(seq_q, seq_k, dtype=torch.bool)
    if is_causal:
        seen = seen.tril(seq_k - seq_q)
    lowest = torch.where(seen, s, torch.finfo(s.dtype).min).amax(-1, keepdim=True)
    p = torch.where(seen, torch.exp(torch.where(seen, s - lowest, 0.0)), 0.0)
    p = p / p.sum(-1, keepdim=True).clamp(min=1e-30)
    return torch.einsum("bhgij,bhjd->bhgid", p, v.float()).reshape(q.shape).to(q.dtype)


def attention_head_by_head(q, k, v, is_causal=False):
    batch, heads_q, seq_q, head_dim = q.shape
    group, seq_k = heads_q // k.shape[1], k.shape[2]
    rows = []
    for b in range(batch):
        for h in range(heads_q):
            keys, values = k[b, h // group].float(), v[b, h // group].float()
            for i in range(seq_q):
                last = max(0, i + 1 + seq_k - seq_q) if is_causal else seq_k
                if last == 0:
                    rows.append(torch.zeros(head_dim))
                    continue
                s = keys[:last] @ q[b, h, i].float() / head_dim**0.5
                p = torch.exp(s - s.max())
                rows.append((p @ values[:last]) / p.sum())
    return torch.stack(rows).reshape(q.shape).to(q.dtype)


def attention_divided_at_the_end(q, k, v, is_causal=False):
    head = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    s = (q.double() @ k[:, head].double().mT).mul(q.shape[-1] ** -0.5)
    if is_causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
        s = s.masked_fill(hidden, -math.inf)
    p = torch.exp(s - torch.nan_to_num(s.amax(-1, keepdim=True), neginf=0.0))
    total = p.sum(-1, keepdim=True)
    return (p @ v[:, head].double() / (total + (total == 0))).to(q.dtype)


def attention_with_rounded_weights(q, k, v, is_causal=False):
    """The weights pass through the inputs' dtype, as a kernel's matrix unit takes them."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1).float() for x in (k, v))
    s = (q.float() * q.shape[-1] ** -0.5) @ keys.mT
    seen = torch.ones(s.shape[-2:], dtype=torch.bool)
    if is_causal:
        seen = seen.tril(k.shape[2] - q.shape[2])
    p = softmax_by_log_sum(s.masked_fill(~seen, -math.inf))
    return (p.to(q.dtype).float() @ values).to(q.dtype)


def padding_mask_loop(lengths, seq_q, seq_k):
    mask = torch.zeros(len(lengths), 1, seq_q, seq_k, dtype=torch.bool)
    for b, length in enumerate(lengths.tolist()):
        mask[b, :, :, :length] = True
    return mask


def padding_mask_expanded(lengths, seq_q, seq_k):
    keys = torch.arange(seq_k, device=lengths.device)
    return (lengths.view(-1, 1, 1, 1) > keys).expand(-1, 1, seq_q, -1)


RIGHT_ANSWERS = {
    "lab1.softmax": [softmax_by_log_sum, softmax_in_base_two, softmax_row_by_row],
    "lab1.attention": [
        attention_grouped_einsum,
        attention_head_by_head,
        attention_divided_at_the_end,
        attention_with_rounded_weights,
    ],
    "lab1.padding_mask": [padding_mask_loop, padding_mask_expanded],
}
