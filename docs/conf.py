"""Sphinx configuration, for `make docs`. The build is offline, and warnings are errors."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "_ext")]

import qkv  # noqa: E402

gc.set_threshold(200_000, 50, 100)  # a build makes millions of nodes, which the collector would visit again and again

project, author, release = "qkv", "The qkv developers", qkv.__version__
copyright = "2026, the qkv developers"
html_title = "qkv"

extensions = [
    "myst_nb",  # pages are text notebooks, executed during the build
    "forked_kernels",  # their kernels start in no time
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_design",  # cards, hidden solutions
    "sphinx_copybutton",
    "mathml",  # formulas as MathML: no script and no web font
    "claims_pages",  # claims/: the verdicts of the ledger
    "public_names",  # reference/: a page for every public name
    "command_line",  # command-line.md: the output of --help
    "error_index",  # every-error.md: all error messages
    "contents",  # the tables of contents of folders, from their first pages
    "mechanism_pages",  # mechanisms/: base class, cost, source, tests and claims of each page
    "accessible",  # levels, names and focus that the theme leaves out
    "open_in_jupyter",  # pages with code cells are notebooks, and can be downloaded as .ipynb
]
exclude_patterns = ["_build", "experiments/runs"]
source_suffix = {".md": "myst-nb", ".rst": "restructuredtext"}

# Notebooks. Each page runs in a new kernel, in its own folder; its outputs are cached until its code changes.
nb_execution_mode = os.environ.get("QKV_DOCS_EXECUTE", "cache")
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
os.environ["MATPLOTLIBRC"] = str(DOCS / "matplotlibrc")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TQDM_DISABLE"] = "1"
os.environ["PYTHONWARNINGS"] = "ignore:IProgress"  # tqdm on a kernel without widgets
os.environ["OMP_NUM_THREADS"] = "1"  # two kernels run at once with small models; more threads are slower
kernel = DOCS / "_build" / "ipython" / "profile_default" / "ipython_kernel_config.py"
kernel.parent.mkdir(parents=True, exist_ok=True)
kernel.write_text("c.IPKernelApp.log_level = 40\n")  # no log line for every kernel start
os.environ["IPYTHONDIR"] = str(kernel.parents[1])

myst_enable_extensions = ["amsmath", "attrs_inline", "colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 4
myst_dmath_double_inline = True

# Docstrings: plain text with `code` in single or double backticks, and Google's sections.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring, napoleon_numpy_docstring = True, False
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

html_theme = "furo"
html_static_path = ["_static"]
html_css_files, html_favicon = ["site.css"], "_static/favicon.svg"
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#174a6c",
        "color-brand-content": "#1f6f8b",
        "font-stack": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif",
    },
    "dark_css_variables": {"color-brand-primary": "#6fb5b5", "color-brand-content": "#6fb5b5"},
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
