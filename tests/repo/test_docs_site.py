"""The documentation site: built with warnings as errors, complete, and without external resources."""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PUBLIC = (
    "rl_core/src/rl_core/interfaces",
    "rl_train/src/rl_train/algorithms",
    "rl_train/src/rl_train/algorithms/losses",
    "rl_core/src/rl_core/cluster",
    "rl_core/src/rl_core/data",
    "rl_core/src/rl_core/plugins",
    "rl_backends_base/src/rl_backends_base",
    "rl_backends_hf/src/rl_backends_hf",
    "rl_backends_megatron/src/rl_backends_megatron",
    "rl_backends_vllm/src/rl_backends_vllm",
    "rl_backends_openai/src/rl_backends_openai",
    "rl_sandbox/src/rl_sandbox",
    "rl_envs/src/rl_envs",
)
ELSEWHERE = {"hookimpl"}  # on the page of hooks
ROOM = '''
def known(row):
    """Known.

    Args:
        row: A row.
    """
'''


def build(folder, output):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", output]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    output = tmp_path_factory.mktemp("site")
    done = build(ROOT, output)
    assert done.returncode == 0, done.stdout + done.stderr
    return output


@pytest.fixture
def copy(tmp_path):
    """A site of two pages with the real hooks and settings."""
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "site_hooks.py", tmp_path / "docs")
    (tmp_path / "docs" / "site.css").write_text("")
    settings, _, _ = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")
    (tmp_path / "mkdocs.yml").write_text(settings + "\nnav: [index.md, other.md]\n")
    (tmp_path / "docs" / "index.md").write_text("# Home\n\n[Other](other.md#part)\n")
    (tmp_path / "docs" / "other.md").write_text("# Other\n\n## Part\n")
    (tmp_path / "rl_core" / "src").mkdir(parents=True)
    (tmp_path / "rl_core" / "src" / "room.py").write_text(
        'def known(row):\n    """Known.\n\n    Args:\n        row: A row.\n    """\n'
    )
    return tmp_path


