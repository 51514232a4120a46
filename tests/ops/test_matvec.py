"""The product of one row that a compiler makes a loop of."""

import pytest
import torch

from nagnet import ops
from nagnet.ops.matvec import matvec


# From 256 rows on a matrix is read in four places, if four parts are equal.
@pytest.mark.parametrize("shape", [(256, 12), (300, 5), (258, 12), (16, 12), (15, 12), (4, 1), (1, 7)], ids=str)
@pytest.mark.parametrize("rows", [(12,), (1, 12), (1, 1, 12)], ids=str)
def test_equals_the_product(generator, shape, rows):
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    x = torch.randn((*rows[:-1], shape[1]), generator=generator, dtype=torch.float64)
    found = matvec(x, weight)
    torch.testing.assert_close(found, x @ weight.mT, rtol=1e-12, atol=1e-12)
    assert found.shape == (*rows[:-1], shape[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_16_bit_is_added_in_float32(generator, dtype):
    weight, x = torch.randn(256, 512, generator=generator).to(dtype), torch.randn(1, 512, generator=generator).to(dtype)
    found = matvec(x, weight)
    assert found.dtype == dtype
    exact = (x.double() @ weight.double().mT).to(dtype)
    assert (found != exact).float().mean() < 0.05  # rounded once: the type nearest to the exact sum, but for ties


def test_strided_input(generator):
    weight = torch.randn(8, 6, generator=generator)
    x = torch.randn(1, 6, 5, generator=generator)[..., 2]
    torch.testing.assert_close(matvec(x, weight), x @ weight.mT)
    weight = torch.randn(6, 8, generator=generator).mT
    torch.testing.assert_close(matvec(x, weight), x @ weight.mT)


def test_it_has_gradients(generator):
    weight = torch.randn(8, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    x = torch.randn(1, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(matvec, (x, weight))


def test_eager_calls_and_many_rows_are_the_librarys(generator, monkeypatch):
    monkeypatch.setattr(ops, "matvec", None)
    weight = torch.randn(8, 3, generator=generator)
    x = torch.randn(1, 3, generator=generator)
    assert torch.equal(ops.project(x, weight), torch.nn.functional.linear(x, weight))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    many = torch.randn(2, 3, generator=generator)
    assert torch.equal(ops.project(many, weight), torch.nn.functional.linear(many, weight))
    with pytest.raises(TypeError):
        ops.project(x, weight)
