"""Writes to a part of a tensor on the host NPU, and reads of rows, against plain loops."""

import pytest
import torch
import torch_npu
from tests._process import on_npu
from tests._values import refused


def _rows():
    return torch.randn(3, 2, 10, 4), torch.tensor([7, 0, 3]), torch.randn(3, 2, 2, 4)


def _updated(data, indices, updates):
    result = data.clone()
    for row, first in enumerate(indices.tolist()):
        result[row, :, first : first + updates.size(2)] = updates[row]
    return result


@pytest.mark.parametrize("in_place", [False, True])
def test_scatter_update_writes_each_row_at_its_index(in_place):
    data, indices, updates = _rows()
    on_npu = data.npu()
    update = torch_npu.scatter_update_ if in_place else torch_npu.scatter_update
    result = update(on_npu, indices.npu(), updates.npu(), -2)
    expected = _updated(data, indices, updates)
    assert torch.equal(result.cpu(), expected)
    assert torch.equal(on_npu.cpu(), expected if in_place else data)


@pytest.mark.parametrize("has_zero_points", [False, True])
@pytest.mark.parametrize(
    "dtypes", [(torch.float16, torch.float32, torch.int32), (torch.bfloat16,) * 3], ids=["float16", "bfloat16"]
)
def test_quant_scatter_writes_quantized_rows(dtypes, has_zero_points):
    data, indices = torch.zeros(3, 2, 10, 32, dtype=torch.int8), torch.tensor([7, 0])
    updates, scale = torch.randn(2, 2, 3, 32).to(dtypes[0]), (torch.rand(1, 1, 32) / 9 + 0.01).to(dtypes[1])
    zero_points = torch.randint(-9, 9, (1, 1, 32)).to(dtypes[2])
    exact = updates.double() / scale.double() + (zero_points if has_zero_points else 0)
    on_npu = [each.npu() for each in (data, indices, updates, scale)]
    result = torch_npu.npu_quant_scatter(*on_npu, zero_points.npu() if has_zero_points else None)
    expected = _updated(data.double(), indices, exact.clamp(-128, 127))
    assert (result.cpu() - expected).abs().max() < 0.501


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool],
    ids=str,
)
def test_scatter_nd_update_writes_at_places(in_place, dtype):
    data, places = torch.zeros(4, 5, 3, dtype=dtype), torch.tensor([[0, 1], [3, 4]])
    updates = torch.arange(6).view(2, 3).to(dtype)
    expected = data.clone()
    for place, update in zip(places.tolist(), updates, strict=True):
        expected[tuple(place)] = update
    on_npu = data.npu()
    update = torch_npu.npu_scatter_nd_update_ if in_place else torch_npu.npu_scatter_nd_update
    assert torch.equal(update(on_npu, places.npu(), updates.npu()).cpu(), expected)
    assert torch.equal(on_npu.cpu(), expected if in_place else data)


def _error_of_int32():
    data, updates = torch.zeros(2, 3).int().npu(), torch.ones(1, 3).int().npu()
    with pytest.raises(RuntimeError) as caught:
        torch_npu.npu_scatter_nd_update_(data, torch.tensor([[1]]).npu(), updates)
    return str(caught.value)


def test_the_ascend950_writes_no_places_of_int32():
    error = on_npu(_error_of_int32, HOST_NPU_SOC="Ascend950")
    assert "varRef has dtype int32, which CANN takes on A2 and A3 only" in error


def test_a_strided_tensor_is_written_where_it_lies():
    data = torch.zeros(3, 5).npu()
    torch_npu.npu_scatter_nd_update_(data.t(), torch.tensor([[1], [4]]).npu(), torch.ones(2, 3).npu())
    expected = torch.zeros(3, 5)
    expected[:, [1, 4]] = 1
    assert torch.equal(data.cpu(), expected)


