"""What torch is doing right now: each question has the right answer, also where torch lacks the private name."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bufpool import torch_state

SOURCE = Path(torch_state.__file__)
PRIVATE = set(re.findall(r'getattr\(torch\._C(?:\._functorch)?, "(\w+)"', SOURCE.read_text()))


class Passing(TorchDispatchMode):
    """A mode that records nothing; counts what it sees."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen += 1
        return function(*args, **(kwargs or {}))


class PassingFunctions(TorchFunctionMode):
    seen = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        type(self).seen += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def bare(monkeypatch):
    """The module as it would be on a torch without any of its private names."""

    class Without:
        def __init__(self, inner):
            self._inner = inner

        def __getattr__(self, name):
            if name in PRIVATE:
                raise AttributeError(name)
            found = getattr(self._inner, name)
            return Without(found) if name == "_functorch" else found

    spec = importlib.util.spec_from_file_location("torch_state_without_private_names", SOURCE)
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_C", Without(torch._C))
        spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["private", "public"])
def state(request):
    return torch_state if request.param == "private" else request.getfixturevalue("bare")


def asked_inside(question):
    """The answers that a function of the module gives while something calls this one."""
    answers = []

    def function(x):
        answers.append(question())
        return x * 2

    return function, answers


def test_every_private_name_is_there_in_this_torch():
    """Where one is gone, the public way serves, at a higher cost: this test is how we notice."""
    names = {name: torch._C._functorch if name == "maybe_current_level" else torch._C for name in PRIVATE}
    assert len(names) >= 9
    missing = {name for name, home in names.items() if not hasattr(home, name)}
    without_cuda = {name for name in names if name.startswith("_cuda_")}
    assert missing <= (without_cuda if torch.version.cuda is None else set())


@pytest.mark.parametrize(
    ("index", "stream", "is_capturing", "guards"),
    [(0, 0, False, []), (0, 7, True, []), (1, 0, False, []), (1, 7, False, [1]), (2, 7, True, [2])],
)
def test_a_capture_is_seen_on_any_device(monkeypatch, index, stream, is_capturing, guards):
    """Device 0 is current; what torch says is about the current one."""
    entered = [0]

    @contextlib.contextmanager
    def guard(device):
        entered.append(device.index)
        yield
        entered.append(0)

    monkeypatch.setattr(torch.cuda, "device", guard)
    monkeypatch.setattr(torch_state, "raw_stream", lambda index: stream)
    monkeypatch.setattr(torch_state, "current_device", lambda: entered[-1])
    monkeypatch.setattr(torch_state, "is_current_stream_capturing", lambda: entered[-1] in (0, 2))
    assert torch_state.is_capturing_on(torch.device("cuda", index)) is is_capturing
    assert [device for device in entered if device] == guards


def test_nothing_happens(state):
    assert state.transform_level() is None
    assert not state.is_jit_tracing()
    assert not state.is_pre_dispatch_tracing()
    assert not state.is_inference()
    assert not state.is_tracing()
    assert not state.tracing_mode()
    assert not state.is_recording()


def test_dispatch_modes_are_counted(bare):
    assert torch_state.dispatch_depth() == 0
    with Passing():
        assert torch_state.dispatch_depth() == 1
        with Passing():
            assert torch_state.dispatch_depth() == 2
    assert bare.dispatch_depth() == 1  # not known: look closer each time


@pytest.mark.parametrize(
    ("mode", "is_tracing", "is_recording"),
    [(Passing, False, False), (FakeTensorMode, True, False), (FunctionalTensorMode, True, True)],
)
def test_a_mode_that_only_looks_is_no_tracer(state, mode, is_tracing, is_recording):
    with mode():
        assert state.tracing_mode() is is_tracing
        assert state.is_recording() is is_recording
    assert not state.tracing_mode()


def test_make_fx_records(state):
    function, answers = asked_inside(lambda: (state.tracing_mode(), state.is_recording()))
    make_fx(function)(torch.ones(2))
    assert answers == [(True, True)]


