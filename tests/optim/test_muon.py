"""flexops.optim.Muon."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch import Tensor

import flexops
from flexops import optim
from flexops.optim import _orthogonal

needs_torch = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9"
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(64, 64), (64, 256), (256, 64), (64, 64), (20, 70)]


def parameters(
    shapes: list[tuple[int, ...]], device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(len(shapes))
    params = []
    for shape in shapes:
        value, grad = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
        params.append(torch.nn.Parameter(value))
        params[-1].grad = grad
    return params


@needs_torch
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "weight_decay": 0.0, "adjust_lr_fn": "original"},
        {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.5, "ns_steps": 4, "eps": 1e-3},
        {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 8},
    ],
)
def test_steps_are_torchs(device, dtype, options):
    # torch normalizes the buffer itself if it is already bfloat16, so its next average is wrong
    options = {**options, "nesterov": options.get("nesterov", True) or dtype == torch.bfloat16}
    ours, theirs = parameters(SHAPES, device, dtype), parameters(SHAPES, device, dtype)
    mine = optim.Muon(ours, lr=0.1, **options)
    reference = torch.optim.Muon(theirs, lr=0.1, **options)
    for _ in range(3):
        mine.step()
        reference.step()
        for a, b in zip(ours, theirs, strict=True):
            error, size = (a - b).float().norm(), b.float().norm()
            assert error < (0.02 if dtype == torch.bfloat16 else 0.004) * size, error / size
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            mine.state[a]["momentum_buffer"], reference.state[b]["momentum_buffer"]
        )


SPECTRA = ("flat", "power", "low rank", "cliff")


@pytest.mark.parametrize(
    ("shape", "spectrum"),
    [
        *itertools.product([(64, 256), (128, 128), (96, 200), (256, 64)], SPECTRA),
        # what large ones reuse (_TIED_FROM), from rows and from columns; seconds each
        *(pytest.param((512, 800), one, marks=pytest.mark.extra) for one in SPECTRA),
        pytest.param((1024, 512), "cliff", marks=pytest.mark.extra),
        *(pytest.param((1024, 512), one, marks=pytest.mark.slow) for one in SPECTRA[:-1]),
    ],
)
def test_the_update_is_as_near_to_the_exact_iteration_as_the_plain_one(
    shape, spectrum, monkeypatch
):
    """The Gram form squares what small singular values have lost; that it is computed anew, from X
    or from the first one, must contain that."""
    monkeypatch.setattr(_orthogonal, "_TIED_FROM", 512)
    m, n = sorted(shape)
    torch.manual_seed(0)
    rank = torch.arange(1, m + 1, dtype=torch.float64)
    values = {
        "flat": torch.ones(m, dtype=torch.float64),
        "power": rank**-1.5,
        "low rank": torch.where(rank < 8, 1.0, 1e-3),
        "cliff": torch.where(rank < m / 2, 1.0, 1e-6),
    }[spectrum].double()
    left = torch.linalg.qr(torch.randn(m, m, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(n, m, dtype=torch.float64))[0]
    x = ((left * values) @ right.T)[None]
    x = x / x.norm()
    numbers = (3.4445, -4.7750, 2.0315)
    exact, rounded = plain_iteration(x, numbers), plain_iteration(x.bfloat16(), numbers).double()
    given = x if shape == (m, n) else x.mT
    given = (_orthogonal.scale_of(m, n) * given.bfloat16().float()).half()  # as on GPUs
    update = _orthogonal.orthogonalize(given.contiguous(), numbers, 5).double()
    update = update if shape == (m, n) else update.mT
    error, usual = ((one - exact).norm() for one in (update, rounded))
    assert error <= 1.1 * usual + 0.02 * exact.norm()
    largest, usual = (torch.linalg.svdvals(one[0])[0] for one in (update, rounded))
    assert largest <= usual + 0.1


def plain_iteration(x: Tensor, numbers: tuple[float, float, float]) -> Tensor:
    a, b, c = numbers
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def test_a_batch_of_matrices_is_stepped_as_its_matrices():
    (batch,) = parameters([(3, 32, 48)])
    singles = [torch.nn.Parameter(one.detach().clone()) for one in batch]
    for single, grad in zip(singles, batch.grad, strict=True):
        single.grad = grad.clone()
    optim.Muon([batch], lr=0.1).step()
    optim.Muon(singles, lr=0.1).step()
    torch.testing.assert_close(batch.detach(), torch.stack([one.detach() for one in singles]))


def test_what_is_no_matrix_is_stepped_by_adamw():
    shapes = [(16, 32), (32,), (2, 2, 2, 2), ()]
    ours, theirs = parameters(shapes), parameters(shapes)
    embedding, other = parameters([(10, 8)]), parameters([(10, 8)])
    adamw = {"lr": 3e-3, "weight_decay": 0.5, "betas": (0.8, 0.9)}
    groups = [{"params": ours, "lr": 0.1}, {"params": embedding, "muon": False, "lr": 0.02}]
    muon = optim.Muon(groups, adamw=adamw)
    assert [group["muon"] for group in muon.param_groups] == [True, False, False]
    assert [group["lr"] for group in muon.param_groups] == [0.1, 3e-3, 0.02]
    reference = torch.optim.AdamW([{"params": theirs[1:]}, {"params": other, "lr": 0.02}], **adamw)
    for _ in range(2):
        muon.step()
        reference.step()
    torch.testing.assert_close([*ours[1:], *embedding], [*theirs[1:], *other])
    assert (ours[0] - theirs[0]).abs().max() > 0.01


@needs_torch
def test_state_dicts_load_both_ways():
    ours, theirs = parameters(SHAPES), parameters(SHAPES)
    mine, reference = optim.Muon(ours, lr=0.1), torch.optim.Muon(theirs, lr=0.1)
    mine.step()
    reference.step()
    fresh, fresh_ours = parameters(SHAPES), parameters(SHAPES)
    other = torch.optim.Muon(fresh, lr=0.5)
    other.load_state_dict(mine.state_dict())
    assert other.param_groups[0]["lr"] == 0.1
    again = optim.Muon(fresh_ours, lr=0.5)
    again.load_state_dict(reference.state_dict())
    assert again.param_groups[0]["lr"] == 0.1
    for one in (other, again):
        for old, new in zip(ours, one.param_groups[0]["params"], strict=True):
            torch.testing.assert_close(
                one.state[new]["momentum_buffer"], mine.state[old]["momentum_buffer"]
            )


def test_a_mixed_state_dict_and_a_pickle_go_on_where_they_were():
    shapes = [(16, 32), (32,)]
    ours, copies = (
        parameters(shapes, dtype=torch.bfloat16),
        parameters(shapes, dtype=torch.bfloat16),
    )
    first, second = optim.Muon(ours), optim.Muon(copies)
    first.step()
    for old, new in zip(ours, copies, strict=True):
        new.data.copy_(old.data)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    third = pickle.loads(pickle.dumps(first))
    for one in (first, second, third):
        for group in one.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        one.step()
    for one in (second, third):
        for group, other in zip(first.param_groups, one.param_groups, strict=True):
            for a, b in zip(group["params"], other["params"], strict=True):
                assert torch.equal(a, b)
    assert first.state[ours[0]]["momentum_buffer"].dtype == torch.bfloat16


def test_foreign_states_are_rejected():
    (param,) = parameters([(8, 8)])
    adamw = optim.AdamW([param])
    adamw.step()
    with pytest.raises(ValueError, match=r"must have momentum_buffer, got exp_avg"):
        optim.Muon([param]).load_state_dict(adamw.state_dict())
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        optim.Muon([3])


@pytest.mark.parametrize("device", DEVICES)
def test_a_scaler_is_undone_and_an_overflow_skipped(device):
    ours, theirs = parameters([(32, 16), (16,)], device), parameters([(32, 16), (16,)], device)
    mine, plain = optim.Muon(ours), optim.Muon(theirs)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    for param in ours:
        scaler.scale(param.grad.sum())  # the scaler makes its scale
        param.grad *= 1024.0
    scaler.step(mine)
    plain.step()
    torch.testing.assert_close(ours, theirs)
    before = [param.detach().clone() for param in ours]
    ours[0].grad[0, 0] = torch.inf
    scaler.update()
    scaler.step(mine)
    assert all(torch.equal(a, b) for a, b in zip(before, ours, strict=True))


def test_a_tensor_as_the_rate():
    ours, theirs = parameters(SHAPES), parameters(SHAPES)
    optim.Muon(ours, lr=torch.tensor(0.1)).step()
    optim.Muon(theirs, lr=0.1).step()
    torch.testing.assert_close(ours, theirs)


def test_zeros_and_empty_matrices():
    zero, empty = torch.nn.Parameter(torch.ones(8, 4)), torch.nn.Parameter(torch.ones(0, 4))
    zero.grad, empty.grad = torch.zeros(8, 4), torch.zeros(0, 4)
    optim.Muon([zero, empty, torch.nn.Parameter(torch.ones(3, 3))], lr=0.5).step()
    torch.testing.assert_close(zero.detach(), torch.full((8, 4), 0.95))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ns_steps": 0}, "ns_steps must be an integer from 1 to 99, got 0"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients must be 3 numbers"),
        ({"adjust_lr_fn": "other"}, "adjust_lr_fn must be None, 'original' or"),
        ({"adamw": {"beta": 1}}, "adamw has unknown options: beta"),
        ({"momentum": 1.0}, "Invalid beta parameter"),
        ({"lr": -1.0}, "Invalid learning rate"),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(ValueError, match=words):
        optim.Muon(parameters([(4, 4)]), **options)


def test_wrong_parameters():
    with pytest.raises(ValueError, match=r"2 or 3 dimensions, got shape \(4,\).*muon=False"):
        optim.Muon([{"params": parameters([(4,)]), "muon": True}])
    param = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
    param.grad = torch.ones_like(param)
    with pytest.raises(TypeError, match=r"params\[0\] must be float32.*got float64"):
        optim.Muon([param]).step()
    (sparse,) = parameters([(4, 4)])
    sparse.grad = torch.ones(4, 4).to_sparse()
    with pytest.raises(RuntimeError, match="sparse gradient"):
        optim.Muon([sparse]).step()


def test_a_model_learns():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    x = torch.randn(256, 8)
    y = x.prod(1, keepdim=True).tanh()
    optimizer = flexops.optim.Muon(model.parameters(), lr=0.02, weight_decay=0.0)
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_a_momentum_that_is_no_number_is_named():
    with pytest.raises(TypeError, match="momentum must be a number, got 'a'"):
        optim.Muon([torch.nn.Parameter(torch.ones(2, 2))], momentum="a")  # type: ignore[arg-type]
