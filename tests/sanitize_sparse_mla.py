"""Small calls of the SM90 kernel with every option, for compute-sanitizer; not a test by itself.

    for tool in memcheck racecheck synccheck initcheck; do
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $tool --error-exitcode 9 \\
            --kernel-name kernel_substring=sparse_mla python tests/sanitize_sparse_mla.py
    done

For racecheck add the argument ``every-lane``: all lanes of a warp then arrive at a barrier in place of one for all. The
tool does not see that lane 0 arrives after the others, as the compiler needs no instruction for that.

Every call is made twice: with a CTA for each item, and with two CTAs, which then take several items each.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import types

import torch

from bufpool.ops import sparse_mla_sm90

# d_qk, h_q, topk, s_q, s_kv
SHAPES = [(576, 64, 300, 3, 200), (512, 64, 300, 3, 200), (576, 20, 64, 2, 70), (512, 80, 65, 3, 70), (576, 1, 1, 1, 1)]
SHAPES += [(576, 130, 130, 4, 70)]  # 3 head groups: two CTAs go from one to another


def call(d_qk: int, h_q: int, topk: int, s_q: int, s_kv: int, *, has_options: bool) -> None:
    q = torch.randn(s_q, h_q, d_qk).to(torch.float8_e4m3fn).cuda()
    kv = torch.randn(s_kv, d_qk).to(torch.float8_e4m3fn).cuda()
    indices = torch.randint(-20, s_kv + 20, (s_q, topk), dtype=torch.int32).cuda()
    out = torch.zeros(s_q, h_q, 512, dtype=torch.bfloat16).cuda()
    max_logits, lse = (torch.zeros(s_q, h_q).cuda() for _ in range(2))
    q_scale: float | torch.Tensor = 1.0
    kv_scale: float | torch.Tensor = 1.0
    sink = lengths = None
    if has_options:
        q_scale, kv_scale = torch.tensor([-0.5]).cuda(), torch.tensor(2.0).cuda()
        sink = torch.full((h_q,), -math.inf).cuda()
        lengths = (torch.arange(s_q, dtype=torch.int32) * 100).cuda()
    sparse_mla_sm90.launch(q, kv, indices, d_qk**-0.5, q_scale, kv_scale, sink, lengths, out, max_logits, lse)
    torch.cuda.synchronize()
    for written in (out, max_logits, lse):
        assert not written.cpu().isnan().any()


def set_sms(sms: int) -> None:
    torch.cuda.init()  # which asks for the true ones
    properties = types.SimpleNamespace(multi_processor_count=sms, L2_cache_size=2**25)
    torch.cuda.get_device_properties = lambda _: properties  # type: ignore[assignment]
    sparse_mla_sm90._plans.by_shape.clear()


def let_every_lane_arrive() -> None:
    for d_qk, source in sparse_mla_sm90.VARIANTS.items():
        defines = tuple((name, "32" if name == "BUFPOOL_ARRIVING_LANES" else value) for name, value in source.defines)
        sparse_mla_sm90.VARIANTS[d_qk] = dataclasses.replace(source, name=f"{source.name}_every_lane", defines=defines)


def main() -> None:
    torch.manual_seed(0)
    if sys.argv[1:] == ["every-lane"]:
        let_every_lane_arrive()
    calls = 0
    for sms in (132, 2):
        for prefetches in (False, True):
            sparse_mla_sm90._prefetches_keys = lambda *_, answer=prefetches: answer  # type: ignore[assignment]
            set_sms(sms)
            for shape in SHAPES:
                for has_options in (False, True):
                    call(*shape, has_options=has_options)
                    calls += 1
    print(f"{calls} calls")


if __name__ == "__main__":
    main()
