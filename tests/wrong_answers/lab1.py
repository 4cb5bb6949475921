"""Lab 1: right within a narrower range, or right on some of the cases only."""

import math

import torch
import torch.nn.functional as F


def _softmax(x, pivot=None, epsilon=0.0):
    m = x.amax(-1, keepdim=True) if pivot is None else pivot
    p = torch.exp(x - torch.where(torch.isfinite(m), m, 0.0))
    total = p.sum(-1, keepdim=True)
    return p / (torch.where(total == 0, 1.0, total) + epsilon)


def _mean(x):
    seen = torch.isfinite(x)
    total = torch.where(seen, x, 0.0).sum(-1, keepdim=True)
    return total / seen.sum(-1, keepdim=True).clamp(min=1)


def softmax_mean_pivot(x):
    return _softmax(x, _mean(x))


def softmax_mean_pivot_in_float64(x):
    return _softmax(x.double(), _mean(x.double())).to(x.dtype)


def softmax_first_entry_pivot(x):
    return _softmax(x, x[..., :1])


def softmax_no_max_in_float64(x):
    return _softmax(x.double(), torch.zeros(()).double()).to(x.dtype)


def softmax_clamped(x):
    return _softmax(torch.where(x == -math.inf, x, x.clamp(-500, 500)))


def softmax_small_epsilon(x):
    return _softmax(x, epsilon=1e-6)


def softmax_plus_a_little(x):
    return _softmax(x) + 1e-5


def softmax_of_torch_where_contiguous(x):
    return torch.softmax(x, -1).nan_to_num(0) if x.is_contiguous() else _softmax(x)


def softmax_by_logcumsumexp(x):
    return torch.exp(x - torch.logcumsumexp(x, -1)[..., -1:]).nan_to_num(0)


def softmax_exponents_clamped(x):
    m = x.amax(-1, keepdim=True)
    p = torch.exp((x - torch.where(torch.isfinite(m), m, 0.0)).clamp(min=-20))
    p = torch.where(x == -math.inf, 0.0, p)
    total = p.sum(-1, keepdim=True)
    return p / torch.where(total == 0, 1.0, total)


class OneBuffer:
    """Writes every result of a shape into the same memory."""

    def __init__(self, answer):
        self.answer, self.buffers = answer, {}
        self.__name__ = f"{answer.__name__}_into_one_buffer"

    def __call__(self, *args, **kwargs):
        result = self.answer(*args, **kwargs)
        results = result if isinstance(result, tuple) else (result,)
        kept = tuple(self._kept(number, tensor) for number, tensor in enumerate(results))
        return kept if isinstance(result, tuple) else kept[0]

    def _kept(self, number, tensor):
        if tensor.requires_grad:
            return tensor
        key = number, tensor.shape, tensor.dtype
        return self.buffers.setdefault(key, torch.empty_like(tensor)).copy_(tensor)


def _attention(q, k, v, is_causal=False, softmax=_softmax, compute=torch.float32, scores=False):
    group, (seq_q, seq_k) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    keys, values = (t.float().repeat_interleave(group, 1) for t in (k, v))
    s = (q.to(compute) * q.shape[-1] ** -0.5).float() @ keys.mT
    if is_causal:
        hidden = torch.arange(seq_k)[None] > torch.arange(seq_q)[:, None] + seq_k - seq_q
        s = s.masked_fill(hidden, -math.inf)
    return softmax(s) if scores else (softmax(s) @ values).to(q.dtype)


def attention_mean_pivot_in_float64(q, k, v, is_causal=False):
    return _attention(q, k, v, is_causal, lambda s: softmax_mean_pivot_in_float64(s))


def attention_first_score_pivot_in_float64(q, k, v, is_causal=False):
    return _attention(
        q, k, v, is_causal, lambda s: _softmax(s.double(), s[..., :1].double()).float()
    )


def attention_clamped(q, k, v, is_causal=False):
    return _attention(q, k, v, is_causal, lambda s: _softmax(s.clamp(max=1000.0)))


def attention_small_epsilon(q, k, v, is_causal=False):
    return _attention(q, k, v, is_causal, lambda s: _softmax(s, epsilon=1e-5))