def public_names(room):
    """The names that a module lists, or imports under their own names for others (`from a import B as B`)."""
    tree = ast.parse(room.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return [alias.name for node in imports for alias in node.names if alias.asname == alias.name]


def script(name):
    specification = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


class Loaded(HTMLParser):
    """The resources a browser would load to show a page."""

    def __init__(self, text):
        super().__init__()
        self.addresses = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        shown = tag == "link" and values.get("rel") in ("stylesheet", "preload", "preconnect", "icon", "modulepreload")
        if shown or tag in ("script", "img", "iframe", "source", "object", "embed"):
            self.addresses += [values[key] for key in ("src", "href", "data", "srcset") if values.get(key)]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(site):
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    sources = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sources <= pages


@pytest.mark.slow
def test_a_page_loads_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        assert [address for address in Loaded(page.read_text()).addresses if "//" in address] == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import|url\(\s*['\"]?(https?:)?//", sheet.read_text()), sheet


def test_a_page_opened_from_disk_brings_the_search_index_and_the_frame_that_searches_it(site):
    assert (site / "search" / "search_index.js").read_text(encoding="utf-8").startswith("var __index = {")
    assert '<script src="iframe-worker.js">' in (site / "index.html").read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_the_search_finds_a_word_on_a_page_opened_from_disk(site, tmp_path):
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000", "--dump-dom"]
    done = subprocess.run(
        [*command, f"{(site / 'index.html').as_uri()}?q=importance"], capture_output=True, text=True, timeout=250
    )
    assert 'class="md-search-result__link"' in done.stdout, done.stderr
    assert "<mark>importance</mark>" in done.stdout


def test_every_public_name_is_in_the_api_reference(site):
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    documented = {line.split(" ", 1)[0].rsplit(".", 1)[-1] for line in zlib.decompress(inventory).decode().splitlines()}
    modules = [*(ROOT / room / "__init__.py" for room in PUBLIC), ROOT / "rl_core/src/rl_core/backend.py"]
    names = {name for module in modules for name in public_names(module)}
    assert len(names) > 50
    assert sorted(names - documented - ELSEWHERE) == []


def test_formulas_are_rendered_as_mathml(site):
    page = (site / "algorithms" / "grpo.html").read_text()
    assert page.count("<math ") >= 3
    assert "```math" not in page


def test_a_link_to_the_code_leads_to_the_code(site):
    page = (site / "algorithms" / "grpo.html").read_text()
    [target] = set(re.findall(r'href="(\.\./source/rl_train/[\w/]+algorithms/grpo_py\.html)"', page))
    assert "def train" in re.sub(r"<[^>]+>", "", (site / "algorithms" / target).resolve().read_text())


def test_pages_from_outside_docs_link_to_docs_and_to_each_other(site):
    page = site / "source" / "rl_backends_megatron" / "index.html"
    links = set(re.findall(r'href="([^"#:]+\.html)', page.read_text()))
    assert {"../../adding_a_model.html", "../../convert.html"} <= links
    assert [link for link in links if not (page.parent / link).resolve().is_file()] == []


def test_a_broken_link_fails_the_build(copy):
    complaints = {
        "[gone](gone.md)": "contains a link 'gone.md'",
        "[gone](other.md#gone)": "does not contain an anchor '#gone'",
        "[gone](../rl_core/src/gone.py)": "contains a link '../rl_core/src/gone.py'",
        "![gone](curves/gone.svg)": "contains a link 'curves/gone.svg'",
        "::: room.known": "No type or annotation for parameter 'row'",
    }
    (copy / "docs" / "index.md").write_text("# Home\n\n" + "\n\n".join(complaints) + "\n")
    (copy / "docs" / "orphan.md").write_text("# Orphan\n")
    settings = (copy / "mkdocs.yml").read_text()
    (copy / "mkdocs.yml").write_text(settings.replace("other.md]", "other.md, lost.md]"))
    done = build(copy, copy / "site")
    assert done.returncode != 0
    output = done.stdout + done.stderr
    expected = [*complaints.values(), "'lost.md' is included in the 'nav' configuration, which is not found", "- orphan.md"]
    assert [complaint for complaint in expected if complaint not in output] == []


def test_a_name_that_the_code_does_not_have_fails_the_build(copy):
    (copy / "docs" / "index.md").write_text("# Home\n\n::: room.gone\n")
    done = build(copy, copy / "site")
    assert done.returncode != 0
    assert "room.gone could not be found" in done.stdout + done.stderr


def test_the_small_test_site_builds(copy):
    done = build(copy, copy / "site")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_of_the_command_is_current():
    assert (ROOT / "docs" / "cli.md").read_text() == script("make_cli_reference").cli_reference(), (
        "run python docs/make_cli_reference.py"
    )


def test_the_page_of_the_conformance_kit_is_current():
    assert (ROOT / "docs" / "conformance.md").read_text() == script("make_conformance_page").conformance_page(), (
        "run python docs/make_conformance_page.py"
    )


def test_the_page_of_interfaces_is_current():
    assert (ROOT / "docs" / "plugin_interfaces.md").read_text() == script("make_interfaces_page").interfaces_page(), (
        "run python docs/make_interfaces_page.py"
    )


def test_the_page_of_batch_keys_is_current():
    page = (ROOT / "docs" / "batch_keys.md").read_text(encoding="utf-8")
    assert page == script("make_batch_keys").as_markdown(), "run python docs/make_batch_keys.py"


def test_a_curve_is_small_and_loads_nothing():
    curves = list((ROOT / "docs" / "curves").glob("*.svg"))
    assert len(curves) >= 3
    for path in curves:
        text = path.read_text()
        assert len(text) < 60_000
        assert not re.search(r"href|<script|@import|url\(", text)


def test_a_curve_is_drawn_from_the_numbers_of_a_run(tmp_path):
    for name, top in (("one", 1.0), ("two", 0.5)):
        (tmp_path / name).mkdir()
        rows = (f'{{"step": {step}, "reward/mean": {top * step / 4}}}\n' for step in range(5))
        (tmp_path / name / "metrics.jsonl").write_text("".join(rows))
    drawing = script("make_curves").curve("reward/mean", {"one": tmp_path / "one", "two": tmp_path / "two"})
    first, second = re.findall(r'<polyline class="c\d" points="([^"]+)"', drawing)
    heights = [[float(point.split(",")[1]) for point in points.split()] for points in (first, second)]
    rises = [points[0] - points[-1] for points in heights]
    assert rises[0] == pytest.approx(2 * rises[1], abs=0.2)  # points are rounded to a tenth of a pixel
    assert ">one</text>" in drawing
    with pytest.raises(SystemExit, match="has no 'gone'"):
        script("make_curves").curve("gone", {"one": tmp_path / "one"})
