"""Lab 2: formulas right for some sizes, numbers of the wrong kind, and ways around the meter."""

import math

import numpy
import torch


class AlwaysEqual(int):
    def __eq__(self, other):
        return True

    def __sub__(self, other):
        return 0

    __hash__ = int.__hash__


class NoDifference(float):
    def __sub__(self, other):
        return 0.0


def _naive(b, h, m, n, d, size):
    return b * h * size * (6 * m * n + 2 * m * d + 2 * n * d)


def naive_as_float(*sizes):
    return float(_naive(*sizes))


def naive_always_equal(*sizes):
    return AlwaysEqual(3)


def naive_four_bytes(b, h, m, n, d, size):
    return _naive(b, h, m, n, d, 4)


def naive_through_float32(*sizes):
    return int(torch.tensor(_naive(*sizes), dtype=torch.float32))


def naive_through_float64(*sizes):
    return int(_naive(*sizes) / 1)


def naive_in_int32(*sizes):
    return _naive(*sizes) % 2**32


def naive_not_for_one_sequence(b, h, m, n, d, size):
    return _naive(b, h, m, n, d, size) if b > 1 else 0


def naive_head_dim_of_eights(b, h, m, n, d, size):
    return _naive(b, h, m, n, d // 8 * 8, size)


def _flash(b, h, m, n, d, size, blocks):
    return b * h * size * d * 2 * (m + n * blocks)


def flash_as_float(b, h, m, n, d, size, block_q):
    return float(_flash(b, h, m, n, d, size, -(-m // block_q)))


def flash_rounded_to_the_nearest(b, h, m, n, d, size, block_q):
    return _flash(b, h, m, n, d, size, max(1, round(m / block_q)))


def flash_through_float32(b, h, m, n, d, size, block_q):
    return int(numpy.float32(_flash(b, h, m, n, d, size, -(-m // block_q))))


def flash_through_float64(b, h, m, n, d, size, block_q):
    return int(_flash(b, h, m, n, d, size, -(-m // block_q)) / 1)


def flash_not_for_blocks_of_one(b, h, m, n, d, size, block_q):
    return _flash(b, h, m, n, d, size, -(-m // block_q)) if block_q > 1 else 0


def flops_not_for_one_sequence(b, h, m, n, d, is_causal):
    pairs = sum(max(0, i + n - m + 1) for i in range(m)) if is_causal else m * n
    return 4 * b * h * d * pairs if b > 1 else 0


def flops_through_float32(b, h, m, n, d, is_causal):
    pairs = sum(max(0, i + n - m + 1) for i in range(m)) if is_causal else m * n
    return int(numpy.float32(4 * b * h * d * pairs))


def flops_through_float64(b, h, m, n, d, is_causal):
    pairs = sum(max(0, i + n - m + 1) for i in range(m)) if is_causal else m * n
    return int(4.0 * b * h * d * pairs)


def roofline_smoothed(flops, bytes_moved, peak_flops, bandwidth):
    return ((flops / peak_flops) ** 30 + (bytes_moved / bandwidth) ** 30) ** (1 / 30)


def roofline_no_difference(flops, bytes_moved, peak_flops, bandwidth):
    return NoDifference(1.0)


def _metered(
    hbm, q, k, v, block_q, block_k, pivot=torch.maximum, kind=torch.float32, start=None, scale=None
):
    scale = scale or q.shape[-1] ** -0.5
    out = hbm.empty(q.shape, q.dtype)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(0, q.shape[2], block_q):
                rows = (b, h, slice(i, i + block_q))
                tile = hbm.load(q, rows) * scale
                l = o = None
                m = None if start is None else torch.full((len(tile), 1), start)
                for j in range(0, k.shape[2], block_k):
                    columns = (b, h, slice(j, j + block_k))
                    s = (tile @ hbm.load(k, columns).T).to(kind)
                    top = s.amax(1, keepdim=True)
                    new = top if m is None else pivot(m, top)
                    p = torch.exp(s - new)
                    factor = torch.zeros_like(new) if l is None else torch.exp(m - new)
                    part = p @ hbm.load(v, columns).to(kind)
                    l = p.sum(1, keepdim=True) + (0 if l is None else factor * l)
                    o = part + (0 if o is None else factor * o)
                    m = new
                hbm.store(out, rows, (o / l).float())
    return out


def metered_larger_blocks(hbm, q, k, v, block_q, block_k):
    return _metered(hbm, q, k, v, 2 * block_q, block_k)


def metered_blocks_of_its_own(hbm, q, k, v, block_q, block_k):
    return _metered(hbm, q, k, v, block_q, 3)


def metered_first_block_pivot(hbm, q, k, v, block_q, block_k):
    return _metered(hbm, q, k, v, block_q, block_k, lambda m, top: m, torch.float64)


def metered_starts_at_minus_50(hbm, q, k, v, block_q, block_k):
    return _metered(hbm, q, k, v, block_q, block_k, start=-50.0)


def metered_starts_at_minus_200(hbm, q, k, v, block_q, block_k):
    return _metered(hbm, q, k, v, block_q, block_k, start=-200.0)


def metered_scale_of_8(hbm, q, k, v, block_q, block_k):
    return _metered(hbm, q, k, v, block_q, block_k, scale=8**-0.5)


def metered_scale_of_powers_of_two(hbm, q, k, v, block_q, block_k):
    scale = 2.0 ** -((q.shape[-1].bit_length() - 1) / 2)
    return _metered(hbm, q, k, v, block_q, block_k, scale=scale)


def _head_outside(hbm, q, k, v, block_q, block_k, leave, again):
    """All keys of a head as lists or arrays; loaded again for every block of queries, or not."""
    out = hbm.empty(q.shape, q.dtype)

    def whole(array, b, h):
        steps = range(0, array.shape[2], block_k)
        return numpy.concatenate(
            [leave(hbm.load(array, (b, h, slice(j, j + block_k)))) for j in steps]
        )

    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            keys = values = None
            for i in range(0, q.shape[2], block_q):
                tile = leave(hbm.load(q, (b, h, slice(i, i + block_q))))
                if keys is None or again:
                    keys, values = whole(k, b, h), whole(v, b, h)
                s = tile @ keys.T / math.sqrt(q.shape[-1])
                p = numpy.exp(s - s.max(1, keepdims=True))
                o = p / p.sum(1, keepdims=True) @ values
                hbm.store(out, (b, h, slice(i, i + block_q)), torch.tensor(o.tolist()))
    return out


def metered_through_lists(*arguments):
    return _head_outside(*arguments, lambda tile: numpy.array(tile.tolist()), True)


def metered_through_arrays(*arguments):
    return _head_outside(*arguments, lambda tile: tile.numpy().copy(), True)


def metered_keys_read_once(*arguments):
    return _head_outside(*arguments, lambda tile: numpy.array(tile.tolist()), False)


def metered_through_single_numbers(*arguments):
    def leave(tile):
        return numpy.array([x.item() for x in tile.flatten()]).reshape(tile.shape)

    return _head_outside(*arguments, leave, True)


def metered_scores_in_lists(hbm, q, k, v, block_q, block_k):
    rows = []

    def pivot(m, top):
        rows.extend(top.tolist())
        return torch.maximum(m, top)

    return _metered(hbm, q, k, v, block_q, block_k, pivot)


def metered_from_behind(hbm, q, k, v, block_q, block_k):
    queries, keys, values = (hbm._memory[array] for array in (q, k, v))
    out = hbm.empty(q.shape, q.dtype)
    s = queries @ keys.mT / math.sqrt(q.shape[-1])
    hbm._memory[out].copy_(torch.softmax(s, -1) @ values)
    return out


WRONG_ANSWERS = {
    "lab2.naive_bytes": [
        naive_as_float,
        naive_always_equal,
        naive_four_bytes,
        naive_through_float32,
        naive_through_float64,
        naive_in_int32,
        naive_not_for_one_sequence,
        naive_head_dim_of_eights,
    ],
    "lab2.flash_bytes": [
        flash_as_float,
        flash_rounded_to_the_nearest,
        flash_not_for_blocks_of_one,
        flash_through_float32,
        flash_through_float64,
    ],
    "lab2.attention_flops": [
        flops_not_for_one_sequence,
        flops_through_float32,
        flops_through_float64,
    ],
    "lab2.roofline_seconds": [roofline_smoothed, roofline_no_difference],
    "lab2.metered_attention": [
        metered_larger_blocks,
        metered_blocks_of_its_own,
        metered_first_block_pivot,
        metered_starts_at_minus_50,
        metered_starts_at_minus_200,
        metered_scale_of_8,
        metered_scale_of_powers_of_two,
        metered_through_lists,
        metered_through_arrays,
        metered_keys_read_once,
        metered_through_single_numbers,
        metered_scores_in_lists,
        metered_from_behind,
    ],
}