def attention_of_torch_for_shared_heads(q, k, v, is_causal=False):
    group, (seq_q, seq_k) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    if group == 1 or seq_q > seq_k:
        return _attention(q, k, v, is_causal)
    mask = torch.ones(seq_q, seq_k, dtype=torch.bool).tril(seq_k - seq_q) if is_causal else None
    keys, values = (t.repeat_interleave(group, 1) for t in (k, v))
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def attention_scales_q_in_its_dtype(q, k, v, is_causal=False):
    return _attention(q, k, v, is_causal, compute=q.dtype)


def attention_cut_off_in_float16(q, k, v, is_causal=False):
    if q.dtype == torch.float16:
        q, k, v = (t.detach() for t in (q, k, v))
    return _attention(q, k, v, is_causal)


def attention_forgets_the_mask_in_float16(q, k, v, is_causal=False):
    return _attention(q, k, v, is_causal and q.dtype != torch.float16)


def attention_zero_for_shared_heads_in_float16(q, k, v, is_causal=False):
    if q.dtype == torch.float16 and q.shape[1] != k.shape[1]:
        return torch.zeros_like(q)
    return _attention(q, k, v, is_causal)


def attention_of_two_sequences(q, k, v, is_causal=False):
    return _attention(q, k, v, is_causal) if q.shape[0] == 2 else torch.zeros_like(q)


def attention_maximum_before_the_mask(q, k, v, is_causal=False):
    m = _attention(q, k, v, False, lambda s: s.amax(-1, keepdim=True), scores=True)
    return _attention(q, k, v, is_causal, lambda s: _softmax(s, m))


def _mask(lengths, seq_q, seq_k):
    return (torch.arange(seq_k) < lengths[:, None])[:, None, None].expand(-1, 1, seq_q, seq_k)


def padding_mask_of_four(lengths, seq_q, seq_k):
    return _mask(lengths[:4], seq_q, seq_k)


def padding_mask_of_few_keys(lengths, seq_q, seq_k):
    return _mask(lengths, seq_q, seq_k) if seq_k < 128 else ~_mask(lengths, seq_q, seq_k)


def padding_mask_all_seen_if_one_key_short(lengths, seq_q, seq_k):
    mask = _mask(lengths, seq_q, seq_k)
    return torch.ones_like(mask) if lengths.max() == seq_k - 1 else mask


def padding_mask_as_uint8(lengths, seq_q, seq_k):
    return _mask(lengths, seq_q, seq_k).to(torch.uint8)


def padding_mask_as_int64(lengths, seq_q, seq_k):
    return _mask(lengths, seq_q, seq_k).long()


_masks = {}


def padding_mask_kept_by_shape(lengths, seq_q, seq_k):
    key = (len(lengths), seq_q, seq_k)
    return _masks.setdefault(key, _mask(lengths, seq_q, seq_k)).clone()


WRONG_ANSWERS = {
    "lab1.softmax": [
        softmax_mean_pivot,
        softmax_mean_pivot_in_float64,
        softmax_first_entry_pivot,
        softmax_no_max_in_float64,
        softmax_clamped,
        softmax_small_epsilon,
        softmax_plus_a_little,
        softmax_of_torch_where_contiguous,
        softmax_by_logcumsumexp,
        softmax_exponents_clamped,
        OneBuffer(_softmax),
    ],
    "lab1.attention": [
        attention_mean_pivot_in_float64,
        attention_first_score_pivot_in_float64,
        attention_clamped,
        attention_small_epsilon,
        attention_of_torch_for_shared_heads,
        attention_forgets_the_mask_in_float16,
        attention_zero_for_shared_heads_in_float16,
        attention_of_two_sequences,
        attention_maximum_before_the_mask,
        attention_scales_q_in_its_dtype,
        attention_cut_off_in_float16,
        OneBuffer(_attention),
    ],
    "lab1.padding_mask": [
        padding_mask_of_four,
        padding_mask_of_few_keys,
        padding_mask_all_seen_if_one_key_short,
        padding_mask_as_uint8,
        padding_mask_as_int64,
        padding_mask_kept_by_shape,
    ],
}