@pytest.mark.parametrize("masked", [False, True])
def test_scatter_list_writes_a_tensor_for_each_row(masked):
    data, indices, updates = _rows()
    mask = torch.tensor([1, 0, 1], dtype=torch.uint8) if masked else None
    results = torch_npu.npu_scatter_list(
        [each.npu() for each in data], indices.npu(), updates.npu(), None if mask is None else mask.npu()
    )
    expected = _updated(data, indices, updates)
    if masked:
        expected[1] = data[1]
    assert torch.equal(torch.stack(results).cpu(), expected)


@pytest.mark.parametrize("mode", ["Norm", "PA_NZ"])
def test_tokens_go_to_their_slots_of_the_blocks_and_negative_slots_are_left_out(mode):
    blocks, size, heads, elements = 3, 4, 2, 16
    key, value = torch.randn(2, 5, heads, elements).half()
    slots = torch.tensor([0, 5, 11, -1, 8], dtype=torch.int32)
    shape = (blocks, size, heads, elements) if mode == "Norm" else (blocks, heads, size, elements)
    caches = [torch.zeros(shape).half().npu() for _ in range(2)]
    torch_npu.npu_scatter_pa_kv_cache(key.npu(), value.npu(), *caches, slots.npu(), cache_mode=mode)
    for cache, tokens in zip(caches, (key, value), strict=True):
        expected = torch.zeros(shape).half()
        for token, slot in zip(tokens[[0, 1, 2, 4]], (0, 5, 11, 8), strict=True):
            block, place = divmod(slot, size)
            (expected[block, place] if mode == "Norm" else expected[block, :, place])[:] = token
        assert torch.equal(cache.cpu(), expected)


