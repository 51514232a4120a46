"""The Triton operators as a compiler sees them, without a GPU: run by test_triton.py in a process of its own.

The kernels are those for a GPU. Where one is launched all the same, Triton's interpreter runs it, and the driver is one
that says there is a GPU to compile for. By hand: python -m pytest tests/ops/triton_traced.py -m ''
"""

import re
import subprocess
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from nagnet import ops
from nagnet.ops import reference

triton = pytest.importorskip("triton")
interpreter = pytest.importorskip("triton.runtime.interpreter")
kernels = pytest.importorskip("nagnet.ops.triton")
from nagnet.nn.residual import NormAgnosticResidual  # noqa: E402
from nagnet.ops import triton_add_norm, triton_rotate, triton_rotate_backward  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own, and numpy's of lanes that a mask drops


@pytest.fixture(autouse=True)
def _as_if_on_a_gpu(monkeypatch):
    def launch(kernel, *arguments, grid, warmup, **options):
        return interpreter.InterpretedFunction(kernel.fn).run(*arguments, grid=grid, warmup=warmup, **options)

    def call(function, *arguments, **options):
        patched = interpreter._patch_lang(function.fn)
        try:
            return interpreter.InterpretedFunction(function.fn).rewrite()(*arguments, **options)
        finally:  # for what is compiled afterwards
            patched.restore()

    monkeypatch.setattr(triton.JITFunction, "run", launch)
    monkeypatch.setattr(triton.JITFunction, "__call__", call)
    driver = SimpleNamespace(get_current_target=lambda: triton.backends.compiler.GPUTarget("cuda", 90, 32))
    triton.runtime.driver.set_active(driver)
    torch._dynamo.reset()


def draw_inputs(n_directions=3, d=24):
    rows = (reference.split(torch.randn(2, 5, d))[0], torch.randn(2, 5), torch.randn(2, 5, d), torch.rand(2, 5))
    parameters = (torch.randn(n_directions, d), torch.randn(n_directions), torch.randn(n_directions))
    return [tensor.requires_grad_() for tensor in (*rows, *parameters, torch.randn(()), torch.rand(()))]


OPERATORS = {
    "write": lambda t: (torch.ops.nagnet.write.default, (*t[:4], 1e-6)),
    "advance": lambda t: (torch.ops.nagnet.advance.default, (*t, 1e-6, 1e-6)),
    "add_norm": lambda t: (torch.ops.nagnet.add_norm.default, (t[0], t[2])),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name):
    operator, arguments = OPERATORS[name](draw_inputs())
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck_of_the_backward(name):
    direction, log_norm, branch, gain, *parameters = (tensor.detach() for tensor in draw_inputs())
    kept = torch.rand(10, 4)
    arguments = {
        "write": (branch, log_norm, direction, branch, gain, kept, 1e-6),
        "advance": (branch, log_norm, gain, direction, branch, gain, kept, direction, *parameters, 1e-6, 1e-6),
        "add_norm": (direction, branch, branch),
    }
    torch.library.opcheck(getattr(torch.ops.nagnet, f"{name}_backward").default, arguments[name])


def graphs_of(function, *inputs):
    """Forward and backward graph as a compiler gets them."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut)
    outputs = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    sum(output.float().sum() for output in outputs).backward()
    return graphs


def min_cut(*arguments, **options):
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(*arguments, **options)


def kernels_in(graph):
    return [node for node in graph.graph.nodes if "triton_kernel_wrapper" in str(node.target)]


def test_a_compiler_sees_the_kernels_and_copies_nothing_for_them():
    """One kernel forward, two backward; only outputs count as written, so no input is cloned first."""
    forward, backward = graphs_of(lambda *t: kernels.advance(*t[:4], t[4:]), *draw_inputs())
    assert len(kernels_in(forward)) == 1 and len(kernels_in(backward)) == 2
    outputs = re.compile(r"(new|to|next|partial|grad_logits|kept)\w*_ptr")
    for node in kernels_in(forward) + kernels_in(backward):
        assert all(outputs.fullmatch(name) for name in node.kwargs["tensors_to_clone"])


@pytest.fixture
def triton_backend():
    ops.set_backend("triton")
    yield
    ops.set_backend("auto")


def test_two_updates_in_one_graph(triton_backend):
    """As in a compiled block: advance, a sublayer, advance; the choice of the backend is made while tracing."""
    first, second, third = (NormAgnosticResidual(24, update_index=index) for index in (1, 2, 3))
    x = torch.randn(2, 5, 24, requires_grad=True)

    def block(x):
        state = first.begin(x)
        state, reading, gain = first.advance(state, x.sin(), first.gain(state), second)
        state, reading, gain = second.advance(state, reading.cos(), gain, third)
        return state.direction, state.log_norm, gain

    forward, backward = graphs_of(block, x)
    assert len(kernels_in(forward)) == 2 and len(kernels_in(backward)) == 4


KERNELS = {
    "write": (triton_rotate.advance_forward, {"WITH_GAIN": False}),
    "advance": (triton_rotate.advance_forward, {"WITH_GAIN": True}),
    "write_backward": (triton_rotate_backward.advance_backward, {"WITH_GAIN": False}),
    "advance_backward": (triton_rotate_backward.advance_backward, {"WITH_GAIN": True}),
    "weight_gradient": (triton_rotate_backward.weight_gradient, {}),
    "add_norm": (triton_add_norm.add_norm_forward, {}),
    "add_norm_backward": (triton_add_norm.add_norm_backward, {}),
}
VECTORS = re.compile(r"(new_|grad_|to_)?(direction|branch|stream|added|reading)_ptr")


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "capability"), [("bf16", 80), ("bf16", 90), ("fp32", 90)])
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for_a_gpu_without_spilling_registers(name, dtype, capability, tmp_path):
    """To machine code, at the sizes of 32 directions and a width of 640."""
    kernel, flags = KERNELS[name]
    stream = torch.bfloat16 if dtype == "bf16" else torch.float32
    sizes = kernels._row_tiles(640) if "add_norm" in name else kernels._tiles(640, 32, stream)
    if name == "weight_gradient":
        sizes = sizes | {"CHUNK": sizes["WIDE"]}
    constants = {name: value for name, value in (sizes | flags).items() if name in kernel.arg_names}
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument.endswith("_ptr"):
            signature[argument] = f"*{dtype}" if VECTORS.fullmatch(argument) else "*fp32"
        else:
            signature[argument] = "fp32" if argument in ("branch_eps", "floor") else "i32"
    pointers = [index for index, argument in enumerate(kernel.arg_names) if argument.endswith("_ptr")]
    attributes = {(index,): [["tt.divisibility", 16]] for index in pointers}
    source = triton.compiler.ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {option: sizes[option] for option in ("num_warps", "num_stages") if option in sizes}
    if name == "weight_gradient":
        del options["num_stages"]
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=options)
    assert compiled.metadata.shared <= 48 * 1024
    path = tmp_path / "kernel.ptx"
    path.write_text(compiled.asm["ptx"])
    assembler = triton.knobs.nvidia.ptxas.path
    architecture = f"--gpu-name=sm_{capability}{'a' if capability == 90 else ''}"
    command = [assembler, "-v", architecture, str(path), "-o", str(tmp_path / "kernel.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert re.findall(r"(\d+) bytes spill stores", said) == ["0"], said
