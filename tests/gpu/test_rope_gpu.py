"""rotary_embedding on a GPU: every way through the kernel, few and many positions and heads, more
than 2^31 elements."""

from __future__ import annotations

import pytest
import test_rope as on_cpu
import torch

import flexops
from flexops.ops import rope as rope_module

pytestmark = pytest.mark.gpu
FAMILIES = ("rope",)


@pytest.mark.parametrize("dtype", on_cpu.DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", on_cpu.LAYOUTS)
def test_native_gives_what_the_reference_gives(dtype, interleaved, layout):
    on_cpu.compare(dtype, interleaved, layout, "cuda")


@pytest.mark.parametrize("length_first", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "key_heads", "length"),
    [(1, 32, 8, 1), (64, 5, 0, 1), (1, 3, 7, 700), (2, 1, 9, 33), (3, 0, 4, 50)],
)
def test_any_number_of_heads_and_positions(batch, heads, key_heads, length, length_first):
    shapes = ((batch, number, length, 64) for number in (heads, key_heads))
    query, key = (
        (on_cpu.length_first if length_first else on_cpu.head_first)(*shape).bfloat16().cuda()
        for shape in shapes
    )
    angles = torch.rand(length, 32, device="cuda") * 6.28
    arguments = (query, key if key_heads else None, angles.cos(), angles.sin(), None, False, False)
    for one, other in zip(
        torch.ops.flexops.rotary_embedding(*arguments),
        rope_module._reference(*arguments),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=2.0**-7, atol=2.0**-13)
        assert one.stride() == other.stride()


def test_more_than_2_to_31_elements():
    """In one batch, so that lengths have to be counted on, too; the ends are compared with calls of
    their own."""
    length, positions = 2**24 + 5, 1000
    query = torch.empty(1, 2, length, 80, dtype=torch.bfloat16, device="cuda").normal_()
    angles = torch.rand(positions, 40, device="cuda") * 6.28
    at = torch.randint(0, positions, (length,), device="cuda")
    result = flexops.rotary_embedding(query, None, angles.cos(), angles.sin(), at)[0]
    assert query.numel() > 2**31
    for part in (slice(0, 50), slice(length - 50, length)):
        alone = flexops.rotary_embedding(
            query[:, :, part].clone(), None, angles.cos(), angles.sin(), at[part].clone()
        )[0]
        assert torch.equal(result[:, :, part], alone)


def test_more_items_than_one_launch_counts():
    """Elements by themselves, since 6 is no multiple of a vector: 2^30 and more of them."""
    length = 2**29 + 7
    query = torch.empty(1, 1, length, 6, dtype=torch.float16, device="cuda").normal_()
    cos, sin = (
        torch.rand(1, 2, device="cuda").expand(length, 2),
        torch.rand(1, 2, device="cuda").expand(length, 2),
    )
    result = flexops.rotary_embedding(query, None, cos, sin)[0]
    for part in (slice(0, 50), slice(2**28 - 100, 2**28 + 100), slice(length - 50, length)):
        alone = flexops.rotary_embedding(query[:, :, part].clone(), None, cos[part], sin[part])[0]
        assert torch.equal(result[:, :, part], alone[:, :, : alone.shape[2]])


@pytest.mark.parametrize("length_first", [False, True])
def test_looked_up_tables_in_several_launches(length_first):
    """Each batch has rows of its own, which have to be counted on with it."""
    batch, heads, length, size = 5000, 2, 1000, 16
    query = torch.randn(
        batch,
        *((length, heads) if length_first else (heads, length)),
        size,
        dtype=torch.bfloat16,
        device="cuda",
    )
    query = query.transpose(1, 2) if length_first else query
    angles = torch.rand(batch, length, size // 2, device="cuda") * 6.28
    cos, sin = (torch.cat([table, table], -1).bfloat16() for table in (angles.cos(), angles.sin()))
    result = flexops.rotary_embedding(query, None, cos, sin)[0]
    for part in (slice(0, 2), slice(2500, 2502), slice(batch - 2, batch)):
        alone = flexops.rotary_embedding(
            query[part].clone(), None, cos[part].clone(), sin[part].clone()
        )[0]
        assert torch.equal(result[part], alone)
        torch.testing.assert_close(
            alone,
            rope_module._reference(query[part], None, cos[part], sin[part], None, False, False)[0],
            rtol=2.0**-7,
            atol=2.0**-13,
        )


@pytest.mark.parametrize(
    ("batch", "heads", "length", "size"), [(2, 3, 2**20 + 5, 64), (1, 140000, 3, 16)]
)
@pytest.mark.parametrize("length_first", [False, True])
def test_more_blocks_than_the_second_dimension_of_a_grid_has(
    batch, heads, length, size, length_first
):
    middle = (length, heads) if length_first else (heads, length)
    query = torch.randn(batch, *middle, size, dtype=torch.bfloat16, device="cuda")
    query = query.transpose(1, 2) if length_first else query
    angles = torch.rand(size // 2, device="cuda") + torch.arange(length, device="cuda")[:, None] % 7
    cos, sin = angles.cos(), angles.sin()
    result = flexops.rotary_embedding(query, None, cos, sin)[0]
    ends = [slice(0, 50), slice(length - 50, length)] if length > 100 else [slice(0, length)]
    for part in ends:
        for some in (slice(0, 3), slice(heads - 3, heads)):
            alone = flexops.rotary_embedding(
                query[:, some, part].clone(), None, cos[part].clone(), sin[part].clone()
            )[0]
            assert torch.equal(result[:, some, part], alone)
