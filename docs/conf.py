"""The documentation site: `python -m flexops_tools.docs` builds it, strictly. Pages are Markdown
that GitHub shows as well."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent / "_ext")]

import flexops  # noqa: E402

project, author, release = "flexops", "The flexops developers", flexops.__version__
project_copyright = author
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "site_parts",
]
exclude_patterns = ["_ext", "requirements.txt"]
html_theme, html_title, html_static_path = "furo", f"flexops {release}", ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "source_repository": "https://github.com/flexops/flexops",
    "source_branch": "main",
    "source_directory": "docs/",
}
html_copy_source = html_show_sourcelink = False

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

default_role = "literal"
add_module_names = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "inherited-members": False, "undoc-members": False}
napoleon_use_rtype = False
napoleon_use_ivar = True
maximum_signature_line_length = 100
