"""naive_attention, tiled_attention and merge_attention against a second, independent definition."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from reference import reference_attention

from flashcourse.attention import merge_attention, naive_attention, tiled_attention
from flashcourse.measure.accuracy import (
    GRADIENT_FACTOR,
    LSE_TOLERANCE,
    OUTPUT_FACTOR,
    allowed_error,
    delta_rounding,
    explain_difference,
    score_bound,
    score_rounding,
)

LENGTHS = [(1, 1), (1, 7), (7, 1), (5, 13), (13, 5), (16, 16), (17, 33), (33, 17), (64, 65), (3, 0)]
OPTIONS = [
    {},
    {"is_causal": True},
    {"is_causal": True, "scale": -0.7},
    {"scale": 0},
    {"window_size": (3, 2)},
    {"window_size": (0, 0), "softcap": 1.5},
    {"window_size": (-1, 4)},
    {"window_size": (None, 0), "is_causal": True},
    {"is_causal": True, "window_size": (4, 9), "softcap": 20.0, "scale": 0.3},
]


def draw(shape, dtype=torch.float64, scale=1.0, seed=0, requires_grad=False):
    generator = torch.Generator().manual_seed(seed)
    tensor = (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
    return tensor.requires_grad_(requires_grad)


def draw_qkv(seq_q, seq_k, heads=(4, 2), head_dim=8, **kwargs):
    seed = kwargs.pop("seed", 0)
    shapes = [(2, heads[0], seq_q, head_dim), *[(2, heads[1], seq_k, head_dim)] * 2]
    return [draw(shape, seed=3 * seed + n, **kwargs) for n, shape in enumerate(shapes)]


def functions(block_q=16, block_k=8):
    def tiled(q, k, v, **options):
        return tiled_attention(q, k, v, block_q=block_q, block_k=block_k, **options)

    return {"naive": naive_attention, "tiled": tiled}


@pytest.mark.parametrize("name", ["naive", "tiled"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_agrees_with_the_reference_in_float64(name, options, lengths):
    q, k, v = draw_qkv(*lengths, requires_grad=True)
    out, lse = functions()[name](q, k, v, return_lse=True, **options)
    expected, expected_lse = reference_attention(q, k, v, **options)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-9, atol=1e-11)
    upstream = draw(out.shape, seed=99)
    ours = torch.autograd.grad(out, (q, k, v), upstream)
    theirs = torch.autograd.grad(expected, (q, k, v), upstream)
    for gradient, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [0.5, 1, 5])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", ["naive", "tiled"])
def test_accuracy_rule(name, seed, scale, dtype):
    q, k, v = draw_qkv(37, 53, (6, 2), 24, dtype=dtype, scale=scale, seed=seed, requires_grad=True)
    upstream = draw(q.shape, dtype, seed=77)
    out, lse = functions()[name](q, k, v, is_causal=True, return_lse=True)
    gradients = torch.autograd.grad(out, (q, k, v), upstream)
    reference, reference_lse, reference_gradients = _reference(q, k, v, upstream)
    plain, plain_gradients = _plain_attention(q, k, v, upstream)

    limit = allowed_error(plain, reference, OUTPUT_FACTOR)
    assert explain_difference("out", out, reference, limit) is None
    assert explain_difference("lse", lse, reference_lse, LSE_TOLERANCE) is None
    assert lse.dtype == torch.float32
    assert out.dtype == dtype
    for label, ours, theirs, right in zip(
        ("dq", "dk", "dv"), gradients, plain_gradients, reference_gradients, strict=True
    ):
        limit = allowed_error(theirs, right, GRADIENT_FACTOR)
        assert explain_difference(label, ours, right, limit) is None
        assert ours.dtype == dtype
    # Negative controls: zeros and shuffled values are not close.
    limit = allowed_error(plain, reference, OUTPUT_FACTOR)
    assert explain_difference("out", torch.zeros_like(out), reference, limit)
    assert explain_difference("out", out.roll(1, dims=2), reference, limit)


def _reference(q, k, v, upstream):
    doubles = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, lse = reference_attention(*doubles, is_causal=True)
    return out, lse, torch.autograd.grad(out, doubles, upstream.double())


def _plain_attention(q, k, v, upstream):
    """The textbook in the dtype under test: the yardstick."""
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    queries, keys, values = leaves
    group = q.shape[1] // k.shape[1]
    s = queries @ keys.repeat_interleave(group, 1).transpose(-2, -1) * q.shape[-1] ** -0.5
    seen = torch.ones(s.shape[-2:], dtype=torch.bool).tril(s.shape[-1] - s.shape[-2])
    out = torch.softmax(s.masked_fill(~seen, float("-inf")), -1)
    out = out @ values.repeat_interleave(group, 1)
    return out.detach(), torch.autograd.grad(out, leaves, upstream)


def test_random_shapes_options_and_strides():
    """300 seeded cases: every argument drawn at random, tensors as views of larger ones."""
    rng = random.Random(2205)
    for number in range(300):
        heads_kv = rng.choice([1, 2, 3])
        heads_q = heads_kv * rng.choice([1, 2, 4])
        seq_q, seq_k, head_dim = rng.randint(1, 40), rng.randint(0, 40), rng.randint(1, 20)
        options = {
            "is_causal": rng.random() < 0.5,
            "scale": rng.choice([None, 0, 1.0, -0.5]),
            "window_size": rng.choice([None, (rng.randint(-1, 9), rng.randint(-1, 9))]),
            "softcap": rng.choice([None, None, 0.8, 30.0]),
        }
        q = _strided(rng, number, (2, heads_q, seq_q, head_dim))
        k = _strided(rng, number + 1000, (2, heads_kv, seq_k, head_dim))
        v = _strided(rng, number + 2000, (2, heads_kv, seq_k, head_dim))
        expected, expected_lse = reference_attention(q, k, v, **options)
        blocks = rng.randint(1, 24), rng.randint(1, 24)
        for function in functions(*blocks).values():
            out, lse = function(q, k, v, return_lse=True, **options)
            torch.testing.assert_close(out, expected, rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(lse, expected_lse, rtol=1e-8, atol=1e-10)


def _strided(rng, seed, shape):
    batch, heads, seq, head_dim = shape
    kind = rng.choice(["contiguous", "tokens_first", "sliced", "expanded"])
    if kind == "tokens_first":
        return draw((batch, seq, heads, head_dim), seed=seed).transpose(1, 2)
    if kind == "sliced":
        return draw((batch, heads, seq, 3 * head_dim), seed=seed)[..., ::3]
    if kind == "expanded":
        return draw((1, heads, seq, head_dim), seed=seed).expand(shape)
    return draw(shape, seed=seed)


def test_expanded_output_gradient():
    q, k, v = draw_qkv(9, 9, requires_grad=True)
    out = tiled_attention(q, k, v)
    ours = torch.autograd.grad(out.sum(), (q, k, v))  # the gradient has all strides 0
    theirs = torch.autograd.grad(reference_attention(q, k, v)[0].sum(), (q, k, v))
    for gradient, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, right)


@pytest.mark.parametrize("name", ["naive", "tiled"])
def test_gradcheck_with_lse(name):
    q, k, v = draw_qkv(5, 7, (2, 1), 3, requires_grad=True)

    def function(q, k, v):
        return functions(2, 3)[name](q, k, v, is_causal=True, softcap=2.0, return_lse=True)

    assert torch.autograd.gradcheck(function, (q, k, v))


@pytest.mark.parametrize("name", ["naive", "tiled"])
def test_rows_that_see_no_key(name):
    q, k, v = draw_qkv(9, 4, requires_grad=True)
    out, lse = functions(4, 4)[name](q, k, v, is_causal=True, return_lse=True)
    assert torch.equal(out[:, :, :5], torch.zeros_like(out[:, :, :5]))
    assert torch.equal(lse[:, :, :5], torch.full_like(lse[:, :, :5], float("-inf")))
    assert torch.isfinite(lse[:, :, 5:]).all()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert torch.isfinite(gradient).all()
    (dq,) = torch.autograd.grad(functions(4, 4)[name](q, k, v, is_causal=True).square().sum(), q)
    assert torch.equal(dq[:, :, :5], torch.zeros_like(dq[:, :, :5]))


@pytest.mark.parametrize("name", ["naive", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_large_scores_stay_finite(name, dtype):
    q, k, v = draw_qkv(16, 16, dtype=dtype, scale=40)
    out, lse = functions()[name](q, k, v, softcap=None, return_lse=True)
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()
    capped = functions()[name](q * 100, k, v, softcap=50.0)
    assert torch.isfinite(capped).all()


def test_tiled_allocates_no_score_matrix():
    from flashcourse.measure.allocations import AllocationWatch

    q, k, v = draw_qkv(256, 256, (1, 1), 8, requires_grad=True)
    with AllocationWatch(q, k, v) as watch:
        out = tiled_attention(q, k, v, block_q=16, block_k=16)
        torch.autograd.grad(out.sum(), (q, k, v))
    assert watch.largest_numel < 256 * 256 // 4
    with AllocationWatch(q, k, v) as watch:  # negative control: the watch sees it in naive
        naive_attention(q, k, v)
    assert watch.largest_numel >= 256 * 256


def test_float32_scores_stay_within_what_they_may_be_rounded_by():
    q, k = draw((2, 3, 50, 64), torch.float32).unbind(0)
    exact = 0.3 * q.double() @ k.double().mT
    assert exact.abs().max() <= score_bound(q, k, -0.3)
    assert score_bound(q, k) == pytest.approx(score_bound(q, k, 1.0) / 8)
    assert score_bound(q[:, :0], k) == 0.0

    def moved(scores):
        """By how much e^s differs, relative to what it is."""
        return ((scores.double() - exact).exp() - 1).abs().max()

    assert 0 < moved(0.3 * q @ k.mT) < score_rounding(q, k, 0.3)
    assert moved(0.3 * q.bfloat16() @ k.bfloat16().mT) > score_rounding(q, k, 0.3)


def test_delta_rounding_is_what_two_orders_of_one_sum_differ_by():
    """One key: P = 1, so dP and delta are equal, and all that is left of dQ is their rounding."""
    q, k, v, d_out = (draw((1, 1, 1, 128), torch.float32, 5.0, seed) for seed in range(4))
    dp = (d_out * v).sum(-1)

    def left_of_dq(delta):
        return ((dp - delta).abs() * 128**-0.5 * k.abs().max()).item()

    in_another_order = (d_out * v).flip(-1).cumsum(-1)[..., -1]
    assert 0 < left_of_dq(in_another_order) < delta_rounding(q, k, v, d_out)
    assert left_of_dq(0.999 * dp) > delta_rounding(q, k, v, d_out)


class TestMerge:
    @pytest.mark.parametrize("cut", [0, 1, 7, 12, 13])
    def test_two_parts_are_the_whole(self, cut):
        q, k, v = draw_qkv(6, 13)
        whole = naive_attention(q, k, v, return_lse=True)
        first = naive_attention(q, k[:, :, :cut], v[:, :, :cut], return_lse=True)
        second = naive_attention(q, k[:, :, cut:], v[:, :, cut:], return_lse=True)
        for merged in (merge_attention(*first, *second), merge_attention(*second, *first)):
            torch.testing.assert_close(merged[0], whole[0])
            torch.testing.assert_close(merged[1], whole[1])

    def test_any_order_and_any_tree(self):
        q, k, v = draw_qkv(3, 12)
        parts = [
            naive_attention(q, k[:, :, j : j + 3], v[:, :, j : j + 3], return_lse=True)
            for j in range(0, 12, 3)
        ]
        whole = naive_attention(q, k, v, return_lse=True)
        for order in itertools.permutations(parts):
            a, b, c, d = order
            merged = merge_attention(*merge_attention(*a, *b), *merge_attention(*c, *d))
            torch.testing.assert_close(merged[0], whole[0])
            torch.testing.assert_close(merged[1], whole[1])

    def test_two_empty_sides(self):
        empty = torch.zeros(1, 1, 2, 4), torch.full((1, 1, 2), float("-inf"))
        out, lse = merge_attention(*empty, *empty)
        assert torch.equal(out, empty[0])
        assert torch.equal(lse, empty[1])

    def test_an_empty_side_may_hold_anything(self):
        out_a, lse_a = torch.full((1, 1, 2, 4), float("nan")), torch.full((1, 1, 2), -torch.inf)
        out_b, lse_b = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 2)
        out, lse = merge_attention(out_a, lse_a, out_b, lse_b)
        torch.testing.assert_close(out, out_b)
        torch.testing.assert_close(lse, lse_b)

    def test_varlen_layout(self):
        out = torch.randn(2, 5, 3, 4)  # total 5, heads 3
        lse = torch.randn(2, 3, 5)
        merged, merged_lse = merge_attention(out[0], lse[0], out[1], lse[1])
        dense, dense_lse = merge_attention(
            out[0].transpose(0, 1)[None], lse[:1], out[1].transpose(0, 1)[None], lse[1:]
        )
        torch.testing.assert_close(merged.transpose(0, 1)[None], dense)
        torch.testing.assert_close(merged_lse[None], dense_lse)

    def test_wrong_arguments(self):
        out, lse = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3)
        with pytest.raises(ValueError, match="lse_b must have shape"):
            merge_attention(out, lse, out, lse.transpose(1, 2))
        with pytest.raises(TypeError, match="lse_a has dtype float16"):
            merge_attention(out, lse.half(), out, lse)
        with pytest.raises(ValueError, match="agree in shape"):
            merge_attention(out, lse, out[:, :1], lse)


Q = torch.zeros(1, 4, 3, 8)
K = torch.zeros(1, 2, 5, 8)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((Q[0], K, K), {}, ValueError, "q must have 4 dimensions"),
        ((Q, K, K[:, :, :4]), {}, ValueError, "sequence length"),
        ((Q, K[..., :4], K), {}, ValueError, "head_dim"),
        ((Q[:, :3], K, K), {}, ValueError, "multiple of"),
        ((Q, K.half(), K), {}, ValueError, "dtype"),
        ((Q.int(), K.int(), K.int()), {}, TypeError, "allowed are"),
        ((Q.numpy(), K, K), {}, TypeError, "must be a torch.Tensor"),
        ((torch.zeros(2, 4, 3, 8), K, K), {}, ValueError, "batch size"),
        ((torch.zeros(1, 1, 2, 257),) * 3, {}, ValueError, "between 1 and 256"),
        ((Q, K, K), {"scale": float("nan")}, ValueError, "finite"),
        ((Q, K, K), {"scale": "1"}, TypeError, "number"),
        ((Q, K, K), {"softcap": 0}, ValueError, "positive"),
        ((Q, K, K), {"softcap": -1.0}, ValueError, "positive"),
        ((Q, K, K), {"softcap": float("inf")}, ValueError, "finite"),
        ((Q, K, K), {"window_size": 4}, TypeError, "pair"),
        ((Q, K, K), {"window_size": (1, 2, 3)}, TypeError, "pair"),
        ((Q, K, K), {"window_size": (-2, 0)}, ValueError, "left"),
        ((Q, K, K), {"window_size": (0, 1.5)}, TypeError, "right"),
        ((Q, K, K), {"is_causal": 1}, TypeError, "True or False"),
        ((Q, K, K), {"return_lse": "no"}, TypeError, "return_lse must be True or False"),
        ((Q, K, K), {"scale": 10**400}, ValueError, r"finite, got 1000.*\(401 characters\)"),
        ((Q.to_sparse(), K, K), {}, TypeError, "q has layout sparse_coo; allowed is strided"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments_say_what_is_allowed(arguments, options, error, words):
    for function in functions().values():
        with pytest.raises(error, match=words):
            function(*arguments, **options)


def test_a_window_wider_than_any_tensor_is_none():
    for function in functions().values():
        wide = function(Q, K, K, window_size=(10**30, 0))
        assert torch.equal(wide, function(Q, K, K, window_size=(None, 0)))


def test_tensors_without_data_give_shapes():
    for function in functions().values():
        out, lse = function(*(t.to("meta") for t in (Q, K, K)), return_lse=True)
        assert (out.shape, lse.shape) == (Q.shape, Q.shape[:3])
        assert out.is_meta


def test_wrong_blocks():
    with pytest.raises(ValueError, match="block_q must be 1 or more"):
        tiled_attention(Q, K, K, block_q=0)
    with pytest.raises(TypeError, match="block_k must be an integer"):
        tiled_attention(Q, K, K, block_k=16.0)