def test_pre_dispatch_recorders_have_a_stack_of_their_own():
    function, answers = asked_inside(
        lambda: (torch_state.is_pre_dispatch_tracing(), torch_state.tracing_mode(), torch_state.is_recording())
    )
    make_fx(function, pre_dispatch=True)(torch.ones(2))
    assert answers == [(True, True, True)]


@pytest.mark.parametrize(
    "transform", [torch.func.vmap, torch.func.functionalize, lambda f: torch.func.grad(lambda x: f(x).sum())]
)
def test_transforms_have_a_level(transform):
    function, answers = asked_inside(lambda: (torch_state.transform_level(), torch_state.tracing_mode()))
    transform(function)(torch.ones(2))
    assert answers == [(1, True)]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_old_tracer_is_seen():
    function, answers = asked_inside(lambda: (torch_state.is_jit_tracing(), torch_state.tracing_mode()))
    torch.jit.trace(function, torch.ones(2), check_trace=False)
    assert answers == [(True, True)]


def test_the_compiler_takes_the_answer_as_a_constant():
    def function(x):
        return x + 1 if torch_state.is_tracing() else x - 1

    assert torch.compile(function, backend="eager", fullgraph=True)(torch.zeros(1)).item() == 1
    assert function(torch.zeros(1)).item() == -1


def test_tensors_made_in_normal_mode_are_no_inference_tensors(state):
    with torch.inference_mode():
        assert state.is_inference()
        assert torch.empty(1).is_inference()
        with state.normal_mode(False):
            assert not torch.empty(1).is_inference()
        assert torch.empty(1).is_inference()


def test_without_modes_no_mode_sees_anything():
    with Passing() as dispatch, PassingFunctions():
        torch.ones(1)
        assert (dispatch.seen, PassingFunctions.seen) != (0, 0)
        before = dispatch.seen, PassingFunctions.seen
        with torch_state.without_modes():
            assert torch.ones(2).sum().item() == 2
        assert (dispatch.seen, PassingFunctions.seen) == before


def test_a_capsule_shares_memory_both_ways(state):
    source = torch.arange(6.0)
    made = state.from_dlpack(state.to_dlpack(source))
    assert made.data_ptr() == source.data_ptr()
    made[2] = 9
    assert source[2] == 9
    assert made.is_leaf
    assert made._base is None


def fake():
    with FakeTensorMode():
        return torch.ones(2)


@pytest.mark.parametrize(
    ("like", "has_none"),
    [
        (lambda: torch.ones(2), False),
        (lambda: torch.nn.Parameter(torch.ones(2)), False),
        (lambda: torch.empty(2, device="meta"), True),
        (fake, True),
        (lambda: [torch.ones(1), torch.ones(1)], False),
        (lambda: [torch.ones(1), fake()], True),
        (lambda: {"q": torch.ones(1), "kv": torch.empty(1, device="meta")}, True),
    ],
)
def test_fakes_and_meta_tensors_have_no_memory(like, has_none):
    assert torch_state.has_no_memory(like()) is has_none


def test_the_mode_of_a_fake_makes_fakes_again():
    one = fake()
    for like in (one, [torch.ones(1), one], {"q": torch.ones(1), "kv": one}):
        with torch_state.fake_mode_of(like) as mode:
            assert mode is one.fake_mode
            assert torch_state.has_no_memory(torch.empty(3))
    for like in (torch.ones(1), [torch.ones(1)], {"q": torch.ones(1)}):
        with torch_state.fake_mode_of(like):
            assert not torch_state.has_no_memory(torch.empty(3))


@pytest.mark.gpu
def test_streams_and_captures(state):
    index = state.current_device()
    assert index == torch.cuda.current_device()
    assert state.raw_stream(index) == 0
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert state.raw_stream(index) == side.cuda_stream
        assert not state.is_current_stream_capturing()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert state.is_current_stream_capturing()
        torch.zeros(1, device="cuda")
