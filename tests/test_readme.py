"""README and docs: the commands are the ones that CI runs, the code runs, the links lead somewhere.

A python block runs, and so does a bash block: from the root of the tree, with ``bufpool`` and ``python`` on the path. What
cannot run here has a comment ``<!-- not run: WHY -->`` in the line above.
"""

import importlib
import importlib.util
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bufpool

try:
    import tomllib
except ImportError:  # Python 3.10
    tomllib = None

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """First line and text of each fenced block in that language."""
    text = page.read_text()
    return [
        (text.count("\n", 0, found.start()) + 2, found[1])
        for found in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)
    ]


def readme_command(last_word: str) -> str:
    """The one command of the README that makes its own environment and ends so."""
    found = [
        line
        for _, block in blocks(ROOT / "README.md", "bash")
        for line in block.splitlines()
        if line.startswith("python3 -m venv ") and line.endswith(last_word)
    ]
    assert len(found) == 1, f"README.md: expected one command that ends with {last_word!r}, got {found}"
    return found[0]


@pytest.mark.parametrize("last_word", ["bufpool run", "pytest"])
def test_command_does_its_own_set_up(last_word) -> None:
    make, install, use = [shlex.split(part) for part in readme_command(last_word).split(" && ")]
    assert make == ["python3", "-m", "venv", ".venv"]
    assert install[:4] == [".venv/bin/pip", "install", "-c", "constraints.txt"]
    assert install[4] == "-e"
    assert use[0].startswith(".venv/bin/")
    assert use == shlex.split(f".venv/bin/{last_word}")


@pytest.mark.skipif(tomllib is None, reason="needs tomllib (Python 3.11)")
@pytest.mark.parametrize("last_word", ["bufpool run", "pytest"])
def test_command_names_extras_that_exist(last_word) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = re.search(r"\.\[([\w,]+)\]", readme_command(last_word))
    assert asked is not None
    assert set(asked[1].split(",")) <= set(project["optional-dependencies"])


@pytest.mark.parametrize("last_word", ["bufpool run", "pytest"])
def test_ci_takes_the_command_from_the_readme(last_word) -> None:
    script = (ROOT / ".ci" / "run").read_text()
    function = re.search(r"^readme_command\(\) \{\n.*?^\}$", script, re.M | re.S)
    assert function is not None
    shell = ["bash", "-euo", "pipefail", "-c", f"{function[0]}\nreadme_command {shlex.quote(last_word)}"]
    run = subprocess.run(shell, capture_output=True, text=True, cwd=ROOT)
    assert run.stdout == readme_command(last_word) + "\n", run.stderr
    assert f"readme_command {shlex.quote(last_word)}" in script
    # Nowhere else does the script call it by itself.
    assert f".venv/bin/{last_word}" not in script


def test_ci_refuses_a_readme_without_the_command(tmp_path) -> None:
    script = (ROOT / ".ci" / "run").read_text()
    function = re.search(r"^readme_command\(\) \{\n.*?^\}$", script, re.M | re.S)
    assert function is not None
    for text in ("", "python3 -m venv a && b/pytest\npython3 -m venv c && d/pytest\n"):
        (tmp_path / "README.md").write_text(text)
        shell = ["bash", "-euo", "pipefail", "-c", f"{function[0]}\nreadme_command pytest"]
        run = subprocess.run(shell, capture_output=True, text=True, cwd=tmp_path)
        assert run.returncode != 0
        assert "README.md: expected one command that ends with pytest" in run.stderr


@pytest.mark.skipif(tomllib is None, reason="needs tomllib (Python 3.11)")
def test_constraints_pin_every_dependency() -> None:
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            assert re.fullmatch(r"[\w.-]+", version), f"constraints.txt: expected NAME==VERSION, got {line!r}"
            key = re.sub(r"[-_.]+", "-", name).lower()
            assert key not in pinned, f"constraints.txt: {name} stands there twice"
            pinned[key] = version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    names = {re.split(r"[\[<>=!~; ]", requirement)[0] for requirement in named} - {"bufpool"}
    missing = {name for name in names if re.sub(r"[-_.]+", "-", name).lower() not in pinned}
    assert not missing


@pytest.mark.skipif(tomllib is None, reason="needs tomllib (Python 3.11)")
def test_build_needs_no_torch() -> None:
    # A build environment does not see constraints.txt: torch there would be the newest one, of several GB.
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert [re.split(r"[<>=]", requirement)[0] for requirement in build] == ["hatchling"]


