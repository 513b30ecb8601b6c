"""What CANN's attention does not allow, or its documentation warns of, is an error that says so.

A device that has failed stays failed, so another process makes the calls, each on a device of its own.
"""

import pytest
from refused_calls import outcomes

CALLS = {
    "fused(x, x, x, 2, 'BNSD', atten_mask=(~triangle).npu(), sparse_mode=2)": "only there",
    "fused(x, x, x, 2, 'BNSD', atten_mask=triangle[:8, :8].npu(), sparse_mode=3)": "[2048, 2048]",
    "fused(x, x, x, 2, 'BNSD', atten_mask=(triangle & False)[:8, :8].npu(), next_tockens=0)": "must agree",
    "fused(x, x, x, 2, 'BNSD', atten_mask=triangle.npu(), sparse_mode=4, pre_tockens=-3, next_tockens=1)": "between",
    "fused(x, x, x, 2, 'BNSD', atten_mask=triangle[:5, :5].npu())": "fits neither",
    "v2(x, x, x, 2, 'BNSD', pse=torch.ones(2).npu(), pse_type=2)": "pse_type 2",
    "fused(packed, packed[:4], packed[:4], 2, 'TND', atten_mask=triangle.npu(), sparse_mode=3,"
    " actual_seq_qlen=[8], actual_seq_kvlen=[4])": "more rows than keys",
    "fused(packed, packed, packed, 2, 'TND', atten_mask=(triangle | True)[:8, :8].npu(), sparse_mode=1,"
    " actual_seq_qlen=[8], actual_seq_kvlen=[8])": "hides every key",
}

PROGRAM = """
import sys
import torch, torch_npu
fused, v2 = torch_npu.npu_fusion_attention, torch_npu.npu_fusion_attention_v2
triangle = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
for device, call in enumerate(sys.argv[1:]):
    torch.npu.set_device(device)
    x, packed = torch.randn(1, 2, 8, 16).npu(), torch.randn(8, 2, 16).npu()
    try:
        eval(call)[0].cpu()
    except RuntimeError:
        print("an error")
    else:
        print("none")
"""


@pytest.fixture(scope="module")
def outcome():
    """Whether each call raised an error, and all that was said of the errors."""
    return outcomes(PROGRAM, list(CALLS))


@pytest.mark.parametrize("call", CALLS)
def test_the_error_says_what_is_wrong(outcome, call):
    raised, said = outcome
    assert raised[call] == "an error"
    assert CALLS[call] in said
