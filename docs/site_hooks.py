"""What the site needs beyond Markdown: sources that pages link to, and formulas that need no script; it knows no page by name.

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
    """Adds a page for each file of the repository, outside the documents, that a page links to."""
    for page in list(files.documentation_pages()):
        for source in _sources_linked_from(page):
            if files.get_file_from_path(_page_of(source)) is None:
                files.append(File.generated(config, _page_of(source), content=_page_with_source(source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links out of the documents into links to those pages."""
    depth = "../" * page.file.src_uri.count("/")

    def to_site(match: re.Match[str]) -> str:
        source = _source(match[2], page.file)
        return match[0] if source is None else f"{match[1]}{depth}{_page_of(source)}{match[4]}"

    return LINK.sub(to_site, markdown)


def _sources_linked_from(page: File) -> list[Path]:
    if page.generated_by is not None:
        return []
    found = (_source(target, page) for _, target, _, _ in LINK.findall(page.content_string))
    return [source for source in found if source is not None]


def _source(target: str, page: File) -> Path | None:
    """The file in the repository that a link leads to, where that is outside the documents."""
    if page.abs_src_path is None:
        return None
    path = (Path(page.abs_src_path).parent / target).resolve()
    inside = path.is_relative_to(ROOT / "docs") or not path.is_relative_to(ROOT)
    return None if inside or not path.is_file() else path.relative_to(ROOT)


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