# A block of any other language would be neither run nor compared: plain text and drawings have none.
LANGUAGES = {"", "bash", "diff", "python"}
# What torch.compile itself lets off (torch 2.13).
OF_TORCH = ["-W", "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"]


def unknown_languages(page: Path) -> list[str]:
    fences = re.findall(r"^( *(?:`{3,}|~{3,}))(.*)$", page.read_text(), re.M)
    return [f"{page.name}: {fence}{word}" for fence, word in fences[::2] if word not in LANGUAGES or fence != "```"]


CODE = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if blocks(page, "python")]


def wrong_code(page: Path, folder: Path) -> list[str]:
    """Runs all python blocks of a page, in order, as one program; a block without a language that follows is its output."""
    parts = blocks(page, "python")
    if not torch.cuda.is_available():
        parts = [(line, text) for line, text in parts if not re.search(r"[\"'.]cuda\b", text)]
    printed = dict(blocks(page, ""))
    # Blank lines in between, so that a traceback names the line of the page; a mark after each block's output.
    program, outputs = "", []
    for line, text in parts:
        program += "\n" * (line - 1 - program.count("\n")) + text + "print('<end of block>')\n"
        outputs.append(printed.get(line + text.count("\n") + 2))
    path = folder / "page.py"
    path.write_text(program)
    command = [sys.executable, "-W", "error", *OF_TORCH, path]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}  # not what an older tree compiled
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder, env=env)
    if run.returncode != 0:
        return [f"{page.name}: {run.stderr}"]
    return [
        f"{page.name}:{line}: expected the output {wanted!r}, got {got!r}"
        for (line, _), got, wanted in zip(parts, run.stdout.split("<end of block>\n"), outputs, strict=False)
        if wanted is not None and got != wanted
    ]


COMMANDS = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if blocks(page, "bash")]
NOT_RUN = re.compile(r"<!-- not run: \S.* -->")


def commands(page: Path) -> list[tuple[int, str]]:
    """First line and text of the bash blocks that run here: not those that need a GPU or a compiler and find none."""
    lines = page.read_text().splitlines()
    missing = []
    if not torch.cuda.is_available():
        missing.append("--device cuda")
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        missing.append("bufpool compile")
    return [
        (line, text)
        for line, text in blocks(page, "bash")
        if (line < 3 or not NOT_RUN.fullmatch(lines[line - 3])) and not any(words in text for words in missing)
    ]


def failed_commands(page: Path, folder: Path) -> list[str]:
    """Runs the bash blocks of a page in a folder that looks like the root of the tree."""
    tree, tools = folder / "tree", folder / "bin"
    tree.mkdir(exist_ok=True)
    tools.mkdir(exist_ok=True)
    for name in ("benchmarks", "csrc", "docs", "examples", "tests"):
        if not (tree / name).exists():
            (tree / name).symlink_to(ROOT / name)
    for tool, rest in {"python": "", "bufpool": " -m bufpool"}.items():
        (tools / tool).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{rest} "$@"\n')
        (tools / tool).chmod(0o755)
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    found = []
    for line, text in commands(page):
        shell = ["bash", "-euo", "pipefail", "-c", text]
        run = subprocess.run(
            shell, capture_output=True, text=True, timeout=120, cwd=tree, env=env, stdin=subprocess.DEVNULL
        )
        if run.returncode != 0:
            found.append(f"{page.name}:{line}: exit code {run.returncode}: {run.stderr}")
    return found