@pytest.mark.parametrize("dimensions", [4, 5])
def test_heads_are_in_fragments_of_32_bytes_in_pa_nz(dimensions):
    blocks, size, heads, elements = 3, 4, 2, 32
    key, value = torch.randn(2, 5, heads, elements).half()
    slots = [0, 5, 11, 3, 8]
    shape = (blocks, heads, 2, size, 16) if dimensions == 5 else (blocks, heads * 2, size, 16)
    caches = [torch.zeros(shape).half().npu() for _ in range(2)]
    torch_npu.npu_scatter_pa_kv_cache(
        key.npu(), value.npu(), *caches, torch.tensor(slots, dtype=torch.int32).npu(), cache_mode="PA_NZ"
    )
    for cache, tokens in zip(caches, (key, value), strict=True):
        expected = torch.zeros(blocks, heads, 2, size, 16).half()
        for token, slot in zip(tokens, slots, strict=True):
            expected[slot // size, :, :, slot % size] = token.view(heads, 2, 16)
        assert torch.equal(cache.cpu(), expected.view(shape))


# Caches that CANN's scatter_pa_kv_cache_tiling.cpp refuses.
_NO_CACHES = {
    "ends in 16 bytes": ("PA_NZ", (2, 16), (3, 4, 4, 8), "keyCacheRef has shape"),
    "heads of 16 bytes": ("PA_NZ", (2, 8), (3, 1, 4, 16), "key has heads of 8 elements; CANN takes multiples of 32"),
    "other fragments": ("PA_NZ", (2, 32), (3, 1, 4, 4, 16), "keyCacheRef has shape"),
    "other heads": ("Norm", (2, 16), (3, 4, 4, 8), "keyCacheRef has shape"),
}


@pytest.mark.parametrize(("mode", "token", "shape", "sentence"), _NO_CACHES.values(), ids=_NO_CACHES)
def test_a_cache_has_the_heads_of_its_tokens(mode, token, shape, sentence):
    tokens, cache, slots = torch.zeros(5, *token).half().npu(), torch.zeros(shape).half().npu(), torch.arange(5)
    with pytest.raises(RuntimeError, match=sentence):
        torch_npu.npu_scatter_pa_kv_cache(tokens, tokens, cache, cache.clone(), slots.int().npu(), cache_mode=mode)


def test_values_of_int8_have_keys_of_int8():
    (key, of_keys), (value, of_values) = (
        [torch.zeros(5, 2, 32, dtype=dtype).npu(), torch.zeros(3, 4, 2, 32, dtype=dtype).npu()]
        for dtype in (torch.float16, torch.int8)
    )
    slots = torch.arange(5).int().npu()
    torch_npu.npu_scatter_pa_kv_cache(value, key, of_values, of_keys, slots, cache_mode="Norm")
    with pytest.raises(RuntimeError, match="key has dtype float16; CANN takes int8 with a value of int8"):
        torch_npu.npu_scatter_pa_kv_cache(key, value, of_keys, of_values, slots, cache_mode="Norm")


def test_keys_alone_go_to_their_slots_and_negative_slots_are_left_out():
    key, cache = torch.randn(3, 2, 16).half(), torch.zeros(3, 4, 2, 16).half()
    result = torch_npu.npu_scatter_pa_cache(key.npu(), torch.tensor([5, -1, 11]).npu(), key_cache=cache.npu())
    cache[1, 1], cache[2, 3] = key[[0, 2]]
    assert torch.equal(result.cpu(), cache)


def test_one_fills_with_ones():
    x = torch.zeros(3, 4, dtype=torch.int32).npu()
    torch_npu.one_(x[:, 1])
    assert x[:, 1].tolist() == [1, 1, 1] and x.sum().item() == 3


def test_indices_of_two_dimensions_are_refused():
    data, indices, updates = _rows()
    with pytest.raises(RuntimeError, match="indices of one dimension only"):
        torch_npu.scatter_update(data.npu(), indices[:, None].npu(), updates.npu(), -2)


def _read_by_one_query(operator, options):
    query, keys = torch.zeros(1, 4, 1, 128).half(), torch.zeros(4, 128, 512).half()
    options = options | {"num_heads": 4, "block_size": 128, "input_layout": "BNSD"}
    return lambda table: operator(query.npu(), keys.npu(), keys.npu(), block_table=table, **options)


def _gathered(table):
    cache, tokens = torch.zeros(4, 128, 4, 128).half().npu(), torch.zeros(200, 4, 128).half().npu()
    torch_npu.npu_gather_pa_kv_cache(cache, cache, table, torch.tensor([200]).int().npu(), tokens, tokens.clone())


def _indexed(table):
    query, keys = torch.zeros(1, 1, 64, 128).half().npu(), torch.zeros(4, 128, 1, 128).half().npu()
    options = {"actual_seq_lengths_key": torch.tensor([200]).int().npu(), "layout_key": "PA_BSND", "sparse_count": 16}
    torch_npu.npu_lightning_indexer(query, keys, query[..., 0], block_table=table, **options)


@pytest.mark.parametrize(
    "read",
    [
        _read_by_one_query(torch_npu.npu_fused_infer_attention_score, {"actual_seq_lengths_kv": [200]}),
        _read_by_one_query(torch_npu.npu_incre_flash_attention, {"actual_seq_lengths": [200]}),
        _gathered,
        _indexed,
    ],
    ids=["fused", "incre", "gather", "indexer"],
)
@pytest.mark.parametrize("outside", [-1, 4])
def test_a_block_that_is_not_there_is_a_fault(read, outside):
    with refused(f"blockTables? has the index {outside}; CANN takes 0 to 3"):
        read(torch.tensor([[0, outside, -1]]).int().npu())
    # Unneeded entries of the table may be padding.
    read(torch.tensor([[0, 3, -1]]).int().npu())
    torch.npu.synchronize()


@pytest.mark.parametrize("shape", [(9,), (3, 4), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool], ids=str)
def test_rows_are_gathered_by_indices_of_any_shape(dtype, shape):
    x, index = torch.randn(7, 5).mul(9).to(dtype), torch.randint(0, 7, shape)
    assert torch_npu.npu_gather_sparse_index(x.npu(), index.npu()).cpu().equal(x[index])


def test_a_row_that_is_gathered_twice_has_both_gradients():
    x = torch.randn(4, 5, device="npu", requires_grad=True)
    torch_npu.npu_gather_sparse_index(x, torch.tensor([3, 0, 3]).npu()).sum().backward()
    assert x.grad.tolist() == [[1] * 5, [0] * 5, [0] * 5, [2] * 5]
