"""rotary_embedding: the shared contract, both layouts, partial rotary dimensions, positions,
strides that are not copied, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract import ROUNDING, Case, Contract, Make, Refusal, Shape
from torch import Tensor

import flexops
from flexops.ops import rope as rope_module

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROTARY = {"whole": lambda head_dim: head_dim, "part": lambda head_dim: head_dim // 4 * 2}


def tables(
    make: Make, positions: int, rotary_dim: int, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    angles = make.uniform(positions, rotary_dim // 2, high=6.28, dtype=torch.float32)
    return angles.cos().to(dtype or make.dtype), angles.sin().to(dtype or make.dtype)


def grouped(make: Make, shape: Shape, rotary: str = "whole") -> tuple[Any, ...]:
    """``shape`` is [batch, heads, length, head_dim]; half as many heads for the key."""
    batch, heads, length, head_dim = shape
    key = make(batch, max(heads // 2, 1), length, head_dim)
    return make(*shape), key, *tables(make, length, ROTARY[rotary](head_dim))


def with_positions(make: Make, shape: Shape, rotary: str = "part") -> tuple[Any, ...]:
    query, key, *_ = grouped(make, shape)
    return (
        query,
        key,
        *tables(make, 64, ROTARY[rotary](shape[3]), torch.float32),
        make.integers(0, 64, shape[0], shape[2]),
    )


def looked_up(
    make: Make, shape: Shape, rotary: str = "whole", rows: int | None = None
) -> tuple[Any, ...]:
    """cos and sin as transformers hands them on: a row for each position, of every batch its own
    unless ``rows`` is 1, each number twice."""
    query, key, *_ = grouped(make, shape)
    angles = make.uniform(
        rows or shape[0], shape[2], ROTARY[rotary](shape[3]) // 2, high=6.28, dtype=torch.float32
    )
    return (
        query,
        key,
        *(torch.cat([table, table], -1).to(make.dtype) for table in (angles.cos(), angles.sin())),
    )


def query_only(make: Make, shape: Shape) -> tuple[Any, ...]:
    return make(*shape), *tables(make, shape[2], shape[3])


def plain(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, ...]:
    """In the words of the models that use it."""
    half = cos.shape[-1] if cos.dim() == 2 else cos.shape[-1] // 2
    if cos.dim() == 3:
        where = slice(0, None, 2) if interleaved else slice(0, half)
        return plain_rotation(
            query, key, cos[:, None, :, where], sin[:, None, :, where], half, interleaved
        )
    c, s = (
        table[: query.shape[2]] if positions is None else table[positions.long()]
        for table in (cos, sin)
    )
    c, s = (table.unsqueeze(-3) if table.dim() == 3 else table for table in (c, s))
    return plain_rotation(query, key, c, s, half, interleaved)


def plain_rotation(
    query: Tensor, key: Tensor | None, c: Tensor, s: Tensor, half: int, interleaved: bool
) -> tuple[Tensor, ...]:
    def rotate(x: Tensor) -> Tensor:
        part, rest = x[..., : 2 * half], x[..., 2 * half :]
        if interleaved:
            pairs = part.unflatten(-1, (half, 2))
            first, second = pairs[..., 0], pairs[..., 1]
            rotated = torch.stack([first * c - second * s, second * c + first * s], -1).flatten(-2)
        else:
            swapped = torch.cat([-part[..., half:], part[..., :half]], -1)
            rotated = part * torch.cat([c, c], -1) + swapped * torch.cat([s, s], -1)
        return torch.cat([rotated.to(x.dtype), rest], -1)

    return tuple(rotate(x) for x in (query, key) if x is not None)


def in_place(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    query, key = (x.clone() if isinstance(x, Tensor) else x for x in (query, key))
    return flexops.rotary_embedding(query, key, cos, sin, inplace=True)


Q, TABLE = torch.zeros(2, 3, 4, 8), torch.zeros(4, 4)
SHAPES: tuple[Shape, ...] = ((2, 4, 3, 8), (2, 4, 5, 48), (2, 6, 37, 128))


def refused(error: type[Exception], message: str, **change: Any) -> Refusal:
    arguments = {"query": Q, "key": Q, "cos": TABLE, "sin": TABLE} | change
    return Refusal(lambda: flexops.rotary_embedding(**arguments), error, message)


REFUSALS = (
    refused(
        ValueError,
        r"query must have shape \[batch, heads, length, head_dim\], got \[3, 4, 8\]",
        query=Q[0],
    ),
    refused(
        ValueError,
        r"key must have shape \[2, any, 4, 8\], as query, got \[2, 3, 3, 8\]",
        key=Q[:, :, :3],
    ),
    refused(ValueError, "key must have shape", key=Q[:1]),
    refused(ValueError, "key must have shape", key=Q[..., :6]),
    refused(TypeError, "key must be float32, as query, got float16", key=Q.half()),
    refused(
        ValueError,
        r"cos must have shape \[max_positions, rotary_dim / 2\]",
        cos=torch.zeros(4, 5),
        sin=torch.zeros(4, 5),
    ),
    refused(ValueError, "cos must have shape", cos=torch.zeros(4), sin=torch.zeros(4)),
    refused(ValueError, r"sin must have cos's shape \[4, 4\], got \[4, 3\]", sin=TABLE[:, :3]),
    refused(TypeError, "sin must be float32, as cos, got float16", sin=TABLE.half()),
    refused(
        ValueError,
        "cos must have a row for each of query's 4 positions",
        cos=TABLE[:3],
        sin=TABLE[:3],
    ),
    refused(
        ValueError,
        r"cos must have shape \[2 or 1, 4, rotary_dim\].*at most 8, got \[3, 4, 8\]",
        cos=torch.zeros(3, 4, 8),
        sin=torch.zeros(3, 4, 8),
    ),
    refused(ValueError, "cos must have shape", cos=torch.zeros(2, 5, 8), sin=torch.zeros(2, 5, 8)),
    refused(ValueError, "cos must have shape", cos=torch.zeros(2, 4, 7), sin=torch.zeros(2, 4, 7)),
    refused(
        ValueError,
        "cos must have shape",
        cos=torch.zeros(1, 4, 7),
        sin=torch.zeros(1, 4, 7),
        interleaved=True,
    ),
    refused(
        ValueError,
        "positions must be None",
        cos=torch.zeros(2, 4, 8),
        sin=torch.zeros(2, 4, 8),
        positions=torch.arange(4),
    ),
    refused(ValueError, r"positions must have shape \[4\] or \[2, 4\]", positions=torch.arange(3)),
    refused(
        ValueError,
        r"positions must have shape \[4\] or \[2, 4\]",
        positions=torch.zeros(3, 4, dtype=torch.int64),
    ),
    refused(TypeError, "positions must be int64 or int32, got float32", positions=torch.zeros(4)),
    refused(TypeError, "positions must be a tensor, got list", positions=[0, 1, 2, 3]),
    refused(ValueError, "sin must not require a gradient", sin=TABLE.clone().requires_grad_()),
    refused(ValueError, "query must not be broadcast", query=Q[:1].expand_as(Q), inplace=True),
)


def case(
    name: str,
    call: Callable[..., Any],
    inputs: Callable[..., Any],
    oracle: Callable[..., Any],
    **more: Any,
) -> Case:
    options: dict[str, Any] = {
        "names": ("query", "key", "cos", "sin", "positions"),
        "differentiable": (0, 1),
        "shapes": SHAPES,
        "empty": ((0, 2, 3, 4), (2, 2, 0, 4), (2, 0, 3, 4)),
    } | more
    return Case(name, "rope", call, inputs, oracle, **options)


class TestContract(Contract):
    cases = (
        case(
            "rotary_embedding",
            flexops.rotary_embedding,
            grouped,
            plain,
            parameters=(2, 3),
            refusals=REFUSALS,
        ),
        case(
            "rotary_embedding interleaved",
            lambda *args: flexops.rotary_embedding(*args, interleaved=True),
            lambda make, shape: grouped(make, shape, "part"),
            lambda *args: plain(*args, interleaved=True),
            inductor=False,
        ),
        case("rotary_embedding at positions", flexops.rotary_embedding, with_positions, plain),
        case(
            "rotary_embedding by looked-up tables",
            flexops.rotary_embedding,
            looked_up,
            plain,
            names=("query", "key", "cos", "sin"),
            parameters=(2, 3),
            inductor=False,
        ),
        case(
            "rotary_embedding by shared looked-up tables, interleaved",
            lambda *args: flexops.rotary_embedding(*args, interleaved=True),
            lambda make, shape: (
                *looked_up(make, shape)[:2],
                *(
                    torch.stack([x[..., : x.shape[-1] // 2]] * 2, -1).flatten(-2)
                    for x in looked_up(make, shape, "part", 1)[2:]
                ),
            ),
            lambda *args: plain(*args, interleaved=True),
            names=("query", "key", "cos", "sin"),
            inductor=False,
        ),
        case(
            "rotary_embedding of a query",
            lambda q, c, s: flexops.rotary_embedding(q, None, c, s)[0],
            query_only,
            lambda q, c, s: plain(q, None, c, s)[0],
            names=("query", "cos", "sin"),
            differentiable=(0,),
            huge=(2**13 + 3, 8, 2**9, 2**6),
        ),
    )


class TestContractInPlace(Contract):
    cases = (
        case("rotary_embedding in place", in_place, grouped, plain, accuracy=False, inductor=False),
    )
    test_gradcheck = None  # what is written in place has its gradient outside of the operator


# ---- more than the contract ----


@pytest.fixture(scope="module")
def native(native_kernels: Callable[[str, str], None]) -> None:
    native_kernels("rope", "cpu")


def head_first(*shape: int) -> Tensor:
    return torch.randn(shape)


def length_first(batch: int, heads: int, length: int, head_dim: int) -> Tensor:
    return torch.randn(batch, length, heads, head_dim).transpose(1, 2)


def packed(batch: int, heads: int, length: int, head_dim: int) -> Tensor:
    return torch.randn(batch, length, 2 * heads + 1, head_dim)[:, :, :heads].transpose(1, 2)


def strided(batch: int, heads: int, length: int, head_dim: int) -> Tensor:
    return torch.randn(batch, heads, length, head_dim, 2)[..., 0]


LAYOUTS = (head_first, length_first, packed, strided)
# heads of query and key, length, head_dim, rotary_dim: vectors, odd numbers, nothing to rotate,
# more pairs than a tile has
GEOMETRIES = (
    (4, 2, 37, 64, 64),
    (3, 1, 5, 80, 32),
    (2, 2, 3, 128, 96),
    (2, 1, 7, 6, 4),
    (3, 1, 4, 10, 0),
    (5, 2, 1, 128, 128),
    (2, 1, 4, 13, 6),
    (2, 2, 9, 600, 520),
)


def compare(
    dtype: torch.dtype, interleaved: bool, layout: Callable[..., Tensor], device: str = "cpu"
) -> None:
    """Native against the reference: values, strides, NaNs; in place; and the tables in float32 or
    in dtype."""
    torch.manual_seed(0)
    for heads, key_heads, length, head_dim, rotary_dim in GEOMETRIES:
        query, key = (
            layout(2, number, length, head_dim).to(dtype).to(device)
            for number in (heads, key_heads)
        )
        if layout is strided:  # .to() makes it dense
            query, key = (torch.stack([x, x], -1)[..., 0] for x in (query, key))
        compare_looked_up(query, key, rotary_dim, interleaved)
        angles = torch.rand(length + 3, rotary_dim // 2, device=device) * 6.28
        for table in (torch.float32, dtype):
            for positions in (
                None,
                torch.randint(0, length + 3, (length,), device=device),
                torch.randint(-1, length + 4, (2, length), device=device).int(),
            ):
                arguments = (query, key, angles.cos().to(table), angles.sin().to(table), positions)
                actual = torch.ops.flexops.rotary_embedding(*arguments, interleaved, False)
                for one, other in zip(
                    actual, rope_module._reference(*arguments, interleaved, False), strict=True
                ):
                    assert one.stride() == other.stride()
                    unit = 2 * ROUNDING[dtype]
                    torch.testing.assert_close(
                        one,
                        other,
                        rtol=unit,
                        atol=4 * 2.0**-24 if dtype == torch.float32 else unit * 2.0**-6,
                        equal_nan=True,
                    )
                copies = [
                    torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=device).copy_(x)
                    for x in (query, key)
                ]
                results = flexops.rotary_embedding(
                    *copies, *arguments[2:], interleaved=interleaved, inplace=True
                )  # type: ignore[call-overload]
                assert results[0] is copies[0]
                assert results[1] is copies[1]
                for one, other in zip(copies, actual, strict=True):
                    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def compare_looked_up(query: Tensor, key: Tensor, rotary_dim: int, interleaved: bool) -> None:
    """Rows that were looked up before have the bits of those that the operator looks up, of any
    strides."""
    batch, length, half = query.shape[0], query.shape[2], rotary_dim // 2
    angles = torch.rand(50, half, device=query.device) * 6.28
    tables = [function(angles).to(query.dtype) for function in (torch.cos, torch.sin)]
    for positions in (
        torch.randint(0, 50, (batch, length), device=query.device),
        torch.randint(0, 50, (1, length), device=query.device),
    ):
        rows = [table[positions] for table in tables]
        twice = [
            row.repeat_interleave(2, -1) if interleaved else torch.cat([row, row], -1)
            for row in rows
        ]
        for cos, sin in (
            twice,
            [torch.cat([x, x, x], -1)[..., rotary_dim : 2 * rotary_dim] for x in twice],
        ):
            actual = flexops.rotary_embedding(query, key, cos, sin, interleaved=interleaved)
            expected = flexops.rotary_embedding(
                query, key, *tables, positions.expand(batch, length), interleaved=interleaved
            )
            assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("native")
def test_native_gives_what_the_reference_gives(dtype, interleaved, layout):
    compare(dtype, interleaved, layout)


def test_the_layouts_are_each_others_permutation():
    query, cos, sin = torch.randn(2, 3, 5, 16), torch.rand(5, 8), torch.rand(5, 8)
    alternating = torch.stack(query.chunk(2, -1), -1).flatten(-2)
    half = flexops.rotary_embedding(query, None, cos, sin)[0]
    pairs = flexops.rotary_embedding(alternating, None, cos, sin, interleaved=True)[0]
    assert torch.equal(torch.stack(half.chunk(2, -1), -1).flatten(-2), pairs)


def test_results_lie_as_the_inputs_do():
    cos, sin = torch.rand(5, 8), torch.rand(5, 8)
    for layout, stride in (
        (head_first, (3 * 5 * 16, 5 * 16, 16, 1)),
        (length_first, (3 * 5 * 16, 16, 3 * 16, 1)),
        (packed, (3 * 5 * 16, 16, 3 * 16, 1)),
    ):
        query, key = flexops.rotary_embedding(layout(2, 3, 5, 16), layout(2, 3, 5, 16), cos, sin)
        assert query.stride() == key.stride() == stride


def test_no_activation_is_kept_for_backward():
    query, cos, sin = (
        torch.randn(2, 3, 5, 16, requires_grad=True),
        torch.rand(5, 8),
        torch.rand(5, 8),
    )
    for inplace in (False, True):
        result, _ = flexops.rotary_embedding(query * 1, None, cos, sin, inplace=inplace)
        assert {
            tensor.data_ptr() for tensor in result.grad_fn.saved_tensors if tensor is not None
        } == {
            cos.data_ptr(),
            sin.data_ptr(),
        }  # type: ignore[union-attr]


def test_the_backward_pass_undoes_the_rotation():
    query, angles = torch.randn(2, 3, 5, 16, requires_grad=True), torch.rand(5, 8) * 6.28
    result, _ = flexops.rotary_embedding(query, None, angles.cos(), angles.sin())
    (gradient,) = torch.autograd.grad(result, query, result.detach())
    torch.testing.assert_close(gradient, query.detach())


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_in_place_under_autograd(wanted):
    """Of views, as models have them, and in any combination."""
    cos, sin = torch.rand(5, 8), torch.rand(5, 8)
    leaves = [
        torch.randn(2, 5, heads, 16, requires_grad=grad)
        for heads, grad in zip((4, 2), wanted, strict=True)
    ]

    def gradients(inplace: bool) -> tuple[Tensor, ...]:
        query, key = ((leaf * 1).transpose(1, 2) for leaf in leaves)
        query, key = flexops.rotary_embedding(query, key, cos, sin, inplace=inplace)
        loss = (query * query.detach().cos()).sum() + (key**3).sum()
        return torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad])

    for one, other in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(one, other)
    frozen = torch.randn(1, 1, 5, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        flexops.rotary_embedding(frozen, None, cos, sin, inplace=True)
    with torch.no_grad():
        assert flexops.rotary_embedding(frozen, None, cos, sin, inplace=True)[0] is frozen


def test_in_place_under_the_compiler():
    cos, sin, leaf = (
        torch.rand(5, 8),
        torch.rand(5, 8),
        torch.randn(2, 5, 4, 16, requires_grad=True),
    )

    def step(x: Tensor) -> Tensor:
        query = (x * 1).transpose(1, 2)
        flexops.rotary_embedding(query, None, cos, sin, inplace=True)
        return query * query

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(compiled(leaf), step(leaf))
    (one,), (other,) = (
        torch.autograd.grad(function(leaf).sum(), leaf) for function in (compiled, step)
    )
    torch.testing.assert_close(one, other)


def test_only_what_is_rotated_is_written_in_place():
    query = torch.full((1, 1, 3, 8), float("nan"))
    query[..., :4] = 1
    flexops.rotary_embedding(query, None, torch.ones(3, 2), torch.zeros(3, 2), inplace=True)
    assert (query[..., :4] == 1).all()
    assert query[..., 4:].isnan().all()


@pytest.mark.parametrize("inplace", [False, True])
def test_a_position_outside_the_tables_gives_nan(inplace):
    query, positions = torch.ones(1, 2, 4, 8), torch.tensor([0, -1, 4, 3])
    result, _ = flexops.rotary_embedding(
        query, None, torch.ones(4, 2), torch.zeros(4, 2), positions, inplace=inplace
    )
    assert result[:, :, 1:3, :4].isnan().all()
    assert (result[:, :, 1:3, 4:] == 1).all()
    assert (result[:, :, [0, 3]] == 1).all()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.usefixtures("native", "transformers_models")
def test_tables_as_transformers_hands_them_on(inplace):
    """With its own modules: the same rotation and gradients, positions of each sample, and nothing
    kept but its tables as they are."""
    from transformers.models.llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64
    )
    hidden = torch.randn(2, 7, 64)
    positions = torch.stack([torch.arange(7), torch.arange(20, 27)])
    leaves = [torch.randn(2, 7, heads, 16, requires_grad=True) for heads in (4, 2)]
    for ids in (positions, positions[:1]):
        cos, sin = LlamaRotaryEmbedding(config)(hidden, ids)
        assert cos.shape == (len(ids), 7, 16)

        def rotated(rotate: Callable[..., Any]) -> tuple[Tensor, ...]:
            return rotate(*((leaf * 1).transpose(1, 2) for leaf in leaves), cos, sin)  # noqa: B023

        actual = rotated(lambda *args: flexops.rotary_embedding(*args, inplace=inplace))
        expected = rotated(apply_rotary_pos_emb)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other)
        if not inplace:  # of views, what is behind is not to be seen
            saved = {
                tensor.data_ptr()
                for result in actual
                for tensor in result.grad_fn.saved_tensors
                if tensor is not None
            }  # type: ignore[union-attr]
            assert saved == {cos.data_ptr(), sin.data_ptr()}
        given = [torch.randn_like(one) for one in actual]
        for one, other in zip(
            *(torch.autograd.grad(results, leaves, given) for results in (actual, expected)),
            strict=True,
        ):
            torch.testing.assert_close(one, other)


def test_tables_may_be_slices():
    """As models hold them: each number twice."""
    query, angles = torch.randn(2, 3, 5, 16), torch.rand(9, 8)
    twice = torch.cat([angles, angles], -1)
    expected = flexops.rotary_embedding(query, None, angles.cos(), angles.sin())[0]
    assert torch.equal(
        flexops.rotary_embedding(query, None, twice.cos()[:, :8], twice.sin()[:, :8])[0], expected
    )
    spread = angles.repeat_interleave(2, -1)
    assert torch.equal(
        flexops.rotary_embedding(query, None, spread.cos()[:, ::2], spread.sin()[:, ::2])[0],
        expected,
    )


@pytest.mark.usefixtures("native")
def test_the_ops_themselves_check_too():
    """For those who call torch.ops directly: a wrong argument is an error, never a wrong
    address."""
    good = {"query": Q, "key": Q, "cos": TABLE, "sin": TABLE, "positions": None}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"query": Q.double()}, "query must be float32"),
        ({"query": Q[0]}, "query must have shape"),
        ({"key": Q.half()}, "key must be float32"),
        ({"key": Q[:1]}, "key must have query's shape"),
        ({"cos": torch.zeros(4, 5), "sin": torch.zeros(4, 5)}, "cos must have shape"),
        ({"cos": TABLE.double()}, "cos must be float32"),
        ({"sin": TABLE[:3]}, "sin must have cos's shape"),
        ({"positions": torch.zeros(4)}, "positions must be int64 or int32"),
        ({"positions": torch.arange(3)}, "positions must have shape"),
        ({"cos": TABLE[:2], "sin": TABLE[:2]}, "cos must have at least query's 4 positions"),
        ({"cos": torch.zeros(3, 4, 8), "sin": torch.zeros(3, 4, 8)}, "cos must have shape"),
        ({"cos": torch.zeros(2, 3, 8), "sin": torch.zeros(2, 3, 8)}, "cos must have shape"),
        ({"cos": torch.zeros(2, 4, 10), "sin": torch.zeros(2, 4, 10)}, "cos must have shape"),
        (
            {
                "cos": torch.zeros(2, 4, 8),
                "sin": torch.zeros(2, 4, 8),
                "positions": torch.arange(4),
            },
            "positions must not be given",
        ),
    ]
    for change, message in wrong:
        for op in (torch.ops.flexops.rotary_embedding, torch.ops.flexops.rotary_embedding_):
            with pytest.raises(RuntimeError, match=message):
                op(*(good | change).values(), False, False)
    with pytest.raises(RuntimeError, match="must not be broadcast"):
        torch.ops.flexops.rotary_embedding_(
            Q[:1].expand_as(Q), None, TABLE, TABLE, None, False, False
        )