def broken_links(page: Path) -> list[str]:
    """Links to files that are not there."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    local = [target.partition("#")[0] for target in targets if not target.startswith(("http://", "https://", "#"))]
    return [f"{page.name}: {target}" for target in local if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", CODE)
def test_code_of_the_page_runs(page, tmp_path) -> None:
    assert wrong_code(page, tmp_path) == []


@pytest.mark.parametrize("page", COMMANDS)
def test_commands_of_the_page_run(page, tmp_path) -> None:
    assert failed_commands(page, tmp_path) == []


def test_no_block_is_overlooked() -> None:
    assert [fault for page in PAGES for fault in unknown_languages(page)] == []


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_links_lead_somewhere(page) -> None:
    assert broken_links(page) == []


def test_planted_faults_are_found(tmp_path) -> None:
    page = tmp_path / "page.md"
    code = "# Page\n\n```python\nx = 1\nprint(x)\n```\n```\n1\n```\ntext\n```python\nprint(x + 1)\n```\n```\n2\n```\n"
    page.write_text(code + "[a](page.md#b) [c](https://example.org)\n")
    assert wrong_code(page, tmp_path) == broken_links(page) == []
    page.write_text(code.replace("\n2\n", "\n3\n") + "[a](missing.md)\n")
    assert wrong_code(page, tmp_path) == ["page.md:12: expected the output '3\\n', got '2\\n'"]
    assert broken_links(page) == ["page.md: missing.md"]
    page.write_text(code.replace("x + 1", "y"))
    (fault,) = wrong_code(page, tmp_path)
    assert 'page.py", line 12' in fault
    assert "NameError" in fault


def test_planted_faults_in_commands_are_found(tmp_path) -> None:
    page = tmp_path / "page.md"
    good = "```bash\nbufpool --version\npython -c 'import bufpool'\n```\n"
    page.write_text(good + "\n<!-- not run: it fails -->\n```bash\nfalse\n```\n")
    assert failed_commands(page, tmp_path) == unknown_languages(page) == []
    page.write_text(good + "\n```bash\necho why >&2\nfalse\necho no\n```\n")
    assert failed_commands(page, tmp_path) == ["page.md:7: exit code 1: why\n"]
    page.write_text("```py\nx\n```\n\n~~~\n~~~\n\n````python\n````\n  ```bash\n  ```\n")
    assert unknown_languages(page) == ["page.md: ```py", "page.md: ~~~", "page.md: ````python", "page.md:   ```bash"]


def test_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").glob("**/*.md")} - {"README.md"}
    missing = {page for page in pages if f"]({page})" not in index}
    assert not missing


def test_site_has_every_page() -> None:
    pages = sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").glob("**/*.md"))
    _, found, rest = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    assert found
    nav = re.match(r"(?: +.*\n)*", rest)
    assert nav is not None
    assert sorted(re.findall(r"\S+\.md$", nav[0], re.M)) == pages


def test_reference_has_every_public_name() -> None:
    listed = set(re.findall(r"^::: bufpool\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.M))
    assert listed == set(bufpool.__all__)


# Inside alone, and what becomes of it.
NOT_FOR_CALLERS = {
    "DeviceOutOfMemoryError": "a DriverError; acquire, reserve and wake make a PoolLimitError of it",
    "UsageError": "of a command: one line on stderr and exit code 2",
}


def error_classes() -> set[str]:
    """Names of all exception classes that the package defines."""
    modules = [
        importlib.import_module(info.name)
        for info in pkgutil.walk_packages(bufpool.__path__, "bufpool.")
        if not info.name.endswith("__main__")
    ]
    return {
        kind.__name__
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, BaseException) and kind.__module__ == module.__name__
    }


def test_catalogue_has_every_error() -> None:
    headings = set(re.findall(r"^## (\w+Error)$", (ROOT / "docs" / "errors.md").read_text(), re.M))
    assert not headings & NOT_FOR_CALLERS.keys()
    assert headings | NOT_FOR_CALLERS.keys() == error_classes()
    assert set(bufpool.errors.__all__) <= headings


def test_catalogue_has_every_text_of_the_root() -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    rules = set()
    for path in (ROOT / "bufpool").rglob("*.py"):
        for found in re.finditer(r"raise BufpoolError\(\s*(.*?)\n? *\)\n", path.read_text(), re.S):
            rules.add(re.findall(r"(?:\w+: )?expected [^,{\"]+", found[1])[0].strip())
    assert "runner: expected no call from inside another one" in rules
    assert sorted(rule for rule in rules if rule not in text) == []


def test_catalogue_says_of_each_error_when_why_and_what_to_do() -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    errors = error_classes() - NOT_FOR_CALLERS.keys()
    assert len(sections) == len(errors) + 2  # TypeError and ValueError, and what is no error
    for heading in sections.keys() - {"What is no error"}:
        for part in ("When", "Why", "What to do"):  # or a column of a table
            assert f"*{part}:*" in sections[heading] or f"| {part.lower()} |" in sections[heading], (heading, part)


FIGURES = [pytest.param(path, id=path.name) for path in sorted((ROOT / "docs" / "figures").glob("*.py"))]


@pytest.mark.parametrize("script", FIGURES)
def test_figure_is_what_its_script_draws(script) -> None:
    figure = script.with_name(script.stem.replace("_", "-") + ".svg")
    assert figure.read_text() == runpy.run_path(str(script))["render"]()


def test_every_figure_has_a_script() -> None:
    folder = ROOT / "docs" / "figures"
    drawn = {path.stem.replace("_", "-") for path in folder.glob("*.py")}
    assert {path.stem for path in folder.glob("*.svg")} == drawn
