"""Configuration of the site: `make docs` builds it, from the repository's root.

The source folder is the whole repository, so that a link between two Markdown files means the same
on GitHub and on the site.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "examples" / "gallery"))  # the module that the examples share

import torch  # noqa: E402 - before the examples: its import warns on some machines

from caster import __version__  # noqa: E402

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # see tests/conftest.py
torch.set_num_threads(1)

# --- what is built ----------------------------------------------------------------------------

project, author = "caster", "The CASTER developers"
copyright = author
version = release = __version__
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/gallery/**",
    "reproduction/README.md",
    "reproduction/report/*/report.md",
    "examples/*/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
exclude_patterns = [
    ".*",
    "build",
    "node_modules",
    "packages",
    "tests",
    "benchmarks",
    "reproduction/records",
    "docs/gallery/**.ipynb",
    "docs/gallery/**.py",
    "docs/gallery/**.json",
]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]

# --- Markdown ---------------------------------------------------------------------------------

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # reports start their sections below the second level
copybutton_prompt_text = "$ "

# --- API reference ----------------------------------------------------------------------------

default_role = "code"  # `name` in a docstring
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

# --- gallery ----------------------------------------------------------------------------------

sphinx_gallery_conf = {
    "examples_dirs": str(ROOT / "examples" / "gallery"),
    "gallery_dirs": str(HERE / "gallery"),
    "filename_pattern": r"/plot_",
    "ignore_pattern": "digits",  # what they share
    "within_subsection_order": "FileNameSortKey",  # their names start with a number
    "abort_on_example_error": True,
    "download_all_examples": False,
    "image_srcset": ["2x"],
    "min_reported_time": 0,
    "remove_config_comments": True,
    "show_memory": False,
    "thumbnail_size": (480, 336),
    "show_signature": False,
    "write_computation_times": False,
}

# --- appearance -------------------------------------------------------------------------------

html_theme = "pydata_sphinx_theme"
html_title = "caster"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
html_extra_path = ["_root"]  # index.html of the site, which leads to docs/
html_show_sourcelink = False
html_sidebars = {name: [] for name in ("docs/index", "docs/start", "docs/api")}
html_theme_options = {
    "header_links_before_dropdown": 8,
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "show_prev_next": True,
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
}

# --- docstrings -------------------------------------------------------------------------------


def describe(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Turn our docstrings into reStructuredText.

    Parameters and attributes are lists of `name : description`, the fields of a dataclass are
    described by the comments beside them, and a file of docs/ is a page.
    """
    described: list[str] = []
    underlined = False
    for i, line in enumerate(lines):
        following = lines[i + 1] if i + 1 < len(lines) else ""
        if re.fullmatch(r"-{4,}", following):
            described += [f".. rubric:: {line}", ""]
            underlined = line in ("Parameters", "Attributes")
        elif re.fullmatch(r"-{4,}", line):
            continue
        elif underlined and (entry := re.match(r"([\w, ]+) : (.*)", line)):
            described += ["", f"**{entry[1]}**", f"    {entry[2]}"]
        else:
            described.append(line)
    lines[:] = [re.sub(r"docs/([\w-]+)\.md", r":doc:`\1 </docs/\1>`", line) for line in described]
    if what == "class" and dataclasses.is_dataclass(value):
        lines += ["", ".. rubric:: Fields", "", *_fields(value)]


def _fields(value: type) -> list[str]:
    """One definition per field: its name and type, and its comment without the spaces."""
    source = inspect.getsource(value)
    found = []
    for field in dataclasses.fields(value):
        pattern = rf"^    {field.name}: [^#]*?#\s*(.*)$"
        comment = re.search(pattern, source, re.MULTILINE)
        found += [
            f"**{field.name}** : ``{field.type}``",
            f"    {comment[1] if comment else ''}",
            "",
        ]
    return found


def link_to_gallery(app: Any, name: str, content: list[str]) -> None:
    """Let links to an example's source, which GitHub shows, lead to its page."""
    content[0] = re.sub(r"\.\./examples/gallery/(plot_\w+)\.py", r"gallery/\1.rst", content[0])


def setup(app: Any) -> None:
    """Register the above."""
    app.connect("autodoc-process-docstring", describe)
    app.connect("source-read", link_to_gallery)
