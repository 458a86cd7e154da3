"""The rules that hold the tree together: imports point down, each outside thing has one door, an import starts nothing.

Every rule is a function from a tree to a list of violations; each is seen to fail on a planted one.
"""

import ast
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From the bottom up. A module imports from lower lines only; the modules of a package named here as a whole may import
# each other. "bufpool" is the public face, bufpool/__init__.py.
LAYERS = (
    ("errors", "spec", "poison"),
    ("torch_state", "device", "host_memory", "driver"),
    ("allocator", "outputs"),
    ("arena",),
    ("handout", "pin"),
    ("slot", "spills"),
    ("lane", "stats", "debug"),
    ("process",),
    ("place",),
    ("pool",),
    ("graphs",),
    ("bufpool",),
    ("jit.compiler",),
    ("jit.kernel",),
    ("jit.launch",),
    ("jit",),
    ("ops",),
    ("adapters",),
    ("testing", "workloads"),
    ("cli",),
    ("__main__",),
)
# The second column: below ops it stands beside the pool, not on it.
JIT_MAY_IMPORT = {"errors", "jit"}
# The public face is for users; inside, only what plays the user may come in through it.
FACE_IS_FOR = {"cli", "testing", "__main__"}


# --------------------------------------------------------------------------------------------------------------- reading


def modules(root: Path) -> Iterator[tuple[str, Path, ast.Module]]:
    """Dotted name below bufpool, path and syntax tree of each module; ``bufpool`` for the public face."""
    package = root / "bufpool"
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        yield ".".join(parts) or "bufpool", path, ast.parse(path.read_text(), str(path))


def unit(name: str) -> str | None:
    """The entry of LAYERS that a module belongs to."""
    named = {entry for layer in LAYERS for entry in layer}
    package = name.split(".")[0]
    return name if name in named else package if package in named else None


