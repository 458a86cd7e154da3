"""The wheel: built from the sdist, installed away from the tree, complete, and able to do the main job."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import bufpool

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {"layout.cuh", "ptx.cuh", "sparse_mla_plan.cuh", "sparse_mla_prefill.cu"}

pytestmark = pytest.mark.slow


def text_of(run: "subprocess.CompletedProcess[str]") -> str:
    return f"exit code {run.returncode}\n{run.stdout}\n{run.stderr}"


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> tuple[Path, Path]:
    """The sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("archives")
    # Without isolation: the build needs hatchling only, which the test extra brings, and no network.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, text_of(run)
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


@dataclass(frozen=True)
class Installation:
    """An environment of its own with the wheel, in a folder that knows nothing of the tree."""

    python: Path
    command: Path
    cwd: Path
    site: Path

    def run(self, *command: str | Path, **more: str) -> "subprocess.CompletedProcess[str]":
        env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "BUFPOOL_", "VIRTUAL_ENV"))}
        env |= {"BUFPOOL_CACHE_DIR": str(self.cwd / "kernels"), **more}
        return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=240, cwd=self.cwd, env=env)


@pytest.fixture(scope="module")
def installed(archives, tmp_path_factory) -> Installation:
    folder = tmp_path_factory.mktemp("away")
    venv.create(folder / "env", with_pip=True, symlinks=True)
    python = folder / "env" / "bin" / "python"
    asked = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True, check=True
    )
    site = Path(asked.stdout.strip())
    run = subprocess.run(
        [python, "-m", "pip", "install", "--no-deps", "--no-index", str(archives[1])],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, text_of(run)
    # torch and numpy come from the environment that runs the tests. Its own .pth files are not read there, so an editable
    # bufpool in it stays out of sight.
    (site / "torch_of_the_tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    (folder / "cwd").mkdir()
    return Installation(python, folder / "env" / "bin" / "bufpool", folder / "cwd", site)


def test_wheel_holds_what_is_needed(archives) -> None:
    with zipfile.ZipFile(archives[1]) as wheel:
        names = set(wheel.namelist())
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        info = metadata.removesuffix("METADATA")
        text = wheel.read(metadata).decode()
        licence = wheel.read(info + "licenses/LICENSE").decode()
        entry_points = wheel.read(info + "entry_points.txt").decode()
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "bufpool").rglob("*.py")}
    assert package <= names
    assert {f"bufpool/csrc/{name}" for name in SOURCES} <= names
    assert "bufpool/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "csrc/", "benchmarks/"))]
    assert licence == (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence
    assert "bufpool = bufpool.cli:main" in entry_points
    assert f"\nVersion: {bufpool.__version__}\n" in text
    assert "\nLicense-Expression: Apache-2.0\n" in text
    required = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", text, re.M)
    assert sorted(required) == ["numpy", "torch"]


def test_sdist_holds_tests_and_their_settings(archives) -> None:
    with tarfile.open(archives[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = {
        "pyproject.toml",
        "constraints.txt",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "CONTRIBUTING.md",
        "mkdocs.yml",
        ".ci/run",
    }
    for folder in ("benchmarks", "docs", "examples", "tests"):
        files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".md", ".py", ".svg")]
        wanted |= {str(path.relative_to(ROOT)) for path in files}
    assert wanted | {f"csrc/{name}" for name in SOURCES} <= names
    assert not [name for name in names if name.startswith((".venv", "build/", "dist/"))]


def test_version_stands_in_one_place(archives) -> None:
    version = bufpool.__version__
    holders = [
        str(path.relative_to(ROOT))
        for pattern in ("pyproject.toml", "bufpool/**/*.py", "docs/*.md", "README.md")
        for path in ROOT.glob(pattern)
        if version in path.read_text()
    ]
    assert holders == ["bufpool/__init__.py"]


def test_import_away_from_the_tree(installed) -> None:
    code = """
        import json, pathlib
        import bufpool
        from bufpool.jit.compiler import source_directory
        folder = source_directory()
        print(json.dumps({
            "file": bufpool.__file__,
            "version": bufpool.__version__,
            "sources": str(folder),
            "names": sorted(path.name for path in folder.iterdir()),
            "is_typed": (pathlib.Path(bufpool.__file__).parent / "py.typed").is_file(),
        }))
    """
    run = installed.run(installed.python, "-c", textwrap.dedent(code))
    assert run.returncode == 0, text_of(run)
    told = json.loads(run.stdout)
    package = installed.site / "bufpool"
    assert told["file"] == str(package / "__init__.py")
    assert told["version"] == bufpool.__version__
    assert told["sources"] == str(package / "csrc")
    assert set(told["names"]) >= SOURCES
    assert told["is_typed"]


def test_entry_point_does_the_main_job(installed) -> None:
    run = installed.run(installed.command, "run", "--max-calls", "3", "--json")
    assert run.returncode == 0, text_of(run)
    facts = json.loads(run.stdout)
    assert facts["calls"] == 3
    assert facts["verified"] > 0
    assert facts["failed"] == 0
    assert facts["mapped_bytes"] >= facts["needed_bytes"] > 0
    assert facts["bufpool"] == bufpool.__version__


def test_entry_point_says_version_and_findings(installed) -> None:
    run = installed.run(installed.command, "--version")
    assert (run.returncode, run.stdout) == (0, f"bufpool {bufpool.__version__}\n")
    run = installed.run(installed.command, "doctor", "--json")
    assert run.returncode == 0, text_of(run)
    facts = json.loads(run.stdout)
    assert facts["bufpool"] == bufpool.__version__
    assert facts["cache_folder"]["path"] == str(installed.cwd / "kernels")
    assert not (installed.cwd / "kernels").exists(), "a doctor makes no folder"
    assert facts["devices"][0]["device"] == "cpu"


def test_works_without_any_extra(installed) -> None:
    """rich, matplotlib and cuda cannot be imported; everything that needs none of them works."""
    code = """
        import sys

        # torch first: what torch itself imports of cuda is not the question.
        import torch

        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("rich", "matplotlib", "cuda"):
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        for name in [name for name in sys.modules if name.split(".")[0] in ("rich", "matplotlib", "cuda")]:
            del sys.modules[name]
        sys.meta_path.insert(0, Block())

        import bufpool
        import bufpool.ops, bufpool.testing
        from bufpool.cli import main

        spec = bufpool.OutputSpec(out=((4,), torch.float32))
        with bufpool.OutputPool() as pool:
            out = pool.acquire(spec, rows=3, like=torch.empty(0)).out
            assert out.shape == (3, 4)
            del out
        assert main(["doctor"]) == 0
        sys.exit(main(["run", "--max-calls", "3"]))
    """
    run = installed.run(installed.python, "-c", textwrap.dedent(code))
    assert run.returncode == 0, text_of(run)
    assert re.search(r"results verified +([1-9]\d*) of \1\n", run.stdout), text_of(run)


def test_kernels_compile_from_the_wheel(installed) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core (the cuda13 or the cuda12 extra)")
    pathfinder = pytest.importorskip("cuda.pathfinder")
    try:
        nvrtc = Path(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)
    except RuntimeError as e:
        pytest.skip(f"needs NVRTC: {e}")
    # A .pth file does not make it a folder where libraries are looked for.
    run = installed.run(installed.command, "compile", "--json", LD_LIBRARY_PATH=str(nvrtc.parent))
    assert run.returncode == 0, text_of(run)
    kernels = json.loads(run.stdout)["kernels"]
    assert len(kernels) >= 2
    for kernel in kernels:
        assert kernel["spill_bytes"] == 0, kernel
        assert 0 < kernel["smem_bytes"] <= 232_448, kernel
    assert len(list((installed.cwd / "kernels").iterdir())) == len(kernels)
