"""What the site needs beyond Markdown: pages from outside the documents, formulas without a script; it knows none by name.

MkDocs calls the `on_...` functions; mkdocs.yml names this file.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()(?!\w+:|#|/)([^)#\s]+)(#[^)\s]*)?(\))")
LANGUAGES = {".py": "python", ".yaml": "yaml"}


def on_config(config: Any) -> Any:
    """Fences of the language `math` become MathML, which browsers draw themselves."""
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences.append({"name": "math", "class": "math", "format": _formula})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds a page for each file of the repository, outside the documents, that the navigation names or a page links to."""
    named = [Path(uri).relative_to("source") for uri in _leaves(config.nav) if uri.startswith("source/")]
    open_links = named + [source for page in files.documentation_pages() for source in _sources_linked_from(page)]
    while open_links:
        source = open_links.pop()
        if files.get_file_from_path(_page_of(source)) is None:
            page = File.generated(config, _page_of(source), content=_page_with_source(source))
            files.append(page)
            open_links += _sources_linked_from(page)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links that leave the documents, or that a page from outside has into them, into links of the site."""
    depth = "../" * page.file.src_uri.count("/")

    def to_site(match: re.Match[str]) -> str:
        source = _linked(match[2], page.file)
        if source is None or (page.file.generated_by is None and source.is_relative_to("docs")):
            return match[0]
        target = source.relative_to("docs").as_posix() if source.is_relative_to("docs") else _page_of(source)
        part = match[3] if match[3] and source.suffix == ".md" else ""
        return f"{match[1]}{depth}{target}{part}{match[4]}"

    return LINK.sub(to_site, markdown)


def _leaves(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    inside = nav.values() if isinstance(nav, dict) else nav or []
    return [uri for each in inside for uri in _leaves(each)]


def _sources_linked_from(page: File) -> list[Path]:
    found = (_linked(target, page) for _, target, _, _ in LINK.findall(page.content_string))
    return [source for source in found if source is not None and not source.is_relative_to("docs")]


def _linked(target: str, page: File) -> Path | None:
    """The file of the repository, seen from its root, that a link of a page leads to; none from a page that shows code."""
    home = Path("docs", page.src_uri) if page.generated_by is None else Path(page.src_uri).relative_to("source")
    if not (ROOT / home).is_file():
        return None
    path = (ROOT / home.parent / target).resolve()
    return path.relative_to(ROOT) if path.is_file() and path.is_relative_to(ROOT) else None


def _page_of(source: Path) -> str:
    named = source.as_posix() if source.suffix == ".md" else f"{source.as_posix().replace('.', '_')}.md"
    return f"source/{named}"


def _page_with_source(source: Path) -> str:
    text = (ROOT / source).read_text(encoding="utf-8")
    if source.suffix == ".md":
        return text
    language = LANGUAGES.get(source.suffix, "text")
    return f"---\nhide: [toc]\n---\n# {source.name}\n\n`{source.as_posix()}`\n\n````{language}\n{text}````\n"


def _formula(source: str, *_: Any, **__: Any) -> str:
    lines = (convert(line, display="block") for line in re.split(r"\n\s*\n", source.strip()))
    return f'<div class="formula" role="math" aria-label="{escape(source)}">{"".join(lines)}</div>'