def imports(name: str, path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything a module imports, also inside functions and by importlib."""
    here = ["bufpool", *(name.split(".") if name != "bufpool" else [])]
    package = here if path.name == "__init__.py" else here[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                yield node.lineno, f"{source}.{alias.name}"
        elif isinstance(node, ast.Call) and dotted(node.func) in ("importlib.import_module", "import_module", "__import__"):
            target = node.args[0] if node.args else None
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                level = len(target.value) - len(target.value.lstrip("."))
                # Our modules resolve relative names against their own __package__ or __name__.
                anchor = dotted(node.args[1]) if len(node.args) > 1 else ""
                base = here if anchor == "__name__" else package
                prefix = ".".join(base[: len(base) - level + 1]) + "." if level else ""
                yield node.lineno, prefix + target.value.lstrip(".")


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of a chain of attributes; empty for anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: everything but the bodies of functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = child.args
            for part in (*child.decorator_list, *arguments.defaults, *filter(None, arguments.kw_defaults)):
                yield part
                yield from at_import(part)
        elif isinstance(child, ast.Lambda):
            continue
        else:
            yield child
            yield from at_import(child)


def place(root: Path, path: Path, line: int) -> str:
    return f"{path.relative_to(root)}:{line}"


# ----------------------------------------------------------------------------------------------------------------- rules


def upward_imports(root: Path) -> list[str]:
    rank = {entry: number for number, layer in enumerate(LAYERS) for entry in layer}
    known = {name for name, _, _ in modules(root)}
    found = []
    for name, path, tree in modules(root):
        mine = unit(name)
        if mine is None:
            found.append(f"{place(root, path, 1)}: {name} has no layer: give it one in LAYERS")
            continue
        for line, target in imports(name, path, tree):
            parts = target.split(".")
            if parts[0] != "bufpool":
                continue
            # "from .pool import OutputPool" names a thing in a module; cut back to the module.
            inner = parts[1:]
            while inner and ".".join(inner) not in known:
                inner.pop()
            theirs = unit(".".join(inner) or "bufpool")
            if theirs is None or theirs == mine:
                continue
            is_inside_jit = mine.split(".")[0] == "jit"
            is_allowed = (
                rank[theirs] < rank[mine]
                and (theirs != "bufpool" or mine in FACE_IS_FOR)
                and (not is_inside_jit or theirs.split(".")[0] in JIT_MAY_IMPORT)
            )
            if not is_allowed:
                found.append(f"{place(root, path, line)}: {name} imports {theirs}")
    return found


def second_doors(root: Path) -> list[str]:
    """What only one module may touch, touched by another."""
    found = []
    for name, path, tree in modules(root):
        for line, target in imports(name, path, tree):
            if target.startswith("cuda.bindings") and name != "driver":
                found.append(f"{place(root, path, line)}: {name} imports cuda.bindings, the business of driver")
            if target.split(".")[0] == "mmap" and name != "host_memory":
                found.append(f"{place(root, path, line)}: {name} imports mmap, the business of host_memory")
            if re.match(r"torch(\.\w+)*\._C\b", target) and name != "torch_state":
                found.append(f"{place(root, path, line)}: {name} imports torch._C, the business of torch_state")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and dotted(node) == "torch._C" and name != "torch_state":
                found.append(f"{place(root, path, node.lineno)}: {name} touches torch._C, the business of torch_state")
            if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in ("CDLL", "PyDLL", "LoadLibrary"):
                library = node.args[0] if node.args else None
                is_libc = isinstance(library, ast.Constant) and (library.value is None or "libc." in str(library.value))
                if is_libc and name != "host_memory":
                    found.append(f"{place(root, path, node.lineno)}: {name} loads libc, the business of host_memory")
    return found


def stray_assembly(root: Path) -> list[str]:
    found = []
    for path in sorted((root / "csrc").rglob("*")):
        if path.name == "ptx.cuh" or path.suffix not in (".cu", ".cuh"):
            continue
        # Blank out comments and keep the lines.
        text = re.sub(r"/\*.*?\*/|//[^\n]*", lambda m: re.sub(r"[^\n]", " ", m.group()), path.read_text(), flags=re.S)
        for number, line in enumerate(text.splitlines(), 1):
            if re.search(r"\b(asm|__asm|__asm__)\b", line):
                found.append(f"{place(root, path, number)}: asm, the business of csrc/ptx.cuh")
    return found


# Calls and names that have no place where importing runs them.
_CALLS = re.compile(
    r"(os\.(getenv|makedirs|mkdir)|open|print|.*\.(mkdir|write_text|write_bytes|touch)|torch\.cuda\..*"
    r"|ctypes\.(CDLL|PyDLL)|.*\.basicConfig)$"
)
_NAMES = ("os.environ", "os.environb")


def side_effects(root: Path) -> list[str]:
    found = []
    for name, path, tree in modules(root):
        if name == "__main__":
            continue
        for node in at_import(tree):
            if isinstance(node, ast.Call) and _CALLS.match(dotted(node.func)):
                found.append(f"{place(root, path, node.lineno)}: {name} calls {dotted(node.func)} at import")
            if isinstance(node, ast.Attribute) and dotted(node) in _NAMES:
                found.append(f"{place(root, path, node.lineno)}: {name} reads {dotted(node)} at import")
    return found


# Imports everything in a process of its own and tells what that did. Whose doing a read of the environment is: the
# innermost caller outside the standard library.
_WATCH = """
import ctypes, importlib, json, os, pkgutil, sys, sysconfig
import numpy, torch, torch.utils.dlpack

root = sys.argv[1]
sys.path.insert(0, root)
ours = os.path.join(root, "bufpool") + os.sep
standard = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))
sites = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib"))
found = []

def caller():
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        is_standard = file.startswith(standard) and not file.startswith(sites)
        if file != "<string>" and not file.startswith("<frozen ") and not is_standard:
            return file
        frame = frame.f_back
    return ""

class Watched(dict):
    def __getitem__(self, key):
        note("reads the environment", key)
        return super().__getitem__(key)
    def get(self, key, default=None):
        note("reads the environment", key)
        return super().get(key, default)
    def __contains__(self, key):
        note("reads the environment", key)
        return super().__contains__(key)
    def __iter__(self):
        note("reads the environment", "all of it")
        return super().__iter__()

