"""The operator under torch.compile, torch.export and make_fx: the same results, no graph break, no copy, no pool."""

from __future__ import annotations

import importlib
import math
import sys
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import bufpool
from bufpool import DeviceMismatchError, FreshAllocator, OutputMismatchError, OutputPool
from bufpool.ops import library, sparse_mla_prefill

E4M3 = torch.float8_e4m3fn
BACKENDS = ("eager", "aot_eager")
OPTIONS = ("attn_sink", "topk_length")


def make(s_q=5, h_q=3, topk=7, s_kv=30, seed=0, device="cpu"):
    """Arguments of the operator by name."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "q": torch.randn(s_q, h_q, 576, generator=generator).to(device, E4M3),
        "kv": torch.randn(s_kv, 576, generator=generator).to(device, E4M3),
        "indices": torch.randint(-1, s_kv, (s_q, topk), generator=generator, dtype=torch.int32).to(device),
        "sm_scale": 0.05,
        "q_scale": torch.tensor([0.5], device=device),
        "kv_scale": 2.0,
        "attn_sink": torch.linspace(-1, 1, h_q, device=device),
        "topk_length": torch.randint(0, topk + 1, (s_q,), generator=generator, dtype=torch.int32).to(device),
    }


def outputs_for(s_q=5, h_q=3, device="cpu"):
    return {
        "out": torch.full((s_q, h_q, 512), math.nan, dtype=torch.bfloat16, device=device),
        "max_logits": torch.full((s_q, h_q), math.nan, device=device),
        "lse": torch.full((s_q, h_q), math.nan, device=device),
    }


def eager(arguments):
    return sparse_mla_prefill(**arguments, allocator=FreshAllocator())


def same_bits(one, other):
    return all(
        a.dtype is b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


class Counter:
    """A backend that runs what was traced and counts how often it was asked to compile."""

    def __init__(self):
        self.graphs = []

    def __call__(self, module, inputs):
        self.graphs.append(module)
        return module

    def ops(self):
        return [node.target for graph in self.graphs for node in graph.graph.nodes if node.op == "call_function"]


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def default_pool():
    former = bufpool.default_pool()
    with OutputPool() as pool:
        bufpool.set_default_pool(pool)
        yield pool
        bufpool.set_default_pool(former)


# The ops


@pytest.fixture
def _float8_compares(monkeypatch):
    """opcheck compares the inputs before and after with torch.allclose, which does not know float8."""
    real = torch.allclose

    def allclose(one, other, **options):
        if one.dtype is E4M3:
            return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        return real(one, other, **options)

    monkeypatch.setattr(torch, "allclose", allclose)


def op_arguments(arguments, scales):
    tensors = {f"{name}_tensor": torch.tensor([number]) for name, number in scales.items()}
    return (arguments["q"], arguments["kv"], arguments["indices"], 0.05, 0.5, 2.0), tensors


@pytest.mark.parametrize("scales", [{}, {"q_scale": 0.5}, {"q_scale": 0.5, "kv_scale": 2.0}])
@pytest.mark.parametrize("options", [(), OPTIONS])
@pytest.mark.parametrize("form", ["functional", "out"])
@pytest.mark.usefixtures("_float8_compares")
def test_opcheck_is_clean(form, options, scales):
    arguments = make()
    args, kwargs = op_arguments(arguments, scales)
    kwargs.update({name: arguments[name] for name in options})
    op = torch.ops.bufpool.sparse_mla_prefill.default
    if form == "out":
        op = torch.ops.bufpool.sparse_mla_prefill.out
        kwargs.update({name: tensor.zero_() for name, tensor in outputs_for().items()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about its own tests
        done = torch.library.opcheck(op, args, kwargs)
    assert set(done.values()) == {"SUCCESS"}


def test_the_ops_compute_what_the_operator_does():
    arguments = make()
    args, kwargs = op_arguments(arguments, {"kv_scale": 2.0})
    args = (*args[:5], math.nan)  # the tensor wins
    kwargs.update({name: arguments[name] for name in OPTIONS})
    want = eager(arguments)
    assert same_bits(torch.ops.bufpool.sparse_mla_prefill(*args, **kwargs), want)
    given = outputs_for()
    torch.ops.bufpool.sparse_mla_prefill.out(*args, **kwargs, **given)
    assert same_bits(given.values(), want)


def test_the_out_form_is_tagged_where_torch_has_a_tag():
    tags = torch.ops.bufpool.sparse_mla_prefill.out.tags
    names = [name for name in ("out", "out_variant") if hasattr(torch.Tag, name)]
    assert not names or getattr(torch.Tag, names[0]) in tags
    assert torch.Tag.pt2_compliant_tag in tags
    schema = torch.ops.bufpool.sparse_mla_prefill.out._schema
    assert [argument.name for argument in schema.arguments if argument.is_write] == ["out", "max_logits", "lse"]
    if names:  # inductor must not put it in place of the functional form: see the test of results that nobody uses
        find = pytest.importorskip("torch._library._out_variant").to_out_variant
        assert find(torch.ops.bufpool.sparse_mla_prefill.default) is None


@pytest.mark.parametrize("how", ["reload", "anew"])
def test_importing_twice_keeps_the_ops(how):
    if how == "reload":
        importlib.reload(library)
    else:
        former = sys.modules.pop(library.__name__)
        try:
            importlib.import_module(library.__name__)
        finally:
            sys.modules[library.__name__] = former
    arguments = make()
    args, kwargs = op_arguments(arguments, {})
    kwargs.update({name: arguments[name] for name in OPTIONS})
    assert same_bits(torch.ops.bufpool.sparse_mla_prefill(*args, **kwargs), eager(arguments))


def test_registration_starts_nothing(run_script):
    done = run_script("import torch, bufpool.ops; print(torch.cuda.is_initialized(), torch.ops.bufpool.sparse_mla_prefill)")
    assert done.stdout.split() == ["False", "bufpool.sparse_mla_prefill"]
    assert done.stderr == ""


def test_eager_calls_do_not_go_through_the_ops(monkeypatch, default_pool):
    def refuse(*args, **kwargs):
        raise AssertionError("an eager call went through the dispatcher")

    monkeypatch.setattr(library, "_functional", refuse)
    monkeypatch.setattr(torch.ops.bufpool, "sparse_mla_prefill", refuse)
    assert same_bits(sparse_mla_prefill(**make()), eager(make()))
    assert default_pool.stats().acquires == 1


# Compiled and eager


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [(), ("attn_sink",), ("topk_length",), OPTIONS])
def test_one_graph_gives_the_eager_result(backend, options):
    arguments = make()
    for name in set(OPTIONS) - set(options):
        del arguments[name]
    compiled = torch.compile(sparse_mla_prefill, fullgraph=True, backend=backend)
    results = compiled(**arguments)
    assert results._fields == ("out", "max_logits", "lse")
    assert same_bits(results, eager(arguments))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("scales", [(0.5, 2.0), (1, 2), (1.0, 1.0), ("tensor", 2.0), (0.5, "tensor"), ("tensor", "tensor")])
def test_scales_are_numbers_or_tensors(backend, scales, given):
    arguments = make()
    arguments["q_scale"], arguments["kv_scale"] = (torch.tensor([0.25]) if scale == "tensor" else scale for scale in scales)
    compiled = torch.compile(sparse_mla_prefill, fullgraph=True, backend=backend)
    assert same_bits(compiled(**arguments, **(outputs_for() if given else {})), eager(arguments))


def test_a_tensor_scale_may_change_its_value_without_a_new_graph():
    counter = Counter()
    compiled = torch.compile(sparse_mla_prefill, fullgraph=True, backend=counter)
    arguments = make()
    for number in (0.5, 0.25, -3.0):
        arguments["q_scale"] = torch.tensor([number])
        assert same_bits(compiled(**arguments), eager(arguments))
    assert len(counter.graphs) == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("given", [("out", "max_logits", "lse"), ("out",), ("lse",), ("max_logits", "lse")])
def test_given_outputs_are_written_and_returned(backend, given):
    arguments = make()
    mine = {name: tensor for name, tensor in outputs_for().items() if name in given}
    compiled = torch.compile(sparse_mla_prefill, fullgraph=True, backend=backend)
    results = compiled(**arguments, **mine)
    want = eager(arguments)
    assert same_bits(results, want)
    for name, tensor in mine.items():
        assert getattr(results, name) is tensor
        assert same_bits([tensor], [getattr(want, name)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_given_rows_of_a_larger_buffer_are_written_and_nothing_beside_them(backend):
    arguments = make()
    buffers = outputs_for(s_q=9)
    compiled = torch.compile(sparse_mla_prefill, fullgraph=True, backend=backend)
    compiled(**arguments, **{name: tensor[2:7] for name, tensor in buffers.items()})
    want = eager(arguments)
    for name, tensor in buffers.items():
        assert same_bits([tensor[2:7].contiguous()], [getattr(want, name)])
        assert bool(tensor[:2].isnan().all())
        assert bool(tensor[7:].isnan().all())


def layers(arguments, outputs=None):
    """Two calls, with something of torch before, between and behind them."""
    indices = arguments["indices"].clamp(max=20)
    first = sparse_mla_prefill(**{**arguments, "indices": indices}, **(outputs or {}))
    kept = first.lse * 2
    second = sparse_mla_prefill(**{**arguments, "indices": indices.flip(1)}, **(outputs or {}))
    return kept, second.out.float() + 1, second.lse, second.max_logits


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_among_other_operations(backend):
    arguments = make()
    compiled = torch.compile(layers, fullgraph=True, backend=backend)
    want = layers(arguments)
    assert same_bits(compiled(arguments), want)
    given = outputs_for()
    assert same_bits(compiled(arguments, given), want)
    assert same_bits([given["lse"]], [want[2]])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_the_default_compiler_gives_the_eager_result():
    arguments = make()
    compiled = torch.compile(sparse_mla_prefill, fullgraph=True)
    assert same_bits(compiled(**arguments), eager(arguments))
    given = outputs_for()
    results = compiled(**arguments, **given)
    assert same_bits(given.values(), eager(arguments))
    assert all(getattr(results, name) is tensor for name, tensor in given.items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("used", [("out",), ("lse",), ("out", "lse"), ("max_logits",)])
def test_the_default_compiler_takes_results_that_nobody_uses(used):
    arguments = make()

    def some(**arguments):
        results = sparse_mla_prefill(**arguments)
        return [getattr(results, name) for name in used]

    want = [getattr(eager(arguments), name) for name in used]
    with torch._inductor.utils.fresh_cache():  # a compiled function of another version would do too
        assert same_bits(torch.compile(some, fullgraph=True)(**arguments), want)


def copies(call):
    """How many copies, of whatever kind, torch makes in a call."""
    call()
    call()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            call()
        return sum("copy" in event.name or "clone" in event.name for event in profile.events())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("given", ["none", "all", "one", "rows", "packed"])
def test_the_default_compiler_adds_no_copy(given):
    arguments = make()
    buffers = outputs_for(s_q=9)
    packed = torch.zeros(2, 5, 3)
    outputs = {
        "none": {},
        "all": outputs_for(),
        "one": {"lse": outputs_for()["lse"]},
        "rows": {name: tensor[2:7] for name, tensor in buffers.items()},
        "packed": {"max_logits": packed[0], "lse": packed[1]},
    }[given]
    compiled = torch.compile(sparse_mla_prefill, fullgraph=True)
    assert copies(lambda: compiled(**arguments, **outputs)) == copies(lambda: eager(arguments))
    results = compiled(**arguments, **outputs)
    assert same_bits(results, eager(arguments))
    assert all(getattr(results, name) is tensor for name, tensor in outputs.items())


# Memory


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("allocator", ["default", "pool", "fresh"])
def test_the_pool_stays_untouched(backend, allocator, pool, default_pool):
    allocators = {"default": None, "pool": pool, "fresh": FreshAllocator()}
    chosen = allocators[allocator]

    def call(arguments):
        return sparse_mla_prefill(**arguments, allocator=chosen)

    before = pool.stats(), default_pool.stats()
    arguments = make()
    results = torch.compile(call, fullgraph=True, backend=backend)(arguments)
    assert same_bits(results, eager(arguments))
    assert (pool.stats(), default_pool.stats()) == before


def test_results_of_the_pool_may_go_in(pool):
    arguments = make()
    compiled = torch.compile(sparse_mla_prefill, fullgraph=True, backend="aot_eager")
    given = sparse_mla_prefill(**make(seed=9), allocator=pool)
    results = compiled(**arguments, **given._asdict())
    assert same_bits(given, eager(arguments))
    assert results.out is given.out


# Row counts


def with_rows(rows, is_marked):
    arguments = make(s_q=rows, seed=rows)
    if is_marked:
        for name in ("q", "indices", "topk_length"):
            torch._dynamo.mark_dynamic(arguments[name], 0)
    return arguments


@pytest.mark.parametrize("is_marked", [True, False], ids=["marked", "not marked"])
@pytest.mark.parametrize("given", [False, True], ids=["functional", "given outputs"])
def test_row_counts_do_not_compile_anew(is_marked, given):
    counter = Counter()
    compiled = torch.compile(sparse_mla_prefill, fullgraph=True, backend=counter)
    for rows in (5, 9, 2, 100, 33, 5, 64):
        arguments = with_rows(rows, is_marked)
        outputs = outputs_for(rows) if given else {}
        if is_marked:
            for tensor in outputs.values():
                torch._dynamo.mark_dynamic(tensor, 0)
        results = compiled(**arguments, **outputs)
        assert same_bits(results, eager(arguments)), rows
    assert len(counter.graphs) == (1 if is_marked else 2)  # unmarked, the second size shows that it varies


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_row_and_none(backend):
    compiled = torch.compile(sparse_mla_prefill, fullgraph=True, backend=backend)
    for rows in (1, 0, 3):
        arguments = make(s_q=rows)
        results = compiled(**arguments)
        assert results.out.shape == (rows, 3, 512)
        assert same_bits(results, eager(arguments))


def test_the_graph_holds_one_op_and_nothing_that_computes():
    counter = Counter()
    torch.compile(sparse_mla_prefill, fullgraph=True, backend=counter)(**make())
    ops = [op for op in counter.ops() if "getitem" not in str(op)]
    assert ops == [torch.ops.bufpool.sparse_mla_prefill.default]


# Gradients, modes


@pytest.mark.parametrize("backend", ["not compiled", *BACKENDS])
def test_no_gradient_flows(backend):
    arguments = make()
    arguments["attn_sink"].requires_grad_()
    arguments["q_scale"].requires_grad_()
    call = sparse_mla_prefill if backend == "not compiled" else torch.compile(sparse_mla_prefill, backend=backend)
    results = call(**arguments)
    assert not any(tensor.requires_grad for tensor in results)
    weight = torch.ones(3, requires_grad=True)
    (results.lse * weight).sum().backward()
    assert weight.grad is not None
    assert arguments["attn_sink"].grad is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "mode",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "autocast"],
)
def test_modes_change_nothing(backend, mode):
    arguments = make()
    want = eager(arguments)
    compiled = torch.compile(sparse_mla_prefill, fullgraph=True, backend=backend)
    with mode():
        assert same_bits(compiled(**arguments), want)
        given = outputs_for()
        compiled(**arguments, **given)
    assert same_bits(given.values(), want)


# Errors


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_arguments_are_said_in_the_eager_words_when_the_code_runs(backend):
    good = make()
    compiled = torch.compile(sparse_mla_prefill, backend=backend)
    wrong = [
        ({"indices": good["indices"].long()}, OutputMismatchError, r"indices: expected int32 \[5, topk >= 1\]"),
        ({"indices": good["indices"][:4]}, OutputMismatchError, r"indices: expected int32 \[5, topk >= 1\]"),
        ({"kv": good["kv"][:, :512]}, OutputMismatchError, r"kv: expected float8_e4m3fn \[s_kv, 576\]"),
        ({"sm_scale": math.nan}, ValueError, "sm_scale: expected a finite number that float32 can hold, got nan"),
        ({"backend": "best"}, ValueError, "backend: expected one of auto, reference, sm90, got 'best'"),
        ({"lse": outputs_for()["lse"].double()}, OutputMismatchError, "lse: expected dtype torch.float32"),
        ({"lse": outputs_for(4)["lse"]}, OutputMismatchError, r"lse: expected shape \[5, 3\], got \[4, 3\]"),
    ]
    for change, error, text in wrong:
        torch._dynamo.reset()
        with pytest.raises(error, match=text):
            compiled(**{**good, **change})
    assert same_bits(compiled(**good), eager(good))


def test_given_outputs_that_share_memory_are_refused_when_the_code_runs():
    memory = torch.zeros(2, 5, 3)
    flat = memory.view(-1)
    compiled = torch.compile(sparse_mla_prefill, backend="eager")
    with pytest.raises(OutputMismatchError, match="lse: expected memory of its own"):
        compiled(**make(), max_logits=flat[:15].view(5, 3), lse=flat[10:25].view(5, 3))


# Other tracers


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_one_op(mode):
    arguments = make()

    def call(q, indices):
        return tuple(sparse_mla_prefill(**{**arguments, "q": q, "indices": indices}))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = make_fx(call, tracing_mode=mode, _allow_non_fake_inputs=True)(arguments["q"], arguments["indices"])
    called = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert sum("sparse_mla_prefill" in name for name in called) == 1
    assert not any("mm" in name or "exp" in name for name in called)
    assert same_bits(traced(arguments["q"], arguments["indices"]), eager(arguments))


@pytest.mark.parametrize("is_strict", [True, False], ids=["strict", "not strict"])
def test_an_exported_program_runs(is_strict):
    class Layer(torch.nn.Module):
        def forward(self, arguments):
            return sparse_mla_prefill(**arguments)

    arguments = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(Layer(), (arguments,), strict=is_strict)
        results = program.module()(arguments)
    assert same_bits(tuple(results), eager(arguments))
    assert "bufpool.sparse_mla_prefill" in str(program.graph)


def test_under_fake_tensors_alone_the_arguments_are_still_checked():
    with FakeTensorMode() as mode:
        arguments = {
            name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for name, value in make().items()
        }
        assert sparse_mla_prefill(**arguments).out.shape == (5, 3, 512)
        with pytest.raises(OutputMismatchError, match="indices"):
            sparse_mla_prefill(**{**arguments, "indices": arguments["indices"].long()})
        with pytest.raises(DeviceMismatchError, match="kv must be on device cpu"):
            sparse_mla_prefill(**{**arguments, "kv": arguments["kv"].to("meta")})


# On CUDA


def kernels(call):
    """Names of everything that ran on the device."""
    call()
    call()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        events = profile.events()
    return sorted(event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiled_code_launches_what_an_eager_call_launches_and_nothing_else():
    pytest.importorskip("triton")
    arguments = make(s_q=64, h_q=64, topk=64, s_kv=256, device="cuda")
    numbers = {**arguments, "q_scale": 0.5, "kv_scale": 2.0}
    given = outputs_for(64, 64, device="cuda")
    compiled = torch.compile(sparse_mla_prefill, fullgraph=True)
    for case in (arguments, numbers):
        expected = kernels(lambda case=case: eager(case))
        assert expected
        assert kernels(lambda case=case: compiled(**case)) == expected
        assert kernels(lambda case=case: compiled(**case, **given)) == expected
        assert same_bits(compiled(**case), eager(case))
        assert same_bits(given.values(), eager(case))


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("given", [False, True], ids=["functional", "given outputs"])
def test_a_compiled_call_is_one_kernel(given):
    pytest.importorskip("triton")
    arguments = {**make(s_q=64, h_q=64, topk=64, s_kv=256, device="cuda"), "backend": "sm90"}
    outputs = outputs_for(64, 64, device="cuda") if given else {}
    compiled = torch.compile(sparse_mla_prefill, fullgraph=True)
    names = kernels(lambda: compiled(**arguments, **outputs))
    assert len(names) == 1, names


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiled_code_is_captured_in_a_graph_and_replayed():
    pytest.importorskip("triton")
    arguments = make(s_q=64, h_q=64, topk=64, s_kv=256, device="cuda")
    given = outputs_for(64, 64, device="cuda")
    compiled = torch.compile(sparse_mla_prefill, fullgraph=True)
    compiled(**arguments, **given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compiled(**arguments, **given)
    arguments["indices"].copy_(arguments["indices"].roll(1, 0))
    graph.replay()
    assert same_bits(given.values(), eager(arguments))
