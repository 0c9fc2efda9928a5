"""The picture of a profile in JupyterLab, docs/figures/notebook.png: python docs/make_notebook.py; needs jupyterlab."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).parent / "figures" / "notebook.png"
CELL = "import qkv\n\nprofile = qkv.profile('qkv-mini', progress=False)\nprofile"


def picture(folder: Path) -> None:
    """Run the cell in JupyterLab, with all settings in `folder`, and take the picture."""
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    cell = {"cell_type": "code", "execution_count": None, "id": "a", "metadata": {}, "outputs": [], "source": CELL}
    notebook = {"cells": [cell], "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    (folder / "attention.ipynb").write_text(json.dumps(notebook))
    settings = {name: str(folder / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [
        "--no-browser",
        "--allow-root",
        f"--port={port}",
        "--IdentityProvider.token=",
        f"--notebook-dir={folder}",
    ]
    command = [sys.executable, "-m", "jupyter", "lab", *options]
    server = subprocess.Popen(command, env=os.environ | settings, stderr=subprocess.DEVNULL)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium") or shutil.which("google-chrome"), args=["--no-sandbox"]
            )
            page = browser.new_page(viewport={"width": 1280, "height": 1000})
            for _ in range(60):
                try:
                    page.goto(f"http://127.0.0.1:{port}/doc/tree/attention.ipynb")
                    break
                except Exception:
                    page.wait_for_timeout(1000)
            for _ in range(30):  # a cell that is run before the kernel has started is not run later
                page.locator(".jp-CodeCell .cm-content").first.click()
                page.keyboard.press("Shift+Enter")
                page.wait_for_timeout(2000)
                if page.locator(".jp-InputPrompt").first.inner_text().strip() != "[ ]:":
                    break
            page.locator(".qkv-widget[data-ready]").wait_for()
            page.get_by_role("button", name="No", exact=True).click()  # no news about Jupyter
            page.locator('.qkv-widget [data-layer="1"][data-head="2"]').click()
            page.mouse.move(5, 5)
            page.wait_for_timeout(1500)
            page.locator(".jp-OutputArea").first.screenshot(path=str(PICTURE))
            browser.close()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        picture(Path(folder))