def note(what, detail):
    file = caller()
    if file.startswith(ours):
        found.append(f"{os.path.relpath(file, root)} {what}: {detail}")

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
def audit(event, args):
    if event == "open" and isinstance(args[2], int) and args[2] & WRITES:
        note("writes a file", args[0])
    elif event in ("os.mkdir", "os.rename", "os.remove", "ctypes.dlopen", "subprocess.Popen", "socket.connect"):
        note(event, args[0])

before = set(sys.modules)
os.environ = Watched(os.environ)
sys.addaudithook(audit)
package = importlib.import_module("bufpool")
names = [m.name for m in pkgutil.walk_packages(package.__path__, "bufpool.") if not m.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
if torch.cuda.is_initialized():
    found.append("bufpool initialises CUDA")
extras = {name.split(".")[0] for name in set(sys.modules) - before} & {"cuda", "rich", "matplotlib"}
found += [f"bufpool imports {extra}" for extra in sorted(extras)]
print(json.dumps({"modules": names, "found": found}))
"""


def watched_import(root: Path) -> dict[str, list[str]]:
    command = [sys.executable, "-B", "-W", "error", "-c", _WATCH, str(root)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


# Written so that this file does not name them itself.
_MACHINE_PATH = re.compile(r"(?<![\w.:/~-])/(?:work|home|root|opt)(?![\w-])(?:/[\w.-]+)*")
_DEBRIS = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|X" r"XX|HA" r"CK)\b")
_BINARY = (".png", ".gz", ".whl", ".pyc")


def committed_files(root: Path) -> list[Path]:
    """What git tracks; in an unpacked sdist, which has no git, everything that stands there."""
    git = ["git", "-c", "safe.directory=*", "-C", str(root), "ls-files", "-z"]
    try:
        names = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        ignored = {".git", ".venv", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", "build"}
        names = [str(p.relative_to(root)) for p in root.rglob("*") if not ignored & set(p.relative_to(root).parts)]
    return sorted(root / name for name in names if name and (root / name).is_file())


def debris(root: Path) -> list[str]:
    found = []
    for path in committed_files(root):
        if path.suffix in _BINARY:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for what, pattern in (("machine path", _MACHINE_PATH), ("debris", _DEBRIS)):
                if match := pattern.search(line):
                    found.append(f"{place(root, path, number)}: {what} {match.group()}")
    return found


# ------------------------------------------------------------------------------------------------------- on the real tree


@pytest.mark.parametrize("rule", [upward_imports, second_doors, stray_assembly, side_effects, debris])
def test_tree_keeps_the_rule(rule: Callable[[Path], list[str]]) -> None:
    assert rule(ROOT) == []


def test_rules_see_the_tree() -> None:
    names = {name for name, _, _ in modules(ROOT)}
    assert {"bufpool", "spec", "pool", "jit.compiler", "ops.sparse_mla", "cli.run", "__main__"} <= names
    seen = {target for name, path, tree in modules(ROOT) for _, target in imports(name, path, tree)}
    assert {"cuda.bindings.driver", "bufpool.spec.OutputSpec", "torch"} <= seen
    assert "asm volatile" in (ROOT / "csrc" / "ptx.cuh").read_text()
    assert ROOT / "LICENSE" in committed_files(ROOT)


def test_watched_import_of_a_clean_tree(plant) -> None:
    assert watched_import(plant({}))["found"] == []


def test_import_starts_nothing() -> None:
    result = watched_import(ROOT)
    assert {"bufpool.pool", "bufpool.jit.kernel", "bufpool.ops.sparse_mla_sm90", "bufpool.cli.run"} <= set(
        result["modules"]
    )
    assert result["found"] == []


# ---------------------------------------------------------------------------------------------------- on planted violations


@pytest.fixture
def plant(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """A small tree that keeps all rules, with files replaced or added."""
    clean = {
        "bufpool/__init__.py": "from .pool import OutputPool\n",
        "bufpool/errors.py": "class BufpoolError(Exception): ...\n",
        "bufpool/spec.py": "import torch\n",
        "bufpool/driver.py": "def f():\n    from cuda.bindings import driver\n",
        "bufpool/host_memory.py": "import ctypes, mmap\ndef f():\n    return ctypes.CDLL(None)\n",
        "bufpool/torch_state.py": "import torch\nraw = getattr(torch._C, 'x', None)\n",
        "bufpool/pool.py": "import os\nfrom .spec import torch\nclass OutputPool: ...\ndef f():\n    os.environ.get('A')\n",
        "bufpool/jit/__init__.py": "",
        "bufpool/jit/compiler.py": "from ..errors import BufpoolError\n",
        "bufpool/ops/__init__.py": "from ..pool import OutputPool\nfrom ..jit import compiler\nfrom .mla import a\n",
        "bufpool/ops/mla.py": "a = 1\n",
        "bufpool/cli/__init__.py": "from .. import OutputPool\nfrom ..ops import mla\n",
        "csrc/ptx.cuh": 'asm volatile("");\n',
        "csrc/kernel.cu": "// no asm here\nint x; /* nor\nasm here */\n",
        "README.md": "See `~/.cache` and https://example.org/home/page, docs/work/notes.\n",
    }

    def build(files: dict[str, str]) -> Path:
        for name, text in {**clean, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        return tmp_path

    return build


@pytest.mark.parametrize("rule", [upward_imports, second_doors, stray_assembly, side_effects, debris])
def test_clean_tree_passes(rule, plant) -> None:
    assert rule(plant({})) == []


PLANTED = [
    (upward_imports, "bufpool/spec.py", "from .pool import OutputPool", "bufpool/spec.py:1: spec imports pool"),
    (upward_imports, "bufpool/spec.py", "from .errors import BufpoolError", "bufpool/spec.py:1: spec imports errors"),
    (upward_imports, "bufpool/pool.py", "def f():\n    from .ops import mla", "bufpool/pool.py:2: pool imports ops"),
    (upward_imports, "bufpool/pool.py", "from . import jit", "bufpool/pool.py:1: pool imports jit"),
    (upward_imports, "bufpool/pool.py", "import bufpool.jit.compiler", "bufpool/pool.py:1: pool imports jit.compiler"),
    (upward_imports, "bufpool/driver.py", "from . import host_memory", "bufpool/driver.py:1: driver imports host_memory"),
    (
        upward_imports,
        "bufpool/jit/compiler.py",
        "from ..spec import x",
        "bufpool/jit/compiler.py:1: jit.compiler imports spec",
    ),
    (
        upward_imports,
        "bufpool/jit/compiler.py",
        "from ..pool import x",
        "bufpool/jit/compiler.py:1: jit.compiler imports pool",
    ),
    (upward_imports, "bufpool/ops/mla.py", "from .. import OutputPool", "bufpool/ops/mla.py:1: ops.mla imports bufpool"),
    (upward_imports, "bufpool/ops/mla.py", "from ..cli import main", "bufpool/ops/mla.py:1: ops.mla imports cli"),
    (upward_imports, "bufpool/__init__.py", "from . import ops", "bufpool/__init__.py:1: bufpool imports ops"),
    (
        upward_imports,
        "bufpool/pool.py",
        "import importlib\nimportlib.import_module('.jit.compiler', __package__)",
        "bufpool/pool.py:2: pool imports jit.compiler",
    ),
    (
        upward_imports,
        "bufpool/pool.py",
        "import importlib\nimportlib.import_module('bufpool.ops.mla')",
        "bufpool/pool.py:2: pool imports ops",
    ),
    (upward_imports, "bufpool/misc.py", "", "bufpool/misc.py:1: misc has no layer: give it one in LAYERS"),
    (
        second_doors,
        "bufpool/jit/compiler.py",
        "from cuda.bindings import nvrtc",
        "bufpool/jit/compiler.py:1: jit.compiler imports cuda.bindings, the business of driver",
    ),
    (
        second_doors,
        "bufpool/pool.py",
        "import importlib\nimportlib.import_module('cuda.bindings.driver')",
        "bufpool/pool.py:2: pool imports cuda.bindings, the business of driver",
    ),
    (second_doors, "bufpool/pool.py", "import mmap", "bufpool/pool.py:1: pool imports mmap, the business of host_memory"),
    (
        second_doors,
        "bufpool/pool.py",
        "import ctypes\nx = ctypes.CDLL('libc.so.6')",
        "bufpool/pool.py:2: pool loads libc, the business of host_memory",
    ),
    (
        second_doors,
        "bufpool/pool.py",
        "import torch\nx = torch._C._storage_Use_Count",
        "bufpool/pool.py:2: pool touches torch._C, the business of torch_state",
    ),
    (
        second_doors,
        "bufpool/pool.py",
        "from torch._C import _from_dlpack",
        "bufpool/pool.py:1: pool imports torch._C, the business of torch_state",
    ),
    (
        second_doors,
        "bufpool/pool.py",
        "from torch import _C",
        "bufpool/pool.py:1: pool imports torch._C, the business of torch_state",
    ),
    (stray_assembly, "csrc/kernel.cu", '// x\nasm volatile("");', "csrc/kernel.cu:2: asm, the business of csrc/ptx.cuh"),
    (stray_assembly, "csrc/a/layout.cuh", '__asm__("");', "csrc/a/layout.cuh:1: asm, the business of csrc/ptx.cuh"),
    (
        side_effects,
        "bufpool/spec.py",
        "import os\nA = os.environ['A']",
        "bufpool/spec.py:2: spec reads os.environ at import",
    ),
    (side_effects, "bufpool/spec.py", "import os\nA = os.getenv('A')", "bufpool/spec.py:2: spec calls os.getenv at import"),
    (
        side_effects,
        "bufpool/spec.py",
        "import os\ndef f(a=os.environ): ...",
        "bufpool/spec.py:2: spec reads os.environ at import",
    ),
    (
        side_effects,
        "bufpool/spec.py",
        "class A:\n    if True:\n        x = torch.cuda.device_count()",
        "bufpool/spec.py:3: spec calls torch.cuda.device_count at import",
    ),
    (
        side_effects,
        "bufpool/jit/compiler.py",
        "cache.mkdir(parents=True)",
        "bufpool/jit/compiler.py:1: jit.compiler calls cache.mkdir at import",
    ),
    (debris, "README.md", "ok\ncd /" + "work/main", "README.md:2: machine path /" + "work/main"),
    (debris, "bufpool/spec.py", "# see '/" + "opt/x'", "bufpool/spec.py:1: machine path /" + "opt/x"),
    (debris, "csrc/kernel.cu", "// TO" + "DO", "csrc/kernel.cu:1: debris TO" + "DO"),
]


@pytest.mark.parametrize(("rule", "file", "text", "violation"), PLANTED)
def test_planted_violation_is_found(rule, file, text, violation, plant) -> None:
    assert rule(plant({file: text})) == [violation]


@pytest.mark.parametrize(
    ("text", "violation"),
    [
        ("import os\nA = os.environ.get('SECRET')", "bufpool/jit/kernel.py reads the environment: SECRET"),
        ("import os\nA = os.getenv('SECRET')", "bufpool/jit/kernel.py reads the environment: SECRET"),
        ("from pathlib import Path\nA = Path('~').expanduser()", "bufpool/jit/kernel.py reads the environment: HOME"),
        ("import os\nos.makedirs('made')", "bufpool/jit/kernel.py os.mkdir: made"),
        ("open('written', 'w').close()", "bufpool/jit/kernel.py writes a file: written"),
        ("import ctypes\nA = ctypes.CDLL(None)", "bufpool/jit/kernel.py ctypes.dlopen: None"),
        ("import torch\ntorch.cuda.is_initialized = lambda: True", "bufpool initialises CUDA"),
        ("import sys\nsys.modules['rich'] = sys", "bufpool imports rich"),
    ],
)
def test_planted_side_effect_is_watched(text, violation, plant) -> None:
    assert violation in watched_import(plant({"bufpool/jit/kernel.py": text}))["found"]
