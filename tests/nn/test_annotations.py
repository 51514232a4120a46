"""The shapes that ops and nn annotate hold, checked by beartype in a process of its own.

`tests/test_annotations.py` trains whole decoders; here are the parts and options that those leave out.
"""

import subprocess
import sys

PROGRAM = """
import sys
from jaxtyping import TypeCheckError, install_import_hook

with install_import_hook(["nagnet.ops", "nagnet.nn"], "beartype.beartype"):
    import torch
    from nagnet.nn.attention import Attention
    from nagnet.nn.mlp import MLPS
    from nagnet.nn.readout import Readout, ReadoutConfig
    from nagnet.nn.residual import RESIDUAL_STREAMS
    from nagnet.nn.rotary import RotaryTable, apply_rotary
    from nagnet.ops import reference

def refused(call):
    try:
        call()
    except TypeCheckError:
        return
    sys.exit("a wrong shape passed")

refused(lambda: reference.merge(torch.zeros(2, 3), torch.zeros(4)))
refused(lambda: reference.rotate(torch.zeros(2, 3), torch.zeros(2), torch.zeros(2, 4), torch.zeros(2)))
refused(lambda: Readout(8, 5)(torch.zeros(2, 8), torch.zeros(3)))
refused(lambda: apply_rotary(torch.zeros(1, 4, 2, 6), torch.zeros(4, 3), torch.zeros(5, 3)))

for dtype in (torch.float32, torch.bfloat16, torch.float64):
    x = torch.randn(2, 6, 8, dtype=dtype, requires_grad=True)
    for stream_class in RESIDUAL_STREAMS.values():
        for scale in ("log_norm", "learned", "none"):
            stream = stream_class(8, 2).to(dtype)
            attention = Attention(8, n_heads=4, n_kv_heads=2, head_dim=2, qk_gain=1.2, window=3).to(dtype)
            first, second = stream.updates
            state = stream.begin(x)
            reading, gain = first.read(state), first.gain(state)
            key_mask = torch.arange(6).expand(2, 6) > 1
            branch = attention(reading, *RotaryTable(2, 1e4, 6)(6), key_mask)
            state, reading, gain = first.advance(state, branch, gain, second)
            for mlp in MLPS.values():
                state = second.write(state, mlp(8, 12).to(dtype)(reading), gain)
            logits = Readout(8, 5, ReadoutConfig(scale=scale)).to(dtype)(*state.split())
            (logits.sum() + state.merge().sum()).backward()
    reference.angle(x, x)
    reference.split(x[0, 0])
"""


def test_every_part_keeps_its_shapes():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
